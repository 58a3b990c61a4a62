"""How far to draft, and with what: measured costs against measured acceptance, "not at all" included."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline.calibration import Judge
from paceline.cost import Price, PriceList, Prices, StepCost
from paceline.habits import Habit, Habits, Lessons

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.cost import Load
    from paceline.tree import Dropping, TokenTree


_PLAIN_SAMPLES = 2
_PLAIN_EVERY = 100  # steps after which the cost of a step without drafts is measured afresh
_CLEAR = 1.5  # drafting that is so many times as fast as plain decoding needs no such measurement
_MORE_EVERY = 32  # steps after which one node more than seems best is tried
_AHEAD = 8  # a lookup is asked for so many nodes, and for so many times as many as were worth verifying of late
_AMPLE = 2
_FADE = 0.9
_LIKELY = 0.3
_KEYS = 64  # isolation keys and drafters whose lessons are remembered, those used last


@dataclass(slots=True)
class Draft:
    """What is drafted for one sequence in one step.

    Attributes:
        sequence: its number.
        ceiling: the most nodes.
        tree: what was drafted so far, weighed by :meth:`Pacer.weigh`.
        context: tokens that have keys.
        parts: who drafted what: the nodes from the first number up to, without, the second.
        whole: whether the tree is verified whole: nothing of it is cut.
    """

    sequence: int
    ceiling: int
    tree: TokenTree
    context: int = 0
    parts: list[tuple[Habit, int, int]] = field(default_factory=list)
    whole: bool = False


_Node = tuple[float, float, float, float, int, int, int]
"""A node that may be verified: what it is worth beside its own price, its survival, its price in seconds, its rows, the
draft that it belongs to, the pass that would draft it (0: it is there, -1: none of its own), its place in its tree."""

_WORTH = itemgetter(0)


class Pacer:
    """Chooses, before anything is drawn, how many nodes each drafter is asked for, and then which are verified.

    One more node is worth its time while it raises the expected tokens a second of the whole step:
    (sum of 1 + survival) / (cost of the rows + cost of drafting), algorithms of this kind being known as goodput
    (Liu et al. 2024, arXiv 2406.14066). What is not chosen is not measured, so each choice is tried now and then: a
    step without drafts, one node more, and a drafter that has been put to rest.

    Args:
        prices: what is believed of the costs of steps.
    """

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = PriceList()
        self._states: dict[int, Habits] = {}
        self._believed = prices
        self.forget()

    def forget(self) -> None:
        """Start afresh with what was measured; sequences that run go on."""
        self.cost = StepCost(self._believed)
        self.prices.forget()
        self.rate = 0.0  # tokens a second of the last steps
        self._since_plain: dict[int, int] = {}
        self._cut = 0
        self._lessons: dict[tuple[str | None, int], Lessons] = {}

    def believe(self, prices: Prices, drafters: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Begin anew with what was measured beforehand of steps and, by their names, of asking drafters: seconds by
        the number of sequences."""
        self._believed = prices
        self.cost = StepCost(prices)
        self.prices.believe(drafters)

    def start(self, sequence: int, cache_salt: str | None = None, drafter: int = 0) -> None:
        """Take a sequence on; what is learned of drafts from it serves others of the same isolation key and drafter."""
        key = cache_salt, drafter
        shared = self._lessons.pop(key, None) or Lessons()
        self._lessons[key] = shared
        while len(self._lessons) > _KEYS:
            del self._lessons[next(iter(self._lessons))]
        self._states[sequence] = Habits(shared, Judge(shared.calibration))

    def release(self, sequence: int) -> Habits | None:
        """Let a sequence go; what was learned of it, unless it went before."""
        return self._states.pop(sequence, None)

    def habits(self, sequence: int) -> Habits:
        """What was learned of a sequence."""
        return self._states[sequence]

    def budgets(self, price: Price, drafts: Sequence[Draft], load: Load) -> list[int]:
        """How many nodes a drafter may be asked for, for each of ``drafts``, given what others drafted already.

        Args:
            price: whose.
            drafts: the sequences that may draft with it.
            load: the step whatever is chosen.
        """
        if not drafts:
            return []
        rate = self.rate or load.decodes / self.cost(load)
        asking = rate * price.asking(len(drafts)) / len(drafts)
        if price.cost == "lookup":
            asked = self._of_whole if price.whole else self._of_lookup
            return [asked(price, draft, asking, load) for draft in drafts]
        levels = self._levels(price, drafts, load)
        habits = [self._states[draft.sequence].of(price) for draft in drafts]
        # A pass for one is a pass for all: who has waited for long joins in.
        patience = 0.5 if any(levels) or any(habit.credit >= asking for habit in habits) else 1.0
        for place, habit in enumerate(habits):
            if levels[place]:
                habit.drafting = (habit.drafting + 1) % _MORE_EVERY
                levels[place] += habit.drafting == 0
            else:
                levels[place] = int(habit.may_try(asking, patience))
            if not price.samples:
                levels[place] = min(levels[place], 1)
        return [
            min(draft.ceiling, ceil(count * habit.spread), habit.ahead)
            for draft, habit, count in zip(drafts, habits, levels, strict=True)
        ]

    def _of_lookup(self, price: Price, draft: Draft, asking: float, load: Load) -> int:
        """A lookup is asked for some more than was worth it of late, unless it brings less than the asking takes."""
        state = self._states[draft.sequence]
        habit = state.of(price)
        if habit.worth < asking and not habit.may_try(asking):
            return 0
        return min(draft.ceiling, _AHEAD + int(_AMPLE * state.kept))

    def _of_whole(self, price: Price, draft: Draft, asking: float, load: Load) -> int:
        """A lookup whose trees are not cut is asked for all that is allowed, unless of late their rows took more than
        they brought."""
        habit = self._states[draft.sequence].of(price)
        rows = self.rate * self._added(load, draft.ceiling)
        return draft.ceiling if habit.worth >= asking or habit.may_try(asking + rows) else 0

    def _added(self, load: Load, rows: int) -> float:
        """Seconds that so many rows take beyond a load."""
        line = self.cost.line(load, rows)
        return line[-1] - line[0]

    def _levels(self, price: Price, drafts: Sequence[Draft], load: Load) -> list[int]:
        """How many levels a drafter that has a price is asked for."""
        offered = self._offered(drafts)
        _, rate = self._best(load, offered)
        nodes: list[_Node] = []
        block, count = price.cost == "block", len(drafts)
        habits = [self._states[draft.sequence].of(price) for draft in drafts]
        width = ceil(sum(habit.spread for habit in habits) / count)
        passes = price.of_pass(count if block else count * width)[:: 1 if block else width]
        for place, (draft, habit) in enumerate(zip(drafts, habits, strict=True)):
            seen = self.cost.of_context(load.all_rows, draft.context) * habit.spread
            covered, worth = _covered(draft.tree), 1.0
            for level, alive in enumerate(
                habit.survival.alive(ceil(min(draft.ceiling, habit.ahead) / habit.spread)), 1
            ):
                gain = habit.share * alive * (1 - (covered[level] if level < len(covered) else 0.0))
                free = block and level > 1
                worth = min(worth, gain - rate * (seen + (0.0 if free else passes[-1] / count)))
                deep = -1 if free else level
                nodes.append((-worth, gain, seen, habit.share * habit.spread, place, deep, 0))
        nodes = sorted(offered + nodes, key=_WORTH)
        best, _ = self._best(load, nodes, passes)
        levels = [0] * count
        for _, _, _, _, place, deep, _ in nodes[:best]:
            levels[place] += deep != 0
        return levels

    def weigh(self, sequence: int, tree: TokenTree, known: int = 1) -> TokenTree:
        """A proposed tree with calibrated estimates in the place of its own; its first ``known`` nodes have them."""
        return self._states[sequence].judge.weigh(tree, known)

    def select(self, drafts: Sequence[Draft], load: Load, by: Dropping) -> list[TokenTree]:
        """The parts of weighed trees that are worth their rows.

        Args:
            drafts: with their trees.
            load: the step whatever is chosen, the roots of the trees included, and those that are verified whole.
            by: the liberty to drop the rest.
        """
        nodes = self._offered(drafts)
        best, rate = self._best(load, nodes)
        line = self.cost.line(load, best)
        if not load.pieces:
            self.rate = rate
        row = (line[-1] - line[0]) / best if best else 0.0
        if best and self._plain_is_due(load, rate * line[0] / load.decodes):
            best = 0
        elif best < len(nodes):
            best += self._one_more(load.all_rows + best, nodes[best][1])
        kept: list[list[int]] = [[0] for _ in drafts]
        for _, _, _, _, place, _, node in nodes[:best]:
            if len(kept[place]) <= drafts[place].ceiling:
                kept[place].append(node)
        for draft, chosen in zip(drafts, kept, strict=True):
            if draft.whole:
                self._keep_whole(draft, chosen, load)
                continue
            state = self._states[draft.sequence]
            state.kept = max(len(chosen) - 1.0, _FADE * state.kept)
            for habit, first, end in draft.parts:
                mine = [draft.tree.survival[node] for node in chosen if first <= node < end]
                habit.pays(len(mine), sum(mine) - self.rate * row * len(mine))
        return [draft.tree.part(sorted(chosen), by) for draft, chosen in zip(drafts, kept, strict=True)]

    def _keep_whole(self, draft: Draft, chosen: list[int], load: Load) -> None:
        """Choose all of a tree, and learn whether that pays."""
        nodes = len(draft.tree) - 1
        chosen += range(1, nodes + 1)
        seconds = self._added(replace(load, rows=load.rows - nodes), nodes)
        for habit, _, _ in draft.parts:
            habit.pays(nodes, sum(draft.tree.survival[1:]) - self.rate * seconds)

    def _offered(self, drafts: Sequence[Draft]) -> list[_Node]:
        """The nodes that are there already and may be cut, the best first."""
        nodes: list[_Node] = []
        for place, draft in enumerate(drafts):
            if draft.whole:
                continue
            seen = self.cost.of_context(1, draft.context)
            price, survival = self.rate * seen, draft.tree.survival
            nodes += [(price - survival[n], survival[n], seen, 1.0, place, 0, n) for n in range(1, len(survival))]
        nodes.sort(key=_WORTH)
        return nodes

    def _best(self, load: Load, nodes: Sequence[_Node], passes: Sequence[float] = ()) -> tuple[int, float]:
        """How many of the nodes, the best first, bring the most expected tokens a second, and how many those are.

        The time of prompts' pieces is not held against the drafts beside them.

        Args:
            passes: seconds of a drafter's pass for 0, 1, 2, ... sequences.
        """
        line = self.cost.line(load, ceil(sum(node[3] for node in nodes)))
        more = self.cost(load.without_pieces()) - line[0] if load.pieces else 0.0
        tokens, rows = float(load.decodes), 0.0
        drafting: dict[int, int] = {}
        best, best_rate = 0, tokens / (line[0] + more)
        for count, (_, gain, seconds, size, _, deep, _) in enumerate(nodes, 1):
            tokens += gain
            rows += size
            more += seconds
            if deep > 0:
                others = drafting.get(deep, 0)
                drafting[deep] = others + 1
                more += passes[others + 1] - passes[others]
            rate = tokens / (line[int(rows)] + more)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate

    def _one_more(self, rows: int, alive: float) -> int:
        """Whether to take one row more than seems best, for what its time tells: now and then, and where it may well be
        right while what such a step takes has hardly been measured."""
        self._cut += 1
        unknown = alive > _LIKELY and not self.cost.prices.known and self.cost.samples(rows + 1) < _PLAIN_SAMPLES
        return int(unknown or self._cut % _MORE_EVERY == 0)

    def _plain_is_due(self, load: Load, faster: float) -> bool:
        """Whether a step without drafts is worth its while for what it tells: not where drafting is clearly faster."""
        if load.pieces or faster > _CLEAR:
            return False
        if not self.cost.prices.known and self.cost.samples(load.rows) < _PLAIN_SAMPLES:
            return True
        since = self._since_plain[load.rows] = self._since_plain.get(load.rows, 0) + 1
        return since > _PLAIN_EVERY

    def learn_step(self, load: Load, seconds: float) -> None:
        """A step took so long, drafting not counted. Few rows of prompts cost less than as many of trees."""
        for lessons in self._lessons.values():
            lessons.calibration.close()
        if not load.pieces or load.all_rows > 64:
            self.cost.learn(load, seconds)
            self._since_plain[load.all_rows] = 0

    def learn_draft(
        self, price: Price, asked: Sequence[tuple[int, int]], trees: Sequence[TokenTree], seconds: float
    ) -> None:
        """A drafter was asked, for each of some sequences, for so many nodes, and gave these trees."""
        if price.cost == "level":
            levels = max([1, *(max(tree.depths()) for tree in trees)])
            price.learn(levels, max(len(asked), sum(len(tree) - 1 for tree in trees)), seconds)
        else:
            price.learn(1, len(asked), seconds)
        for (sequence, budget), tree in zip(asked, trees, strict=True):
            self._states[sequence].of(price).propose(budget, tree, price.cost != "lookup")

    def learn_outcome(self, sequence: int, tokens: Sequence[int]) -> None:
        """These tokens follow the root of the trees that were proposed last."""
        state = self._states[sequence]
        state.judge.learn(tokens)
        state.accept(len(tokens) - 1)
        for habit in state.each.values():
            if habit.proposed is not None:
                habit.learn(tokens)


def _covered(tree: TokenTree) -> list[float]:
    """For each depth the chance that what follows is in the tree so far."""
    covered = [1.0]
    for depth, survival in zip(tree.depths(), tree.survival, strict=True):
        if depth == len(covered):
            covered.append(0.0)
        if depth:
            covered[depth] = min(1.0, covered[depth] + survival)
    return covered
