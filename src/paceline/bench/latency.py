"""Figures of requests that were served side by side, under the names that ``vllm bench serve`` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.stats import Spread, ratio_interval
from paceline.record import add_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Cell = Mapping[str, Any]

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Timeline:
    """When the tokens of one request came, in seconds.

    Attributes:
        due: when it was sent, or should have been.
        times: of every arrival of tokens, at whoever waits for them; at least one.
        counts: how many tokens came each time; a step with accepted drafts brings several together.
        end: when it was known that there are no more.
    """

    due: float
    times: Sequence[float]
    counts: Sequence[int]
    end: float

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.times[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where there is none."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latency: the gaps between arrivals. Tokens that came together have none between them."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.end - self.due


@dataclass(frozen=True)
class Limits:
    """What a request must keep to for goodput.

    Attributes:
        ttft: the longest time to first token, in milliseconds.
        tpot: the longest time per output token, in milliseconds.
    """

    ttft: float | None = None
    tpot: float | None = None

    @property
    def given(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def met(self, timeline: Timeline) -> bool:
        """Whether a request kept to all limits that there are."""
        quick = self.ttft is None or 1000 * timeline.ttft <= self.ttft
        return quick and (self.tpot is None or 1000 * (timeline.tpot or 0.0) <= self.tpot)


KINDS: dict[str, Callable[[Timeline], float | None]] = {
    "ttft": lambda timeline: timeline.ttft,
    "tpot": lambda timeline: timeline.tpot,
    "e2el": lambda timeline: timeline.e2el,
}
"""What each request has one value of."""


def figures(plain: Sequence[Cell], other: Sequence[Cell], limits: Limits) -> dict[str, Any]:
    """What a method did under one pattern of arrivals, beside plain decoding.

    Args:
        plain, other: a cell for each round: ``seconds`` it took, and ``requests``, each with ``id``, ``timeline``,
            ``digest`` and ``record``, or with ``id`` and why it was ``refused``.
        limits: of goodput.

    Returns:
        ``output_throughput`` (tokens a second), ``request_throughput`` and, under limits, ``request_goodput`` (requests
        a second), each with median and spread over rounds; of ``ttft_ms``, ``tpot_ms``, ``itl_ms`` and ``e2el_ms`` mean
        and percentiles over all requests of all rounds; ``speedup``, plain / the method's, above 1 where the method is
        better: of throughput by round with its spread, of latencies the ratio of sums with a 95 % interval, requests
        drawn again; acceptance; how many were refused, gave their pages to others, or have other tokens than plain.
    """
    served = [[request for request in cell["requests"] if "refused" not in request] for cell in other]
    everyone = [request for requests in served for request in requests]
    lines = [[_timeline(request) for request in requests] for requests in served]
    every = [timeline for timelines in lines for timeline in timelines]
    seconds = [cell["seconds"] for cell in other]
    total = add_up([request["record"] for request in everyone])
    shown: dict[str, Any] = {
        "requests": len(other[0]["requests"]),
        "refused": sum(len(cell["requests"]) for cell in other) - len(everyone),
        "tokens": sum(timeline.tokens for timeline in every) // len(other),
        "differing": _differing(plain, other),
        "preemptions": sum(request["record"]["preemptions"] for request in everyone),
        "output_throughput": _rates([sum(line.tokens for line in own) for own in lines], seconds),
        "request_throughput": _rates([len(own) for own in lines], seconds),
        "request_goodput": _rates([sum(map(limits.met, own)) for own in lines], seconds) if limits.given else None,
    }
    values = {kind: [value for line in every if (value := take(line)) is not None] for kind, take in KINDS.items()}
    values["itl"] = [gap for line in every for gap in line.itl]
    shown |= {f"{kind}_ms": summary([1000 * value for value in found]) for kind, found in values.items()}
    shown["speedup"] = {
        "output_throughput": _throughput(plain, other),
        **{kind: _ratio(plain, other, take) for kind, take in KINDS.items()},
    }
    acceptance = ("mean_accepted_length", "steps", "drafted", "accepted", "accepted_by_position", "seconds")
    return {**shown, **{key: total[key] for key in acceptance}}


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles, between values on a straight line; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    named = {f"p{at}": float(value) for at, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def _timeline(request: Mapping[str, Any]) -> Timeline:
    return Timeline(**request["timeline"])


def _rates(counts: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
    return Spread.of([count / spent for count, spent in zip(counts, seconds, strict=True)]).as_dict()


def _throughput(plain: Sequence[Cell], other: Sequence[Cell]) -> dict[str, float] | None:
    """By how much more tokens a second came, round by round; None where plain decoding served none in some round."""
    slow, fast = ([_tokens(cell) / cell["seconds"] for cell in cells] for cells in (plain, other))
    if not all(slow):
        return None
    return Spread.of([more / less for more, less in zip(fast, slow, strict=True)]).as_dict()


def _tokens(cell: Cell) -> int:
    return sum(_timeline(request).tokens for request in cell["requests"] if "refused" not in request)


def _ratio(
    plain: Sequence[Cell], other: Sequence[Cell], take: Callable[[Timeline], float | None]
) -> dict[str, Any] | None:
    """Sums over the requests that both served, of each the median over rounds."""
    slow, fast = _medians(plain, take), _medians(other, take)
    both = [name for name in slow if slow[name] > 0 and fast.get(name, 0) > 0]
    if not both:
        return None
    above, below = [slow[name] for name in both], [fast[name] for name in both]
    return {"ratio": sum(above) / sum(below), "interval": ratio_interval(above, below)}


def _medians(cells: Sequence[Cell], take: Callable[[Timeline], float | None]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for cell in cells:
        for request in cell["requests"]:
            value = None if "refused" in request else take(_timeline(request))
            if value is not None:
                found.setdefault(request["id"], []).append(value)
    return {name: median(values) for name, values in found.items()}


def _differing(plain: Sequence[Cell], other: Sequence[Cell]) -> int:
    """How many requests have other tokens somewhere, of those that were served by both."""
    expected, found = _digests(plain), _digests(other)
    return sum(len(expected[name] | found[name]) > 1 for name in found if name in expected)


def _digests(cells: Sequence[Cell]) -> dict[str, set[str]]:
    digests: dict[str, set[str]] = {}
    for request in (request for cell in cells for request in cell["requests"] if "refused" not in request):
        digests.setdefault(request["id"], set()).add(request["digest"])
    return digests
