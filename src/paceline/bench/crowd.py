"""Requests of every kind at once, in several orders: each is answered as it is alone, without speculation."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.bench.arrivals import Closed
from paceline.bench.run import parse_method
from paceline.bench.verify import first_difference
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.async_llm import AsyncLLM
    from paceline.bench.runner import Runner
    from paceline.completion import Completion
    from paceline.prompts import Prompt
    from paceline.wishes import Wishes

AT_ONCE, CONTEXT, CACHE = 32, 2048, 40 << 20
"""Requests at a time, tokens of context and bytes of cache under which requests of the default model give way."""
PART = 50
"""So many requests make a cell."""
ROOM = "draft_model:draft_layers=8"
"""What the cache is planned for: the drafters in play have caches of no more layers together."""
METHODS = (
    "auto",
    "ngram",
    "suffix",
    "suffix:tree=none",
    "recycling",
    "lookahead",
    "prediction",
    "cascade:tree=none",
    "draft_model:draft_layers=4",
    "draft_model:draft_layers=2,tree=2",
    "medusa:random=true",
    "eagle:random=true",
    "eagle3:random=true",
)
LEAST = 20
"""How often each thing must have happened in a whole run for it to count."""
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logprobs": 2},
    {"logprobs": 0, "logprobs_mode": "processed"},
    {"stop": ["?", "\n\n"]},
    {"stop": " the ", "include_stop_str_in_output": True},
    {"min_tokens": 8},
    {"n": 3},
)
_LENGTHS = (1, 8, 32, 96, 96, 96)
_SHARED = 0.4  # of the requests begin with one of a few long texts
_BEGINNINGS = (300, 600, 1200)  # characters of two long texts
_QUESTIONS = (100, 100, 100, 6000)
_LEAVE = 0.15  # of the requests are left before their end
_LONGEST = 1200  # tokens of a prompt


@dataclass(frozen=True)
class Visitor:
    """One request.

    Attributes:
        id: its number.
        ids: its prompt.
        sampling: its settings, the seed among them.
        method: how it drafts, as ``bench run`` takes it.
        wishes: what else it says.
        leaves: after so many chunks it is left; None to its end.
    """

    id: str
    ids: tuple[int, ...]
    sampling: Sampling
    method: str
    wishes: Wishes
    leaves: int | None


def visitors(
    llm: AsyncLLM, prompts: Sequence[Prompt], count: int, methods: Sequence[str] = METHODS, seed: int = 0
) -> list[Visitor]:
    """Draw requests of mixed lengths, settings, seeds, keys and ways to draft, many with a beginning in common.

    Args:
        prompts: of which the first turns are asked.
        methods: as ``bench run`` takes them.
    """
    lot = random.Random(seed)
    texts = [prompt.turns[0] for prompt in prompts]
    longest = sorted(texts, key=len)[-2:]
    beginnings = [longest[0][:size] for size in _BEGINNINGS] + [longest[1][:size] for size in _BEGINNINGS]
    return [_visitor(llm, lot, str(number), texts, beginnings, methods) for number in range(count)]


def _visitor(
    llm: AsyncLLM,
    lot: random.Random,
    number: str,
    texts: Sequence[str],
    beginnings: Sequence[str],
    methods: Sequence[str],
) -> Visitor:
    question = lot.choice(texts)[: lot.choice(_QUESTIONS)]
    before = [{"role": "system", "content": lot.choice(beginnings)}] if lot.random() < _SHARED else []
    ids = llm.chat_ids([*before, {"role": "user", "content": question}])
    settings: dict[str, Any] = {}
    for chosen in lot.sample(_SETTINGS, lot.choice((0, 0, 1, 2))):
        settings |= chosen
    lengths = [length for length in _LENGTHS if length >= settings.get("min_tokens", 0)]
    sampling = Sampling(
        temperature=lot.choice((0.0, 0.5, 0.8, 1.0)),
        seed=lot.randrange(2**32),
        max_tokens=lot.choice(lengths),
        ignore_eos=lot.random() < 0.6,
        **settings,
    )
    common: dict[str, Any] = {"adaptive": lot.random() < 0.5}
    if lot.random() < 0.5:
        common["num_speculative_tokens"] = lot.choice((1, 3, 8, 20))
    method = lot.choice(methods)
    wishes: Wishes = {
        "speculation": parse_method(method, common).speculation,
        "cache_salt": lot.choice((None, "one", "two")),
        "priority": lot.choice((0, 0, 1)),
    }
    if lot.random() < 0.3 or method == "prediction":
        wishes["prediction"] = question[-200:]
    leaves = lot.choice((0, 1, 3, 10)) if lot.random() < _LEAVE else None
    longest = min(_LONGEST, llm.max_model_len - max(_LENGTHS))
    return Visitor(number, tuple(ids[-longest:]), sampling, method, wishes, leaves)


class Crowd:
    """Serves the same requests in several orders and compares each answer with that of plain decoding alone.

    Args:
        llm: the model; where its cache is small, requests give way to others.
        everyone: the requests.
        runner: keeps the cells.
        orders: in how many orders they arrive.
        at_once: how many there are at a time, waiting ones included.
    """

    def __init__(
        self, llm: AsyncLLM, everyone: Sequence[Visitor], runner: Runner, *, orders: int = 3, at_once: int = AT_ONCE
    ) -> None:
        self._llm = llm
        self._everyone = everyone
        self._runner = runner
        self._orders = orders
        self._at_once = at_once

    def report(self) -> dict[str, Any]:
        """Serve who has not been served yet; the result as JSON has it.

        ``compared`` answers were compared, those of requests that were left as far as they came, and ``differing`` of
        them are not the plain ones. ``seen`` counts what happened, and ``short`` names what happened too seldom for
        the run to prove something.
        """
        with asyncio.Runner() as loop:
            expected = {visitor.id: self._alone(loop, visitor) for visitor in self._everyone}
            served = [
                self._part(loop, expected, order, at)
                for order in range(self._orders)
                for at in range(0, len(self._everyone), PART)
            ]
        outcomes = [outcome for part in served for outcome in part]
        seen = _seen(outcomes)
        return {
            "requests": len(self._everyone),
            "orders": self._orders,
            "compared": sum(len(outcome["tokens"]) for outcome in outcomes),
            "lost": sum(outcome["lost"] for outcome in outcomes),
            "differing": sum(len(outcome["differences"]) for outcome in outcomes),
            "tokens": sum(sum(outcome["tokens"]) for outcome in outcomes),
            "seen": seen,
            "short": [name for name, number in seen.items() if number < LEAST],
            "methods": _methods(outcomes),
            "differences": [difference for outcome in outcomes for difference in outcome["differences"]],
            "environment": self._runner.environment,
            "settings": self._runner.settings,
        }

    def _alone(self, loop: asyncio.Runner, visitor: Visitor) -> list[dict[str, Any]]:
        """What plain decoding answers where nobody else is there, a list with each of its choices."""

        async def take() -> dict[str, Any]:
            await self._llm.forget()
            stream = self._llm.stream(list(visitor.ids), visitor.sampling, speculation=False)
            return {"answers": [_answer(one) for one in (await _follow(stream, None))[0].values()]}

        cell = self._runner.cell({"alone": visitor.id}, lambda: loop.run(take()))
        answers: list[dict[str, Any]] = cell["answers"]
        return answers

    def _part(
        self, loop: asyncio.Runner, expected: Mapping[str, list[dict[str, Any]]], order: int, at: int
    ) -> list[dict[str, Any]]:
        whole = list(self._everyone)
        random.Random(order).shuffle(whole)
        members = whole[at : at + PART]
        cell = self._runner.cell(
            {"order": order, "from": at}, lambda: loop.run(self._serve(members, expected, f"{order} {at}"))
        )
        outcomes: list[dict[str, Any]] = cell["outcomes"]
        return outcomes

    async def _serve(
        self, members: Sequence[Visitor], expected: Mapping[str, list[dict[str, Any]]], key: str
    ) -> dict[str, Any]:
        await self._llm.forget()
        lot = random.Random(key)
        found: dict[int, dict[str, Any]] = {}

        async def send(place: int, due: float) -> None:
            visitor = members[place]
            await asyncio.sleep(lot.choice((0.0, 0.0, 0.0, 0.3)))
            stream = self._llm.stream(list(visitor.ids), visitor.sampling, **visitor.wishes)
            answers, ids = await _follow(stream, visitor.leaves)
            found[place] = _outcome(visitor, expected[visitor.id], answers, ids)

        await Closed(self._at_once).drive(len(members), send)
        await asyncio.to_thread(self._check)
        return {"outcomes": [found[place] for place in range(len(members))]}

    def _check(self) -> None:
        """Nothing may be left of those who are gone."""
        with self._llm.paused() as engine:
            engine.scheduler.check()
            assert engine.idle
            assert all(pool.free == pool.pages for pool in engine.pools)


async def _follow(stream: Any, leaves: int | None) -> tuple[dict[int, Completion], dict[int, list[int]]]:
    """Whole answers by choice, and the tokens of each as they came; left after so many chunks, if any."""
    answers: dict[int, Completion] = {}
    ids: dict[int, list[int]] = {}
    chunks = 0
    async with stream:
        if leaves == 0:  # before the first token, perhaps while it waits
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            first.cancel()
            await asyncio.wait([first])
            return answers, ids
        async for chunk in stream:
            ids.setdefault(chunk.choice, []).extend(chunk.token_ids)
            if chunk.completion is not None:
                answers[chunk.choice] = chunk.completion
            chunks += 1
            if chunks == leaves:
                break
    return dict(sorted(answers.items())), ids


def _answer(completion: Completion) -> dict[str, Any]:
    probabilities = completion.logprobs
    return {
        "ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "logprobs": None if probabilities is None else repr(probabilities),
    }


def _outcome(
    visitor: Visitor,
    expected: Sequence[Mapping[str, Any]],
    answers: Mapping[int, Completion],
    ids: Mapping[int, list[int]],
) -> dict[str, Any]:
    """What a request did, and where its answers leave the expected ones, if they do."""
    differences = []
    for choice, came in ids.items():
        wanted, whole = expected[choice], answers.get(choice)
        same = came == wanted["ids"][: len(came)] if whole is None else _answer(whole) == wanted
        if not same or (whole is not None and came != whole.token_ids):
            found = {"ids": came} if whole is None else _answer(whole)
            place = first_difference(wanted["ids"], came)
            differences.append(
                {"request": visitor.id, "choice": choice, "place": place, "expected": wanted, "found": found}
            )
    lost = visitor.leaves is None and len(answers) != len(expected)
    records = [answer.record for answer in answers.values()]
    return {
        "method": visitor.method,
        "tokens": [len(came) for came in ids.values()],
        "left": len(answers) < len(expected),
        "lost": lost,
        **{
            key: sum(getattr(record, key) for record in records)
            for key in ("drafted", "accepted", "preemptions", "cached_tokens")
        },
        "differences": differences,
    }


def _seen(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {
        "finished": sum(not outcome["left"] for outcome in outcomes),
        "left": sum(outcome["left"] for outcome in outcomes),
        "gave way": sum(outcome["preemptions"] > 0 for outcome in outcomes),
        "shared a beginning": sum(outcome["cached_tokens"] > 0 for outcome in outcomes),
        "drafts accepted": sum(outcome["accepted"] for outcome in outcomes),
        "drafts rejected": sum(outcome["drafted"] - outcome["accepted"] for outcome in outcomes),
    }


def _methods(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        total = found.setdefault(outcome["method"], Counter())
        total.update({"requests": 1, **{key: outcome[key] for key in ("drafted", "accepted")}})
        total["differing"] += len(outcome["differences"])
    return {method: dict(found[method]) for method in sorted(found)}
