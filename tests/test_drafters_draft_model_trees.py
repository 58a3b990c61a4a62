"""Trees of a draft model: no worse than chains, bounded, and with books that are right after every step."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.shape import TreeShape
from tests.draft_models import OTHER, PROMPT, RULE, Draft, half_right, ride
from tests.toys import VOCAB, StrictTarget, ToyRun, alone, path_rule, same


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("width", "budget"), [(2, 1), (2, 6), (3, 13), (10, 63)])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_tree_of_the_target_itself_is_accepted_to_its_depth(
    width: int, budget: int, temperature: float, lag: int
) -> None:
    """Every row of the tree saw its own path alone, and the accepted path is what the next step goes on from."""
    settings: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "max_tokens": 50}
    run = ToyRun(RULE, lag=lag, pages=128)
    draft = Draft(StrictTarget(RULE, VOCAB), pages=128, tree=width)
    spec = {"num_speculative_tokens": budget}
    sequences = [run.add(PROMPT[: 5 + 9 * n], draft.drafter, speculation=spec, seed=n, **settings) for n in range(3)]
    ride(run, draft, sequences)
    for n, sequence in enumerate(sequences):
        same(sequence, alone(RULE, PROMPT[: 5 + 9 * n], seed=n, **settings))
        record = sequence.record
        assert record.accepted_at == record.reached
        if not lag:
            assert record.accepted / record.steps > min(budget, 4) / 2


@pytest.mark.parametrize("windows", [(None, None), (8, None), (None, 8), (16, 16)])
@pytest.mark.parametrize("lag", [0, 2])
def test_trees_of_any_model_keep_their_books(windows: tuple[int | None, int | None], lag: int) -> None:
    expected = [
        alone(RULE, PROMPT[: 9 * n + 1], window=windows[0], temperature=0.5 * n, seed=n, max_tokens=30)
        for n in range(3)
    ]
    run = ToyRun(RULE, window=windows[0], lag=lag, max_batch_tokens=20, pages=128)
    draft = Draft(StrictTarget(half_right, VOCAB, window=windows[1]), tree=3)
    sequences = [
        run.add(
            PROMPT[: 9 * n + 1],
            draft.drafter,
            temperature=0.5 * n,
            seed=n,
            max_tokens=30,
            speculation={"num_speculative_tokens": 5 + 4 * n},
        )
        for n in range(3)
    ]
    ride(run, draft, sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    if windows == (None, None):
        assert all(0 < s.record.accepted < s.record.drafted for s in sequences)


def test_a_tree_finds_more_than_a_chain_of_as_many_levels() -> None:
    """A drafter that is often second best: the target's logits, blurred."""

    def blurred(path: list[int]) -> Any:
        return RULE(path) + 0.35 * OTHER(path)

    accepted = {}
    for width, budget in ((1, 4), (4, 16)):
        run = ToyRun(RULE, pages=128)
        draft = Draft(StrictTarget(blurred, VOCAB), tree=width)
        spec = {"num_speculative_tokens": budget}
        settings: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "speculation": spec}
        sequences = [run.add(PROMPT[: 3 + 5 * n], draft.drafter, seed=n, **settings) for n in range(4)]
        ride(run, draft, sequences)
        accepted[width] = sum(s.record.accepted for s in sequences) / sum(s.record.steps for s in sequences)
    assert accepted[4] > 1.1 * accepted[1] > 0.5


@pytest.mark.parametrize(("rule", "width"), [("ratio", 1), ("block", 1), ("recursive", 3), ("traversal", 3)])
def test_under_rules_with_probabilities_what_was_drawn_stays(rule: str, width: int) -> None:
    """The target as its own drafter: p is q, so the first branch is always accepted, and no node is ever dropped."""
    run = ToyRun(RULE, pages=128)
    draft = Draft(StrictTarget(RULE, VOCAB), tree=width)
    spec = {"num_speculative_tokens": 6, "rule": rule}
    sequences = [
        run.add(
            PROMPT[: 9 * n + 1],
            draft.drafter,
            max_tokens=40,
            ignore_eos=True,
            temperature=1.0,
            seed=n,
            speculation=spec,
        )
        for n in range(3)
    ]
    ride(run, draft, sequences)
    for sequence in sequences:
        assert sequence.record.accepted > 10
        assert sequence.record.accepted_at == sequence.record.reached


def test_a_tree_has_room_for_as_many_rows_as_a_word_has_bits(caplog: pytest.LogCaptureFixture) -> None:
    """Where chances are flat, more nodes are worth expanding than can be."""
    flat = path_rule(VOCAB, seed=74, spread=0.1)
    run = ToyRun(flat, pages=128)
    draft = Draft(StrictTarget(flat, VOCAB), pages=128, tree=63)
    spec = {"num_speculative_tokens": 63}
    sequence = run.add(PROMPT, draft.drafter, ignore_eos=True, max_tokens=90, temperature=1.0, speculation=spec)
    ride(run, draft, [sequence])
    same(sequence, alone(flat, PROMPT, ignore_eos=True, max_tokens=90, temperature=1.0))
    assert sequence.record.accepted > 0
    assert not caplog.records


def test_what_was_accepted_of_a_tree_is_not_taken_in_again() -> None:
    taken: list[int] = []

    class Watched(StrictTarget):
        def forward(self, batch: Any, *rest: Any) -> Any:
            taken.append(int((batch.visible == 0).sum()))
            return super().forward(batch, *rest)

    run = ToyRun(RULE, pages=128)
    draft = Draft(Watched(RULE, VOCAB), pages=128, tree=3)
    spec = {"num_speculative_tokens": 13}
    sequence = run.add(PROMPT, draft.drafter, ignore_eos=True, max_tokens=60, speculation=spec)
    ride(run, draft, [sequence])
    assert sequence.record.accepted_at == sequence.record.reached
    firsts = [rows for rows in taken if rows]
    assert firsts[0] == len(PROMPT) + 1
    assert set(firsts[1:]) == {
        1,
        2,
    }  # the last token accepted, where its children were not drafted, and the target's own


@pytest.mark.parametrize("rule", ["coupled", "recursive"])
def test_a_shape_is_filled_node_for_node(rule: str) -> None:
    shape = TreeShape.parse([[0], [1], [0, 0], [0, 1], [0, 0, 0], [2]])
    run = ToyRun(RULE, pages=128)
    draft = Draft(StrictTarget(RULE, VOCAB), pages=128, tree=shape)
    spec = {"num_speculative_tokens": len(shape) - 1, "rule": rule}
    settings: dict[str, Any] = {"max_tokens": 41, "ignore_eos": True, "temperature": 1.0, "speculation": spec}
    sequences = [run.add(PROMPT[: 9 * n + 1], draft.drafter, seed=n, **settings) for n in range(2)]
    ride(run, draft, sequences)
    for sequence in sequences:
        record = sequence.record
        # nine whole trees, one of the three nodes for which there is room at the end, and a step without drafts
        assert record.steps == 11
        assert record.drafted == 9 * (len(shape) - 1) + 3
        assert record.accepted == 9 * 3 + 2
