"""The record: every number taken after the cut, and all of them in agreement."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.record import SpeculationRecord
from paceline.targets.toy import ToyTarget, script_rule
from tests.toys import (
    EOS,
    VOCAB,
    Clock,
    ScriptedDrafter,
    Timed,
    ToyRun,
    TreeDrafter,
    alone,
    mix,
    oracle,
    path_rule,
    random_tree,
    trials,
)

RULE = path_rule(VOCAB, seed=41)
PROMPT = list(b"count")


def test_counts_of_single_steps() -> None:
    record = SpeculationRecord("x", 1, "bits")
    assert record.mean_accepted_length is None
    record.judge(4, 1, True)  # right, wrong, then two that were never judged
    record.judge(3, 3, False)
    record.judge(0, 0, False)
    record.judge(2, 0, True)
    shown = record.as_dict()
    assert shown["steps"] == 4
    assert shown["drafted"] == 9
    assert shown["accepted"] == 4
    assert shown["accepted_by_position"] == [
        {"accepted": 2, "reached": 3},
        {"accepted": 1, "reached": 2},
        {"accepted": 1, "reached": 1},
    ]
    assert shown["mean_accepted_length"] == 2.0


def test_the_keys_are_the_ones_promised() -> None:
    shown = SpeculationRecord("none", 7, "bits", origins=[]).as_dict()
    promised = {
        *("method", "steps", "drafted", "accepted", "accepted_by_position", "mean_accepted_length"),
        *("seconds", "lossless", "disabled_reason", "cached_tokens", "preemptions", "collapsed", "drafters"),
        *("seed", "origins"),
    }
    assert set(shown) == promised
    assert set(shown["seconds"]) == {"draft", "verify", "sample", "other"}
    assert shown["mean_accepted_length"] is None
    assert shown["seed"] == 7


@trials(40)
@given(
    seed=st.integers(0, 2**32),
    right=st.floats(0, 1),
    length=st.integers(1, 10),
    tokens=st.integers(1, 40),
    end=st.integers(1, 60),
    tree=st.booleans(),
    lag=st.integers(0, 2),
)
def test_all_numbers_agree(seed: int, right: float, length: int, tokens: int, end: int, tree: bool, lag: int) -> None:
    def rule(path: list[int]) -> Any:
        row = RULE(path).clone()
        row[EOS] = 99.0 if len(path) == len(PROMPT) + end else -99.0
        return row

    expected = alone(rule, PROMPT, max_tokens=60)
    dice = random.Random(seed)
    start = len(PROMPT)
    drafter = (
        TreeDrafter(
            lambda t, b: random_tree(dice, t[-1], expected.output[len(t) - start :], b, width=3, depth=9, vocab=VOCAB)
        )
        if tree
        else ScriptedDrafter(mix(expected.output, start, right, seed), name="tree")
    )
    run = ToyRun(rule, lag=lag)
    sequence = run.add(
        PROMPT,
        drafter,
        speculation={"num_speculative_tokens": length},
        max_tokens=tokens,
        logprobs=0,
        origins=True,
    )
    run.finish(sequence)
    output, record = sequence.output, sequence.record
    assert output == expected.output[:tokens]
    assert len(sequence.logprobs) == len(output)
    origins = record.origins or []
    assert len(origins) == len(output)
    # The first token comes with the prompt; a step that is cut inside its drafts brings none of the target's own.
    cut = origins[-1].depth > 0
    assert len(output) == 1 + record.accepted + record.steps - cut
    assert 0 <= record.accepted <= record.drafted <= length * record.steps
    assert record.reached == sorted(record.reached, reverse=True)
    assert record.accepted_at == sorted(record.accepted_at, reverse=True)
    assert all(a <= r for a, r in zip(record.accepted_at, record.reached, strict=True))
    # Whoever is judged at a depth was accepted at the one before.
    assert all(r <= a for r, a in zip(record.reached[1:], record.accepted_at, strict=False))
    assert record.reached[:1] <= [record.steps]
    # The origins tell the same story.
    assert sum(o.origin == "tree" for o in origins) == record.accepted
    assert all((o.origin == "target") == (o.depth == 0) for o in origins)
    for depth, accepted in enumerate(record.accepted_at, 1):
        assert sum(o.depth == depth for o in origins) == accepted
    assert (origins[0].step, origins[0].origin) == (0, "target")
    assert {o.step for o in origins[1:]} == set(range(1, record.steps + 1))
    assert [o.step for o in origins] == sorted(o.step for o in origins)
    if record.steps:
        assert record.mean_accepted_length == 1 + record.accepted / record.steps


@pytest.mark.parametrize("place", range(1, 8))
@pytest.mark.parametrize("ends", ["eos", "stop", "length"])
def test_a_cut_inside_a_block_cuts_the_counts(place: int, ends: str) -> None:
    script = [*range(65, 65 + place), EOS if ends == "eos" else 90, *range(97, 120)]
    run = ToyRun(script_rule(VOCAB, script, 1))
    cases: dict[str, dict[str, Any]] = {"eos": {}, "stop": {"stop": "Z"}, "length": {"max_tokens": place + 1}}
    settings = cases[ends]
    sequence = run.add(
        [1],
        ScriptedDrafter(oracle(script, 1)),
        speculation={"num_speculative_tokens": 7},
        origins=True,
        **settings,
    )
    run.finish(sequence)
    record = sequence.record
    assert len(sequence.output) == len(record.origins or []) == place + 1
    assert record.steps == 1
    # A stop is drafted and accepted; at max_tokens the last token is the target's, since drafts leave it room.
    assert record.accepted == place - (ends == "length")
    assert record.drafted == (place - 1 if ends == "length" else 7)
    assert record.accepted_at == record.reached == [1] * record.accepted


def test_probabilities_are_the_targets_after_the_rules() -> None:
    settings: dict[str, Any] = {"temperature": 0.7, "seed": 5, "top_k": 4}
    expected = alone(RULE, PROMPT, **settings)
    run = ToyRun(RULE)
    drafter = ScriptedDrafter(mix(expected.output, len(PROMPT), 0.7))
    sequence = run.add(PROMPT, drafter, origins=True, **settings)
    run.finish(sequence)
    for place, origin in enumerate(sequence.record.origins or []):
        row = RULE([*PROMPT, *sequence.output[:place]]).double() / 0.7
        kept = row.topk(4)
        truth = float((row[sequence.output[place]] - kept.values.logsumexp(0)).exp())
        assert origin.probability == pytest.approx(truth, abs=1e-5)


def test_origins_only_where_asked_for() -> None:
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, max_tokens=3)
    run.finish(sequence)
    assert sequence.record.origins is None
    assert "origins" not in sequence.record.as_dict()


@pytest.mark.parametrize("lag", [0, 2])
def test_the_seconds_of_all_requests_are_those_of_all_steps(lag: int) -> None:
    """Each pass charges its time in equal parts to those in it, pieces of prompts too; nothing is lost or doubled."""
    clock = Clock()

    class Slow(ScriptedDrafter):
        def propose(self, views: Any, budgets: Any) -> Any:
            clock.now += 0.5
            return super().propose(views, budgets)

    expected = [alone(RULE, [n] * (5 + 20 * n), max_tokens=9 + n) for n in range(3)]
    run = ToyRun(
        RULE,
        target=Timed(ToyTarget(RULE, VOCAB), clock, lambda rows: 1.0 + rows / 64),
        clock=clock,
        lag=lag,
        max_batch_tokens=8,
    )
    drafters = [Slow(oracle(e.output, 5 + 20 * n)) for n, e in enumerate(expected)]
    sequences = [
        run.add([n] * (5 + 20 * n), drafters[n], max_tokens=9 + n, speculation={"num_speculative_tokens": 2})
        for n in range(3)
    ]
    run.finish(*sequences)
    parts = [sequence.record.seconds for sequence in sequences]
    assert all(min(p.draft, p.verify, p.sample, p.other) >= 0 for p in parts)
    # With a lag, the passes that were under way when the last token came are charged to nobody.
    total = sum(part.total for part in parts)
    assert total == pytest.approx(clock.now) if not lag else total <= clock.now
    assert sum(part.draft for part in parts) > 0
    assert all(part.verify > part.draft for part in parts)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_time_a_drafter_takes_to_propose_and_to_learn_is_that_of_drafting(lag: int) -> None:
    clock, took = Clock(), Counter[str]()

    class Slow(ScriptedDrafter):
        def propose(self, views: Any, budgets: Any) -> Any:
            clock.now += 0.5
            took["drafter"] += 2
            return super().propose(views, budgets)

        def observe(self, outcomes: Any) -> None:
            clock.now += 0.25
            took["drafter"] += 1
            super().observe(outcomes)

    run = ToyRun(RULE, target=Timed(ToyTarget(RULE, VOCAB), clock, lambda rows: 1.0), clock=clock, lag=lag)
    sequence = run.add([1, 2], Slow(mix(alone(RULE, [1, 2]).output, 2, 0.5)), max_tokens=20)
    run.finish(sequence)
    seconds = sequence.record.seconds
    assert seconds.sample == seconds.other == 0
    assert seconds.verify == sequence.record.steps + 1
    if not lag:  # the passes that were under way when the last token came are charged to nobody
        assert seconds.draft == took["drafter"] / 4


def test_requests_that_ride_together_have_records_of_their_own() -> None:
    expected = [alone(RULE, [n], max_tokens=13) for n in range(4)]
    rights = (0.0, 0.5, 1.0, None)

    def drafter_of(n: int) -> ScriptedDrafter | None:
        right = rights[n]
        return None if right is None else ScriptedDrafter(mix(expected[n].output, 1, right))

    records: list[list[dict[str, Any]]] = []
    for together in (True, False):
        run = ToyRun(RULE)
        sequences = []
        for n in range(4):
            sequences.append(run.add([n], drafter_of(n), max_tokens=13))
            if not together:
                run.finish(sequences[-1])
        run.finish(*sequences)
        records.append([{**s.record.as_dict(), "seconds": None} for s in sequences])
    assert records[0] == records[1]
    assert [r["method"] for r in records[0]] == ["scripted", "scripted", "scripted", "none"]


def test_nothing_drafted_is_said_with_its_reason() -> None:
    run = ToyRun(RULE)
    silent = ScriptedDrafter(lambda tokens, budget: [])
    fixed = run.add(PROMPT, silent, max_tokens=6)
    short = run.add(PROMPT, silent, max_tokens=1)
    plain = run.add(PROMPT, max_tokens=6)
    used = run.add(PROMPT, ScriptedDrafter(lambda tokens, budget: [1] * budget), max_tokens=6)
    run.finish(fixed, short, plain, used)
    assert [s.record.as_dict()["disabled_reason"] for s in (fixed, short, plain, used)] == [
        "no match",
        None,
        None,
        None,
    ]
    costly = ToyRun(RULE)
    costly.engine.pacer.prices.of(silent).learn(1, 1, 1e6)
    rested = costly.add(PROMPT, silent, max_tokens=6, speculation={"adaptive": True})
    costly.finish(rested)
    assert rested.record.as_dict()["disabled_reason"] == "it does not pay"
