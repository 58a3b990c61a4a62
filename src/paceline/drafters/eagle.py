"""EAGLE-1 and 2: a head that foretells the target's next state, and with the target's own head the token after it.

Sources: Li et al. 2024 (arXiv 2401.15077) for the head, 2024 (arXiv 2406.16858) for its trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters import Method, Surroundings
from paceline.drafters._eagle import EagleDrafter, make

if TYPE_CHECKING:
    from paceline.options import Speculation


def _make(speculation: Speculation, around: Surroundings) -> EagleDrafter:
    return make("eagle", speculation, around)


METHOD = Method(
    _make, options=("model", "random", "tree", "rule"), model="needed", sampled=True, trees=True, shapes=True
)
