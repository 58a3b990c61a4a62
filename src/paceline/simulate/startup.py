"""What the pacer is told at start-up: a table of steps that is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.simulate.device import Server

ERROR = 0.15
"""By how much the entry that is furthest off is wrong."""

ROWS = (*range(1, 65), *(64 << doubling for doubling in range(1, 7)))
"""1 to 64, then doublings."""

_SHORT = 256


def table(server: Server, rng: np.random.Generator, error: float = ERROR) -> dict[int, float]:
    """Seconds by rows as they would be measured on a server with little context.

    All entries are wrong together, few rows otherwise than many, and each by itself; the worst by ``error``.
    """
    return dict(zip(ROWS, (server.step(np.array(ROWS), 1, _SHORT) * _wrong(rng, error)).tolist(), strict=True))


def _wrong(rng: np.random.Generator, error: float) -> NDArray[np.float64]:
    steep = np.linspace(-1.0, 1.0, len(ROWS)) * rng.uniform(-1, 1)
    off = rng.uniform(-1, 1) + steep + rng.uniform(-0.5, 0.5, len(ROWS))
    return np.asarray(1 + error * off / np.abs(off).max())
