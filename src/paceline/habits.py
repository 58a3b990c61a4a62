"""What the pacer has learned of one sequence and one drafter: what it brings, and whether it is asked or rests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.calibration import Calibration, Judge
from paceline.survival import Survival

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cost import Price
    from paceline.rate import Rate
    from paceline.tree import TokenTree

_TRIES = 0.01  # of what a sequence decodes may be spent on trying a drafter that does not pay
_MOST_TRIES = 0.5  # tokens that may be saved up for it
_WORTH = 0.15  # tokens that an asked lookup is believed to bring until something is known
_WORTH_FORGET = 0.85
_FIRST = 8  # times that a lookup is asked before it is judged
_QUICK = 0.2
_FADE = 0.9
_AHEAD = 2
_AMPLE = 1.25
_SHARED_FORGET = 0.98
_SOON = 0.8  # what a request accepts: a fast mean
_LATE = 0.95  # and a slow one
_LITTLE = 0.2  # a collapse is a fast mean below so much of the slow one
_SOME = 0.4  # where that was so many drafts a step


@dataclass
class Shared:
    """What sequences that may learn from each other share of one drafter."""

    rates: list[Rate] = field(default_factory=list)
    worth: float = _WORTH
    asked: int = 0


@dataclass
class Lessons:
    """All that is shared under one isolation key, of a drafter and its members."""

    calibration: Calibration = field(default_factory=Calibration)
    drafters: dict[int, Shared] = field(default_factory=dict)

    def of(self, price: Price) -> Shared:
        return self.drafters.setdefault(price.number, Shared())


@dataclass(slots=True)
class Habit:
    """One drafter in one sequence.

    Attributes:
        worth: tokens that asking it brings, the time of their rows taken off; of lookups.
        survival: of its drafts, by depth.
        spread: nodes for each level that it gives.
        share: of the nodes that it is asked for, how many it gives.
        useful: the most of its nodes that were verified of late.
        credit: tokens that may be spent on asking though it does not seem to pay.
        tried: what was spent on trying it in this step.
        drafting: steps in which it was asked for what pays.
        proposed: its last tree, until it is judged.
        asked, given, kept: steps in which it was asked; nodes that it gave, and those that were verified.
    """

    shared: Shared
    survival: Survival
    worth: float
    spread: float = 1.0
    share: float = 1.0
    useful: float = 0.0
    credit: float = 0.0
    tried: float = 0.0
    drafting: int = 0
    proposed: TokenTree | None = None
    asked: int = 0
    given: int = 0
    kept: int = 0

    def propose(self, budget: int, tree: TokenTree, priced: bool) -> None:
        """Asked for so many nodes it gave a tree; one that has a price is judged by what follows."""
        self.asked += 1
        self.given += len(tree) - 1
        if priced:
            nodes = len(tree) - 1
            self.proposed = tree
            self.share += _QUICK * (min(nodes / budget, 1.0) - self.share)
            if nodes:
                self.spread += _QUICK * (nodes / max(tree.depths()) - self.spread)

    def learn(self, tokens: Sequence[int]) -> None:
        """Judge what was proposed."""
        assert self.proposed is not None
        right, missed = self.proposed.follow(tokens)
        expected = self.survival.first
        self.proposed = None
        self.survival.learn(right, missed)
        if right:  # what was tried and was right against all expectation is tried again at once
            self.credit += self.tried * (1 - expected)
        self.tried = 0.0

    def pays(self, nodes: int, tokens: float) -> None:
        """Asked, it gave so many nodes that were verified, which brought so much."""
        self.kept += nodes
        self.useful = max(nodes, _FADE * self.useful)
        self.worth += (1 - _WORTH_FORGET) * (tokens + self.shared.worth - 2 * self.worth)
        self.shared.asked += 1
        self.shared.worth += (1 - _SHARED_FORGET) * (tokens - self.shared.worth)

    @property
    def ahead(self) -> int:
        """What it may be asked for: little more than was worth verifying of late, for it takes its time."""
        return _AHEAD + int(_AMPLE * self.useful)

    def rests(self, asking: float) -> bool:
        """Whether asking, which costs so many tokens, is known not to pay."""
        return self.worth < asking and self.shared.asked > _FIRST

    def earn(self, asking: float) -> None:
        """A step goes by in which asking, which costs so many tokens, does not seem to pay."""
        self.credit = min(self.credit + _TRIES, max(_MOST_TRIES, asking))

    def spend(self, asking: float) -> None:
        """It is tried all the same."""
        self.credit -= asking
        self.tried = asking


@dataclass
class Habits:
    """One sequence.

    Attributes:
        judge: weighs its drafts.
        kept: the most nodes that were worth verifying of late.
        collapsed: how often its acceptance collapsed.
        low: whether it has not recovered from the last time.
    """

    lessons: Lessons
    judge: Judge
    each: dict[str, Habit] = field(default_factory=dict)
    kept: float = 0.0
    collapsed: int = 0
    low: bool = False
    _soon: float = 0.0
    _late: float = 0.0

    def of(self, price: Price) -> Habit:
        habit = self.each.get(price.name)
        if habit is None:
            shared = self.lessons.of(price)
            habit = Habit(shared, Survival(shared.rates), max(shared.worth, 0.0))
            self.each[price.name] = habit
        return habit

    def accept(self, drafts: int) -> None:
        """So many drafts of a step turned out right."""
        self._soon += (1 - _SOON) * (drafts - self._soon)
        self._late += (1 - _LATE) * (drafts - self._late)
        if self._soon >= self._late:
            self.low = False
        elif self._late > _SOME and self._soon < _LITTLE * self._late:
            self.collapsed += 1
            self.low, self._late = True, self._soon

    def summary(self) -> dict[str, Any]:
        """Decisions and estimates, for the record."""
        return {
            name: {
                "asked": habit.asked,
                "offered": habit.given,
                "kept": habit.kept,
                "worth": round(habit.worth, 3),
                "survival": [round(chance, 3) for chance in habit.survival.alive(8)],
            }
            for name, habit in self.each.items()
        }
