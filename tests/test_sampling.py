"""Sampling's settings and the rules that change logits."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.errors import OptionError, RequestError
from paceline.sampling import Counts, LogitRules, Sampling, SamplingParams, bad_word_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

V = 12
INF = math.inf


def logits() -> Tensor:
    return torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5, 0.0, 4.0, -4.0, 3.0, 2.5, -0.5, 1.5])


def rules(
    prompt: Sequence[int] = (), eos: Sequence[int] = (), words: Sequence[Sequence[int]] = (), **options: Any
) -> LogitRules:
    return LogitRules(Sampling(**options), prompt, V, eos, words)


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "'temprature' is not an option of Sampling; did you mean 'temperature'"),
        ({"max_token": 1}, "did you mean 'max_tokens'"),
        ({"given": frozenset()}, "'given' is not an option"),
        ({"temperature": -1}, "temperature is -1; it must be 0 to 100"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": 1e9}, "temperature is 1000000000.0"),
        ({"temperature": "0.7"}, "temperature is a number"),
        ({"temperature": None}, "temperature is a number"),
        ({"temperature": True}, "temperature is a number"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 2.0}, "top_k is a whole number"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 is 101"),
        ({"logit_bias": {3: INF}}, "logit_bias of token 3 is inf"),
        ({"logit_bias": {-1: 1}}, "a token id in logit_bias is -1"),
        ({"logit_bias": {"a": 1}}, "a token id in logit_bias is a whole number"),
        ({"logit_bias": [1]}, "logit_bias maps"),
        ({"bad_words": ["a", ""]}, "bad_words holds an empty text"),
        ({"bad_words": "a"}, "bad_words is a list of texts"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids is -1"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids is a list"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, above max_tokens, 4"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ""}, "stop holds an empty text"),
        ({"stop": [1]}, "stop holds 1"),
        ({"stop": 7}, "stop is a list of texts"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids is a whole number"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": 1.0}, "seed is a whole number"),
        ({"n": 0}, "n is 0"),
        ({"n": 129}, "n is 129"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"logprobs_mode": "both"}, "logprobs_mode is 'raw' or 'processed'"),
        ({"ignore_eos": 1}, "ignore_eos is true or false"),
        ({"skip_special_tokens": None}, "skip_special_tokens is true or false"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        Sampling(**options)
    assert str(caught.value).endswith((".", "?"))
    assert "\n" not in str(caught.value)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(OptionError, match="given by name"):
        Sampling(0.5)  # type: ignore[call-arg]


def test_defaults_and_forms() -> None:
    assert Sampling() == SamplingParams()
    assert (Sampling().temperature, Sampling().top_k, Sampling().top_p) == (1.0, 0, 1.0)
    assert Sampling(top_k=-1).top_k == 0
    assert Sampling(stop="a").stop == ("a",) == Sampling(stop=["a", "a"]).stop
    assert Sampling(**dict[str, Any](logit_bias={"3": 1})).logit_bias == {3: 1.0}
    assert Sampling(max_tokens=0, prompt_logprobs=1).max_tokens == 0
    assert Sampling(max_tokens=None, min_tokens=1000).max_tokens is None
    assert Sampling(seed=2**63 - 1).seed == 2**63 - 1
    assert pickle.loads(pickle.dumps(Sampling(seed=3, logit_bias={1: 2}))) == Sampling(seed=3, logit_bias={1: 2})
    assert hash(Sampling(logit_bias={1: 2})) is not None


def test_settings_do_not_change_with_what_they_were_made_of() -> None:
    bias, stop = {1: 2.0}, ["a"]
    sampling = Sampling(logit_bias=bias, stop=stop)
    bias[2] = 3.0
    stop.append("b")
    assert sampling.logit_bias == {1: 2.0}
    assert sampling.stop == ("a",)


def test_what_was_written_is_remembered() -> None:
    model = Sampling(temperature=0.6, top_p=0.9)
    mine = Sampling(top_p=1.0, max_tokens=3)
    assert mine.given == {"top_p", "max_tokens"}
    assert mine.over(model) == Sampling(temperature=0.6, top_p=1.0, max_tokens=3)
    assert Sampling().over(model) == model
    assert mine.replace(seed=4).given == {"top_p", "max_tokens", "seed"}
    assert mine.replace(seed=4) == Sampling(top_p=1.0, max_tokens=3, seed=4)
    with pytest.raises(OptionError, match="did you mean 'seed'"):
        mine.replace(sede=4)


def test_generation_config() -> None:
    config = {"bos_token_id": 1, "eos_token_id": [2, 3], "transformers_version": "5.0", "num_beams": 1}
    assert Sampling.from_generation_config(config) == Sampling()
    sampled = {**config, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert Sampling.from_generation_config(sampled) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert Sampling.from_generation_config({**sampled, "do_sample": False}).temperature == 0.0
    assert Sampling.from_generation_config({"max_new_tokens": 7}).max_tokens == 7
    with pytest.raises(OptionError, match="no_repeat_ngram_size=3, which is not supported"):
        Sampling.from_generation_config({"no_repeat_ngram_size": 3})


# Rules


def test_without_rules_a_row_is_left_as_it_is() -> None:
    row = logits()
    assert rules().trivial
    assert rules().apply(row, [1, 2]).data_ptr() == row.data_ptr()
    for options in ({"logit_bias": {1: 1}}, {"min_tokens": 1}, {"allowed_token_ids": [1]}, {"repetition_penalty": 2}):
        assert not rules(**options).trivial
    assert not rules(words=[[1]]).trivial


def test_a_row_is_never_written_to() -> None:
    row = logits()
    rules([1], [2], [[3]], logit_bias={1: 1}, min_tokens=9, repetition_penalty=2.0).apply(row, [4], [5])
    assert torch.equal(row, logits())


def test_padding_is_cut_off() -> None:
    padded = torch.cat([logits(), torch.full((4,), 99.0)])
    assert torch.equal(rules().apply(padded, []), logits())
    assert rules(logit_bias={0: 1}).apply(padded, []).shape == (V,)


def test_repetition_penalty_of_prompt_output_and_path() -> None:
    row = rules([0, 1], repetition_penalty=2.0).apply(logits(), [2, 2, 7], [3])
    expected = logits()
    expected[[0, 2]] /= 2.0
    expected[[1, 3, 7]] *= 2.0
    assert torch.equal(row, expected)


def test_presence_and_frequency_count_output_and_path_but_no_prompt() -> None:
    row = rules([0, 1], presence_penalty=1.0, frequency_penalty=0.5).apply(logits(), [2, 2, 3], [2, 4])
    expected = logits()
    expected[2] -= 1.0 + 3 * 0.5
    expected[[3, 4]] -= 1.0 + 0.5
    assert torch.equal(row, expected)


def test_bias() -> None:
    row = rules(logit_bias={1: 100, 6: -100}).apply(logits(), [])
    assert row[[1, 6]].tolist() == [98.0, -96.0]


def test_allowed_ids() -> None:
    row = rules(allowed_token_ids=[3, 5]).apply(logits(), [])
    assert row.isfinite().nonzero()[:, 0].tolist() == [3, 5]


def test_min_tokens_bans_what_would_end_the_output() -> None:
    some = rules(eos=[6, 8], min_tokens=4, stop_token_ids=[9])
    for output, path in (([], []), ([1, 1], [1]), ([1, 1, 1], []), ([], [1, 1, 1])):
        assert some.apply(logits(), output, path).isinf().nonzero()[:, 0].tolist() == [6, 8, 9]
    for output, path in (([1, 1], [1, 1]), ([1] * 4, []), ([], [1] * 5)):
        assert torch.equal(some.apply(logits(), output, path), logits())
    ignoring = rules(eos=[6], min_tokens=4, stop_token_ids=[9], ignore_eos=True)
    assert ignoring.apply(logits(), []).isinf().nonzero()[:, 0].tolist() == [9]


@pytest.mark.parametrize(
    ("output", "path", "banned"),
    [
        ([], [], []),
        ([1], [], []),
        ([1, 2], [], [3]),
        ([1], [2], [3]),
        ([], [1, 2], [3]),
        ([0, 1], [2], [3]),
        ([1, 2], [0], []),
        ([1, 2], [3], []),
        ([2], [1], []),
    ],
)
def test_a_bad_word_is_not_completed(output: list[int], path: list[int], banned: list[int]) -> None:
    row = rules(words=[[1, 2, 3], [7]]).apply(logits(), output, path)
    assert row.isinf().nonzero()[:, 0].tolist() == [*banned, 7]


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [len(text)]

    assert bad_word_ids(["no", " yes", "no"], encode) == [(2,), (3,), (4,)]
    assert set(seen) == {"no", " no", "yes", " yes"}
    assert bad_word_ids(["x"], lambda _: []) == []


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({"allowed_token_ids": [3, V]}, (), "allowed_token_ids names token 12, but the model's ids end at 11"),
        ({"logit_bias": {V: 1}}, (), "logit_bias names token 12"),
        ({"stop_token_ids": [99]}, (), "stop_token_ids names token 99"),
        ({"allowed_token_ids": [3]}, [[3]], "leave no token"),
        ({"allowed_token_ids": [6], "min_tokens": 2}, (), "min_tokens forbids"),
    ],
)
def test_rules_that_cannot_be_kept(options: dict[str, Any], words: Sequence[Sequence[int]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rules(eos=[6], words=words, **options)


def test_counts_after_two_accepted_of_five_are_those_of_three_committed_tokens() -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.8}
    some = rules([0, 1], **options)
    counts = some.counts([5, 6])
    drafts = [2, 3, 4, 2, 3]
    for depth in range(6):
        some.apply(logits(), [5, 6], drafts[:depth], counts)
    counts.commit([2, 3, 9])
    one_by_one = some.counts()
    for token in (5, 6, 2, 3, 9):
        one_by_one.commit([token])
    assert counts == one_by_one == some.counts([5, 6, 2, 3, 9]) == Counts([9, 3, 2, 6, 5])
    assert counts != some.counts([5, 6, 2, 3])
    assert torch.equal(some.apply(logits(), [5, 6, 2, 3, 9], (), counts), some.apply(logits(), [5, 6], [2, 3, 9]))


def test_a_row_depends_on_the_tokens_and_not_on_their_cut() -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.8}
    some = rules([0, 1], [6], [[2, 3], [3, 2, 5]], min_tokens=5, logit_bias={4: 3}, **options)
    tokens = [2, 3, 2, 3, 2, 2, 3, 2]
    for length in range(len(tokens) + 1):
        whole = some.apply(logits(), tokens[:length])
        for cut in range(length + 1):
            counts = some.counts(tokens[:cut])
            assert torch.equal(whole, some.apply(logits(), tokens[:cut], tokens[cut:length], counts))
