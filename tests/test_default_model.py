"""Tier 3: the default model, for real."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from paceline import LLM, Completion, ContextLengthError, OptionError, RequestError, Sampling
from paceline.prompts import read_prompts

CODE = "def area(w, h):\n    result = w * h\n    return result\n"
REWRITE = [{"role": "user", "content": f"Repeat this code, with the name result changed to total.\n\n{CODE * 2}"}]
PROSE = [{"role": "user", "content": "Write three sentences about a bicycle race in the rain."}]
OWN = {"method": "draft_model", "draft_layers": 30, "num_speculative_tokens": 4, "adaptive": False}
METHODS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False},
    {"method": "ngram"},
    {"method": "draft_model", "draft_layers": 6, "num_speculative_tokens": 4, "adaptive": False},
    OWN,
]
SETTINGS = [Sampling(temperature=0.0, max_tokens=40), Sampling(temperature=0.8, top_p=0.95, seed=7, max_tokens=40)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS, ids=["ngram", "paced", "layers", "own"])
def test_not_one_token_differs(llm: LLM, method: dict[str, Any], sampling: Sampling) -> None:
    plain = [llm.chat(messages, sampling, speculation=False) for messages in (REWRITE, PROSE)]
    alone = [llm.chat(messages, sampling, speculation=method) for messages in (REWRITE, PROSE)]
    together = llm.chat([REWRITE, PROSE, PROSE, REWRITE], sampling, speculation=method)
    expected = [answer.token_ids for answer in plain]
    assert [answer.token_ids for answer in alone] == expected
    assert [answer.token_ids for answer in together] == [expected[i] for i in (0, 1, 1, 0)]
    assert all(answer.record.drafted for answer in alone if method.get("draft_layers"))
    assert all(answer.record.lossless == "bits" for answer in together)


def test_the_target_as_its_own_drafter_is_accepted_fully(llm: LLM) -> None:
    for sampling in (Sampling(temperature=0.0, max_tokens=121), Sampling(seed=3, max_tokens=121)):
        answer = llm.chat(PROSE, sampling.replace(ignore_eos=True), speculation=OWN)
        assert answer.record.accepted == answer.record.drafted
        assert answer.record.steps == 24


def test_many_pieces_give_the_same_bits(llm: LLM) -> None:
    """A prompt of several pieces beside running decodes equals the same prompt alone."""
    long = " ".join(str(n * n) for n in range(260))
    sampling = Sampling(temperature=0.0, max_tokens=12)
    prompts = [long, "Once upon a time", long[:900], "1, 2, 3, 4,"]
    together = llm.generate(prompts, sampling)
    for prompt, answer in zip(prompts, together, strict=True):
        assert llm.generate(prompt, sampling, speculation=False).token_ids == answer.token_ids


def test_logprobs_are_those_of_plain_decoding(llm: LLM) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=24, logprobs=3, prompt_logprobs=2)
    plain, drafted = (llm.chat(REWRITE, sampling, speculation=s) for s in (False, METHODS[0]))
    assert drafted.record.accepted > 0
    assert drafted.logprobs == plain.logprobs
    assert drafted.prompt_logprobs == plain.prompt_logprobs
    assert plain.prompt_logprobs is not None
    assert len(plain.prompt_logprobs) == len(plain.prompt_token_ids)
    assert plain.logprobs is not None
    for entry, token in zip(plain.logprobs, plain.token_ids, strict=True):
        assert entry.token == token == entry.top[0][0]
        assert entry.logprob <= 0.0


def test_choices_differ_and_the_first_does_not_depend_on_their_number(llm: LLM) -> None:
    sampling = Sampling(temperature=1.0, seed=11, max_tokens=16)
    one = llm.generate("The weather today", sampling)
    three = llm.generate("The weather today", sampling.replace(n=3))
    assert three[0].token_ids == one.token_ids
    assert len({tuple(choice.token_ids) for choice in three}) == 3


def test_a_stream_is_the_completion_in_parts(llm: LLM) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=40)
    whole = llm.generate("Speculative decoding is", sampling)
    chunks = list(llm.stream("Speculative decoding is", sampling))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.text == whole.text


def test_leaving_a_stream_frees_all_of_it(llm: LLM) -> None:
    stream = llm.stream("One two three", Sampling(max_tokens=200))
    next(stream)
    stream.close()
    with llm.paused() as engine:
        assert engine.idle
        assert all(pool.free == pool.pages for pool in engine.pools)


def test_bad_requests_say_what_is_wrong(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate("")
    with pytest.raises(ContextLengthError, match=r"2048.*3000"):
        llm.generate([5] * 3000)
    with pytest.raises(RequestError, match="49152"):
        llm.generate([1, 2, 49152])
    with pytest.raises(OptionError, match="num_speculative_tokens"):
        llm.generate("x", speculation={"num_speculative_token": 3})
    assert llm.engine.idle


def test_int8_is_as_good_as_fp32(llm: LLM) -> None:
    """Mean log-probability of one long text: int8 loses at most 1 % of perplexity; the full measure is in bench."""
    text = next(p for p in (prompt.turns[0] for prompt in read_prompts(None)) if len(p) > 4000)
    sampling = Sampling(max_tokens=0, prompt_logprobs=0)
    fp32 = LLM(dtype="fp32", max_model_len=2048, max_num_seqs=1)
    losses = [_loss(model.generate(text[:6000], sampling)) for model in (llm, fp32)]
    assert math.exp(losses[0] - losses[1]) < 1.02


def _loss(answer: Completion) -> float:
    entries = answer.prompt_logprobs
    assert entries is not None
    values = [-entry.logprob for entry in entries if entry is not None]
    return sum(values) / len(values)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_are_kept_in_floats_too(dtype: str) -> None:
    model = LLM(dtype=dtype, max_model_len=1024, max_num_seqs=4)
    for sampling in SETTINGS:
        expected = [model.chat(m, sampling, speculation=False).token_ids for m in (REWRITE, PROSE)]
        for method in (METHODS[0], METHODS[2]):
            assert [a.token_ids for a in model.chat([REWRITE, PROSE], sampling, speculation=method)] == expected


@pytest.mark.long
def test_ten_thousand_short_requests_do_not_grow(llm: LLM) -> None:
    psutil = pytest.importorskip("psutil")
    process, sampling = psutil.Process(), Sampling(temperature=0.0, max_tokens=2)
    random.seed(0)
    sizes = []
    for round_ in range(10):
        prompts = [[random.randrange(1000) for _ in range(4)] for _ in range(1000)]
        llm.generate(prompts, sampling)
        if round_ >= 2:
            sizes.append(process.memory_info().rss)
    assert max(sizes) - sizes[0] < 16 * 2**20
