"""The paged cache: keys and values of every sequence, in pages cut from slabs that are allocated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

PAGE = 16
"""Tokens a page holds: the lanes of one 512-bit vector of fp32."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share page tables, as a target or a drafter declares them.

    ``dtype`` is float32 or bfloat16; ``window`` is the number of tokens the group's layers look back, if bounded.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * PAGE * self.dtype.itemsize


@dataclass(frozen=True)
class Slab:
    """The storage of one group.

    Attributes:
        keys: [pages, layers, kv_heads, head_dim, PAGE], a page's keys transposed so that each lane is one key.
        values: [pages, layers, kv_heads, PAGE, head_dim].
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, group: CacheGroup, pages: int) -> Slab:
        shape = (pages, group.layers, group.kv_heads)
        return cls(
            torch.zeros(*shape, group.head_dim, PAGE, dtype=group.dtype),
            torch.zeros(*shape, PAGE, group.head_dim, dtype=group.dtype),
        )

    def copy_rows(self, page_from: Tensor, lane_from: Tensor, page_to: Tensor, lane_to: Tensor) -> None:
        """Copy the rows (page, lane) of every layer; all sources are read before any row is written."""
        self.keys[page_to, :, :, :, lane_to] = self.keys[page_from, :, :, :, lane_from]
        self.values[page_to, :, :, lane_to] = self.values[page_from, :, :, lane_from]


class PageTable:
    """The pages of one sequence in one group: storage index i lies in page ``pages[i // PAGE]``."""

    __slots__ = ("pages", "tensor")

    def __init__(self) -> None:
        self.pages: list[int] = []


def pages_for(rows: int) -> int:
    """How many pages ``rows`` storage indices take."""
    return -(-rows // PAGE)


class PagePool:
    """Pages of every group, cut from one budget and handed out to sequences.

    One page number stands for a page in each group, so a sequence needs one table.
    """

    def __init__(self, groups: Sequence[CacheGroup], pages: int) -> None:
        if pages < 1:
            raise ResourceError(f"the cache needs at least one page of {PAGE} tokens, not {pages}.")
        self.groups = tuple(groups)
        self.pages = pages
        self.slabs = tuple(Slab.allocate(group, pages) for group in groups)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)
