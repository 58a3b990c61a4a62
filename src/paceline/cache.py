"""The memory for keys and values: one budget, from which target and drafters have their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from paceline.amount import WRITTEN, amount
from paceline.errors import ResourceError
from paceline.pages import PAGE, PagePool, pages_for
from paceline.tree import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.pages import CacheGroup

_SHARE = 4  # unless said otherwise the cache takes at most this part of the free memory


class CacheBudget:
    """So many bytes, and the number of pages of 16 tokens that every cache group gets of them.

    Args:
        groups: of the target and of the draft model that it is set up with.
        memory: bytes; None is what the groups can use, at most a quarter of the free memory.
        max_num_seqs: how many sequences run at once.
        max_model_len: the longest of them in tokens.
        pass_rows: the most rows of one sequence in a pass: what a window holds beyond itself.

    Raises:
        ResourceError: the memory is not free, or does not hold a page.
    """

    def __init__(
        self, groups: Iterable[CacheGroup], memory: int | None, max_num_seqs: int, max_model_len: int, pass_rows: int
    ) -> None:
        free = psutil.virtual_memory().available
        self._given = memory is not None
        self.memory = free // _SHARE if memory is None else memory
        if self.memory > free:
            raise ResourceError(
                f"cache_memory is {amount(self.memory)}, and {amount(free)} are free: lower it ({WRITTEN})."
            )
        per_page = sum(group.page_bytes for group in groups)
        if self.memory < per_page:
            raise ResourceError(
                f"{PAGE} tokens of cache take {amount(per_page)}, and {amount(self.memory)} are allowed: raise "
                f"cache_memory ({WRITTEN})."
            )
        self._sequences = max_num_seqs
        self._window_rows = pages_for(max(pass_rows, MAX_NODES)) + 2
        self._pages = min(self.memory // per_page, max_num_seqs * pages_for(max_model_len + MAX_NODES))
        self._cut: list[PagePool] = []

    @property
    def used(self) -> int:
        """Bytes of all pools that were cut and not given back."""
        return sum(pool.pages * pool.group.page_bytes for pool in self._cut)

    def cut(self, groups: Sequence[CacheGroup]) -> list[PagePool]:
        """Page pools for all of ``groups``.

        Raises:
            ResourceError: they do not fit into what is left.
        """
        sizes = [self._size(group) for group in groups]
        wanted, left = sum(n * g.page_bytes for n, g in zip(sizes, groups, strict=True)), self._left()
        if wanted > left:
            raise ResourceError(
                f"the cache of the drafter takes {amount(wanted)}, and {amount(left)} of cache_memory are left: name "
                f"the draft model when the target is loaded, so that both are planned for, or raise cache_memory "
                f"({WRITTEN})."
            )
        pools = [PagePool(group, size) for group, size in zip(groups, sizes, strict=True)]
        self._cut += pools
        return pools

    def _left(self) -> int:
        """Bytes for further pools: of what was given, or else as much again as the free memory has to spare."""
        left = self.memory - self.used
        return left if self._given else max(left, psutil.virtual_memory().available // _SHARE)

    def give_back(self, pools: Iterable[PagePool]) -> None:
        """Take pools out of the count; their memory goes with the last who holds them."""
        for pool in pools:
            self._cut.remove(pool)

    def _size(self, group: CacheGroup) -> int:
        if group.window is None:
            return self._pages
        return min(self._pages, self._sequences * (pages_for(group.window) + self._window_rows))
