"""Never slower: the pacer beside plain decoding and beside drafting at fixed lengths, for every kind of text, number of
users and temperature."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.arrivals import Closed
from paceline.bench.load import Order, serve
from paceline.bench.run import PLAIN, Method, rotated
from paceline.bench.stats import ratio_interval
from paceline.errors import OptionError
from paceline.options import Speculation
from paceline.prompts import read_prompts
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from paceline.async_llm import AsyncLLM
    from paceline.bench.runner import Runner
    from paceline.prompts import Prompt

    Rounds = Sequence[Mapping[str, Any]]

AUTO = "auto"
SLOWEST = 0.97
"""No cell of auto may lie below so much of plain decoding with its whole interval."""
OF_BEST = 0.95
"""Nor below so much of the best fixed length, nor of the reference where one user is served."""
_AGAIN = 4  # a cell that fails is taken again with so many times the prompts, or else the rounds
_WARM_UP_TOKENS = 24


@dataclass(frozen=True, order=True)
class Place:
    """One field of the grid.

    Attributes:
        category: the group of its prompts.
        users: who each wait for an answer before they ask again.
        temperature: 0 is greedy; above it 5 % of the mass are left out (top_p 0.95).
    """

    category: str
    users: int
    temperature: float


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        users: how many there are, each number a part of the grid.
        temperatures: of the answers.
        lengths: of the cascade as a chain of fixed length, 0 being plain decoding, which is always there.
        prompts: of each cell; as many as there are users where these are more.
        max_tokens: of each answer.
        rounds: how often everything is taken.
        reference: a method that auto is compared with where there is one user.
        minutes: after which no further cell is begun.

    Raises:
        OptionError: there is nothing to measure.
    """

    users: Sequence[int] = (1, 2, 4, 8, 16, 32)
    temperatures: Sequence[float] = (0.0, 0.8)
    lengths: Sequence[int] = (2, 4, 8)
    prompts: int = 16
    max_tokens: int = 96
    rounds: int = 3
    reference: Method | None = None
    minutes: float = math.inf

    def __post_init__(self) -> None:
        if not (self.users and self.temperatures and self.lengths):
            raise OptionError("give at least one number of users, one temperature and one length.")

    def methods(self, place: Place) -> list[Method]:
        """Those that are compared at a place."""
        chain: dict[str, Any] = {"method": "cascade", "tree": "none", "adaptive": False}
        fixed = [Method(f"length {n}", Speculation.parse({**chain, "num_speculative_tokens": n})) for n in self.lengths]
        others = [self.reference] if self.reference is not None and place.users == 1 else []
        return [Method(PLAIN, Speculation.off()), Method(AUTO, Speculation()), *fixed, *others]


@dataclass
class Pacing:
    """Takes the grid, cell by cell, every round once over all of it, so that a run cut short says something of all.

    Args:
        llm: the model; whatever it learned is forgotten before every cell.
        prompts: of each the first turn is a request.
        runner: keeps the cells.
        grid: what is measured.
        clock: seconds.

    Raises:
        OptionError: a category has fewer prompts than there are users.
    """

    llm: AsyncLLM
    prompts: Sequence[Prompt]
    runner: Runner
    grid: Grid = field(default_factory=Grid)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._groups: dict[str, list[list[int]]] = {}
        for prompt in self.prompts:
            ids = self.llm.chat_ids([{"role": "user", "content": prompt.turns[0]}])
            self._groups.setdefault(prompt.group, []).append(ids)
        for name, group in self._groups.items():
            if len(group) < max(self.grid.users):
                raise OptionError(f"{name} has {len(group)} prompts for {max(self.grid.users)} users: give more.")
        self._end = self.clock() + 60 * self.grid.minutes
        self._warm = False

    @property
    def places(self) -> list[Place]:
        """All fields of the grid, few users first."""
        every = itertools.product(self.grid.users, self._groups, self.grid.temperatures)
        return [Place(category, users, temperature) for users, category, temperature in every]

    def report(self) -> dict[str, Any]:
        """Take what is missing, as far as time allows; the result as JSON has it."""
        with asyncio.Runner() as loop:
            found = self._take(loop, self.places, self.grid.rounds)
            missing = sum(self.grid.rounds - len(turns) for turns in found.values())
            found = {place: turns for place, turns in found.items() if turns}
            rows = {place: self._row(place, turns) for place, turns in found.items()}
            for place in [place for place, row in rows.items() if row["failed"]]:
                turns = self._again(loop, place)
                if turns is not None:
                    found[place], rows[place] = turns, {**self._row(place, turns), "again": True}
        return {
            "environment": self.runner.environment,
            "settings": self.runner.settings,
            "cells": list(rows.values()),
            "missing": missing,
            **totals(found, self.grid.reference, {prompt.group for prompt in read_prompts()}),
        }

    def _take(
        self, loop: asyncio.Runner, places: Sequence[Place], rounds: int, times: int = 1
    ) -> dict[Place, list[dict[str, Any]]]:
        """Of each place its whole rounds: what each method took."""
        found: dict[Place, list[dict[str, Any]]] = {place: [] for place in places}
        for number, place in itertools.product(range(rounds), places):
            methods = self.grid.methods(place)
            names = {method.name: _name(place, method, number, times) for method in methods}
            missing = [name for name in names.values() if not self.runner.has(name)]
            if missing and self.clock() >= self._end:
                continue
            if missing and not self._warm:
                loop.run(self._warm_up())
            turn = {
                method.name: self.runner.cell(names[method.name], partial(self._measured, loop, place, method, times))
                for method in rotated(methods, number + places.index(place))
            }
            found[place].append({method.name: turn[method.name] for method in methods})
        return found

    def _again(self, loop: asyncio.Runner, place: Place) -> list[dict[str, Any]] | None:
        """The rounds of a place that failed, with four times the prompts, and more rounds where there are not so many;
        None where there is no time for all of it."""
        rounds = self.grid.rounds * math.ceil(_AGAIN * self._count(place) / self._count(place, _AGAIN))
        turns = self._take(loop, [place], rounds, _AGAIN)[place]
        return turns if len(turns) == rounds else None

    def _count(self, place: Place, times: int = 1) -> int:
        return min(times * max(self.grid.prompts, place.users), len(self._groups[place.category]))

    async def _warm_up(self) -> None:
        """Costs are measured beforehand, and every method runs once unmeasured."""
        self._warm = True
        await asyncio.to_thread(self.llm.calibrate)
        first = next(iter(self._groups.values()))[0]
        for method in self.grid.methods(Place("", 1, 0.0)):
            await self.llm.generate(
                first, Sampling(temperature=0.0, max_tokens=_WARM_UP_TOKENS), speculation=method.speculation
            )

    def _measured(self, loop: asyncio.Runner, place: Place, method: Method, times: int) -> dict[str, Any]:
        return loop.run(self._measure(place, method, times))

    async def _measure(self, place: Place, method: Method, times: int) -> dict[str, Any]:
        await self.llm.forget()
        if method.speculation.enabled:  # made anew, but not while the clock runs
            await asyncio.to_thread(self.llm.roster.drafter, method.speculation)
        sampling = Sampling(
            temperature=place.temperature, top_p=0.95 if place.temperature else 1.0, max_tokens=self.grid.max_tokens
        )
        orders = [
            Order(str(number), ids, sampling.replace(seed=number))
            for number, ids in enumerate(self._groups[place.category][: self._count(place, times)])
        ]
        return _compact(await serve(self.llm, orders, method.speculation, Closed(place.users)))

    def _row(self, place: Place, turns: Rounds) -> dict[str, Any]:
        fixed = [PLAIN, *(f"length {n}" for n in self.grid.lengths)]
        best = min(fixed, key=lambda name: sum(_decode(turns, name)[::2]))
        row: dict[str, Any] = {
            **asdict(place),
            "rounds": len(turns),
            "again": False,
            "differing": sum(turn[name]["digest"] != turn[PLAIN]["digest"] for turn in turns for name in turn),
            "methods": {
                name: {
                    **_faster(_decode(turns, PLAIN), _decode(turns, name)),
                    "end_to_end": _seconds(turns, PLAIN) / _seconds(turns, name),
                    "tau": _tau(turns, name),
                }
                for name in turns[0]
            },
            "best_fixed": best,
            "of_best": _faster(_decode(turns, best)[1::2], _decode(turns, AUTO)[1::2]),
        }
        return row | {"failed": failures(row)}


def failures(row: Mapping[str, Any]) -> list[str]:
    """The bounds that a place does not keep to: its whole interval lies below."""
    slow = row["methods"][AUTO]["interval"][1] < SLOWEST
    behind = row["of_best"]["interval"][1] < OF_BEST
    return ["slower than plain"] * slow + ["behind the best length"] * behind


def totals(found: Mapping[Place, Rounds], reference: Method | None, near: Collection[str]) -> dict[str, Any]:
    """What holds over all places.

    Args:
        found: the rounds of each.
        reference: what auto is compared with where one user is served.
        near: the categories over which it is, and over which auto must be faster than plain decoding at two users.

    Returns:
        ``geometric_mean`` of auto's ratios to plain decoding, and for each temperature, over all requests of near
        categories, how much faster auto is than the reference at one user (``of_reference``) and than plain decoding at
        two (``two_users``).
    """
    logs = [math.log(_faster(_decode(turns, PLAIN), _decode(turns, AUTO))["ratio"]) for turns in found.values()]

    def over(users: int, name: str) -> dict[str, Any]:
        pairs: dict[float, list[list[float]]] = {}
        for place, turns in found.items():
            if place.users == users and place.category in near:
                both = pairs.setdefault(place.temperature, [[], []])
                both[0] += _decode(turns, name)
                both[1] += _decode(turns, AUTO)
        return {f"{temperature:g}": _faster(*both) for temperature, both in sorted(pairs.items())}

    return {
        "geometric_mean": math.exp(sum(logs) / len(logs)) if logs else None,
        "of_reference": {} if reference is None else over(1, reference.name),
        "two_users": over(2, PLAIN),
    }


def _name(place: Place, method: Method, number: int, times: int) -> dict[str, Any]:
    return {**asdict(place), "method": method.name, "round": number, "times": times}


def _compact(cell: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a cell: for each request its decode seconds, tokens and steps, and a digest of all tokens."""
    requests = cell["requests"]
    times = [request["timeline"]["times"] for request in requests]
    digests = "".join(request["digest"] for request in requests)
    return {
        "seconds": round(cell["seconds"], 6),
        "decode": [round(own[-1] - own[0], 6) for own in times],
        "tokens": sum(sum(request["timeline"]["counts"]) for request in requests),
        **{key: sum(request["record"][key] for request in requests) for key in ("steps", "drafted", "accepted")},
        "digest": hashlib.sha256(digests.encode()).hexdigest()[:16],
    }


def _decode(turns: Rounds, method: str) -> list[float]:
    """Decode seconds of each request: the median over rounds."""
    return [median(own) for own in zip(*(turn[method]["decode"] for turn in turns), strict=True)]


def _faster(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """By how much: seconds of the same requests, and the 95 % interval of their ratio, requests drawn again."""
    return {"ratio": sum(slow) / sum(fast), "interval": ratio_interval(slow, fast)}


def _seconds(turns: Rounds, method: str) -> float:
    return float(median(turn[method]["seconds"] for turn in turns))


def _tau(turns: Rounds, method: str) -> float | None:
    accepted, steps = (sum(turn[method][key] for turn in turns) for key in ("accepted", "steps"))
    return 1 + accepted / steps if steps else None
