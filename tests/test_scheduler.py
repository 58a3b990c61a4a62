"""Who runs, who waits, and how much of a prompt goes into a pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.pages import PAGE, pages_for
from paceline.tree import MAX_NODES
from tests.toys import VOCAB, PairTarget, ToyRun, path_rule, trials

RULE = path_rule(VOCAB, seed=8)


def test_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits for pages."""
    run = ToyRun(RULE, pages=14, max_num_seqs=3)
    large = [run.add([n] * 60, max_tokens=60) for n in range(2)]  # 12 pages each
    small = run.add([9], max_tokens=2)
    run.engine.step()
    assert run.engine.scheduler.running == [large[0]]
    run.finish(large[0])
    run.engine.step()
    assert run.engine.scheduler.running[0] is large[1]
    run.finish(large[1], small)
    assert small.finish_reason is not None


def test_a_pass_takes_no_more_rows_of_prompts_and_roots_than_allowed() -> None:
    run = ToyRun(RULE, max_batch_tokens=10, max_num_seqs=4)
    sequences = [run.add([n] * 23, max_tokens=5, piece_limit=6) for n in range(4)]
    while not run.engine.idle:
        plan = run.engine.scheduler.plan()
        assert len(plan.decodes) + sum(piece.rows for piece in plan.pieces) <= 10
        assert all(piece.rows <= 6 for piece in plan.pieces)
        run.engine.step()
    assert all(sequence.finish_reason == "length" for sequence in sequences)


def test_more_decoding_rows_than_a_pass_takes_of_prompts() -> None:
    """Decoding goes first; the prompt that waits for room comes in once there is some."""
    run = ToyRun(RULE, max_batch_tokens=2)
    first = [run.add([n], max_tokens=10) for n in range(2)]
    late = run.add([7] * 5, max_tokens=2)
    run.finish(*first, late)
    assert late.finish_reason == "length"


@trials(30)
@given(
    length=st.integers(1, 100),
    tokens=st.integers(1, 60),
    lag=st.integers(0, 2),
    rows=st.integers(1, 64),
    window=st.sampled_from([None, 4, 20]),
)
def test_a_sequence_never_holds_more_pages_than_it_was_promised(
    length: int, tokens: int, lag: int, rows: int, window: int | None
) -> None:
    target = PairTarget(RULE, VOCAB, 256, window or 1)
    run = ToyRun(RULE, target=target, lag=lag, max_batch_tokens=rows)
    sequence = run.add([3] * length, max_tokens=tokens)
    demand = run.engine.scheduler._demand(sequence)
    while not run.engine.idle:
        run.engine.step()
        for table, most in zip(sequence.tables, demand, strict=True):
            assert len(table.owned()) <= most
    assert demand[0] == pages_for(length + tokens + MAX_NODES)
    assert run.engine.scheduler._promised == [0, 0]


def test_the_plan_gives_no_room_for_drafts_beyond_the_limit() -> None:
    run = ToyRun(RULE, max_model_len=128)
    sequence = run.add([1] * 100, max_tokens=None)
    room = []
    while sequence.finish_reason is None:
        room += [room for _, room in run.engine.scheduler.plan().decodes]
        run.engine.step()
    assert room == list(range(26, -1, -1))
    long = ToyRun(RULE).add([1], max_tokens=None)
    assert long.request.limit == 256


def test_a_tree_of_64_nodes_is_the_largest_that_is_planned() -> None:
    run = ToyRun(RULE)
    sequence = run.add([1], max_tokens=None)
    while not run.engine.scheduler.plan().decodes:
        run.engine.step()
    assert run.engine.scheduler.plan().decodes == ((sequence, MAX_NODES - 1),)


def test_capacity_covers_the_longest_sequence_and_a_tree() -> None:
    run = ToyRun(RULE, max_model_len=100)
    sequence = run.add([1] * 99, max_tokens=None)
    run.engine.step()
    assert sequence.tables[0].tensor.shape[0] * PAGE >= 100 + MAX_NODES
