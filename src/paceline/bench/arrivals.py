"""When requests arrive: users who wait for their answers, or strangers who do not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.errors import OptionError
from paceline.options import integer, number

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from typing import Any

    Clock = Callable[[], float]
    Send = Callable[[int, float], Coroutine[Any, Any, None]]
    """Serves the request of that number, due at that time of the clock, to its end."""


class Arrivals(Protocol):
    """A pattern of arrivals.

    Attributes:
        kind: what ``level`` counts, "users" or "rate".
        level: users at a time, or requests a second.
    """

    @property
    def kind(self) -> str: ...
    @property
    def level(self) -> float: ...

    async def drive(self, count: int, send: Send, *, seed: int = 0, clock: Clock = time.perf_counter) -> None:
        """Send the requests 0 to ``count`` - 1 when each is due; returns when all were served.

        Raises:
            Exception: what the first request that failed raised; the others are cancelled.
        """


@dataclass(frozen=True)
class Closed:
    """A closed loop: each of some users sends the next request when the last has ended.

    Raises:
        OptionError: there is no user.
    """

    users: int

    kind = "users"

    def __post_init__(self) -> None:
        integer("users", self.users, 1)

    @property
    def level(self) -> float:
        return self.users

    async def drive(self, count: int, send: Send, *, seed: int = 0, clock: Clock = time.perf_counter) -> None:
        places = iter(range(count))

        async def user() -> None:
            for place in places:
                await send(place, clock())

        await _together(user() for _ in range(min(self.users, count)))


@dataclass(frozen=True)
class Poisson:
    """An open loop: requests arrive at random, independently of each other and of how long answers take.

    A request is due when it arrives, whenever it can be sent: what a busy machine makes it wait counts.

    Attributes:
        rate: requests a second on the average.

    Raises:
        OptionError: the rate is not above 0.
    """

    rate: float

    kind = "rate"

    def __post_init__(self) -> None:
        if not number("rate", self.rate, 0.0):
            raise OptionError("rate is 0, and no request would ever arrive; it must be above 0.")

    @property
    def level(self) -> float:
        return self.rate

    def times(self, count: int, seed: int = 0) -> list[float]:
        """When the requests arrive, in seconds after the first; those of two rates and one seed are proportional."""
        gaps = np.random.default_rng(seed).exponential(size=max(count - 1, 0)) / self.rate
        return [0.0, *gaps.cumsum().tolist()][:count]

    async def drive(self, count: int, send: Send, *, seed: int = 0, clock: Clock = time.perf_counter) -> None:
        begin = clock()

        async def arrive(place: int, after: float) -> None:
            await asyncio.sleep(begin + after - clock())
            await send(place, begin + after)

        await _together(arrive(place, after) for place, after in enumerate(self.times(count, seed)))


async def _together(tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run tasks until all are done; where one fails the others are cancelled, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
