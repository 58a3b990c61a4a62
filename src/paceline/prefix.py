"""Full pages of committed tokens, found again by all the tokens up to their end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from paceline.pages import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.pages import PagePool, PageTable


@dataclass(slots=True)
class Chain:
    """The keys of a sequence's full pages, each a SHA-256 of the one before it and the page's tokens.

    Attributes:
        tokens: the sequence's own list of committed tokens, which grows with it.
        root: what stands for the key before the first.
        keys: as far as they have been worked out.
        entered: how many leading pages were entered in the index, or came from there.
    """

    tokens: Sequence[int]
    root: bytes
    keys: list[bytes] = field(default_factory=list)
    entered: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int], *apart: str | None) -> Chain:
        """A chain apart from those of other models, formats and adapters, and of other isolation keys."""
        return cls(tokens, sha256(repr(apart).encode()).digest())

    def page(self, place: int) -> tuple[int, ...]:
        """The tokens of a page."""
        return tuple(self.tokens[place * PAGE : (place + 1) * PAGE])

    def key(self, place: int) -> bytes:
        """The key of a page, all of whose tokens are committed."""
        while len(self.keys) <= place:
            above = self.keys[-1] if self.keys else self.root
            self.keys.append(sha256(above + array("q", self.page(len(self.keys))).tobytes()).digest())
        return self.keys[place]


@dataclass(slots=True)
class _Entry:
    """One page of each pool with the keys and values of the same tokens; None where there is none any more."""

    tokens: tuple[int, ...]
    pages: list[int | None]


class PrefixIndex:
    """What others have computed. A page is entered when it is full of committed tokens and their rows are computed; it
    stays as long as somebody has it, and then until its pool needs it for something else, the one longest out of use
    first.

    Args:
        pools: one for each cache group, in the order of a sequence's tables.
    """

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self._pools = tuple(pools)
        self._entries: dict[bytes, _Entry] = {}
        self._keys: list[dict[int, bytes]] = [{} for _ in pools]
        for place, pool in enumerate(pools):
            pool.on_loss(partial(self._lose, place))

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, chain: Chain, tables: Sequence[PageTable], rows: int) -> None:
        """Enter the full pages of the first ``rows`` rows; of pages that are there already the first stays."""
        for place in range(chain.entered, rows // PAGE):
            key, tokens = chain.key(place), chain.page(place)
            pages = [table.page(place) for table in tables]
            entry = self._entries.get(key)
            if entry is None:
                entry = _Entry(tokens, [None] * len(pages))
            elif entry.tokens != tokens:
                continue
            for group, page in enumerate(pages):
                if page is not None and entry.pages[group] is None and page not in self._keys[group]:
                    entry.pages[group] = page
                    self._keys[group][page] = key
                    self._pools[group].keep(page)
                    self._entries[key] = entry
        chain.entered = max(chain.entered, rows // PAGE)

    def find(self, chain: Chain, rows: int) -> int:
        """How many pages a sequence may begin with, of those that lie in its first ``rows`` rows: so many that every
        page is there that a group without window has of them, or that the next row sees of one with a window."""
        best, first = 0, [0] * len(self._pools)  # where the pages begin that are there without a gap
        for place in range(rows // PAGE):
            entry = self._entries.get(chain.key(place))
            if entry is None or entry.tokens != chain.page(place):
                entry = None
            for group in range(len(self._pools)):
                if entry is None or entry.pages[group] is None:
                    first[group] = place + 1
            needed = [_first_needed(pool, place + 1) for pool in self._pools]
            if all(have <= need for have, need in zip(first, needed, strict=True)):
                best = place + 1
            elif any(have and pool.group.window is None for have, pool in zip(first, self._pools, strict=True)):
                break
        return best

    def unused(self, chain: Chain, pages: int) -> list[int]:
        """How many of a sequence's first pages, as :meth:`find` gave them, nobody has: for each pool."""
        found = self._found(chain, pages)
        return [sum(pool.idle(page) for page in group) for pool, (_, group) in zip(self._pools, found, strict=True)]

    def adopt(self, chain: Chain, tables: Sequence[PageTable], pages: int) -> None:
        """Let empty tables begin with the first ``pages`` pages, as :meth:`find` gave them."""
        for table, (first, found) in zip(tables, self._found(chain, pages), strict=True):
            table.adopt(first, found)
        chain.entered = pages

    def forget(self) -> None:
        """Empty the index; pages that somebody has stay where they are."""
        for pool, keys in zip(self._pools, self._keys, strict=True):
            for page in list(keys):
                pool.give_up(page)

    def check(self) -> None:
        """Prove that entries and pages know of each other."""
        for group, (pool, keys) in enumerate(zip(self._pools, self._keys, strict=True)):
            entered = {
                entry.pages[group]: key for key, entry in self._entries.items() if entry.pages[group] is not None
            }
            assert entered == keys, f"the index of {pool.group.name} has lost a page"
            assert set(keys) == pool.kept, f"pages of {pool.group.name} are kept that nobody can find"
        assert all(any(page is not None for page in entry.pages) for entry in self._entries.values())

    def _found(self, chain: Chain, pages: int) -> list[tuple[int, list[int]]]:
        """For each pool the place of the first page that is needed, and the pages from there on."""
        entries = [self._entries.get(chain.key(place)) for place in range(pages)]
        found = []
        for group, pool in enumerate(self._pools):
            first = min(_first_needed(pool, pages), pages)
            there = [None if entry is None else entry.pages[group] for entry in entries[first:]]
            found.append((first, [page for page in there if page is not None]))
        return found

    def _lose(self, group: int, page: int) -> None:
        """A pool needs a page for something else."""
        key = self._keys[group].pop(page)
        entry = self._entries[key]
        entry.pages[group] = None
        if all(other is None for other in entry.pages):
            del self._entries[key]


def _first_needed(pool: PagePool, pages: int) -> int:
    """The place of the first page that the row behind ``pages`` pages sees."""
    window = pool.group.window
    return 0 if window is None else max(0, pages * PAGE - window) // PAGE
