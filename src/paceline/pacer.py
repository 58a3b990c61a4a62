"""How far to draft: the measured cost of rows against the measured acceptance, "not at all" included."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tree import TokenTree

_FORGET = 0.95  # a judgement counts half after 14 more of its kind
_PRIOR_WEIGHT = 4.0
_PRIOR = 0.6
_ROW_GUESS = 0.03  # what one more row adds to a step until it has been measured, in parts of the one-row step
_PROBE_EVERY = 24
_PROBE_NODES = 2


@dataclass
class RowCost:
    """Seconds of a step for each number of rows, as measured while running (exponential mean)."""

    seconds: dict[int, float] = field(default_factory=dict)
    _rows: list[int] = field(default_factory=list)

    def learn(self, rows: int, seconds: float) -> None:
        known = self.seconds.get(rows)
        if known is None:
            self._rows.insert(bisect_left(self._rows, rows), rows)
            self.seconds[rows] = seconds
        else:
            # A step that was interrupted says little: one sample moves the mean by a fifth of at most twice itself.
            self.seconds[rows] = known + 0.2 * (min(seconds, 2 * known) - known)

    def __call__(self, rows: int) -> float:
        """Estimated seconds of a step of ``rows`` rows: between two measured counts on the line through them."""
        if not self._rows:
            return 1.0 + _ROW_GUESS * (rows - 1)
        place = bisect_left(self._rows, rows)
        if place < len(self._rows) and self._rows[place] == rows:
            return self.seconds[rows]
        if place == 0:
            return self.seconds[self._rows[0]]
        low = self._rows[place - 1]
        if place == len(self._rows):
            return self.seconds[low] * (1 + _ROW_GUESS * (rows - low))
        high = self._rows[place]
        part = (rows - low) / (high - low)
        return self.seconds[low] + part * (self.seconds[high] - self.seconds[low])


@dataclass
class Survival:
    """For each depth, how often a draft was accepted when all before it were: the denominator is who got there."""

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def learn(self, accepted: int, missed: bool) -> None:
        while len(self.reached) < accepted + missed:
            self.reached.append(0.0)
            self.accepted.append(0.0)
        for depth in range(accepted + missed):
            self.reached[depth] = self.reached[depth] * _FORGET + 1
            self.accepted[depth] = self.accepted[depth] * _FORGET + (depth < accepted)

    def alive(self, depths: int) -> list[float]:
        """The chance that the first d drafts are all accepted, for d from 1 to ``depths``."""
        rate, product, chances = _PRIOR, 1.0, []
        for depth in range(depths):
            if depth < len(self.reached):
                rate = (self.accepted[depth] + _PRIOR_WEIGHT * rate) / (self.reached[depth] + _PRIOR_WEIGHT)
            product *= rate
            chances.append(product)
        return chances


@dataclass
class _State:
    survival: Survival = field(default_factory=Survival)
    rested: int = 0


class Pacer:
    """Chooses, before anything is drawn, how many nodes each sequence may draft.

    One more node is worth its rows while it raises the expected tokens a second of the whole step:
    (sum of 1 + survival) / (cost of the rows + cost of drafting), algorithms of this kind being known as goodput
    (Liu et al. 2024, arXiv 2406.14066).
    """

    def __init__(self) -> None:
        self.rows = RowCost()
        self._draft_seconds: dict[str, float] = {}
        self._states: dict[int, _State] = {}

    def start(self, sequence: int) -> None:
        self._states[sequence] = _State()

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def budgets(self, wanted: Sequence[tuple[int, str, int]]) -> list[int]:
        """How many nodes each of ``wanted`` (sequence, drafter, ceiling) may draft; ceilings of 0 stay 0."""
        nodes: list[tuple[float, int, float]] = []
        for place, (sequence, drafter, ceiling) in enumerate(wanted):
            price = self._draft_seconds.get(drafter, 0.0)
            nodes += [(alive, place, price) for alive in self._states[sequence].survival.alive(ceiling)]
        nodes.sort(key=lambda node: -node[0])
        best = self._best_prefix(len(wanted), nodes)
        budgets = [0] * len(wanted)
        for _, place, _ in nodes[:best]:
            budgets[place] += 1
        return [self._probe(w, budget) for w, budget in zip(wanted, budgets, strict=True)]

    def _best_prefix(self, sequences: int, nodes: Sequence[tuple[float, int, float]]) -> int:
        """How many of the nodes, likeliest first, bring the most expected tokens a second."""
        tokens, drafting = float(sequences), 0.0
        best, best_rate = 0, tokens / self.rows(max(sequences, 1))
        for count, (alive, _, price) in enumerate(nodes, 1):
            tokens += alive
            drafting += price
            rate = tokens / (self.rows(sequences + count) + drafting)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _probe(self, wanted: tuple[int, str, int], budget: int) -> int:
        """A drafter at rest is tried again, rarely: without drafts nothing is learned."""
        sequence, _, ceiling = wanted
        state = self._states[sequence]
        if budget or not ceiling:
            state.rested = 0
            return budget
        state.rested += 1
        if state.rested < _PROBE_EVERY:
            return 0
        state.rested = 0
        return min(ceiling, _PROBE_NODES)

    def select(self, tree: TokenTree, budget: int) -> TokenTree:
        """The part of a proposed tree that is verified: its likeliest nodes, within the budget."""
        return tree.best(budget + 1)

    def learn_step(self, rows: int, seconds: float) -> None:
        """A step of decoding rows alone took so long, drafting not counted."""
        self.rows.learn(rows, seconds)

    def learn_draft(self, drafter: str, nodes: int, seconds: float) -> None:
        if nodes:
            each = seconds / nodes
            known = self._draft_seconds.get(drafter, each)
            self._draft_seconds[drafter] = known + 0.2 * (min(each, 2 * known) - known)

    def learn_outcome(self, sequence: int, accepted: int, missed: bool) -> None:
        if accepted or missed:
            self._states[sequence].survival.learn(accepted, missed)
