"""What the pacer is told at start-up: a table of steps that is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.cost import Load

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.simulate.device import Server

ERROR = 0.15
"""By how much the entry that is furthest off is wrong."""

ROWS = (*range(1, 65), *(64 << doubling for doubling in range(1, 7)))
"""1 to 64, then doublings."""

_SHORT, _LONG = 256, 8192
_SEQUENCES = (2, 4, 8, 16, 32)


def table(server: Server, rng: np.random.Generator, error: float = ERROR) -> list[tuple[Load, float]]:
    """Steps as they would be measured on a server: of one sequence with little context and with much, and of several.

    All entries are wrong together, few rows otherwise than many, and each by itself; the worst by ``error``.
    """
    rows, wrong = np.array(ROWS), _wrong(rng, error)
    cells: list[tuple[Load, float]] = []
    for context in (_SHORT, _LONG):
        seconds = (server.step(rows, 1, context) * wrong).tolist()
        cells += [(Load(n, 1, 0, context, n * context), s) for n, s in zip(ROWS, seconds, strict=True)]
    for count in _SEQUENCES:
        read = count * _SHORT
        second = float(server.step(count, count, read)) * float(wrong[count - 1])
        cells.append((Load(count, count, 0, read, read), second))
    return cells


def _wrong(rng: np.random.Generator, error: float) -> NDArray[np.float64]:
    steep = np.linspace(-1.0, 1.0, len(ROWS)) * rng.uniform(-1, 1)
    off = rng.uniform(-1, 1) + steep + rng.uniform(-0.5, 0.5, len(ROWS))
    return np.asarray(1 + error * off / np.abs(off).max())
