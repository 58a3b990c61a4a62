"""The paged cache: keys and values of every sequence, in pages of slabs that are allocated once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import ResourceError
from paceline.kernels.memory import huge_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

PAGE = 16
"""Tokens a page holds: the lanes of one 512-bit vector of fp32."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share page tables, as a target or a drafter declares them.

    ``dtype`` is float32 or bfloat16; ``window`` is how many tokens the group's layers look back, if bounded.
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
        size = pages * group.page_bytes // 2
        return cls(
            huge_empty(size).view(group.dtype).view(*shape, group.head_dim, PAGE),
            huge_empty(size).view(group.dtype).view(*shape, PAGE, group.head_dim),
        )

    def move_rows(self, table: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy storage rows ``sources`` of one sequence to ``targets``, all read before any is written.

        ``table`` is the sequence's int32 page table.
        """
        old, new = torch.tensor(sources), torch.tensor(targets)
        table = table.long()
        page_from, lane_from = table[old // PAGE], old % PAGE
        page_to, lane_to = table[new // PAGE], new % PAGE
        self.keys[page_to, :, :, :, lane_to] = self.keys[page_from, :, :, :, lane_from]
        self.values[page_to, :, :, lane_to] = self.values[page_from, :, :, lane_from]

    def copy_page(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]


def pages_for(rows: int) -> int:
    """How many pages ``rows`` storage indices take."""
    return -(-rows // PAGE)


class PagePool:
    """The pages of one group: a slab, and who owns what of it.

    A page that is kept for what it holds stays so when its last owner lets it go, until there is no other: then the one
    that has been without an owner for longest is taken.
    """

    def __init__(self, group: CacheGroup, pages: int) -> None:
        if pages < 1:
            raise ResourceError(f"the cache group {group.name} needs at least one page of {PAGE} tokens.")
        self.group = group
        self.pages = pages
        self.slab = Slab.allocate(group, pages)
        self.kept: set[int] = set()
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept pages without an owner, those left first at the front
        self._owners = [0] * pages
        self._losses: list[Callable[[int], None]] = []

    @property
    def free(self) -> int:
        """How many pages can be taken."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Hand out one page.

        Raises:
            ResourceError: none is free.
        """
        if not self._free:
            if not self._idle:
                raise ResourceError(f"all {self.pages} pages of the cache group {self.group.name} are in use.")
            self.give_up(next(iter(self._idle)))
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Make one more an owner of a page that somebody has, or that is kept."""
        self._idle.pop(page, None)
        self._owners[page] += 1

    def release(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            if page in self.kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep a page that somebody has for what it holds."""
        self.kept.add(page)

    def give_up(self, page: int) -> None:
        """Keep a page no longer; whoever kept it hears of that."""
        self.kept.remove(page)
        for tell in self._losses:
            tell(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def on_loss(self, tell: Callable[[int], None]) -> None:
        """Have ``tell`` called with every page that is kept no longer."""
        self._losses.append(tell)

    def idle(self, page: int) -> bool:
        """Whether nobody has a page that is kept."""
        return page in self._idle

    def check(self, tables: Iterable[PageTable]) -> None:
        """Prove that no page is lost, doubled or leaked, given every table that owns pages of this pool."""
        owners = [0] * self.pages
        for table in tables:
            for page in table.owned():
                owners[page] += 1
        assert owners == self._owners, f"owners differ from the tables in {self.group.name}"
        assert len(set(self._free)) == len(self._free), f"a page of {self.group.name} is free twice"
        assert not set(self._free) & self.kept, f"a page of {self.group.name} is free and kept"
        assert set(self._idle) == {page for page in self.kept if not owners[page]}, "a kept page is lost"
        assert {p for p, n in enumerate(owners) if not n} == {*self._free, *self._idle}, (
            "a page is lost, or owned and free"
        )


class PageTable:
    """The pages of one sequence in one group: storage index i lies in page ``i // PAGE`` of the table.

    ``tensor`` is int32 [capacity], -1 where nothing is mapped; passes read it in place.
    """

    __slots__ = ("_dropped", "_end", "pool", "tensor")

    def __init__(self, pool: PagePool, capacity: int) -> None:
        self.pool = pool
        self.tensor = torch.full((pages_for(capacity),), -1, dtype=torch.int32)
        self._dropped = 0
        self._end = 0

    def owned(self) -> list[int]:
        pages: list[int] = self.tensor[self._dropped : self._end].tolist()
        return pages

    def page(self, place: int) -> int | None:
        """The page of the storage indices from ``PAGE * place`` on, if it is mapped."""
        return int(self.tensor[place]) if self._dropped <= place < self._end else None

    def adopt(self, first: int, pages: Sequence[int]) -> None:
        """Let an empty table begin with pages that hold the storage indices from ``PAGE * first`` on; those before it
        count as given up."""
        for place, page in enumerate(pages, first):
            self.pool.share(page)
            self.tensor[place] = page
        self._dropped, self._end = first, first + len(pages)

    @property
    def mapped(self) -> int:
        """The storage indices below it are mapped, or were given up because no later row sees them."""
        return self._end * PAGE

    def missing(self, rows: int) -> int:
        """How many pages it takes to map every storage index below ``rows``."""
        return max(0, pages_for(rows) - self._end)

    def reserve(self, rows: int) -> None:
        """Map every storage index below ``rows``.

        Raises:
            ResourceError: too few pages are free; none is taken.
        """
        wanted = pages_for(rows) - self._end
        if wanted > self.pool.free:
            raise ResourceError(
                f"{wanted} pages of the cache group {self.pool.group.name} are wanted, and {self.pool.free} of "
                f"{self.pool.pages} are free."
            )
        for place in range(self._end, pages_for(rows)):
            self.tensor[place] = self.pool.take()
            self._end = place + 1

    def cut(self, rows: int) -> None:
        """Give up the pages that hold only storage indices from ``rows`` on."""
        for place in range(self._end - 1, max(pages_for(rows), self._dropped) - 1, -1):
            self.pool.release(int(self.tensor[place]))
            self.tensor[place] = -1
            self._end = place

    def drop_before(self, row: int) -> None:
        """Give up the pages that hold only storage indices below ``row``: no later row sees them."""
        for place in range(self._dropped, min(row // PAGE, self._end)):
            self.pool.release(int(self.tensor[place]))
            self.tensor[place] = -1
            self._dropped = place + 1

    def holds(self, rows: int) -> bool:
        """Whether all is there that the row behind the first ``rows`` rows sees."""
        window = self.pool.group.window
        return self._dropped * PAGE <= (0 if window is None else max(0, rows - window))

    def fork(self, rows: int) -> PageTable:
        """A table with the first ``rows`` storage indices: full pages are shared, a partial one is copied.

        Raises:
            ResourceError: the partial page needs a new one and none is free.
        """
        whole = rows // PAGE
        own = self.pool.take() if rows % PAGE else None  # before anything is shared: what fails holds nothing
        twin = PageTable(self.pool, self.tensor.shape[0] * PAGE)
        twin._dropped = self._dropped
        for page in self.tensor[self._dropped : whole].tolist():
            self.pool.share(page)
        twin.tensor[:whole] = self.tensor[:whole]
        if own is not None:
            self.pool.slab.copy_page(int(self.tensor[whole]), own)
            twin.tensor[whole] = own
        twin._end = pages_for(rows)
        return twin

    def commit(self, base: int, path: Sequence[int]) -> None:
        """Make the accepted path contiguous: the row of ``path[k]`` at ``base + path[k]`` moves to ``base + k``."""
        moved = [(base + node, base + k) for k, node in enumerate(path) if node != k]
        if moved:
            self.pool.slab.move_rows(self.tensor, [old for old, _ in moved], [new for _, new in moved])

    def free(self) -> None:
        """Give up all pages, the last first: of those that are kept it is to go first, being worth least alone."""
        for page in reversed(self.owned()):
            self.pool.release(page)
        self.tensor.fill_(-1)
        self._dropped = self._end = 0
