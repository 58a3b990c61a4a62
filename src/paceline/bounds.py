"""How much may be asked for at once, and how long anybody waits: over that a request is refused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.request import Sequence


@dataclass(frozen=True)
class Bounds:
    """None is no bound.

    Attributes:
        max_waiting: how many requests may be there beyond those that run at once.
        max_wait_seconds: how long a request may wait for its first turn.
        max_total_tokens: how many tokens the requests that are there may grow to together.
    """

    max_waiting: int | None = None
    max_wait_seconds: float | None = None
    max_total_tokens: int | None = None


class Gate:
    """Counts who is there, and refuses who is too many. Nothing here takes time for each that waits.

    Args:
        bounds: what is refused.
        max_num_seqs: how many run at once.
        clock: seconds. When it jumps back, nobody has waited less or longer for it.
    """

    def __init__(self, bounds: Bounds, max_num_seqs: int, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._read = clock()
        self._now = 0.0
        self._there = 0
        self._tokens = 0
        self._since: OrderedDict[int, tuple[float, Sequence]] = OrderedDict()  # who never had a turn, the first first

    def enter(self, sequence: Sequence) -> None:
        """Count a sequence in.

        Raises:
            OverloadedError: it is too much.
        """
        bounds, limit = self._bounds, sequence.request.limit
        waiting = self._there - self._max_num_seqs
        if bounds.max_waiting is not None and waiting >= bounds.max_waiting:
            raise OverloadedError(
                f"{self._there} requests are there, {self._max_num_seqs} run at once, and max_waiting is "
                f"{bounds.max_waiting}: try again later."
            )
        if bounds.max_total_tokens is not None and self._tokens + limit > bounds.max_total_tokens:
            raise OverloadedError(
                f"the request may grow to {limit} tokens, those that are there to {self._tokens}, and max_total_tokens "
                f"is {bounds.max_total_tokens}: try again later, or ask for fewer tokens."
            )
        self._there += 1
        self._tokens += limit
        if bounds.max_wait_seconds is not None:
            self._since[sequence.id] = self._time(), sequence

    def begin(self, sequence: Sequence) -> None:
        """A sequence has its first turn, or a further one."""
        self._since.pop(sequence.id, None)

    def leave(self, sequence: Sequence) -> None:
        """Count a sequence out."""
        self._there -= 1
        self._tokens -= sequence.request.limit
        self._since.pop(sequence.id, None)

    def late(self) -> list[tuple[Sequence, OverloadedError]]:
        """Who has waited too long, with what to say to them."""
        most, now = self._bounds.max_wait_seconds, self._time()
        late: list[tuple[Sequence, OverloadedError]] = []
        while most is not None and self._since:
            since, sequence = next(iter(self._since.values()))
            if now - since <= most:
                break
            self._since.popitem(last=False)
            error = f"the request has waited {now - since:.3g} s, and max_wait_seconds is {most:g}: try again later."
            late.append((sequence, OverloadedError(error)))
        return late

    def _time(self) -> float:
        """Seconds that have passed, whichever way the clock jumps."""
        read = self._clock()
        self._now += max(0.0, read - self._read)
        self._read = read
        return self._now
