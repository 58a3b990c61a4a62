"""What a drafter's own estimates of its chances are worth.

Every draft can be judged, verified or not: once it is known which token followed, a node whose ancestors were all
right was right or wrong. So nothing has to be tried for the sake of knowing; only drafts at greater depths wait for
their ancestors to come true.

What a claim is worth is learned over all sequences. How far a drafter is to be trusted now, in one sequence and in all
of them together, is learned apart: that changes soon.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.rate import Rate
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

_CELL_PRIOR = 3.0  # so many judgements the drafter's own estimate counts for
_CELL_FORGET = 0.998
_TRUST_PRIOR = 12.0  # so many judgements the belief that a sequence is like the others counts for
_STEP_FORGET = 0.9  # what a step's judgements of all sequences are worth after the next step
_EXPECTED_FORGET = 0.9
_DEEP = 4  # depths from here on share their cells
_LEAST, _MOST = 0.002, 0.995
# Claims are told apart where their odds differ by a factor of 1.4; those of 0 and of 1 are by themselves.
_STEPS = (1e-300, *(1 / (1 + 2 ** (step / 4)) for step in range(23, -24, -2)), 1.0)

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


@dataclass(slots=True)
class Trust:
    """How often one of a drafter's drafts for a place was right, against what was expected."""

    rate: Rate
    expected: float | None = None

    def learn(self, right: float, expected: float, judged: float = 1.0) -> None:
        """Of so many places, so many were right where ``expected`` were expected to be."""
        mean = expected / judged
        self.rate.learn(right, judged, mean)
        self.expected = mean if self.expected is None else mean + _EXPECTED_FORGET * (self.expected - mean)

    @property
    def factor(self) -> float:
        """How many times the odds that were expected its drafts have."""
        if self.expected is None:
            return 1.0
        before = _bounded(self.expected)
        own = _bounded(self.rate.value(before))
        return own / (1 - own) * (1 - before) / before


@dataclass(slots=True)
class Calibration:
    """Estimates shared by all sequences that may learn from each other.

    Attributes:
        cells: what claims are worth.
        trust: how far each drafter is to be trusted now.
        open: for each drafter the judgements of this step: places, right ones, expected ones.
    """

    cells: dict[_Key, _Cell] = field(default_factory=dict)
    trust: dict[str, Trust] = field(default_factory=dict)
    open: dict[str, list[float]] = field(default_factory=dict)

    def close(self) -> None:
        """A step is over."""
        for origin, (judged, right, expected) in self.open.items():
            if origin not in self.trust:
                self.trust[origin] = Trust(Rate(_TRUST_PRIOR, _STEP_FORGET))
            self.trust[origin].learn(right, expected, judged)
        self.open.clear()


class Judge:
    """One sequence's use of a calibration: it weighs what is drafted, and learns when the truth is known."""

    def __init__(self, shared: Calibration) -> None:
        self._shared = shared
        self._trust: dict[str, Trust] = {}
        self._drafted: TokenTree | None = None
        self._keys: list[_Key] = [("target", 0, 0)]
        self._depths = [0]
        self._common, self._expected = [1.0], [1.0]

    def weigh(self, tree: TokenTree, known: int = 1) -> TokenTree:
        """The tree with calibrated estimates in the place of its own; it is judged when :meth:`learn` is called.

        The first ``known`` nodes, the root among them, are those of the tree that was weighed last.
        """
        keys, depths, common, expected = self._keys, self._depths, self._common, self._expected
        for notes in (keys, depths, common, expected):
            del notes[known:]
        parents, claimed, origins, cells = tree.parents, tree.survival, tree.origin, self._shared.cells
        survival = claimed[:known]
        all_factors = {origin: trust.factor for origin, trust in self._shared.trust.items()}
        factors = {origin: trust.factor for origin, trust in self._trust.items()}
        for node in range(known, len(parents)):
            parent, origin = parents[node], origins[node]
            above = claimed[parent]
            claim = claimed[node] / above if above > 0.0 else 0.0
            depth = depths[parent] + 1
            key = origin, depth if depth < _DEEP else _DEEP, bisect_right(_STEPS, claim)
            cell = cells.get(key)
            if cell is not None:
                claim = (cell.right + _CELL_PRIOR * claim) / (cell.judged + _CELL_PRIOR)
            claim = _LEAST if claim < _LEAST else _MOST if claim > _MOST else claim
            odds = claim / (1 - claim) * all_factors.get(origin, 1.0)
            own = odds * factors.get(origin, 1.0)
            own /= 1 + own
            depths.append(depth)
            keys.append(key)
            common.append(claim)
            expected.append(odds / (1 + odds))
            survival.append(survival[parent] * (_LEAST if own < _LEAST else _MOST if own > _MOST else own))
        self._drafted = TokenTree(tree.tokens, parents, survival, origins, tree.q)
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
        for token in truth:
            children = [n for n in range(node + 1, len(tree)) if tree.parents[n] == node]
            following = self._judge(tree, children, token)
            if following is None:
                return depth, bool(children)
            node, depth = following, depth + 1
        return depth, False

    def _judge(self, tree: TokenTree, children: Sequence[int], token: int) -> int | None:
        """Learn from all drafts for one place; returns the right one."""
        cells, following = self._shared.cells, None
        places: dict[str, list[float]] = {}
        for child in children:
            hit = tree.tokens[child] == token
            cell = cells.get(self._keys[child])
            if cell is None:
                cell = cells[self._keys[child]] = _Cell()
            cell.learn(hit)
            sums = places.setdefault(tree.origin[child], [0.0, 0.0, 0.0])
            sums[0] += hit
            sums[1] += self._common[child]
            sums[2] += self._expected[child]
            if hit:
                following = child
        for origin, (right, common, expected) in places.items():
            if origin not in self._trust:
                self._trust[origin] = Trust(Rate(_TRUST_PRIOR))
            self._trust[origin].learn(right, min(expected, 1.0))
            step = self._shared.open.setdefault(origin, [0.0, 0.0, 0.0])
            step[0] += 1
            step[1] += right
            step[2] += min(common, 1.0)
        return following


def _bounded(chance: float) -> float:
    return min(max(chance, _LEAST), _MOST)
