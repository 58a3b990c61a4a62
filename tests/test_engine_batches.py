"""Ragged batches: every request gives what it gives alone and plain, whoever rides beside it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.ngram import NgramDrafter
from paceline.errors import ResourceError
from tests.toys import (
    EOS,
    VOCAB,
    PairTarget,
    ScriptedDrafter,
    ToyRun,
    TreeDrafter,
    alone,
    mix,
    oracle,
    path_rule,
    random_tree,
    same,
    trials,
    wrong,
)

if TYPE_CHECKING:
    from paceline.drafters import Drafter
    from paceline.request import Sequence

RULE = path_rule(VOCAB, seed=5, memory=2)
WHOLE = path_rule(VOCAB, seed=6)
TEXT = list(b"a row of riders, a row of riders, a row")
KINDS = ("none", "empty", "oracle", "wrong", "mix", "tree", "ngram", "long")


def drafter_of(kind: str, answer: list[int], start: int, seed: int) -> Drafter | None:
    dice = random.Random(seed)
    rules = {
        "empty": lambda tokens, budget: [],
        "oracle": oracle(answer, start),
        "wrong": wrong(answer, start),
        "mix": mix(answer, start, 0.5, seed),
        "long": lambda tokens, budget: [1] * 1000,
    }
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter(1, 3)
    if kind == "tree":
        return TreeDrafter(
            lambda tokens, budget: random_tree(
                dice, tokens[-1], answer[len(tokens) - start :], budget, width=3, depth=6, vocab=VOCAB
            )
        )
    return ScriptedDrafter(rules[kind])


def request_of(dice: random.Random, longest: int = 70) -> dict[str, Any]:
    prompt = [dice.choice(TEXT) for _ in range(dice.randint(1, longest))]
    return {
        "prompt": prompt,
        "temperature": dice.choice([0.0, 0.7, 1.2]),
        "seed": dice.randrange(5),
        "choice": dice.randrange(2),
        "max_tokens": dice.randint(1, 30),
        "logprobs": dice.choice([None, 2]),
        "prompt_logprobs": dice.choice([None, None, 1]),
        "repetition_penalty": dice.choice([1.0, 1.3]),
        "top_p": dice.choice([1.0, 0.8]),
    }


def ride(seed: int, count: int, rule: Any, target: Any = None, **engine: Any) -> None:
    """Requests of every kind join at random steps; some are cancelled on the way."""
    dice = random.Random(seed)
    requests = [request_of(dice) for _ in range(count)]
    expected = [alone(rule, target=target, **request) for request in requests]
    shared = NgramDrafter(2, 4)
    run = ToyRun(rule, target=target, **engine)
    waiting = list(range(count))
    running: dict[int, Sequence] = {}
    doomed = {place for place in range(count) if dice.random() < 0.2}
    while waiting or not run.engine.idle:
        if waiting and dice.random() < 0.4:
            place = waiting.pop(0)
            reference = expected[place]
            kind = dice.choice(KINDS)
            drafter = drafter_of(kind, reference.output, reference.prompt_length, dice.randrange(99))
            running[place] = run.add(
                **requests[place],
                drafter=shared if kind == "ngram" else drafter,
                speculation={"num_speculative_tokens": dice.choice([1, 2, 3, 5, 8, 20])},
                piece_limit=dice.choice([1, 3, 17, 64]),
            )
        for place in [p for p in doomed if p in running and dice.random() < 0.3]:
            run.engine.cancel(running[place])
            run.check()
        run.engine.step()
        run.check()
    for place, sequence in running.items():
        if sequence.finish_reason == "abort":
            done = len(sequence.output)
            assert place in doomed
            assert sequence.output == expected[place].output[:done]
            assert sequence.logprobs == expected[place].logprobs[:done]
        else:
            same(sequence, expected[place])
    run.check_empty()
    assert not shared._indices


@trials(20)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 8),
    lag=st.integers(0, 2),
    rows=st.sampled_from([1, 3, 17, 64]),
    running=st.integers(1, 8),
    pages=st.sampled_from([12, 20, 64]),
)
def test_riding_together_changes_nothing(seed: int, count: int, lag: int, rows: int, running: int, pages: int) -> None:
    ride(seed, count, WHOLE, lag=lag, max_batch_tokens=rows, max_num_seqs=running, pages=pages)


@trials(6)
@given(seed=st.integers(0, 2**32), lag=st.integers(0, 2), window=st.sampled_from([8, 16]))
def test_riding_together_on_two_cache_groups(seed: int, lag: int, window: int) -> None:
    target = PairTarget(RULE, VOCAB, 256, window)
    ride(seed, 5, RULE, target=target, lag=lag, max_batch_tokens=40, max_num_seqs=4, pages=30)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_riding_together_for_long(seed: int) -> None:
    dice = random.Random(seed)
    engine = {
        "lag": dice.randrange(3),
        "max_batch_tokens": dice.choice([1, 3, 17, 64]),
        "max_num_seqs": dice.randint(1, 8),
        "pages": dice.choice([12, 20, 64]),
    }
    ride(seed, 20, dice.choice([RULE, WHOLE]), **engine)


def test_rows_with_and_without_drafts_side_by_side() -> None:
    """Id 0 is a legal and frequent token, and no placeholder."""
    script = [0, 5, 0, 0, 7, 0, 0, 0, 9, 0]

    def rule(path: list[int]) -> Any:
        row = WHOLE(path[:1]).clone()
        row[script[len(path) % len(script)]] = 50.0
        return row

    prompts = [[0], [0, 0], [3], [0, 0, 0]]
    expected = [alone(rule, prompt, max_tokens=n) for prompt, n in zip(prompts, (20, 20, 20, 1), strict=True)]
    run = ToyRun(rule)
    kinds = ("empty", "oracle", "wrong", "oracle")
    sequences = [
        run.add(
            reference.request.prompt,
            drafter_of(kind, reference.output, reference.prompt_length, 0),
            max_tokens=reference.request.sampling.max_tokens,
        )
        for kind, reference in zip(kinds, expected, strict=True)
    ]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    assert [s.record.drafted > 0 for s in sequences] == [False, True, True, False]
    assert expected[1].output.count(0) > 10


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 100])
def test_prompts_cut_in_pieces(length: int, rows: int, lag: int) -> None:
    prompt = (TEXT * 3)[:length]
    expected = alone(WHOLE, prompt, temperature=0.9, seed=4, prompt_logprobs=2, max_tokens=6)
    run = ToyRun(WHOLE, max_batch_tokens=max(rows, 2), lag=lag)
    beside = run.add([9], max_tokens=40)
    sequence = run.add(
        prompt,
        ScriptedDrafter(oracle(expected.output, length)),
        piece_limit=rows,
        temperature=0.9,
        seed=4,
        prompt_logprobs=2,
        max_tokens=6,
    )
    run.finish(sequence, beside)
    same(sequence, expected)
    same(beside, alone(WHOLE, [9], max_tokens=40))


def test_a_small_cache_makes_requests_wait_and_fails_none() -> None:
    expected = [alone(WHOLE, [n] * (10 + n), max_tokens=40) for n in range(6)]
    run = ToyRun(WHOLE, pages=5)  # one of them takes four
    sequences = [
        run.add([n] * (10 + n), ScriptedDrafter(oracle(reference.output, 10 + n)), max_tokens=40)
        for n, reference in enumerate(expected)
    ]
    most = 0
    while not run.engine.idle:
        run.engine.step()
        run.check()
        most = max(most, len(run.engine.scheduler.running))
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    assert most == 3
    run.check_empty()


def test_a_request_that_can_never_fit_is_refused_and_leaves_nothing() -> None:
    run = ToyRun(WHOLE, pages=4)
    drafter = ScriptedDrafter(lambda tokens, budget: [])
    with pytest.raises(ResourceError, match="cache holds 64"):
        run.add([1] * 20, drafter, max_tokens=100)
    assert not drafter.observed
    run.check_empty()


@pytest.mark.parametrize("when", ["waiting", "prompt", "decoding", "done"])
@pytest.mark.parametrize("lag", [0, 2])
def test_cancelling_at_any_time_frees_all(when: str, lag: int) -> None:
    run = ToyRun(WHOLE, max_num_seqs=1, max_batch_tokens=4, lag=lag)
    drafter = ScriptedDrafter(lambda tokens, budget: [3] * budget)
    first = run.add([1] * 10, drafter, max_tokens=10)
    second = run.add([2] * 10, drafter, max_tokens=10)
    for _ in range({"waiting": 1, "prompt": 1, "decoding": 6, "done": 60}[when]):
        run.engine.step()
    chosen = second if when == "waiting" else first
    run.engine.cancel(chosen)
    run.engine.cancel(chosen)
    run.check()
    assert chosen.finish_reason == ("length" if when == "done" else "abort")
    assert chosen.id not in drafter.observed
    run.finish(first, second)
    rest = first if when == "waiting" else second
    same(rest, alone(WHOLE, rest.request.prompt, max_tokens=10))
    run.check_empty()


def test_a_step_that_breaks_off_leaves_an_engine_that_works() -> None:
    """A target that fails, or rules that leave no token, end what runs; what waits, and what comes, is served."""
    calls = 0

    def rule(path: list[int]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise MemoryError("no memory is left")
        return WHOLE(path)

    for lag in (0, 1, 2):
        calls = 0
        run = ToyRun(rule, max_num_seqs=2, lag=lag)
        drafter = ScriptedDrafter(lambda tokens, budget: [3] * min(budget, 1))
        sequences = [run.add([n], drafter, max_tokens=9) for n in range(3)]
        with pytest.raises(MemoryError):
            run.finish(*sequences)
        assert [s.finish_reason for s in sequences] == ["abort", "abort", None]
        expected = [alone(WHOLE, [n], max_tokens=9) for n in range(3)]
        for sequence, reference in zip(sequences[:2], expected, strict=False):
            assert sequence.output == reference.output[: len(sequence.output)]
        run.finish(*sequences)
        same(sequences[2], expected[2])
        run.check_empty()
        assert not drafter.observed


def test_an_end_of_text_in_one_row_does_not_end_another() -> None:
    def rule(path: list[int]) -> Any:
        row = WHOLE(path).clone()
        row[EOS] = 60.0 if path[0] == 1 and len(path) >= 4 else -60.0
        return row

    run = ToyRun(rule)
    expected = [alone(rule, [n], max_tokens=12) for n in (1, 2)]
    sequences = [
        run.add([n], ScriptedDrafter(oracle(e.output, 1)), max_tokens=12) for n, e in zip((1, 2), expected, strict=True)
    ]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    assert [s.finish_reason for s in sequences] == ["stop", "length"]
