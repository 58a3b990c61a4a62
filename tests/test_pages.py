"""The paged cache by itself: who owns which page, and what lies in it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.errors import ResourceError
from paceline.pages import PAGE, CacheGroup, PagePool, PageTable, pages_for
from tests.toys import trials

GROUP = CacheGroup("test", 2, 3, 4, torch.float32)
CAPACITY = 160


class Storage:
    """A table, and beside it what each of its rows ought to hold."""

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.rows: list[int | None] = []
        self.first = 0  # rows before this one may be gone
        self.end = 0  # rows below this one are mapped

    def write(self, row: int, value: int) -> None:
        page, lane = int(self.table.tensor[row // PAGE]), row % PAGE
        self.table.pool.slab.keys[page, :, :, :, lane] = value
        self.table.pool.slab.values[page, :, :, lane] = -value

    def check(self) -> None:
        for row, value in enumerate(self.rows):
            if row >= self.first and value is not None:
                page, lane = int(self.table.tensor[row // PAGE]), row % PAGE
                assert page >= 0
                assert (self.table.pool.slab.keys[page, :, :, :, lane] == value).all()
                assert (self.table.pool.slab.values[page, :, :, lane] == -value).all()


class Pages(RuleBasedStateMachine):
    """Any order of reserving, committing, dropping, forking and freeing, against a plain list of rows."""

    @initialize(pages=st.integers(1, 24), seed=st.integers(0, 2**32))
    def begin(self, pages: int, seed: int) -> None:
        self.pool = PagePool(GROUP, pages)
        self.storages: list[Storage] = []
        self.dice = random.Random(seed)
        self.stamp = 0

    @rule()
    def new(self) -> None:
        if len(self.storages) < 5:
            self.storages.append(Storage(PageTable(self.pool, CAPACITY)))

    @precondition(lambda self: self.storages)
    @rule(nodes=st.integers(1, 40))
    def step(self, nodes: int) -> None:
        """Write the rows of a tree, then commit a path of them."""
        storage = self.dice.choice(self.storages)
        base = len(storage.rows)
        nodes = min(nodes, CAPACITY - base)
        if not nodes:
            return
        try:
            storage.table.reserve(base + nodes)
        except ResourceError:
            assert self.pool.free < pages_for(base + nodes)
            return
        written = list(range(self.stamp, self.stamp + nodes))
        self.stamp += nodes
        for node, value in enumerate(written):
            storage.write(base + node, value)
        path = [0, *sorted(self.dice.sample(range(1, nodes), self.dice.randint(0, nodes - 1)))]
        storage.table.commit(base, path)
        storage.rows += [written[node] for node in path]

    @precondition(lambda self: self.storages)
    @rule(back=st.integers(0, CAPACITY))
    def drop(self, back: int) -> None:
        storage = self.dice.choice(self.storages)
        row = len(storage.rows) - back
        storage.table.drop_before(row)
        storage.first = max(storage.first, row)
        assert all(page == -1 for page in storage.table.tensor[: max(row, 0) // PAGE].tolist())

    @precondition(lambda self: self.storages)
    @rule(part=st.floats(0, 1))
    def fork(self, part: float) -> None:
        storage = self.dice.choice(self.storages)
        rows = max(round(part * len(storage.rows)), storage.first)
        free = self.pool.free
        try:
            twin = Storage(storage.table.fork(rows))
        except ResourceError:
            assert self.pool.free == free == 0
            return
        assert free - self.pool.free == (rows % PAGE > 0)
        twin.rows, twin.first = storage.rows[:rows], storage.first
        self.storages.append(twin)

    @precondition(lambda self: self.storages)
    @rule()
    def free(self) -> None:
        storage = self.storages.pop(self.dice.randrange(len(self.storages)))
        storage.table.free()
        storage.table.free()
        assert storage.table.owned() == []

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check([storage.table for storage in self.storages])
            for storage in self.storages:
                storage.check()
            # What is not committed is never in a page with another owner.
            for storage in self.storages:
                for place in range(len(storage.rows) // PAGE + (len(storage.rows) % PAGE > 0), CAPACITY // PAGE):
                    page = int(storage.table.tensor[place])
                    assert page < 0 or self.pool._owners[page] == 1

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for storage in self.storages:
                storage.table.free()
            self.pool.check([])
            assert self.pool.free == self.pool.pages


TestPages = Pages.TestCase
TestPages.settings = trials(60)


@trials(100)
@given(base=st.integers(0, 40), path=st.sets(st.integers(1, 63)))
def test_a_path_becomes_contiguous_as_if_copied_through_a_list(base: int, path: set[int]) -> None:
    pool = PagePool(GROUP, 10)
    storage = Storage(PageTable(pool, CAPACITY))
    storage.table.reserve(base + 64)
    for row in range(base + 64):
        storage.write(row, row)
    nodes = [0, *sorted(path)]
    storage.table.commit(base, nodes)
    storage.rows = [*range(base), *(base + node for node in nodes), *range(base + len(nodes), base + 64)]
    storage.check()


def test_reserving_more_than_there_is_takes_nothing() -> None:
    pool = PagePool(GROUP, 3)
    first, second = PageTable(pool, CAPACITY), PageTable(pool, CAPACITY)
    first.reserve(2 * PAGE)
    with pytest.raises(ResourceError, match="1 of 3 are free"):
        second.reserve(2 * PAGE)
    pool.check([first, second])
    assert pool.free == 1
    first.reserve(3 * PAGE)
    pool.check([first, second])


def test_a_fork_that_finds_no_page_takes_none() -> None:
    pool = PagePool(GROUP, 2)
    table = PageTable(pool, CAPACITY)
    table.reserve(PAGE + 3)
    with pytest.raises(ResourceError):
        table.fork(PAGE + 3)
    pool.check([table])
    table.free()
    assert pool.free == 2


def test_the_check_finds_what_is_lost_doubled_and_leaked() -> None:
    def prepared() -> tuple[PagePool, PageTable]:
        pool = PagePool(GROUP, 4)
        table = PageTable(pool, CAPACITY)
        table.reserve(2 * PAGE)
        pool.check([table])
        return pool, table

    pool, table = prepared()
    with pytest.raises(AssertionError):
        pool.check([])
    pool._free.append(int(table.tensor[0]))
    with pytest.raises(AssertionError):
        pool.check([table])
    pool, table = prepared()
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError):
        pool.check([table])
    pool, table = prepared()
    pool._free.pop()
    with pytest.raises(AssertionError):
        pool.check([table])
    pool, table = prepared()
    table.tensor[1] = table.tensor[0]
    with pytest.raises(AssertionError):
        pool.check([table])


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ResourceError, match="at least one page"):
        PagePool(GROUP, 0)
