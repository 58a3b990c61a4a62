"""Sampling and stopping under speculation: each rule is a function of the committed tokens and the path alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.drafters.ngram import NgramDrafter
from paceline.errors import RequestError
from paceline.targets.toy import script_rule
from tests.toys import (
    EOS,
    VOCAB,
    ScriptedDrafter,
    ToyRun,
    alone,
    mix,
    oracle,
    path_rule,
    same,
    wrong,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.drafters import Drafter
    from paceline.request import Sequence

WHOLE = path_rule(VOCAB, seed=11, spread=3.0)
PROMPT = list(b"abababab")


def looping(path: list[int]) -> Tensor:
    """Loops between a few letters, with others close behind, so that a penalty changes the choice."""
    row = WHOLE(path[-1:]) * 0.3
    row = row.clone()
    row[97 + (len(path) % 2)] += 4.0
    row[99:103] += 2.5
    return row


def drafters(answer: list[int], start: int) -> dict[str, Drafter]:
    return {
        "oracle": ScriptedDrafter(oracle(answer, start)),
        "wrong": ScriptedDrafter(wrong(answer, start)),
        "mix": ScriptedDrafter(mix(answer, start, 0.5)),
        "ngram": NgramDrafter(1, 3),
        "empty": ScriptedDrafter(lambda tokens, budget: []),
        "loop": ScriptedDrafter(lambda tokens, budget: [97 + (len(tokens) + d) % 2 for d in range(budget)]),
    }


def equals_plain(
    rule: Callable[[list[int]], Tensor], prompt: Any = PROMPT, lengths: tuple[int, ...] = (2, 5), **sampling: Any
) -> Sequence:
    """Every drafter at every length gives what plain decoding gives; returns that."""
    expected = alone(rule, prompt, **sampling)
    for length in lengths:
        for name, drafter in drafters(expected.output, expected.prompt_length).items():
            run = ToyRun(rule)
            sequence = run.add(prompt, drafter, speculation={"num_speculative_tokens": length}, **sampling)
            run.finish(sequence)
            same(sequence, expected)
            if name == "oracle":
                # max_tokens, or a stop, may cut the last block: all else that was drafted is accepted.
                assert sequence.record.drafted - sequence.record.accepted <= length
            run.check_empty()
    return expected


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.8, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    {"frequency_penalty": -0.5},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=lambda p: "+".join(name.split("_")[0] for name in p))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties(penalties: dict[str, Any], temperature: float) -> None:
    expected = equals_plain(looping, temperature=temperature, seed=2, **penalties)
    without = alone(looping, PROMPT, temperature=temperature, seed=2)
    assert expected.output != without.output or penalties["frequency_penalty"] < 0


def test_counts_after_a_step_are_those_of_the_committed_tokens() -> None:
    """Two of five drafts accepted: three tokens are counted, none twice, no rejected one."""
    expected = alone(looping, PROMPT, frequency_penalty=0.8)

    def rule(tokens: Any, budget: int) -> list[int]:
        done = len(tokens) - len(PROMPT)
        return [*expected.output[done : done + 2], 7, 7, 7][:budget]

    run = ToyRun(looping)
    sequence = run.add(PROMPT, ScriptedDrafter(rule), frequency_penalty=0.8)
    while sequence.finish_reason is None:
        run.engine.step()
        counted = sequence.choose._counts.output
        seen = expected.output[: sequence.choose._counted - len(PROMPT)]
        assert counted == {token: seen.count(token) for token in set(seen)}
    assert sequence.record.accepted_at[1] > 5
    same(sequence, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rules",
    [
        {"logit_bias": {97: -100.0, 98: -3.0}},
        {"logit_bias": {120: 100.0}},
        {"allowed_token_ids": [97, 99]},
        {"min_p": 0.2},
        {"top_k": 3},
        {"top_p": 0.3},
        {"bad_words": ["abc", "b", "cde"]},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "logit_bias": {99: 5.0}, "presence_penalty": 0.7},
    ],
    ids=lambda rules: "+".join(rules),
)
def test_rules(rules: dict[str, Any], temperature: float) -> None:
    answer = equals_plain(looping, temperature=temperature, seed=9, **rules).output
    if "allowed_token_ids" in rules:
        assert set(answer) <= {97, 99}
    if rules == {"logit_bias": {120: 100.0}}:
        assert set(answer) == {120}
    if -100.0 in rules.get("logit_bias", {}).values():
        assert 97 not in answer
    if "bad_words" in rules:
        assert b"b" not in bytes(answer)
        assert b"cde" not in bytes(answer)


def test_a_bad_word_across_two_blocks_is_never_completed() -> None:
    script = list(b"xyzwxyzwxyzwxyzw")

    def rule(path: list[int]) -> Tensor:
        row = torch.zeros(VOCAB)
        row[script[(len(path) - 1) % len(script)]] = 9.0
        row[EOS] = -50.0
        row[35] = 5.0
        return row

    for start in range(4):
        answer = equals_plain(rule, [1] * (start + 1), max_tokens=20, bad_words=["yzw"]).output
        assert b"yzw" not in bytes(answer)
        assert answer.count(35) >= 4


@pytest.mark.parametrize("least", [0, 1, 3, 4, 6, 10])
@pytest.mark.parametrize("ends", [(EOS,), (EOS, 70), (70, 71)])
def test_min_tokens_is_exact(least: int, ends: tuple[int, ...]) -> None:
    """The target wants to end at every position."""

    def rule(path: list[int]) -> Tensor:
        row = WHOLE(path).clone()
        row[list(ends)] = 40.0
        return row

    stops = [token for token in ends if token != EOS]
    expected = equals_plain(
        rule, min_tokens=least, max_tokens=10, stop_token_ids=stops, ignore_eos=EOS not in ends, logprobs=1
    )
    assert len(expected.output) == min(least + 1, 10)
    assert not set(expected.output[:least]) & set(ends)
    assert expected.finish_reason == ("length" if least == 10 else "stop")


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["E", "END", ["ND", "END"], ["zz", "EN"], "ENDENDENDE"])
def test_stop_strings_anywhere_in_a_block(place: int, include: bool, stop: Any) -> None:
    script = [*b"abcdefghi"[:place], *b"ENDENDENDEND and on and on"]
    rule = script_rule(VOCAB, script, 2)
    expected = equals_plain(
        rule, [1, 2], (1, 5), max_tokens=30, stop=stop, include_stop_str_in_output=include, logprobs=1
    )
    assert expected.finish_reason == "stop"
    text = bytes(expected.output).decode()
    ended = min((text.find(s) + len(s), s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    assert len(text) == ended[0]
    assert expected.text.text == (text if include else text[: -len(ended[1])])
    assert len(expected.logprobs) == len(expected.output) == len(expected.text.token_offsets)


@pytest.mark.parametrize("place", range(7))
def test_streamed_text_never_shows_the_beginning_of_a_stop(place: int) -> None:
    script = [*b"abcdefghi"[:place], *b"ENDxyz"]
    for length in (1, 2, 3, 5):
        run = ToyRun(script_rule(VOCAB, script, 1))
        sequence = run.add(
            [1], ScriptedDrafter(oracle(script, 1)), speculation={"num_speculative_tokens": length}, stop="END"
        )
        shown = ""
        while sequence.finish_reason is None:
            run.engine.step()
            shown += sequence.text.delta()
            assert "E" not in shown
        assert shown + sequence.text.delta() == sequence.text.text == "abcdefghi"[:place]


@pytest.mark.parametrize("place", range(8))
def test_stop_ids_and_ignored_ends(place: int) -> None:
    script = [*range(65, 65 + place), EOS, *range(97, 120)]
    rule = script_rule(VOCAB, script, 3)
    prompt = [1, 2, 3]
    ended = equals_plain(rule, prompt, max_tokens=20, logprobs=0)
    assert ended.output == script[: place + 1]
    ignored = equals_plain(rule, prompt, max_tokens=20, ignore_eos=True, logprobs=0)
    assert ignored.output == script[:20]
    assert ignored.finish_reason == "length"
    stopped = equals_plain(rule, prompt, max_tokens=20, ignore_eos=True, stop_token_ids=[99, 200, 97])
    assert stopped.output == script[: place + 2]
    assert stopped.text.text == bytes(script[:place]).decode()


def test_several_ends_of_text() -> None:
    for end in (3, 4, 5):
        script = [70, 71, end, 72]
        run = ToyRun(script_rule(VOCAB, script, 1))
        sequence = run.add([1], ScriptedDrafter(oracle(script, 1)), eos=(3, 4, 5))
        run.finish(sequence)
        assert sequence.output == [70, 71, end]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9, 1e-3])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, -1])
def test_no_temperature_is_the_most_likely(temperature: float, top_p: float, top_k: int) -> None:
    expected = alone(WHOLE, PROMPT, max_tokens=8)
    run = ToyRun(WHOLE)
    drafter = ScriptedDrafter(mix(expected.output, len(PROMPT), 0.5))
    sequences = [
        run.add(PROMPT, drafter, temperature=temperature, top_p=top_p, top_k=top_k, seed=s, max_tokens=8)
        for s in range(3)
    ]
    run.finish(*sequences)
    for sequence in sequences:
        assert sequence.output == expected.output
        assert min(sequence.record.accepted, sequence.record.drafted) >= 0


def test_seeds() -> None:
    """A seed gives one text whoever rides beside it, another seed another; greedy takes no notice of it."""
    settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": 10}
    expected = alone(WHOLE, PROMPT, seed=42, **settings)
    for beside in ([], [7, 42, 1], [3, 3]):
        run = ToyRun(WHOLE)
        neighbours = [run.add(PROMPT, NgramDrafter(1, 2), seed=s, **settings) for s in beside]
        drafter = ScriptedDrafter(mix(expected.output, len(PROMPT), 0.6, seed=len(beside)))
        sequence = run.add(PROMPT, drafter, seed=42, **settings)
        run.finish(sequence, *neighbours)
        same(sequence, expected)
    texts = {tuple(alone(WHOLE, PROMPT, seed=seed, **settings).output) for seed in range(1, 21)}
    assert len(texts) > 10
    greedy = {tuple(alone(WHOLE, PROMPT, seed=seed, max_tokens=10).output) for seed in range(1, 6)}
    assert len(greedy) == 1


def test_choices_differ_from_each_other_and_are_the_same_alone() -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 10}
    expected = [alone(WHOLE, PROMPT, choice=choice, **settings) for choice in range(5)]
    assert len({tuple(sequence.output) for sequence in expected}) == 5
    run = ToyRun(WHOLE)
    sequences = [
        run.add(PROMPT, ScriptedDrafter(mix(e.output, len(PROMPT), 0.5)), choice=choice, **settings)
        for choice, e in enumerate(expected)
    ]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("count", [0, 3, 400])
def test_logprobs_are_the_targets(mode: str, count: int) -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "seed": 3, "top_k": 30, "presence_penalty": 0.5}
    expected = equals_plain(looping, logprobs=count, logprobs_mode=mode, **settings)
    assert len(expected.logprobs) == len(expected.output)
    for place, entry in enumerate(expected.logprobs):
        before = [*PROMPT, *expected.output[:place]]
        assert entry.token == expected.output[place]
        assert len(entry.top) == min(count, 30 if mode == "processed" else VOCAB)
        assert entry.logprob <= 0.0
        if mode == "raw":
            truth = torch.log_softmax(looping(before).double(), 0)
            assert entry.logprob == pytest.approx(float(truth[entry.token]), abs=1e-5)
            for token, value in entry.top:
                assert value == pytest.approx(float(truth[token]), abs=1e-5)
        if count == 400:
            assert math.fsum(math.exp(value) for _, value in entry.top) == pytest.approx(1.0, abs=1e-5)


def test_greedy_tops_begin_with_the_token() -> None:
    for entry in equals_plain(WHOLE, logprobs=2).logprobs:
        assert entry.top[0] == (entry.token, entry.logprob)
        assert entry.rank == 1


@pytest.mark.parametrize("length", [1, 2, 7, 33, 100])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_prompt_logprobs_are_those_of_a_direct_pass(length: int, most: int) -> None:
    prompt = [(5 * i + 1) % 256 for i in range(length)]
    for rows in (1, 3, 17, 64):
        run = ToyRun(WHOLE, max_batch_tokens=rows)
        sequence = run.add(prompt, NgramDrafter(1, 2), prompt_logprobs=3, max_tokens=most, piece_limit=rows)
        run.finish(sequence)
        assert len(sequence.output) == most
        assert sequence.finish_reason == "length"
        assert len(sequence.prompt_logprobs) == length
        assert sequence.prompt_logprobs[0] is None
        for place, entry in enumerate(sequence.prompt_logprobs[1:], 1):
            truth = torch.log_softmax(WHOLE(prompt[:place]).double(), 0)
            assert entry is not None
            assert entry.token == prompt[place]
            assert entry.logprob == pytest.approx(float(truth[prompt[place]]), abs=1e-5)
            best = truth.topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        run.check_empty()


@pytest.mark.parametrize("length", range(122, 128))
@pytest.mark.parametrize("lag", [0, 2])
def test_the_context_is_filled_exactly(length: int, lag: int) -> None:
    prompt = [(3 * i) % 256 for i in range(length)]
    expected = alone(WHOLE, prompt, max_model_len=128, max_tokens=None)
    assert len(expected.output) == 128 - length
    assert expected.finish_reason == "length"
    for drafter in drafters(expected.output, length).values():
        run = ToyRun(WHOLE, max_model_len=128, lag=lag)
        sequence = run.add(prompt, drafter, speculation={"num_speculative_tokens": 8}, max_tokens=None)
        run.finish(sequence)
        same(sequence, expected)


def test_max_tokens_beyond_the_context_ends_at_it() -> None:
    expected = equals_plain(WHOLE, [3] * 250, max_tokens=100)
    assert len(expected.output) == 6


def test_rules_that_leave_no_token_are_an_error_that_says_so() -> None:
    run = ToyRun(WHOLE)
    sequence = run.add([97], allowed_token_ids=[97, 98], bad_words=["aa", "ab", "ba", "bb"], max_tokens=4)
    run.finish(sequence)
    assert isinstance(sequence.error, RequestError)
    assert "no token" in str(sequence.error)
    assert sequence.finish_reason == "abort"
    run.check_empty()
