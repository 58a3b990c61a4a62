"""EAGLE-1 and 2: a head that foretells the target's next state, and with the target's own head the token after it.

Sources: Li et al. 2024 (arXiv 2401.15077) for the head, 2024 (arXiv 2406.16858) for its trees.
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
    return make("eagle", speculation, around)


def _groups(speculation: Speculation, models: Models) -> Sequence[CacheGroup]:
    return groups("eagle", speculation, models)


METHOD = Method(
    _make, _groups, options=("model", "random", "tree", "rule"), model="needed", sampled=True, trees=True, shapes=True
)
