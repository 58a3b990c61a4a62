"""Medians with their spread, and intervals of ratios."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Spread:
    """A median and the least and greatest value around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """A 95 % interval of sum(numerators) / sum(denominators), pairs drawn again with replacement.

    The percentile bootstrap (Efron 1979, "Bootstrap methods: another look at the jackknife").

    Args:
        numerators, denominators: two values for each prompt, in the same order; at least one pair.
    """
    pairs = np.array([numerators, denominators], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(pairs.shape[1], size=(resamples, pairs.shape[1]))
    above, below = pairs[:, drawn].sum(axis=2)
    low, high = np.quantile(above / below, (0.025, 0.975))
    return float(low), float(high)
