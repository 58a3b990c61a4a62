"""How far to draft: the measured cost of rows against the measured acceptance, "not at all" included."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from paceline.calibration import Calibration, Judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.drafters import Cost
    from paceline.tree import Dropping, TokenTree


_FORGET = 0.95  # a judgement counts half after 14 more of its kind
_PRIOR_WEIGHT = 4.0
_PRIOR = 0.6
_ROW_GUESS = 0.05  # what one more row adds to a step until it has been measured, in parts of the one-row step
_PLAIN_SAMPLES = 2
_PLAIN_EVERY = 100  # steps after which the cost of a step without drafts is measured afresh
_MORE_EVERY = 32  # steps after which one node more than seems best is tried
_REST = 24  # steps without drafts after which a drafter at rest is tried with one node
_LONGEST_REST = 96
_SOON = 2
_AHEAD = 8  # a lookup is asked for so many nodes, and for so many times as many as were worth verifying of late
_AMPLE = 2
_FADE = 0.9
_LIKELY = 0.3
_KEYS = 64  # isolation keys whose calibration is remembered, those used last
_TICK = 1e-9  # seconds; no step takes less, whatever a coarse clock says


def _towards(known: float, sample: float) -> float:
    """Move a mean of seconds: down at once by half, for nothing is faster by accident, up slowly and in bounds."""
    return known + (0.5 if sample < known else 0.2) * (min(sample, 2 * known) - known)


@dataclass
class RowCost:
    """Seconds of a step for each number of rows, as measured while running."""

    seconds: dict[int, float] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    _rows: list[int] = field(default_factory=list)
    _least: list[float] = field(default_factory=list)

    def learn(self, rows: int, seconds: float) -> None:
        seconds = max(seconds, _TICK)
        known = self.seconds.get(rows)
        if known is not None:
            first_again = self.samples[rows] == 1 and seconds < known  # the first step of a kind is often a cold one
            self.seconds[rows] = seconds if first_again else _towards(known, seconds)
        else:
            # Without a sample of its own a count is judged by its neighbours: a step that was interrupted says little.
            self.seconds[rows] = min(seconds, 2 * self(rows)) if self._rows else seconds
            insort(self._rows, rows)
        self.samples[rows] = self.samples.get(rows, 0) + 1
        # Fewer rows never take longer than more do: what seems so was interrupted, or measured in slower times.
        falling = accumulate((self.seconds[count] for count in reversed(self._rows)), min)
        self._least = list(falling)[::-1]

    def __call__(self, rows: float) -> float:
        """Estimated seconds of a step of ``rows`` rows: between two measured counts on the line through them."""
        if not self._rows:
            return _guess(1, rows)
        place = bisect_left(self._rows, rows)
        if place == 0:
            return self._least[0] / _guess(rows, self._rows[0])
        low, least = self._rows[place - 1], self._least[place - 1]
        if place == len(self._rows):
            return least * _guess(low, rows)
        part = (rows - low) / (self._rows[place] - low)
        return least + part * (self._least[place] - least)


def _guess(low: float, high: float) -> float:
    """How many times as long ``high`` rows take as ``low``, as long as nobody has measured it."""
    return (1 + _ROW_GUESS * (high - 1)) / (1 + _ROW_GUESS * (low - 1))


@dataclass
class _Depth:
    """How often a draft was right where all before it were, and what is left of the belief held beforehand."""

    reached: float = 0.0
    accepted: float = 0.0
    prior: float = _PRIOR_WEIGHT

    def learn(self, accepted: bool) -> None:
        self.reached = self.reached * _FORGET + 1
        self.accepted = self.accepted * _FORGET + accepted
        self.prior *= _FORGET


@dataclass
class Survival:
    """For each depth, how often a draft was accepted when all before it were: the denominator is who got there."""

    depths: list[_Depth] = field(default_factory=list)

    def learn(self, accepted: int, missed: bool) -> None:
        while len(self.depths) < accepted + missed:
            self.depths.append(_Depth())
        for place, depth in enumerate(self.depths[: accepted + missed]):
            depth.learn(place < accepted)

    def alive(self, depths: int) -> list[float]:
        """The chance that the first d drafts are all accepted, for d from 1 to ``depths``."""
        rate, product, chances = _PRIOR, 1.0, []
        for place in range(depths):
            if place < len(self.depths):
                depth = self.depths[place]
                rate = (depth.accepted + depth.prior * rate) / (depth.reached + depth.prior)
            product *= rate
            chances.append(product)
        return chances


@dataclass
class _State:
    """``rested`` steps without a draft, of at most ``rest``; ``drafting`` steps with fewer than allowed; ``kept``, the
    most nodes that were worth verifying of late."""

    judge: Judge
    survival: Survival = field(default_factory=Survival)
    rested: int = 0
    rest: int = _REST
    drafting: int = 0
    kept: float = 0.0


@dataclass
class _Price:
    """What a drafter takes for each node that it is asked for, in seconds, and the share that it gives."""

    seconds: float = 0.0
    given: float = 1.0


@dataclass(frozen=True)
class Wish:
    """A sequence that may draft: with which drafter, what kind of cost that has, and the most nodes."""

    sequence: int
    drafter: str
    ceiling: int
    cost: Cost = "level"


@dataclass(frozen=True)
class _Node:
    place: int
    alive: float
    price: _Price


_SUNK = _Price()
"""Of drafts that are there already."""


class Pacer:
    """Chooses, before anything is drawn, how many nodes each sequence may draft.

    One more node is worth its rows while it raises the expected tokens a second of the whole step:
    (sum of 1 + survival) / (cost of the rows + cost of drafting), algorithms of this kind being known as goodput
    (Liu et al. 2024, arXiv 2406.14066). What is not chosen is not measured, so each choice is tried now and then: a
    step without drafts, one node more, and a drafter that has been put to rest.
    """

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self.forget()

    def forget(self) -> None:
        """Start afresh with what was measured; sequences that run go on."""
        self.rows = RowCost()
        self._prices: dict[str, _Price] = {}
        self._since_plain: dict[int, int] = {}
        self._cut = 0
        self._calibrations: dict[str | None, Calibration] = {}

    def start(self, sequence: int, cache_salt: str | None = None) -> None:
        """Take a sequence on; what is learned of drafts from it serves others of the same isolation key."""
        shared = self._calibrations.pop(cache_salt, None) or Calibration()
        self._calibrations[cache_salt] = shared
        while len(self._calibrations) > _KEYS:
            del self._calibrations[next(iter(self._calibrations))]
        self._states[sequence] = _State(Judge(shared))

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def budgets(self, wanted: Sequence[Wish], beside: int = 0, measured: bool = True) -> list[int]:
        """How many nodes each of ``wanted`` may draft; ceilings of 0 stay 0.

        A lookup may always draft: of what it gives :meth:`select` keeps what pays.
        ``beside`` is how many rows the step takes whatever is chosen, besides one for each of ``wanted``;
        ``measured`` whether its time will be learned.
        """
        plain = len(wanted) + beside
        if measured and any(wish.ceiling for wish in wanted) and self._plain_is_due(plain):
            return [0] * len(wanted)
        nodes = [
            _Node(place, alive, self._prices.get(wish.drafter, _Price()))
            for place, wish in enumerate(wanted)
            if wish.cost != "lookup"
            for alive in self._states[wish.sequence].survival.alive(wish.ceiling)
        ]
        nodes.sort(key=lambda node: -node.alive)
        budgets = [0] * len(wanted)
        for node in nodes[: self._best_prefix(plain, nodes)]:
            budgets[node.place] += 1
        return [self._explore(wish, budget) for wish, budget in zip(wanted, budgets, strict=True)]

    def select(self, proposals: Sequence[tuple[int, TokenTree]], beside: int, by: Dropping) -> list[TokenTree]:
        """The parts of proposed trees that are worth their rows.

        Args:
            proposals: sequence and tree, weighed by :meth:`weigh`.
            beside: how many rows the step takes whatever is chosen, besides the roots of the trees.
            by: the liberty to drop the rest.
        """
        nodes = [_Node(place, alive, _SUNK) for place, (_, tree) in enumerate(proposals) for alive in tree.survival[1:]]
        nodes.sort(key=lambda node: -node.alive)
        best = self._best_prefix(len(proposals) + beside, nodes)
        kept = [1] * len(proposals)
        if best < len(nodes):
            best += self._one_more(len(proposals) + beside + best, nodes[best].alive)
        for node in nodes[:best]:
            kept[node.place] += 1
        for (sequence, _), count in zip(proposals, kept, strict=True):
            state = self._states[sequence]
            state.kept = max(count - 1.0, _FADE * state.kept)
        return [tree.best(count, by) for (_, tree), count in zip(proposals, kept, strict=True)]

    def weigh(self, sequence: int, tree: TokenTree) -> TokenTree:
        """A proposed tree with calibrated estimates in the place of its own."""
        return self._states[sequence].judge.weigh(tree)

    def _one_more(self, rows: int, alive: float) -> int:
        """Whether to take one row more than seems best, for what its time tells: now and then, and where it may well be
        right while what such a step takes has hardly been measured."""
        self._cut += 1
        unknown = self.rows.samples.get(rows + 1, 0) < _PLAIN_SAMPLES and alive > _LIKELY
        return int(unknown or self._cut % _MORE_EVERY == 0)

    def _plain_is_due(self, rows: int) -> bool:
        """Whether a step of ``rows`` rows without drafts is worth its while for what it tells."""
        if self.rows.samples.get(rows, 0) < _PLAIN_SAMPLES:
            return True
        self._since_plain[rows] = self._since_plain.get(rows, 0) + 1
        return self._since_plain[rows] > _PLAIN_EVERY

    def _best_prefix(self, plain: int, nodes: Sequence[_Node]) -> int:
        """How many of the nodes, likeliest first, bring the most expected tokens a second."""
        tokens, rows, drafting = float(plain), float(plain), 0.0
        best, best_rate = 0, tokens / self.rows(max(plain, 1))
        for count, node in enumerate(nodes, 1):
            tokens += node.alive * node.price.given
            rows += node.price.given
            drafting += node.price.seconds
            rate = tokens / (self.rows(rows) + drafting)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _explore(self, wish: Wish, budget: int) -> int:
        """What is chosen, or now and then the next larger choice."""
        state = self._states[wish.sequence]
        if wish.cost == "lookup":
            return min(wish.ceiling, _AHEAD + int(_AMPLE * state.kept))
        if budget == wish.ceiling:
            return budget
        if budget:
            state.rested, state.rest = 0, _REST
            state.drafting = (state.drafting + 1) % _MORE_EVERY
            return budget + (state.drafting == 0)
        state.rested += 1
        if state.rested < state.rest:
            return 0
        state.rested = 0
        return 1

    def learn_step(self, rows: int, seconds: float) -> None:
        """A step of decoding rows alone took so long, drafting not counted."""
        self.rows.learn(rows, seconds)
        self._since_plain[rows] = 0

    def learn_draft(self, drafter: str, asked: int, given: int, seconds: float) -> None:
        """A drafter was asked for so many nodes, gave some of them, and took so long."""
        price = self._prices.get(drafter)
        if price is None:
            self._prices[drafter] = _Price(seconds / asked, given / asked)
        else:
            price.seconds = _towards(price.seconds, seconds / asked)
            price.given += 0.2 * (given / asked - price.given)

    def learn_outcome(self, sequence: int, tokens: Sequence[int], verified: int) -> None:
        """These tokens follow the root of the tree that was proposed last, of which so many nodes were verified."""
        state = self._states[sequence]
        right, missed = state.judge.learn(tokens)
        if not (right or missed):
            return
        state.survival.learn(right, missed)
        # One that was right is tried again at once, or soon where its drafts were not worth their rows; one that was
        # wrong rests longer each time.
        state.rest = (1 if verified else _SOON) if right else min(max(2 * state.rest, _REST), _LONGEST_REST)
