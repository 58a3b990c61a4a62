"""Which sequences run, which wait, and how much of a prompt goes into a pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ResourceError
from paceline.pages import PAGE, PageTable, pages_for
from paceline.tree import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.pages import PagePool
    from paceline.request import Sequence


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``start + rows - 1`` of a prompt; the last piece is followed by the first drawn token."""

    sequence: Sequence
    start: int
    rows: int

    @property
    def ends_prompt(self) -> bool:
        return self.start + self.rows == self.sequence.prompt_length

    @property
    def scored(self) -> int:
        """How many of the last rows are scored: the one that draws the first token, all for prompt logprobs."""
        if self.sequence.request.sampling.prompt_logprobs is not None:
            return self.rows
        return int(self.ends_prompt)


@dataclass(frozen=True)
class Plan:
    """What the next pass does: for each decoding sequence the most nodes that may be drafted, and pieces of prompts."""

    decodes: tuple[tuple[Sequence, int], ...]
    pieces: tuple[Piece, ...]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.pieces)


class Scheduler:
    """First come, first served. A sequence starts when every page that it may ever need is free or promised to it.

    The plan reads only what the host knows: how much of each prompt has been planned, how much output has been
    delivered, and the most that passes still under way may add.
    """

    def __init__(
        self,
        pools: Seq[PagePool],
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        lag: int = 0,
    ) -> None:
        self.pools = tuple(pools)
        self.capacity = max_model_len + MAX_NODES
        # A window drops pages by what the host knows, so it also holds the trees of the passes still under way.
        self.pass_rows = max(max_batch_tokens, MAX_NODES * (lag + 1))
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._promised = [0] * len(self.pools)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ResourceError: the whole cache is too small for it alone.
        """
        for pool, pages in zip(self.pools, self._demand(sequence), strict=True):
            if pages > pool.pages:
                raise ResourceError(
                    f"the request may grow to {sequence.request.limit} tokens, which take {pages * PAGE} tokens of "
                    f"cache; the cache holds {pool.pages * PAGE}: ask for fewer tokens or raise cache_memory."
                )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its pages."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            for place, pages in enumerate(self._demand(sequence)):
                self._promised[place] -= pages
            for table in sequence.tables:
                table.free()

    def plan(self) -> Plan:
        """What the next pass does; pages are reserved for the worst case."""
        self._admit()
        room = self.max_batch_tokens
        decodes: list[tuple[Sequence, int]] = []
        pieces: list[Piece] = []
        for sequence in self.running:
            if sequence.planned == sequence.prompt_length and sequence.reach < sequence.request.limit:
                decodes.append((sequence, min(MAX_NODES, sequence.request.limit - sequence.reach) - 1))
                room -= 1
        for sequence in self.running:
            left = sequence.prompt_length - sequence.planned
            rows = min(left, room, sequence.request.piece_limit)
            if rows > 0:
                pieces.append(Piece(sequence, sequence.planned, rows))
                room -= rows
        return Plan(tuple(decodes), tuple(pieces))

    def reserve(self, sequence: Sequence, low: int, end: int) -> None:
        """Map storage up to ``end``, and give up pages that no row at position ``low`` or later sees."""
        for table in sequence.tables:
            window = table.pool.group.window
            if window is not None:
                table.drop_before(low - window)
            table.reserve(end)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            demand = self._demand(sequence)
            if any(
                promised + pages > pool.pages
                for promised, pages, pool in zip(self._promised, demand, self.pools, strict=True)
            ):
                return
            self.waiting.popleft()
            self._promised = [p + d for p, d in zip(self._promised, demand, strict=True)]
            sequence.tables = tuple(PageTable(pool, self.capacity) for pool in self.pools)
            self.running.append(sequence)

    def _demand(self, sequence: Sequence) -> list[int]:
        """The most pages that a sequence may hold at once, for each pool."""
        whole = pages_for(sequence.request.limit + MAX_NODES)
        return [
            whole if pool.group.window is None else min(whole, pages_for(pool.group.window + self.pass_rows) + 2)
            for pool in self.pools
        ]
