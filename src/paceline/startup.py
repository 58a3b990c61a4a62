"""Measuring steps before anything is served."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from paceline.batch import Rows
from paceline.cost import EXACT, Load
from paceline.pages import PAGE, PageTable
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.engine import Engine

ROWS = (*range(1, 17), *range(18, 33, 2), *range(36, EXACT + 1, 4))
"""Numbers of rows of one tree; those between lie between."""

_SOME = (1, 2, 4, 8, 16, 32, EXACT)
_SHORT, _LONG = 128, 2048
_REPEATS = 3
_SEQUENCES = (2, 4, 8, 16, 32)


def measure(engine: Engine) -> list[tuple[Load, float]]:
    """Times of steps of an engine that is idle: one tree of 1 to 64 rows, pieces of prompts in doublings up to the
    token budget, several sequences at once, after little context and much.

    Returns:
        Loads and seconds; what has no room in the cache is left out.
    """
    return _Meter(engine).cells()


class _Meter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slabs = [pool.slab for pool in engine.pools]
        self._free_rows = min(pool.free for pool in engine.pools) * PAGE
        self._room = min(engine.scheduler.capacity - MAX_NODES, self._free_rows)  # for one sequence

    def cells(self) -> list[tuple[Load, float]]:
        cells: list[tuple[Load, float]] = []
        longest = self._room - EXACT
        if longest < 1:
            return []
        for context, rows in ((min(_SHORT, longest), ROWS), (min(_LONG, longest), _SOME)):
            tables = self._tables()
            self._fill(tables, context)
            for count in rows:
                load = Load(count, 1, 0, context, count * context)
                tree = TokenTree.chain(0, [0] * (count - 1), [1.0] * (count - 1), "")
                cells.append((load, self._time(partial(self._trees, [(tree, context, tables)]))))
            self._free([tables])
        pieces = EXACT * 2
        while pieces <= min(self._engine.scheduler.max_batch_tokens, self._room):
            tables = self._tables()
            load = Load(0, 0, pieces, pieces, pieces * pieces // 2)
            cells.append((load, self._time(partial(self._piece, tables, 0, pieces))))
            self._free([tables])
            pieces *= 2
        return [*cells, *self._several()]

    def _several(self) -> list[tuple[Load, float]]:
        """Steps of several sequences, one row each."""
        cells, context = [], min(_SHORT, self._room - 1)
        for count in _SEQUENCES:
            if count > self._engine.scheduler.max_num_seqs or count * (context + PAGE) > self._free_rows:
                break
            each = [self._tables() for _ in range(count)]
            for tables in each:
                self._fill(tables, context)
            trees = [(TokenTree.root(0), context, tables) for tables in each]
            load = Load(count, count, 0, count * context, count * context)
            cells.append((load, self._time(partial(self._trees, trees))))
            self._free(each)
        return cells

    def _time(self, step: Callable[[], None]) -> float:
        """The median of some repeats, behind one that does not count."""
        seconds = []
        for _ in range(_REPEATS + 1):
            started = self._engine.clock()
            step()
            seconds.append(self._engine.clock() - started)
        return median(seconds[1:])

    def _tables(self) -> tuple[PageTable, ...]:
        return tuple(PageTable(pool, self._engine.scheduler.capacity) for pool in self._engine.pools)

    def _free(self, each: Sequence[tuple[PageTable, ...]]) -> None:
        for tables in each:
            for table in tables:
                table.free()

    def _fill(self, tables: tuple[PageTable, ...], context: int) -> None:
        step = self._engine.scheduler.max_batch_tokens
        for start in range(0, context, step):
            self._piece(tables, start, min(start + step, context))

    def _piece(self, tables: tuple[PageTable, ...], start: int, end: int) -> None:
        for table in tables:
            table.reserve(end)
        rows = Rows()
        rows.piece([0] * (end - start), start, tables, 1)
        self._engine.target.forward(rows.batch(), self._slabs)

    def _trees(self, trees: Sequence[tuple[TokenTree, int, tuple[PageTable, ...]]]) -> None:
        rows = Rows()
        for tree, context, tables in trees:
            for table in tables:
                table.reserve(context + len(tree))
            rows.tree(tree, context, tables)
        self._engine.target.forward(rows.batch(), self._slabs)
