"""Nothing grows: the cache is allocated once, and what a request needed is gone with it."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from itertools import pairwise
from typing import Any

import pytest

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.pages import PagePool
from tests.toys import VOCAB, ScriptedDrafter, StrictTarget, ToyRun, path_rule

RULE = path_rule(VOCAB, seed=101)


def serve(run: ToyRun, drafters: list[Any], requests: range) -> None:
    """Short requests of all kinds, some of them cancelled."""
    for first in range(requests.start, requests.stop, 4):
        added = [
            run.add(
                [n % 250, 1, 2],
                drafters[n % len(drafters)],
                max_tokens=4,
                temperature=float(n % 2),
                seed=n,
                logprobs=1,
                origins=True,
                frequency_penalty=0.5 * (n % 3),
                stop="ab",
                speculation={"adaptive": n % 5 == 0},
            )
            for n in range(first, first + 4)
        ]
        run.engine.step()
        run.engine.cancel(added[first % 4])
        while not run.engine.idle:
            run.engine.step()


def held() -> int:
    """Bytes of what the package has allocated and something still holds."""
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*paceline*")])
    return sum(trace.size for trace in ours.traces)


def growth(requests: int, lag: int) -> int:
    """Bytes that are left of so many requests, after as many that fill whatever is filled once.

    The least of three lots: what is kept of each request shows in all of them, what grows by accident in one.
    """
    draft = StrictTarget(path_rule(VOCAB, seed=102), VOCAB)
    pool = PagePool(draft.groups[0], 32)
    drafters: list[Any] = [
        NgramDrafter(1, 3),
        DraftModelDrafter(draft, [pool], 64),
        ScriptedDrafter(lambda tokens, budget: [1] * budget),
        None,
    ]
    run = ToyRun(RULE, max_model_len=64, pages=32, lag=lag)
    slabs = [slab.keys.data_ptr() for slab in run.engine._slabs]
    tracemalloc.start()
    serve(run, drafters, range(requests))
    sizes = [held()]
    for lot in range(1, 4):
        serve(run, drafters, range(lot * requests, (lot + 1) * requests))
        sizes.append(held())
    left = min(after - before for before, after in pairwise(sizes))
    tracemalloc.stop()
    run.check_empty()
    assert [slab.keys.data_ptr() for slab in run.engine._slabs] == slabs
    assert not run.engine.scheduler.waiting
    assert not run.engine.scheduler.running
    assert not run.engine._passes
    assert not drafters[0]._indices
    assert not drafters[1]._states
    assert pool.free == pool.pages
    assert not drafters[2].observed
    return left


def test_short_requests_leave_nothing() -> None:
    """Less than 40 bytes a request: one number that is kept for each would be more."""
    assert growth(300, 0) < 40 * 300


@pytest.mark.long
@pytest.mark.parametrize("lag", [0, 2])
def test_many_requests_leave_nothing(lag: int) -> None:
    assert growth(4_000, lag) < 10 * 4_000


@pytest.mark.parametrize("lag", [0, 1])
def test_the_engine_holds_no_sequence_that_is_over(lag: int) -> None:
    run = ToyRun(RULE, lag=lag)
    drafter = NgramDrafter(1, 2)
    sequences = [run.add([n], drafter, max_tokens=5) for n in range(3)]
    run.finish(*sequences)
    # Passes under way behind the host may still name them.
    while not run.engine.idle:
        run.engine.step()
    texts = [weakref.ref(sequence.text) for sequence in sequences]
    del sequences
    gc.collect()
    assert [text() for text in texts] == [None] * 3
