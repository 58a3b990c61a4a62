"""What a drafter's own estimates of its chances are worth.

Every draft can be judged, verified or not: once it is known which token followed, a node whose ancestors were all
right was right or wrong. So nothing has to be tried for the sake of knowing; only drafts at greater depths wait for
their ancestors to come true.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tree import TokenTree

_CELL_PRIOR = 4.0  # so many judgements the drafter's own estimate counts for
_CELL_FORGET = 0.998
_TRUST_PRIOR = 3.0  # so many judgements the belief that a sequence is like the others counts for
_TRUST_FORGET = 0.95  # a step's judgements count half after 14 more steps
_STEPS = 2.0  # cells for each doubling of the odds
_END = 12
_DEEP = 4  # depths from here on share their cells
_LEAST, _MOST = 0.002, 0.995

_Key = tuple[str, int, int]
"""The cell of a draft: whose it is, how deep, and how likely its drafter thinks it."""


@dataclass(slots=True)
class _Cell:
    """Judgements of drafts that were thought about equally likely."""

    judged: float = 0.0
    right: float = 0.0

    def learn(self, right: bool) -> None:
        self.judged = self.judged * _CELL_FORGET + 1
        self.right = self.right * _CELL_FORGET + right

    def chance(self, claimed: float) -> float:
        return (self.right + _CELL_PRIOR * claimed) / (self.judged + _CELL_PRIOR)


@dataclass(slots=True)
class _Trust:
    """How many of a drafter's drafts were right in one sequence, against what the cells expect."""

    judged: float = 0.0
    right: float = 0.0
    expected: float = 0.0

    def fade(self) -> None:
        self.judged *= _TRUST_FORGET
        self.right *= _TRUST_FORGET
        self.expected *= _TRUST_FORGET

    def learn(self, right: bool, expected: float) -> None:
        self.judged += 1
        self.right += right
        self.expected += expected

    @property
    def shift(self) -> float:
        """By how much the log-odds of the sequence's drafts are above those that the cells give them."""
        if not self.judged:
            return 0.0
        expected = _bounded(self.expected / self.judged)
        own = _bounded((self.right + _TRUST_PRIOR * expected) / (self.judged + _TRUST_PRIOR))
        return _log_odds(own) - _log_odds(expected)


@dataclass(slots=True)
class Calibration:
    """Estimates shared by all sequences that may learn from each other."""

    cells: dict[_Key, _Cell] = field(default_factory=dict)


class Judge:
    """One sequence's use of a calibration: it weighs what is drafted, and learns when the truth is known."""

    def __init__(self, shared: Calibration) -> None:
        self._cells = shared.cells
        self._trust: dict[str, _Trust] = {}
        self._drafted: TokenTree | None = None
        self._keys: list[_Key] = []
        self._expected: list[float] = []

    def weigh(self, tree: TokenTree) -> TokenTree:
        """The tree with calibrated estimates in the place of its own; it is judged when :meth:`learn` is called."""
        depths = tree.depths()
        claims = [1.0, *(_share(tree.survival, tree.parents, node) for node in range(1, len(tree)))]
        self._keys = [
            (origin, min(depth, _DEEP), _step(claim))
            for origin, depth, claim in zip(tree.origin, depths, claims, strict=True)
        ]
        self._expected = [1.0] * len(tree)
        survival = [1.0] * len(tree)
        shifts = {origin: trust.shift for origin, trust in self._trust.items()}
        for node in range(1, len(tree)):
            cell = self._cells.get(self._keys[node])
            expected = claims[node] if cell is None else cell.chance(claims[node])
            odds = _log_odds(_bounded(expected)) + shifts.get(tree.origin[node], 0.0)
            self._expected[node] = expected
            survival[node] = survival[tree.parents[node]] * _bounded(1 / (1 + math.exp(-odds)))
        self._drafted = replace(tree, survival=survival)
        return self._drafted

    def learn(self, truth: Sequence[int]) -> tuple[int, bool]:
        """Judge the tree that was weighed last by the tokens that followed its root.

        Returns:
            How many of its drafts in a row were right, and whether one was wrong then.
        """
        tree, node, depth = self._drafted, 0, 0
        self._drafted = None
        if tree is None:
            return 0, False
        for trust in self._trust.values():
            trust.fade()
        families: dict[int, list[int]] = {}
        for child in range(1, len(tree)):
            families.setdefault(tree.parents[child], []).append(child)
        for token in truth:
            following, children = None, families.get(node, ())
            for child in children:
                right = tree.tokens[child] == token
                self._cells.setdefault(self._keys[child], _Cell()).learn(right)
                self._trust.setdefault(tree.origin[child], _Trust()).learn(right, self._expected[child])
                if right:
                    following = child
            if following is None:
                return depth, bool(children)
            node, depth = following, depth + 1
        return depth, False


def _bounded(chance: float) -> float:
    return min(max(chance, _LEAST), _MOST)


def _log_odds(chance: float) -> float:
    return math.log(chance / (1 - chance))


def _share(survival: Sequence[float], parents: Sequence[int], node: int) -> float:
    above = survival[parents[node]]
    return survival[node] / above if above > 0 else 0.0


def _step(claimed: float) -> int:
    """The step of the odds that a drafter gives its draft."""
    if not 0.0 < claimed < 1.0:
        return _END if claimed > 0.0 else -_END
    return min(max(round(_STEPS * math.log2(claimed / (1 - claimed))), -_END), _END)
