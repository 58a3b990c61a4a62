"""What more training would bring: a curve through what some of it has brought."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 4
"""Points that a curve needs: it has three numbers."""

_POWERS = np.geomspace(0.05, 2.0, 200)


@dataclass(frozen=True)
class Scaling:
    """tau = limit - gap * (tokens / first)^-power: a power law in what is missing (arXiv 2001.08361), `gap` of it after
    the first point's tokens."""

    limit: float
    gap: float
    power: float
    first: float

    def at(self, tokens: float) -> float:
        """tau after so many tokens."""
        return float(self.limit - self.gap * (tokens / self.first) ** -self.power)


def fit(points: Sequence[tuple[float, float]]) -> Scaling | None:
    """The curve nearest to ``points`` (tokens, tau) in least squares; None where there are too few, or tau falls.

    Among the exponents 0.05 to 2, for each of which limit and gap are known exactly.
    """
    if len({tokens for tokens, _ in points}) < LEAST:
        return None
    tokens, taus = np.array(sorted(points), dtype=float).T
    first = tokens[0]
    best: tuple[float, Scaling] | None = None
    for power in _POWERS:
        missing = (tokens / first) ** -power
        (limit, gap), *_ = np.linalg.lstsq(np.stack([np.ones_like(missing), -missing], 1), taus, rcond=None)
        found = Scaling(float(limit), float(gap), float(power), float(first))
        error = float(np.square(limit - gap * missing - taus).sum())
        if gap > 0 and (best is None or error < best[0]):
            best = error, found
    return None if best is None else best[1]
