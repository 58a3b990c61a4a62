"""Requests of every kind, drawn by lot: prompts, settings, seeds, keys, priorities, ways to draft, and who leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.bench.drafters import variations
from paceline.bench.run import parse_method
from paceline.bench.ways import Way
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.front import Front
    from paceline.prompts import Prompt
    from paceline.wishes import Wishes

SHORT = 8
"""Layers of the short draft model; half of the target's where it has no more."""
CROWD = (
    Way("auto", "auto"),
    Way("ngram", "ngram"),
    Way("suffix", "suffix:tree=none"),
    Way("suffix tree", "suffix"),
    Way("recycling", "recycling:tree=none"),
    Way("recycling tree", "recycling"),
    Way("lookahead", "lookahead"),
    Way("prediction", "prediction", request="predicted"),
    Way("grammar", "grammar", judge="accepted", request="constrained"),
    Way("draft_layers", "draft_model:draft_layers={short}"),
    Way("draft_layers tree", "draft_model:draft_layers={short},tree=2"),
    Way("medusa", "medusa:random=true,tree=none", judge="rejected"),
    Way("medusa tree", "medusa:random=true", judge="rejected"),
    Way("eagle", "eagle:random=true,tree=none", judge="rejected"),
    Way("eagle tree", "eagle:random=true", judge="rejected"),
    Way("eagle3", "eagle3:random=true,tree=none", judge="rejected"),
    Way("eagle3 tree", "eagle3:random=true", judge="rejected"),
    Way("cascade of chains", "cascade:tree=none", request="predicted"),
    Way("cascade with a model", "cascade:draft_layers={short}"),
)
LONG = 1000
"""Prompts of more tokens are long."""
ROOM = f"draft_model:draft_layers={SHORT + 2}"
"""What a cache is planned for that all these drafters share: EAGLE's heads have two layers beside."""
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logprobs": 2},
    {"logprobs": 0, "logprobs_mode": "processed"},
    {"prompt_logprobs": 1},
    {"stop": ["?", "\n\n"]},
    {"stop": " the ", "include_stop_str_in_output": True},
    {"bad_words": [" of", "and"]},
    {"min_tokens": 8},
)
_HARMLESS = _SETTINGS[:7]  # to a constraint, which leaves few tokens
_LENGTHS = (1, 8, 32, 96, 96, 96, 96)
_CHOICES = (1, 1, 1, 1, 1, 1, 1, 2, 4)  # several answers begin with the pages of one, and grow to more than there are
_LONGEST = 1200  # tokens of a prompt
_SHARED = 0.4  # of the requests begin with one of a few long texts
_BEGINNINGS = (300, 600, 1200, 6000)  # characters of two of them
_QUESTIONS = (100, 100, 100, 6000)
_RECITED = 40  # tokens that a constraint allows, but for a few that are swapped
_PREDICTED = 0.2  # of the requests, beside those that draft from nothing else, come with a prediction
_LEAVE = 0.2  # of the requests are left, most of them before their end
_CHUNKS = (1, 3, 10)
_SECONDS = (0.05, 0.5, 3.0)


@dataclass(frozen=True)
class Visitor:
    """One request.

    Attributes:
        id: its number.
        ids: its prompt.
        sampling: its settings, the seed among them.
        way: how it drafts.
        wishes: what else it says.
        predicted: whether it comes with the answer that it will get, some tokens of which are wrong.
        chunks: after so many it is left; None to its end.
        seconds: after so many it is left, whatever has come; None to its end.
    """

    id: str
    ids: tuple[int, ...]
    sampling: Sampling
    way: Way
    wishes: Wishes
    predicted: bool
    chunks: int | None = None
    seconds: float | None = None


def visitors(
    llm: Front, prompts: Sequence[Prompt], count: int, ways: Sequence[Way] = CROWD, seed: int = 0
) -> list[Visitor]:
    """Draw requests of mixed lengths, settings, seeds and keys, many with a beginning in common.

    Args:
        prompts: of which the first turns are asked.
        ways: how they draft; each has its turn.
        seed: fixes all that is drawn.
    """
    lot = random.Random(seed)
    texts = [prompt.turns[0] for prompt in prompts]
    longest = sorted(texts, key=len)[-2:]
    beginnings = [text[:size] for text in longest for size in _BEGINNINGS]
    return [_visitor(llm, lot, str(number), texts, beginnings, ways[number % len(ways)]) for number in range(count)]


def _visitor(
    llm: Front, lot: random.Random, number: str, texts: Sequence[str], beginnings: Sequence[str], way: Way
) -> Visitor:
    question = lot.choice(texts)[: lot.choice(_QUESTIONS)]
    before = [{"role": "system", "content": lot.choice(beginnings)}] if lot.random() < _SHARED else []
    longest = min(_LONGEST, llm.max_model_len - max(_LENGTHS))
    ids = llm.chat_ids([*before, {"role": "user", "content": question}])[-longest:]
    constrained = way.request == "constrained"
    wishes = _wishes(llm, lot, way)
    if constrained:
        recited = llm.tokenizer.encode(question)[:_RECITED]
        wishes["constraint"] = variations(recited, llm.loaded.decoder.vocab_size, llm.tokenizer.eos_ids)
    leaves: dict[str, Any] = {}
    if lot.random() < _LEAVE:
        name, bounds = lot.choice((("chunks", _CHUNKS), ("seconds", _SECONDS)))
        leaves[name] = lot.choice(bounds)
    return Visitor(
        number,
        tuple(ids),
        _sampling(lot, ids, constrained),
        way,
        wishes,
        predicted=way.request == "predicted" or (not constrained and lot.random() < _PREDICTED),
        **leaves,
    )


def _sampling(lot: random.Random, ids: Sequence[int], constrained: bool) -> Sampling:
    settings: dict[str, Any] = {}
    biased = {"logit_bias": {lot.choice(ids): lot.choice((-4.0, 2.0))}}
    for chosen in lot.sample(_HARMLESS if constrained else (*_SETTINGS, biased), lot.choice((0, 0, 1, 2))):
        settings |= chosen
    return Sampling(
        temperature=lot.choice((0.0, 0.5, 0.8, 1.0)),
        seed=lot.randrange(2**32),
        max_tokens=lot.choice([length for length in _LENGTHS if length >= settings.get("min_tokens", 0)]),
        n=1 if constrained else lot.choice(_CHOICES),
        ignore_eos=not constrained and lot.random() < 0.6,
        **settings,
    )


def _wishes(llm: Front, lot: random.Random, way: Way) -> Wishes:
    layers = len(llm.loaded.spec.layers)
    short = SHORT if layers > SHORT else max(1, layers // 2)
    common: dict[str, Any] = {"adaptive": lot.random() < 0.5}
    if lot.random() < 0.5:
        common["num_speculative_tokens"] = lot.choice((1, 3, 8, 20))
    assert way.options is not None  # what knows the answer is not asked for here
    return {
        "speculation": parse_method(way.options.format(short=short, layers=layers), common).speculation,
        "cache_salt": lot.choice((None, "one", "two")),
        "priority": lot.choice((0, 0, 1)),
        "origins": lot.random() < 0.3,
    }
