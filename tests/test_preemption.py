"""Where pages run out the youngest gives way and later goes on to the same bits; before that drafts are given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.pages import PagePool
from tests.toys import (
    VOCAB,
    PairTarget,
    ScriptedDrafter,
    StrictTarget,
    ToyRun,
    alone,
    mix,
    oracle,
    path_rule,
    same,
)

if TYPE_CHECKING:
    from paceline.request import Sequence

RULE = path_rule(VOCAB, seed=201)
PERIODIC = path_rule(VOCAB, seed=202, memory=1)
LENGTHS = (30, 45, 17, 60)
TOKENS = 50


def prompt(n: int) -> list[int]:
    return [n + 1] * LENGTHS[n]


def references(rule: Any = RULE, **settings: Any) -> list[Sequence]:
    return [alone(rule, prompt(n), max_tokens=TOKENS, seed=n, **settings) for n in range(len(LENGTHS))]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("pages", [7, 9, 12])
@pytest.mark.parametrize("kind", ["none", "mix", "wrong", "ngram", "suffix", "model"])
def test_who_gave_way_goes_on_to_the_same_bits(kind: str, pages: int, lag: int) -> None:
    settings: dict[str, Any] = {"temperature": 0.7, "logprobs": 1, "prompt_logprobs": 0, "repetition_penalty": 1.2}
    expected = references(PERIODIC, **settings)
    run = ToyRun(PERIODIC, pages=pages, lag=lag, max_batch_tokens=48)
    draft_pool = PagePool(StrictTarget(PERIODIC, VOCAB).groups[0], 40)
    shared: dict[str, Any] = {
        "none": None,
        "ngram": NgramDrafter(1, 3),
        "suffix": SuffixDrafter(),
        "model": DraftModelDrafter(StrictTarget(PERIODIC, VOCAB), [draft_pool], 256),
    }

    def drafter(reference: Sequence) -> Any:
        right = {"mix": 0.8, "wrong": 0.0}
        if kind in right:
            return ScriptedDrafter(mix(reference.output, reference.prompt_length, right[kind]))
        return shared[kind]

    sequences = [
        run.add(prompt(n), drafter(reference), max_tokens=TOKENS, seed=n, **settings)
        for n, reference in enumerate(expected)
    ]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    assert sum(sequence.record.preemptions for sequence in sequences) > 0
    assert sequences[0].record.preemptions == 0
    run.check_empty()
    assert draft_pool.free == draft_pool.pages
    if kind in ("mix", "model"):
        assert sum(sequence.record.accepted for sequence in sequences) > 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("window", [4, 20])
def test_with_a_window(window: int, lag: int) -> None:
    target = PairTarget(RULE, VOCAB, 256, window)
    expected = references(target=target)
    run = ToyRun(RULE, target=target, pages=(9, 64), lag=lag, max_batch_tokens=40)
    sequences = [
        run.add(prompt(n), ScriptedDrafter(oracle(e.output, e.prompt_length)), max_tokens=TOKENS, seed=n)
        for n, e in enumerate(expected)
    ]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    assert sum(sequence.record.preemptions for sequence in sequences) > 0
    run.check_empty()


def test_the_youngest_of_the_last_priority_gives_way_and_comes_back_first() -> None:
    run = ToyRun(RULE, pages=8, max_num_seqs=4)
    priorities = [1, 0, 1]
    sequences = [run.add([n] * 30, max_tokens=34, priority=priority) for n, priority in enumerate(priorities)]
    late = run.add([9], max_tokens=2, priority=1)
    gave_way: list[int] = []
    while not run.engine.idle:
        before = [sequence.record.preemptions for sequence in sequences]
        run.engine.step()
        run.check()
        gave_way += [n for n, s in enumerate(sequences) if s.record.preemptions > before[n]]
        if gave_way and sequences[2] in run.engine.scheduler.waiting:
            assert run.engine.scheduler.waiting.head in (sequences[0], sequences[2])
            assert late.delivered == 1
    assert gave_way[0] == 2
    assert 1 not in gave_way
    for n, sequence in enumerate(sequences):
        same(sequence, alone(RULE, [n] * 30, max_tokens=34))


def test_drafts_are_given_up_before_a_request_is() -> None:
    """Two requests that fit exactly as long as they draft little: neither gives way."""
    expected = [alone(RULE, [n] * 20, max_tokens=44) for n in range(2)]
    run = ToyRun(RULE, pages=8, max_batch_tokens=128)
    sequences = [
        run.add(
            [n] * 20,
            ScriptedDrafter(mix(reference.output, 20, 0.5)),
            max_tokens=44,
            speculation={"num_speculative_tokens": 40},
        )
        for n, reference in enumerate(expected)
    ]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
        assert sequence.record.preemptions == 0
        assert sequence.record.accepted > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_who_gave_way_can_be_cancelled(lag: int) -> None:
    run = ToyRun(RULE, pages=8, lag=lag)
    drafter = ScriptedDrafter(lambda tokens, budget: [1] * budget)
    sequences = [run.add([n] * 30, drafter, max_tokens=90) for n in range(3)]
    while not any(sequence.record.preemptions for sequence in sequences):
        run.engine.step()
        run.check()
    (gone,) = [sequence for sequence in sequences if sequence.record.preemptions]
    assert gone in run.engine.scheduler.waiting
    run.engine.cancel(gone)
    run.check()
    assert gone.finish_reason == "abort"
    run.finish(*sequences)
    run.check_empty()
    assert not drafter.observed


def test_features_of_what_is_taken_in_again_are_observed_again() -> None:
    """A drafter hears of every row anew, in order, from the first on."""

    class Once(ScriptedDrafter):
        starts = 0

        def start(self, view: Any, valid: int) -> None:
            assert view.id not in self.observed
            self.starts += 1
            super().start(view, valid)

    run = ToyRun(RULE, pages=8)
    drafter = Once(lambda tokens, budget: [1] * budget)
    sequences = [run.add([n] * 30, drafter, max_tokens=40) for n in range(3)]
    while not run.engine.idle:
        run.engine.step()
        for sequence in run.engine.scheduler.running:
            assert drafter.observed[sequence.id] == sequence.tokens[: sequence.filled]
    assert drafter.starts == len(sequences) + sum(sequence.record.preemptions for sequence in sequences)
    assert drafter.starts > len(sequences)


def test_it_fails_with_the_step_that_fails_only_while_it_runs() -> None:
    """A request that waits for its second turn is not part of a step."""
    run = ToyRun(RULE, pages=8)
    sequences = [run.add([n] * 30, max_tokens=60) for n in range(3)]
    while not any(sequence.record.preemptions for sequence in sequences):
        run.engine.step()
    waiting = [sequence for sequence in sequences if sequence in run.engine.scheduler.waiting]
    forward, run.target.forward = run.target.forward, None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        run.engine.step()
    run.target.forward = forward  # type: ignore[method-assign]
    run.finish(*sequences)
    for n, sequence in enumerate(sequences):
        if sequence in waiting:
            same(sequence, alone(RULE, [n] * 30, max_tokens=60))
        else:
            assert isinstance(sequence.error, TypeError)
    run.check_empty()
