"""Which sequences run, which wait, which give way, and how much of a prompt goes into a pass."""

from __future__ import annotations

import time
from bisect import insort
from typing import TYPE_CHECKING

from paceline.bounds import Bounds, Gate
from paceline.errors import ResourceError
from paceline.pages import PAGE, PageTable, pages_for
from paceline.plan import Piece, Plan, evenly, in_turn
from paceline.tree import MAX_NODES
from paceline.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from paceline.drafting import Drafting
    from paceline.pages import PagePool
    from paceline.prefix import PrefixIndex
    from paceline.request import Sequence

_DRAFTS = 8  # beside prompts this part of a pass's rows, at most, is kept free for drafts


class Scheduler:
    """First come, first served, within each priority.

    A sequence starts when there are pages for its prompt, and grows page by page. Where pages run out, drafts are
    given up first; then the youngest gives way: it loses its pages, waits at its old place in the queue, and takes in
    what it has committed as it once did its prompt.

    The plan reads only what the host knows: how much of each prompt has been planned, how much output has been
    delivered, and the most that passes still under way may add.
    """

    def __init__(
        self,
        pools: Seq[PagePool],
        drafting: Drafting,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        lag: int = 0,
        index: PrefixIndex | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.index = index
        self.gate = gate or Gate(Bounds(), max_num_seqs, time.monotonic)
        self.capacity = max_model_len + MAX_NODES
        # A window drops pages by what the host knows, so it also holds the trees of the passes still under way.
        self.pass_rows = max(max_batch_tokens, MAX_NODES * (lag + 1))
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self._drafting = drafting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ResourceError: the whole cache is too small for it alone.
            OverloadedError: too much is there already.
        """
        for pool in self.pools:
            pages = self._pages(pool, sequence.request.limit, 0)
            if pages > pool.pages:
                raise ResourceError(
                    f"the request may grow to {sequence.request.limit} tokens, which take {pages * PAGE} tokens of "
                    f"cache; the cache holds {pool.pages * PAGE}: ask for fewer tokens or raise cache_memory."
                )
        self.gate.enter(sequence)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its pages."""
        waits, runs = sequence in self.waiting, sequence in self.running
        if waits:
            self.waiting.remove(sequence)
        if runs:
            self.running.remove(sequence)
            self._free(sequence)
        if waits or runs:
            sequence.leader = None
            self.gate.leave(sequence)

    def plan(self) -> Plan:
        """What the next pass does. Pages for all of it but the drafts are mapped, and for those they are free."""
        for sequence in self.running:
            self._enter(sequence)
        for sequence in [s for s in self.running if not s.filling]:
            if sequence in self.running and sequence.reach < sequence.request.limit:
                self._secure_root(sequence)
        self._admit()
        decodes = [s for s in self.running if _decodes(s)]
        firm = [_firm(sequence) for sequence in decodes]
        room = self.max_batch_tokens - len(decodes) - sum(firm)
        wishes = [_most_drafts(sequence) - least for sequence, least in zip(decodes, firm, strict=True)]
        pieces = self._pieces(room - min(sum(wishes), self.max_batch_tokens // _DRAFTS))
        shares = evenly(wishes, room - sum(piece.rows for piece in pieces))
        return Plan(tuple(self._cut_drafts(zip(decodes, firm, shares, strict=True))), tuple(pieces))

    def reserve(self, sequence: Sequence, end: int) -> None:
        """Map storage up to ``end``, for which the plan has left room."""
        for table in sequence.tables:
            table.reserve(end)

    def forget(self) -> None:
        """Share nothing with later requests of what is computed by now."""
        if self.index is not None:
            self.index.forget()

    def check(self) -> None:
        """Prove that no page is lost, doubled or leaked."""
        for place, pool in enumerate(self.pools):
            pool.check([sequence.tables[place] for sequence in self.running if sequence.tables])
        assert self.running == sorted(self.running, key=lambda sequence: sequence.turn)
        assert len(self.running) <= self.max_num_seqs
        assert not any(sequence in self.waiting for sequence in self.running)
        if self.index is not None:
            self.index.check()

    def _admit(self) -> None:
        """Let in whose turn it is while there are pages for it, and one more for each that runs and will grow."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.head
            if sequence.in_flight:
                return  # it gave way, and what it has committed is not known yet
            intake = max(sequence.prompt_length, sequence.delivered - 1)
            leader = sequence.leader
            follows = leader is not None and leader in self.running
            known = 0 if follows else self._known(sequence, intake)
            if self.running and not self._has_pages(sequence, PAGE if follows else intake, known):
                return
            # An interrupt may come at any place, and must find it in one list or the other.
            insort(self.running, sequence, key=lambda one: one.turn)
            self.waiting.remove(sequence)
            self.gate.begin(sequence)
            sequence.intake = intake
            if not follows:
                self._begin(sequence, known)
            if not sequence.filling:
                self._secure_root(sequence)

    def _has_pages(self, sequence: Sequence, rows: int, known: int) -> bool:
        """Whether a sequence can take in so many rows, ``known`` pages of which others have computed, and those that
        run can grow meanwhile."""
        unused = [0] * len(self.pools) if self.index is None else self.index.unused(sequence.chain, known)
        for place, (pool, idle) in enumerate(zip(self.pools, unused, strict=True)):
            promised = sum(self._promised(other, place) for other in self.running)
            wanted = max(self._pages(pool, rows, self.pass_rows) - known, 0) + idle
            if wanted + promised + len(self.running) > pool.free:
                return False
        return True

    def _known(self, sequence: Sequence, rows: int) -> int:
        """How many pages of a sequence's first rows others have computed. The last token of a prompt is not among
        them, for it is what the first token is drawn behind; and prompt logprobs need every row."""
        if self.index is None or sequence.request.sampling.prompt_logprobs is not None:
            return 0
        return self.index.find(sequence.chain, rows - sequence.fresh)

    def _begin(self, sequence: Sequence, known: int) -> None:
        """Let a sequence begin with pages that others have computed, as far as its drafter can do with them."""
        sequence.tables = tuple(PageTable(pool, self.capacity) for pool in self.pools)
        able = self._drafting.start(sequence, known * PAGE)
        if able < known * PAGE:
            known = self._known(sequence, able + sequence.fresh)
            self._drafting.release(sequence)
            self._drafting.start(sequence, known * PAGE)
        if self.index is not None:
            self.index.adopt(sequence.chain, sequence.tables, known)
        self._set_out(sequence, known * PAGE)

    def _follow(self, sequence: Sequence) -> None:
        """Let an answer begin where another to the same prompt has taken that in: full pages are shared, the last one
        is copied. It goes alone where the other does not run any more, or has given up what is needed."""
        leader = sequence.leader
        if leader is not None and leader in self.running:
            if leader.filling or not all(pool.free for pool in self.pools):
                return
            rows = self._drafting.fork(leader, sequence, sequence.prompt_length - 1)
            if all(table.holds(rows) for table in leader.tables):
                sequence.tables = tuple(table.fork(rows) for table in leader.tables)
                sequence.chain.entered = min(leader.chain.entered, rows // PAGE)
                self._set_out(sequence, rows)
                return
            self._drafting.release(sequence)
        self._begin(sequence, self._known(sequence, sequence.intake))

    def _set_out(self, sequence: Sequence, rows: int) -> None:
        """The first ``rows`` rows are there."""
        sequence.leader = None
        sequence.planned = sequence.filled = rows
        if sequence.fresh:
            sequence.record.cached_tokens = rows

    def _enter(self, sequence: Sequence) -> None:
        """Let others find what a sequence has computed."""
        if self.index is not None and sequence.tables:
            rows = sequence.planned if sequence.filling else max(sequence.planned, sequence.delivered - 1)
            self.index.enter(sequence.chain, sequence.tables, rows)

    def _promised(self, sequence: Sequence, place: int) -> int:
        """How many pages of a pool a sequence still needs for what it has to take in."""
        if not sequence.filling:
            return 0
        if not sequence.tables:
            return 1
        table = sequence.tables[place]
        wanted = self._pages(table.pool, sequence.intake, self.pass_rows)
        return max(0, min(wanted - len(table.owned()), table.missing(sequence.intake)))

    def _pages(self, pool: PagePool, rows: int, pass_rows: int) -> int:
        """The most pages that a sequence of ``rows`` rows needs at once, of which a pass takes in ``pass_rows``."""
        whole, window = pages_for(rows), pool.group.window
        return whole if window is None else min(whole, pages_for(window + pass_rows) + 2)

    def _secure_root(self, sequence: Sequence) -> None:
        """Map the row of the next tree's root; the youngest give way where there is no page."""
        _drop(sequence, sequence.delivered - 1)
        end = _least_end(sequence)
        while any(table.missing(end) > table.pool.free for table in sequence.tables):
            if not self._trim():
                youngest = self.running[-1]
                if youngest is sequence and sequence.in_flight:
                    return  # the host will soon know better how much it needs
                self._give_way(youngest)
                if youngest is sequence:
                    return
        self.reserve(sequence, end)

    def _pieces(self, room: int) -> list[Piece]:
        for sequence in self.running:
            if not sequence.tables:
                self._follow(sequence)
        filling = [sequence for sequence in self.running if sequence.filling and sequence.tables]
        wanted = [min(s.intake - s.planned, s.request.piece_limit) for s in filling]
        pieces = []
        for sequence, rows in zip(filling, in_turn(wanted, room), strict=True):
            rows = self._secure_piece(sequence, rows) if rows and sequence in self.running else 0
            if rows:
                pieces.append(Piece.next(sequence, rows))
        return pieces

    def _secure_piece(self, sequence: Sequence, rows: int) -> int:
        """Map the next rows, as many of ``rows`` as there are pages for; younger ones give way if there is none."""
        start = sequence.planned
        _drop(sequence, start)
        while (most := min(table.mapped + PAGE * table.pool.free for table in sequence.tables) - start) <= 0:
            if not self._trim():
                youngest = self.running[-1]
                if youngest is sequence:
                    return 0
                self._give_way(youngest)
        self.reserve(sequence, start + min(rows, most))
        return min(rows, most)

    def _cut_drafts(self, decodes: Iterable[tuple[Sequence, int, int]]) -> list[tuple[Sequence, int]]:
        """Cut drafts to what the free pages hold, those of the youngest first; who gave way has none."""
        free = [pool.free for pool in self.pools]
        cut = []
        for sequence, firm, share in decodes:
            tables = sequence.tables
            if tables:
                most = min(table.mapped + PAGE * left for table, left in zip(tables, free, strict=True))
                room = min(firm + share, most - sequence.reach)
                free = [left - table.missing(sequence.reach + room) for table, left in zip(tables, free, strict=True)]
                cut.append((sequence, room))
        return cut

    def _trim(self) -> bool:
        """Give up pages that were for drafts; returns whether there were any."""
        free = [pool.free for pool in self.pools]
        for sequence in self.running:
            for table in sequence.tables:
                table.cut(_least_end(sequence))
        return free != [pool.free for pool in self.pools]

    def _give_way(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)
        self.running.remove(sequence)
        self._free(sequence)
        self._drafting.release(sequence)
        sequence.filled = sequence.planned = sequence.intake = 0
        sequence.record.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        if sequence.error is None:
            self._enter(sequence)
        sequence.chain.entered = 0
        for table in sequence.tables:
            table.free()
        sequence.tables = ()


def _drop(sequence: Sequence, low: int) -> None:
    """Give up pages that no row at position ``low`` or later sees."""
    for table in sequence.tables:
        window = table.pool.group.window
        if window is not None:
            table.drop_before(low - window)


def _decodes(sequence: Sequence) -> bool:
    """Whether a sequence decodes in the next pass: it has the pages that it cannot do without."""
    mapped = all(not table.missing(_least_end(sequence)) for table in sequence.tables)
    return bool(sequence.tables) and mapped and not sequence.filling and sequence.reach < sequence.request.limit


def _least_end(sequence: Sequence) -> int:
    """Up to where a decoding sequence needs storage: the row of the next root, and drafts that it cannot be denied."""
    return sequence.reach + _firm(sequence)


def _firm(sequence: Sequence) -> int:
    """How many drafts a sequence must have, whatever the room."""
    return _most_drafts(sequence) if sequence.request.firm else 0


def _most_drafts(sequence: Sequence) -> int:
    """The most nodes that may be drafted for a sequence, whatever the room."""
    if sequence.drafter is None:
        return 0
    return max(0, min(sequence.request.ceiling, MAX_NODES - 1, sequence.request.limit - sequence.reach - 1))
