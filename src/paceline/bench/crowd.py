"""Requests of every kind at once, in several orders: each is answered as it is alone, without speculation."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.bench.arrivals import Closed
from paceline.bench.drafters import spoiled
from paceline.bench.verify import first_difference
from paceline.bench.visitors import LONG
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.async_llm import AsyncLLM
    from paceline.bench.runner import Runner
    from paceline.bench.visitors import Visitor
    from paceline.bench.ways import Way
    from paceline.completion import Chunk, Completion
    from paceline.record import SpeculationRecord
    from paceline.wishes import Wishes

    Answer = Mapping[str, Any]

AT_ONCE, CONTEXT, CACHE = 32, 2048, 40 << 20
"""Requests at a time, tokens of context and bytes of cache under which requests of the default model give way."""
PART = 25
"""So many requests make a cell."""
LEAST = 20
"""How often each thing must have happened in a whole run for it to count."""
WRONG = ("differing", "lost", "held")
"""What a report counts of which there must be nothing."""
_WANTED = {"both": ("accepted", "rejected"), "accepted": ("accepted",), "rejected": ("rejected",), "none": ()}
_WRONG = 0.1  # of a prediction
_PAUSES = (0.0, 0.0, 0.0, 0.3, 1.0, 3.0)  # seconds before a request is sent: they come in waves
_PATIENCE = 1800.0  # seconds within which a request comes to its end


@dataclass
class _Came:
    """What came of one answer, whole or not."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    origins: list[str] = field(default_factory=list)
    record: SpeculationRecord | None = None
    whole: Completion | None = None

    def add(self, chunk: Chunk) -> None:
        self.ids += chunk.token_ids
        self.text += chunk.text
        self.origins += chunk.origins
        self.record, self.whole = chunk.record, chunk.completion


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
        them are not the plain ones; ``lost`` requests broke off or came to no end (``errors`` says how), and ``held``
        pages of caches were still taken when all had gone. ``seen`` counts what happened, ``by_way`` what became of
        drafts, ``by_drafter`` whose tokens the answers are, and ``short`` names what happened too seldom for the run to
        prove something.
        """
        with asyncio.Runner() as loop:
            expected = {visitor.id: self._alone(loop, visitor) for visitor in self._everyone}
            parts = [
                self._part(loop, expected, order, at)
                for order in range(self._orders)
                for at in range(0, len(self._everyone), PART)
            ]
        outcomes = [outcome for part in parts for outcome in part["outcomes"]]
        seen, ways = self._seen(outcomes), self._ways(outcomes)
        return {
            "requests": len(self._everyone),
            "orders": self._orders,
            "compared": sum(len(outcome["tokens"]) for outcome in outcomes),
            "lost": sum(outcome["lost"] is not None for outcome in outcomes),
            "held": sum(part["held"] for part in parts),
            "differing": sum(len(outcome["differences"]) for outcome in outcomes),
            "tokens": sum(sum(outcome["tokens"]) for outcome in outcomes),
            "seen": seen,
            "by_way": ways,
            "by_drafter": dict(sum((Counter(outcome["origins"]) for outcome in outcomes), Counter[str]())),
            "short": [
                *(name for name, number in seen.items() if number < LEAST),
                *(f"{way}: {what}" for way, what in self._seldom(ways)),
            ],
            "differences": [difference for outcome in outcomes for difference in outcome["differences"]],
            "errors": {outcome["request"]: outcome["lost"] for outcome in outcomes if outcome["lost"] is not None},
            "environment": self._runner.environment,
            "settings": self._runner.settings,
        }

    def _alone(self, loop: asyncio.Runner, visitor: Visitor) -> list[Answer]:
        """What plain decoding answers where nobody else is there, a list with each of its choices."""
        constraint = {name: wish for name, wish in visitor.wishes.items() if name == "constraint"}

        async def take() -> dict[str, Any]:
            await self._llm.forget()
            wishes: Any = {**constraint, "speculation": False}
            came = _none_yet(visitor)
            await self._follow(replace(visitor, chunks=None, seconds=None), wishes, came)
            return {"answers": [_answer(one) for one in came]}

        answers: list[Answer] = self._runner.cell({"alone": visitor.id}, lambda: loop.run(take()))["answers"]
        return answers

    def _part(
        self, loop: asyncio.Runner, expected: Mapping[str, Sequence[Answer]], order: int, at: int
    ) -> dict[str, Any]:
        whole = list(self._everyone)
        random.Random(order).shuffle(whole)
        members = whole[at : at + PART]
        lot = random.Random(f"{order} {at}")
        return self._runner.cell({"order": order, "from": at}, lambda: loop.run(self._serve(members, expected, lot)))

    async def _serve(
        self, members: Sequence[Visitor], expected: Mapping[str, Sequence[Answer]], lot: random.Random
    ) -> dict[str, Any]:
        await self._llm.forget()
        pauses = [lot.choice(_PAUSES) for _ in members]
        found: dict[int, dict[str, Any]] = {}

        async def send(place: int, due: float) -> None:
            visitor, lost = members[place], None
            came = _none_yet(visitor)
            await asyncio.sleep(pauses[place])
            try:
                await self._follow(visitor, self._wishes(visitor, expected[visitor.id]), came)
            except (PacelineError, TimeoutError) as error:
                lost = repr(error)
            found[place] = _outcome(visitor, expected[visitor.id], came, lost)

        await Closed(self._at_once).drive(len(members), send)
        held = await asyncio.to_thread(self._held)
        return {"outcomes": [found[place] for place in range(len(members))], "held": held}

    def _wishes(self, visitor: Visitor, expected: Sequence[Answer]) -> Wishes:
        if not visitor.predicted:
            return visitor.wishes
        answer = spoiled(expected[0]["ids"], self._llm.loaded.decoder.vocab_size, _WRONG, 0, visitor.id)
        return {**visitor.wishes, "prediction": answer}

    async def _follow(self, visitor: Visitor, wishes: Wishes, came: Sequence[_Came]) -> None:
        """Note what comes of each choice, until the end or until it is left.

        Raises:
            PacelineError: the request broke off.
            TimeoutError: it does not come to its end.
        """
        chunks = 0
        async with self._llm.stream(list(visitor.ids), visitor.sampling, **wishes) as stream:
            with suppress(*[TimeoutError] * (visitor.seconds is not None)):
                async with asyncio.timeout(_PATIENCE if visitor.seconds is None else visitor.seconds):
                    async for chunk in stream:
                        came[chunk.choice].add(chunk)
                        chunks += 1
                        if chunks == visitor.chunks:
                            break

    def _held(self) -> int:
        """How many pages of the target's and the drafters' caches are taken though everybody has gone."""
        with self._llm.paused() as engine:
            engine.scheduler.check()
            assert engine.idle
            return sum(pool.pages - pool.free for pool in (*engine.pools, *self._llm.roster.lent))

    def _seen(self, outcomes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        lengths = {visitor.id: len(visitor.ids) for visitor in self._everyone}
        return {
            "finished": sum(not outcome["left"] and outcome["lost"] is None for outcome in outcomes),
            "left before their end": sum(outcome["left"] for outcome in outcomes),
            "several answers": sum(len(outcome["tokens"]) > 1 for outcome in outcomes),
            f"over {LONG:,} tokens": sum(lengths[outcome["request"]] > LONG for outcome in outcomes),
            "gave way": sum(outcome["preemptions"] for outcome in outcomes),
            "shared a beginning": sum(outcome["cached_tokens"] > 0 for outcome in outcomes),
            "drafts accepted": sum(outcome["accepted"] for outcome in outcomes),
            "drafts rejected": sum(outcome["rejected"] for outcome in outcomes),
        }

    def _ways(self, outcomes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        names = {visitor.id: visitor.way.name for visitor in self._everyone}
        found: dict[str, Counter[str]] = {name: Counter() for name in names.values()}
        for outcome in outcomes:
            found[names[outcome["request"]]].update(
                requests=1,
                differing=len(outcome["differences"]),
                **{key: outcome[key] for key in ("preemptions", "drafted", "accepted", "rejected")},
            )
        return {name: dict(counts) for name, counts in sorted(found.items())}

    def _seldom(self, ways: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
        """The ways of drafting whose drafts were accepted or rejected too seldom, and which of it."""
        every: dict[str, Way] = {visitor.way.name: visitor.way for visitor in self._everyone}
        return [(name, what) for name in ways for what in _WANTED[every[name].judge] if ways[name][what] < LEAST]


def _none_yet(visitor: Visitor) -> list[_Came]:
    return [_Came() for _ in range(visitor.sampling.n)]


def _answer(came: _Came) -> dict[str, Any]:
    """What must be equal; what is as long as a prompt, by its digest."""
    whole = came.whole
    assert whole is not None
    scored = None if whole.prompt_logprobs is None else repr(whole.prompt_logprobs).encode()
    return {
        "ids": whole.token_ids,
        "text": whole.text,
        "finish_reason": whole.finish_reason,
        "logprobs": None if whole.logprobs is None else repr(whole.logprobs),
        "prompt_logprobs": None if scored is None else hashlib.sha256(scored).hexdigest(),
    }


def _outcome(visitor: Visitor, expected: Sequence[Answer], came: Sequence[_Came], lost: str | None) -> dict[str, Any]:
    """What a request did, and where its answers leave the expected ones, if they do."""
    differences = [
        {"request": visitor.id, "choice": choice, "place": place, "expected": wanted, "found": found}
        for choice, (wanted, one) in enumerate(zip(expected, came, strict=True))
        if (found := _found(wanted, one)) is not None
        for place in [first_difference(wanted["ids"], one.ids)]
    ]
    records = [one.record for one in came if one.record is not None]
    accepted = sum(record.accepted for record in records)
    return {
        "request": visitor.id,
        "tokens": [len(one.ids) for one in came],
        "left": lost is None and any(one.whole is None for one in came),
        "lost": lost,
        "drafted": sum(record.drafted for record in records),
        "accepted": accepted,
        "rejected": sum(sum(record.reached) for record in records) - accepted,
        "preemptions": sum(record.preemptions for record in records),
        "cached_tokens": sum(record.cached_tokens for record in records),
        "origins": Counter(origin for one in came for origin in one.origins),
        "differences": differences,
    }


def _found(wanted: Answer, came: _Came) -> dict[str, Any] | None:
    """What came where something else was wanted: of an answer that was left a beginning, and of all others everything,
    chunk by chunk as in the end."""
    if came.whole is None:
        same = came.ids == wanted["ids"][: len(came.ids)] and wanted["text"].startswith(came.text)
        return None if same else {"ids": came.ids, "text": came.text}
    answer = _answer(came)
    parts = {"ids": came.ids, "text": came.text}
    return None if answer == wanted and parts == {key: answer[key] for key in parts} else answer | {"chunks": parts}
