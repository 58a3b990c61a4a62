"""EAGLE-3 and 3.1: a head that reads three of the target's states at once, and has a small vocabulary of its own.

Source: Li et al. 2025 (arXiv 2503.01840); for 3.1, arXiv 2605.09992. Trees are those of EAGLE-2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters import Method, Surroundings
from paceline.drafters._eagle import EagleDrafter, make

if TYPE_CHECKING:
    from paceline.options import Speculation


def _make(speculation: Speculation, around: Surroundings) -> EagleDrafter:
    return make("eagle3", speculation, around)


METHOD = Method(
    _make, options=("model", "random", "tree", "rule"), model="needed", sampled=True, trees=True, shapes=True
)
