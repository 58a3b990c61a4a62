"""The random decisions of one round of acceptance: a protocol, and the noise that answers it when text is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from paceline.kernels.sample import draws
from paceline.noise import Purpose, noise_key, stream

if TYPE_CHECKING:
    from paceline.acceptance.rows import Number, Row


class Coins(Protocol):
    """What a rule asks; each node is asked about at most once a round, and there is one pick."""

    def accept(self, node: int, chance: Number) -> bool:
        """True with probability ``chance``, which is at least 0 and at most 1."""

    def pick(self, weights: Row) -> int:
        """A token with a probability in proportion to its weight; the weights are not all 0."""


class Noise:
    """The noise of one round: draws, coins and the last pick are independent of each other and of all other rounds.

    It is a function of the seed, the choice, what it is for and the root's position. The position of the root and not
    of the token: a rule may look at drafts beyond those that it commits, so a later round must not meet their noise
    again at the same place.
    """

    def __init__(self, seed: int, choice: int, position: int) -> None:
        """``position`` is the absolute position of the tree's root, which no other round of the request has."""
        self._draws, self._coins, self._pick = (
            stream(noise_key(seed, choice, purpose), position)
            for purpose in (Purpose.DRAFT, Purpose.COIN, Purpose.RESIDUAL)
        )

    def children(self, node: int, q: Row, count: int) -> list[int]:
        """Up to ``count`` tokens drawn from ``q`` without replacement, in draw order, as children of ``node``.

        There are fewer where ``q`` has fewer that are possible. The highest of log q + Gumbel noise are such draws
        (Kool et al. 2019, arXiv 1903.06059).
        """
        return draws(torch.from_numpy(q), self._draws, node, count)

    def accept(self, node: int, chance: Number) -> bool:
        return _uniform(self._coins, node) < chance

    def pick(self, weights: Row) -> int:
        possible = np.flatnonzero(weights != 0)  # few after top-p, and the sums are the same
        heights = weights[possible].cumsum()
        place = int(heights.searchsorted(_uniform(self._pick, 0) * heights[-1], side="right"))
        return int(possible[min(place, possible.size - 1)])  # rounding may reach the whole height


def _uniform(key: int, index: int) -> float:
    """What :func:`paceline.noise.uniforms` gives for one id."""
    return max(1, stream(key, index) >> 11) * 2.0**-53
