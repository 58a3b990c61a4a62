"""EAGLE-3 and 3.1: a head that reads three of the target's states at once, and has a small vocabulary of its own.

Source: Li et al. 2025 (arXiv 2503.01840); for 3.1, arXiv 2605.09992. Trees are those of EAGLE-2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters import Method, Models, Surroundings
from paceline.drafters._eagle import EagleDrafter, groups, make

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.options import Speculation
    from paceline.pages import CacheGroup


def _make(speculation: Speculation, around: Surroundings) -> EagleDrafter:
    return make("eagle3", speculation, around)


def _groups(speculation: Speculation, models: Models) -> Sequence[CacheGroup]:
    return groups("eagle3", speculation, models)


METHOD = Method(
    _make, _groups, options=("model", "random", "tree", "rule"), model="needed", sampled=True, trees=True, shapes=True
)
