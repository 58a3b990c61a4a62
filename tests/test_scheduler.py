"""Who runs, who waits, and how much of a prompt goes into a pass."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from paceline.pages import PAGE
from paceline.plan import evenly, in_turn
from paceline.tree import MAX_NODES
from tests.toys import VOCAB, PairTarget, ScriptedDrafter, ToyRun, alone, mix, path_rule, same, trials

if TYPE_CHECKING:
    from paceline.request import Sequence

RULE = path_rule(VOCAB, seed=8)


def test_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits for pages."""
    run = ToyRun(RULE, pages=7, max_num_seqs=3)
    large = [run.add([n] * 60, max_tokens=40) for n in range(2)]  # 4 pages each for their prompts
    small = run.add([9], max_tokens=2)
    run.engine.step()
    assert run.engine.scheduler.running == [large[0]]
    run.finish(large[0])
    run.engine.step()
    assert run.engine.scheduler.running[0] is large[1]
    run.finish(large[1], small)
    assert small.finish_reason is not None


def test_a_lower_number_comes_first() -> None:
    run = ToyRun(RULE, max_num_seqs=1)
    order = [run.add([n], max_tokens=3, priority=priority) for n, priority in enumerate([1, 0, -2, 0, 1])]
    ended: list[Sequence] = []
    while not run.engine.idle:
        ended += [sequence for sequence in run.engine.step() if sequence.finish_reason]
        run.check()
    assert ended == [order[place] for place in (2, 1, 3, 0, 4)]


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


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """And the one that came first gets the most."""
    run = ToyRun(RULE, max_batch_tokens=16)
    long = [run.add([n] * 100, max_tokens=2) for n in (1, 2)]
    short = run.add([3] * 4, max_tokens=2)
    run.engine.step()
    assert [sequence.planned for sequence in (*long, short)] == [8, 4, 4]
    run.finish(*long, short)


@trials(200)
@given(st.lists(st.integers(0, 100), max_size=9), st.integers(-5, 200))
def test_shares(wanted: list[int], room: int) -> None:
    """All of the room is used that is wanted, nobody gets more than that, and who comes later or wants less does not
    get more than who comes first or wants more."""
    for shares in (in_turn(wanted, room), evenly(wanted, room)):
        assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
        assert sum(shares) == max(0, min(sum(wanted), room))
    for (first, want), (second, other) in pairwise(zip(in_turn(wanted, room), wanted, strict=True)):
        assert first >= second or first == want < other
    for first, want in zip(evenly(wanted, room), wanted, strict=True):
        assert first == want or first >= max(evenly(wanted, room)) - 1


@trials(60)
@given(
    length=st.integers(1, 100),
    tokens=st.integers(1, 60),
    lag=st.integers(0, 2),
    rows=st.integers(1, 64),
    window=st.sampled_from([None, 4, 20]),
)
def test_a_sequence_that_fits_by_itself_comes_to_its_end(
    length: int, tokens: int, lag: int, rows: int, window: int | None
) -> None:
    """In pools of no more pages than it takes without drafts."""
    target = PairTarget(RULE, VOCAB, 256, window or 1)
    expected = alone(RULE, [3] * length, target=target, max_tokens=tokens)
    run = ToyRun(RULE, target=target, lag=lag, max_batch_tokens=rows)
    least = [run.engine.scheduler._pages(pool, length + tokens, 0) for pool in run.pools]
    run = ToyRun(RULE, target=target, lag=lag, max_batch_tokens=rows, pages=tuple(least))
    drafter = ScriptedDrafter(mix(expected.output, length, 0.7))
    sequence = run.add([3] * length, drafter, max_tokens=tokens, speculation={"num_speculative_tokens": 40})
    run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.preemptions == 0
    run.check_empty()


def test_the_plan_gives_no_room_for_drafts_beyond_the_limit() -> None:
    run = ToyRun(RULE, max_model_len=128)
    drafter = ScriptedDrafter(lambda tokens, budget: [])
    sequence = run.add([1] * 100, drafter, max_tokens=None, speculation={"num_speculative_tokens": 63})
    room = []
    while sequence.finish_reason is None:
        room += [room for _, room in run.engine.scheduler.plan().decodes]
        run.engine.step()
    assert room == list(range(26, -1, -1))
    long = ToyRun(RULE).add([1], max_tokens=None)
    assert long.request.limit == 256


def test_a_tree_of_64_nodes_is_the_largest_that_is_planned() -> None:
    run = ToyRun(RULE)
    drafter = ScriptedDrafter(lambda tokens, budget: [])
    sequence = run.add([1], drafter, max_tokens=None, speculation={"num_speculative_tokens": 63})
    while not run.engine.scheduler.plan().decodes:
        run.engine.step()
    assert run.engine.scheduler.plan().decodes == ((sequence, MAX_NODES - 1),)


def test_drafts_count_in_a_pass_and_share_its_room() -> None:
    run = ToyRun(RULE, max_batch_tokens=32, max_num_seqs=4)
    drafter = ScriptedDrafter(lambda tokens, budget: [1] * budget)
    wishes = [2, 63, 63]
    for wish in wishes:
        run.add([1], drafter, max_tokens=None, speculation={"num_speculative_tokens": wish})
    run.engine.step()
    assert [room for _, room in run.engine.scheduler.plan().decodes] == [2, 14, 13]
    run.add([5] * 100)
    run.engine.step()
    plan = run.engine.scheduler.plan()
    assert [room for _, room in plan.decodes] == [1, 2, 1]
    assert [piece.rows for piece in plan.pieces] == [32 - 3 - 4]


def test_drafts_that_a_seed_depends_on_are_never_cut() -> None:
    run = ToyRun(RULE, max_batch_tokens=8)
    drafter = ScriptedDrafter(lambda tokens, budget: [])
    for rule, seed in (("coupled", 1), ("ratio", 1), ("ratio", None)):
        run.add([1], drafter, max_tokens=None, temperature=1.0, seed=seed, speculation={"rule": rule})
    run.engine.step()
    assert [room for _, room in run.engine.scheduler.plan().decodes] == [0, 5, 0]


def test_capacity_covers_the_longest_sequence_and_a_tree() -> None:
    run = ToyRun(RULE, max_model_len=100)
    sequence = run.add([1] * 99, max_tokens=None)
    run.engine.step()
    assert sequence.tables[0].tensor.shape[0] * PAGE >= 100 + MAX_NODES
