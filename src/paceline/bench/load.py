"""Many requests at a time, methods side by side: the same requests, seeds and arrivals for each of them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.bench.latency import Limits, Timeline, figures
from paceline.bench.run import PLAIN, Method, rotated
from paceline.errors import OptionError, ResourceError
from paceline.options import Speculation

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Sequence

    from paceline.async_llm import AsyncLLM
    from paceline.bench.arrivals import Arrivals, Clock
    from paceline.bench.runner import Runner
    from paceline.completion import Chunk
    from paceline.prompts import Prompt
    from paceline.sampling import Sampling

_WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Order:
    """One request: what it is called, its prompt and its settings."""

    id: str
    ids: list[int]
    sampling: Sampling


class LoadBench:
    """Serves the same requests by every method under every pattern of arrivals, round by round.

    Args:
        llm: the model; whatever it learned is forgotten before every cell.
        prompts: of each the first turn is a request.
        methods: compared with plain decoding, which is always measured too.
        arrivals: the patterns.
        runner: keeps the cells.
        sampling: of all requests; each has a seed of its own, counted from this one's.
        rounds: how often everything is taken; every round has other arrival times, and another order of methods.
        limits: of goodput.

    Attributes:
        orders: the requests.

    Raises:
        OptionError: a method is named twice, or there are fewer prompts than users.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        prompts: Sequence[Prompt],
        methods: Sequence[Method],
        arrivals: Sequence[Arrivals],
        runner: Runner,
        *,
        sampling: Sampling,
        rounds: int = 3,
        limits: Limits | None = None,
    ) -> None:
        self._llm = llm
        self._methods = [Method(PLAIN, Speculation.off()), *(m for m in methods if m.name != PLAIN)]
        self._arrivals = arrivals
        self._runner = runner
        self._rounds = rounds
        self._limits = limits or Limits()
        self._seed = sampling.seed or 0
        if len({method.name for method in self._methods}) < len(self._methods):
            raise OptionError("a method is named twice; give each once.")
        users = max((pattern.level for pattern in arrivals if pattern.kind == "users"), default=0)
        if users > len(prompts):
            raise OptionError(
                f"{users:g} users need as many prompts at least, and there are {len(prompts)}: give more prompts, or "
                "fewer users."
            )
        self.orders = [
            Order(
                prompt.id,
                llm.chat_ids([{"role": "user", "content": prompt.turns[0]}]),
                sampling.replace(seed=self._seed + place),
            )
            for place, prompt in enumerate(prompts)
        ]

    def report(self) -> dict[str, Any]:
        """Take what is missing; the result as JSON has it: for each pattern of arrivals the figures by method."""
        cells = self._take()
        return {
            "environment": self._runner.environment,
            "settings": self._runner.settings,
            "prompts": len(self.orders),
            "rounds": self._rounds,
            "limits_ms": asdict(self._limits),
            "arrivals": [
                {
                    "kind": pattern.kind,
                    "level": pattern.level,
                    "methods": {
                        method.name: figures(cells[place, PLAIN], cells[place, method.name], self._limits)
                        for method in self._methods
                    },
                }
                for place, pattern in enumerate(self._arrivals)
            ],
        }

    def _take(self) -> dict[tuple[int, str], list[dict[str, Any]]]:
        """Of each pattern, by its place, and each method the cells, one a round."""
        every = [
            (place, pattern, method, number)
            for number in range(self._rounds)
            for place, pattern in enumerate(self._arrivals)
            for method in rotated(self._methods, place + number)
        ]
        cells: dict[tuple[int, str], list[dict[str, Any]]] = {}
        with asyncio.Runner() as loop:
            if not all(self._runner.has(_name(pattern, method, number)) for _, pattern, method, number in every):
                loop.run(self._warm_up())
            for place, pattern, method, number in every:
                take = partial(self._measured, loop, pattern, method, number)
                cell = self._runner.cell(_name(pattern, method, number), take)
                cells.setdefault((place, method.name), []).append(cell)
        return cells

    async def _warm_up(self) -> None:
        """Every method runs once unmeasured, so that none pays for reading the weights from disk."""
        first = self.orders[0]
        for method in self._methods:
            sampling = first.sampling.replace(max_tokens=_WARM_UP_TOKENS)
            await self._llm.generate(first.ids, sampling, speculation=method.speculation)

    def _measured(self, loop: asyncio.Runner, pattern: Arrivals, method: Method, number: int) -> dict[str, Any]:
        return loop.run(self._measure(pattern, method, number))

    async def _measure(self, pattern: Arrivals, method: Method, number: int) -> dict[str, Any]:
        await self._llm.forget()
        if method.speculation.enabled:  # made anew, but not while the clock runs
            await asyncio.to_thread(self._llm.roster.drafter, method.speculation)
        return await serve(self._llm, self.orders, method.speculation, pattern, seed=self._seed + number)


async def serve(
    llm: AsyncLLM,
    orders: Sequence[Order],
    speculation: Speculation,
    pattern: Arrivals,
    *,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Send every request when it is due, and follow it to its end.

    Args:
        seed: of the arrival times.

    Returns:
        A cell: ``seconds`` from its begin to the end of the last request, and ``requests`` in their order; see
        :func:`paceline.bench.latency.figures`. Times count from the cell's begin.
    """
    found: dict[int, dict[str, Any]] = {}
    begin = clock()

    async def send(place: int, due: float) -> None:
        order = orders[place]
        try:
            stream = llm.stream(order.ids, order.sampling, speculation=speculation)
            answer = await follow(stream, due, begin, clock)
        except ResourceError as error:  # more was asked for at once than the engine takes
            answer = {"refused": str(error)}
        found[place] = {"id": order.id, **answer}

    await pattern.drive(len(orders), send, seed=seed, clock=clock)
    return {"seconds": clock() - begin, "requests": [found[place] for place in range(len(orders))]}


async def follow(stream: AsyncIterable[Chunk], due: float, begin: float, clock: Clock) -> dict[str, Any]:
    """One streamed answer with the times at which its tokens came, counted from ``begin``, and its record."""
    times, counts, completion = [], [], None
    async for chunk in stream:
        now = clock()
        if chunk.token_ids:
            times.append(now - begin)
            counts.append(len(chunk.token_ids))
        completion = chunk.completion
    assert completion is not None
    return {
        "timeline": asdict(Timeline(due - begin, times, counts, clock() - begin)),
        "digest": hashlib.sha256(repr(completion.token_ids).encode()).hexdigest()[:16],
        "record": completion.record.as_dict(),
    }


def _name(pattern: Arrivals, method: Method, number: int) -> dict[str, Any]:
    return {pattern.kind: pattern.level, "method": method.name, "round": number}
