"""Odd and hostile requests to a real model: a clear refusal or the right answer, and an engine as good as new."""

from __future__ import annotations

import signal
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline import LLM, ContextLengthError, OptionError, RequestError, Sampling
from paceline.constraint import TokenAutomaton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GREEDY = Sampling(temperature=0.0, max_tokens=6)
LONG = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
STORY, COUNT = "Once upon a time", "one two three one two three one two"
NO_TOKEN = Sampling(allowed_token_ids=[65], bad_words=["QQ"], max_tokens=9)  # the ids of Q, and of Q twice


@pytest.fixture(autouse=True)
def as_good_as_new(llm: LLM) -> Iterator[None]:
    """Whatever a test did, nothing is held afterwards."""
    yield
    with llm.paused() as engine:
        assert engine.idle
        assert all(pool.free == pool.pages for pool in engine.pools)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[]], "empty"),
        ([STORY, ""], "empty"),
        (None, "NoneType"),
        (5, "int"),
        (b"bytes", "bytes"),
        ([b"bytes"], "bytes"),
        ({"prompt": STORY}, "dict: messages are for chat"),
        ([{"role": "user", "content": STORY}], "dict: messages are for chat"),
        ([STORY, None], "NoneType"),
        ([STORY, 5], "int"),
        ([5, STORY], "place 1 is not a whole number"),
        ([[5, STORY]], "place 1 is not a whole number"),
        ([True, 5], "True at place 0"),
        ([5, 1.0], "1.0 at place 1"),
        (np.array([1.0, 2.0]), "not a whole number"),
        (torch.tensor([True]), "not a whole number"),
        ([-1], "-1 at place 0"),
        ([5, 49152], "0 to 49151"),
        ([2**70], "0 to 49151"),
        ("half \ud800 a pair", "UTF-8"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("prompt", [None, 5, [STORY], [[5]], "half \ud800 a pair", ""])
def test_a_stream_refuses_before_it_begins(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.stream(prompt, GREEDY)


@pytest.mark.parametrize("prompts", [[STORY, COUNT], [STORY], (STORY,), [[5, 6], [7]], [[]]])
@pytest.mark.parametrize("call", ["stream", "submit"])
def test_one_prompt_is_not_a_list_of_them(llm: LLM, call: str, prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"^{call} takes one prompt.*call {call} for each, or generate for all"):
        getattr(llm, call)(prompts, GREEDY)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculation": {"method": "draft_model"}}, "needs a draft model"),
        ({"constraint": TokenAutomaton.from_texts([[5]], 2), "sampling": LONG}, "ignore_eos exclude each other"),
        ({"prediction": [10**6]}, "0 to 49151"),
    ],
)
def test_a_stream_refuses_options_before_it_begins(llm: LLM, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((OptionError, RequestError), match=sentence):
        llm.stream(STORY, **options)


def test_texts_and_ids_of_every_kind_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(STORY)
    expected = llm.generate(STORY, GREEDY)
    singles: list[Any] = [ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int32(i) for i in ids]]
    for single in singles:
        answer = llm.generate(single, GREEDY)
        assert answer.token_ids == expected.token_ids
        assert {type(token) for token in answer.prompt_token_ids} == {int}
    several: Any = [STORY, ids, np.array(ids), torch.tensor(ids)]
    assert [answer.token_ids for answer in llm.generate(several, GREEDY)] == [expected.token_ids] * 4
    assert [answer.token_ids for answer in llm.generate(iter([ids, STORY]), GREEDY)] == [expected.token_ids] * 2  # type: ignore[arg-type]


@pytest.mark.parametrize("blank", [" ", "\n\n\n", "\x00", "\u200b", "\ufffd"])
def test_blanks_are_prompts(llm: LLM, blank: str) -> None:
    assert len(llm.generate(blank, GREEDY.replace(ignore_eos=True)).token_ids) == 6


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, "greedy", 0, [0]])
def test_settings_of_another_type_are_refused(llm: LLM, sampling: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(OptionError, match=r"Sampling\(temperature"):
            call(STORY, sampling)


def test_each_prompt_may_have_settings_of_its_own(llm: LLM) -> None:
    settings = [GREEDY, Sampling(temperature=0.8, seed=3, max_tokens=9), Sampling(temperature=0.0, max_tokens=2)]
    together = llm.generate([STORY, COUNT, COUNT], settings)
    alone = [llm.generate(prompt, own) for prompt, own in zip([STORY, COUNT, COUNT], settings, strict=True)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    talk = [[{"role": "user", "content": text}] for text in (STORY, COUNT)]
    assert [len(answer.token_ids) for answer in llm.chat(talk, [settings[2], GREEDY])] == [2, 6]


@pytest.mark.parametrize("settings", [[], [GREEDY], [GREEDY] * 3, [GREEDY, {"temperature": 0.0}]])
def test_settings_that_are_not_one_for_each_prompt_are_refused(llm: LLM, settings: Any) -> None:
    with pytest.raises(OptionError, match=r"settings for 2 prompts|Sampling\("):
        llm.generate([STORY, COUNT], settings)


def test_lengths_at_the_limit() -> None:
    small = LLM(max_model_len=64, max_num_seqs=2)
    endless, scored = LONG.replace(max_tokens=None), Sampling(max_tokens=0, prompt_logprobs=0)
    for length in (50, 61, 62, 63):
        prompt = (llm_ids := small.tokenizer.encode(COUNT)) * 8
        plain = small.generate(prompt[:length], endless, speculation=False)
        drafted = small.generate(prompt[:length], endless, speculation={**NGRAM, "num_speculative_tokens": 63})
        assert len(plain.token_ids) == 64 - length
        assert drafted.token_ids == plain.token_ids
        assert drafted.finish_reason == "length"
    assert len(small.generate((llm_ids * 8)[:64], scored).prompt_logprobs) == 64
    for length, sampling in ((64, GREEDY), (64, endless), (65, scored), (65, GREEDY)):
        with pytest.raises(ContextLengthError, match=rf"64 tokens.*{length}"):
            small.generate((llm_ids * 9)[:length], sampling)
    raising = "shorten it, or raise max_model_len, to 8192 at most."
    for length, sampling, sentence in (
        (64, GREEDY, f"the prompt has 64, and the answer needs room: {raising}"),
        (100, GREEDY, f"the context is 64 tokens and the prompt has 100: {raising}"),
        (8191, GREEDY, raising),
        (8192, scored, raising),
        (8192, GREEDY, "the prompt has 8192: shorten it."),
        (9000, scored, "the context is 64 tokens and the prompt has 9000: shorten it."),
    ):
        with pytest.raises(ContextLengthError) as caught:
            small.generate((llm_ids * 9000)[:length], sampling)
        assert str(caught.value).endswith(sentence)


def test_more_choices_and_prompts_than_run_at_once(llm: LLM) -> None:
    sampling = Sampling(seed=5, max_tokens=2)
    choices = llm.generate(STORY, sampling.replace(n=128))
    assert len(choices) == 128
    assert len({tuple(choice.token_ids) for choice in choices}) > 30
    prompts = [f"number {n}" for n in range(20)]
    together = llm.generate(prompts, GREEDY)
    assert [answer.prompt_token_ids for answer in together] == [llm.tokenizer.encode(prompt) for prompt in prompts]
    assert together[13].token_ids == llm.generate(prompts[13], GREEDY).token_ids


def test_a_request_without_a_token_left_is_an_error_to_its_caller_alone(llm: LLM) -> None:
    expected = llm.generate(STORY, LONG).token_ids
    stream = llm.stream(STORY, LONG)
    tokens = list(next(stream).token_ids)
    with pytest.raises(RequestError, match="no token"):
        llm.generate([STORY, COUNT], NO_TOKEN)
    hopeless = llm.stream(COUNT, NO_TOKEN)
    with pytest.raises(RequestError, match="no token"):
        list(hopeless)
    for chunk in stream:
        tokens += chunk.token_ids
    assert tokens == expected


def test_streams_side_by_side_each_come_to_their_end(llm: LLM) -> None:
    """A step for one is a step for all, so one may be over before it is read again."""
    settings = [LONG, LONG.replace(max_tokens=5), LONG.replace(max_tokens=17)]
    streams = [llm.stream(STORY, sampling) for sampling in settings]
    chunks: list[list[Any]] = [[next(stream)] for stream in streams]
    for stream, seen in zip(streams, chunks, strict=True):
        seen += stream
    for sampling, seen in zip(settings, chunks, strict=True):
        whole = llm.generate(STORY, sampling)
        assert [token for chunk in seen for token in chunk.token_ids] == whole.token_ids
        assert "".join(chunk.text for chunk in seen) == whole.text == seen[-1].completion.text
        assert [chunk.completion is None for chunk in seen] == [True] * (len(seen) - 1) + [False]


def test_streams_left_early_or_never_begun_hold_nothing(llm: LLM) -> None:
    llm.stream(STORY, LONG)
    stream = llm.stream(llm.chat_ids([{"role": "user", "content": STORY}]), LONG, speculation=NGRAM)
    next(stream)
    with llm.paused() as engine:
        assert not engine.idle
    del stream


def test_threads_share_a_model_and_take_turns(llm: LLM) -> None:
    sampling = [LONG.replace(max_tokens=12 + n) for n in range(4)]
    expected = [llm.generate(STORY, each).token_ids for each in sampling]
    found: dict[int, list[list[int]]] = {n: [] for n in range(4)}
    order: list[int] = []

    def work(n: int) -> None:
        for _ in range(2):
            if n % 2:
                found[n].append(llm.generate([STORY], sampling[n], speculation=NGRAM)[0].token_ids)
            else:
                tokens: list[int] = []
                for chunk in llm.stream(STORY, sampling[n]):
                    tokens += chunk.token_ids
                    order.append(n)
                found[n].append(tokens)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [expected[n]] * 2 for n in range(4)}
    assert sum(a != b for a, b in pairwise(order)) > 3


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_interrupt_leaves_an_engine_that_works(
    llm: LLM, call: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate([STORY, COUNT], LONG)
    forward, calls = llm.loaded.decoder.forward, 0

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return forward(*given)

    calling: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate([STORY] * 12, LONG.replace(n=2), speculation=NGRAM),
        "stream": lambda: list(llm.stream(STORY, LONG)),
    }
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calling[call]()
        with llm.paused() as engine:
            assert engine.idle
    again = llm.generate([STORY, COUNT], LONG)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]


def test_an_interrupt_while_requests_are_queued_holds_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add, calls = llm.engine.add, 0

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return add(*given)

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([STORY, COUNT], LONG.replace(n=4))


@pytest.mark.parametrize("call", ["start", "propose", "observe", "rewind", "release"])
def test_a_drafter_that_raises_costs_no_token(llm: LLM, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(COUNT, LONG, speculation=False).token_ids

    def fail(*given: Any) -> Any:
        raise RuntimeError("not today")

    llm.generate(COUNT, GREEDY, speculation=NGRAM)
    for drafter in list(llm.roster._drafters.values()):
        monkeypatch.setattr(drafter, call, fail)
    assert llm.generate(COUNT, LONG, speculation=NGRAM).token_ids == expected
    llm.forget()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-300, "seed": 0},
        {"temperature": 100.0, "top_p": 0.0},
        {"temperature": 100.0, "top_k": 1, "seed": 2**63 - 1},
        {"temperature": 1.0, "min_p": 1.0},
    ],
)
def test_extremes_that_leave_the_likeliest_token(llm: LLM, options: dict[str, Any]) -> None:
    assert llm.generate(STORY, Sampling(**options, max_tokens=6)).token_ids == llm.generate(STORY, GREEDY).token_ids


@pytest.mark.parametrize("speculation", [False, NGRAM])
def test_rules_at_their_extremes(llm: LLM, speculation: Any) -> None:
    eos = llm.tokenizer.eos_ids[0]
    for options, expected in (
        ({"logit_bias": {100: 100.0}}, [100] * 6),
        ({"allowed_token_ids": [77]}, [77] * 6),
        ({"allowed_token_ids": [eos]}, [eos]),
        ({"allowed_token_ids": [77, eos], "logit_bias": {eos: 100.0}, "min_tokens": 4}, [77] * 4 + [eos]),
    ):
        answer = llm.generate(COUNT, Sampling(**options, max_tokens=6), speculation=speculation)
        assert answer.token_ids == expected
    for penalty in (0.01, 100.0):
        harsh = Sampling(temperature=0.0, repetition_penalty=penalty, presence_penalty=2, frequency_penalty=-2)
        llm.generate(COUNT, harsh.replace(max_tokens=6), speculation=speculation)
    answer = llm.generate(COUNT, Sampling(logprobs=10**9, prompt_logprobs=10**9, max_tokens=1), speculation=speculation)
    assert len(answer.logprobs[0].top) == len(answer.prompt_logprobs[1].top) == llm.loaded.decoder.vocab_size
    odd = GREEDY.replace(stop=["\u0301", "\U0001f600", "\ud800", "\ufffd", "\u200b\u200b"])
    assert llm.generate(COUNT, odd, speculation=speculation).token_ids == llm.generate(COUNT, GREEDY).token_ids


@pytest.mark.parametrize(
    ("speculation", "sentence"),
    [
        ({"draft_layers": 0}, "at least 1"),
        ({"draft_layers": 31}, "30 layers"),
        ({"num_speculative_tokens": 64}, "63"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"method": "hydra"}, "not part of this version"),
        ([], "mapping"),
    ],
)
def test_speculation_that_is_not_to_be_had(llm: LLM, speculation: Any, sentence: str) -> None:
    with pytest.raises(Exception, match=sentence) as caught:
        llm.generate(STORY, GREEDY, speculation=speculation)
    assert type(caught.value).__module__ == "paceline.errors"


def test_a_cache_too_small_names_both_amounts() -> None:
    with pytest.raises(Exception, match="360 KiB, and 1000 bytes are allowed: raise cache_memory"):
        LLM(cache_memory=1000)
    small = LLM(cache_memory=1_000_000, max_model_len=256)
    with pytest.raises(
        Exception, match=r"256 tokens of cache; the cache holds 32: ask for fewer tokens or raise cache_memory"
    ):
        small.generate(STORY, Sampling(max_tokens=250))
    with small.paused() as engine:
        assert engine.idle


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}, {"threads": 7}, {"max_num_seqs": 1}])
def test_threads_and_seats_change_no_token(llm: LLM, options: dict[str, Any]) -> None:
    other = LLM(max_model_len=256, **options)
    prompts = [STORY, COUNT, "2 + 2 ="]
    assert [answer.token_ids for answer in other.generate(prompts, LONG)] == [
        answer.token_ids for answer in llm.generate(prompts, LONG)
    ]
