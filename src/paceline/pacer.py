"""How far to draft, and with what: measured costs against measured acceptance, "not at all" included."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from paceline.budget import WORTH, covered, offered, spend
from paceline.calibration import Judge
from paceline.cost import Load, Prices, StepCost
from paceline.habits import Habit, Habits, Lessons
from paceline.price import Price, PriceList

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.budget import Draft, Node
    from paceline.calibration import Calibration
    from paceline.tree import Dropping, TokenTree


_PLAIN_SAMPLES = 2
_PLAIN_EVERY = 100  # steps after which the cost of a step without drafts is measured afresh
_CLEAR = 1.5  # drafting that is so many times as fast as plain decoding needs no such measurement
_TABLE_ERROR = 1.2  # the same where a table says so that was measured beforehand
_MORE_EVERY = 32  # steps after which one node more than seems best is tried
_MORE_SOON = 8
_AHEAD = 8  # a lookup is asked for so many nodes, and for so many times as many as were worth verifying of late
_AMPLE = 2
_FADE = 0.9
_LIKELY = 0.3
_KEYS = 64  # isolation keys and drafters whose lessons are remembered, those used last


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
        self._judged: list[Calibration] = []  # whose drafts were judged since the last step
        self._believed = prices
        self._load, self._plain = Load(1), 0.0  # the last step that was asked about, and its tokens a second
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
        if load is not self._load:
            self._load, self._plain = load, load.decodes / self.cost(load)
        rate = self._plain
        if price.cost == "lookup":
            return [self._of_lookup(price, draft, rate * price.asking(1)) for draft in drafts]
        levels = self._levels(price, drafts, load)
        habits = [self._states[draft.sequence].of(price) for draft in drafts]
        resting = []
        every = self._more_every(load.all_rows + sum(levels) + len(levels) - levels.count(0))
        for place, habit in enumerate(habits):
            if levels[place]:
                habit.drafting = (habit.drafting + 1) % every
                levels[place] += habit.drafting == 0
            else:
                resting.append(place)
        self._try(price, habits, levels, resting, rate)
        if not price.samples:
            levels = [min(level, 1) for level in levels]
        return [
            min(draft.ceiling, ceil(level * habit.spread), habit.ahead)
            for draft, habit, level in zip(drafts, habits, levels, strict=True)
        ]

    def _try(
        self, price: Price, habits: Sequence[Habit], levels: list[int], resting: Sequence[int], rate: float
    ) -> None:
        """Now and then have one level drafted for those who rest, all in one pass."""
        if not resting:
            return
        passes = price.of_pass(len(habits))
        cost = rate * (passes[-1] - passes[len(habits) - len(resting)])
        for place in resting:
            habits[place].earn(cost / len(resting))
        if sum(habits[place].credit for place in resting) >= cost:
            for place in resting:
                habits[place].spend(cost / len(resting))
                levels[place] = 1

    def _of_lookup(self, price: Price, draft: Draft, asking: float) -> int:
        """A lookup is asked for some more than was worth it of late, unless it brings less than the asking takes."""
        state = self._states[draft.sequence]
        habit = state.of(price)
        if habit.rests(asking):
            habit.earn(asking)
            if habit.credit < asking:
                return 0
            habit.spend(asking)
        return min(draft.ceiling, _AHEAD + int(_AMPLE * state.kept))

    def _levels(self, price: Price, drafts: Sequence[Draft], load: Load) -> list[int]:
        """How many levels a drafter that has a price is asked for."""
        there = offered(self.cost, drafts, self.rate)
        _, rate, _ = spend(self.cost, load, there)
        nodes: list[Node] = []
        block, count = price.cost == "block", len(drafts)
        habits = [self._states[draft.sequence].of(price) for draft in drafts]
        width = ceil(sum(habit.spread for habit in habits) / count)
        passes = price.of_pass(count if block else count * width)[:: 1 if block else width]
        for place, (draft, habit) in enumerate(zip(drafts, habits, strict=True)):
            seen = self.cost.of_context(load.all_rows, draft.context) * habit.spread
            shares, worth = covered(draft.tree), 1.0
            for level, alive in enumerate(
                habit.survival.alive(ceil(min(draft.ceiling, habit.ahead) / habit.spread)), 1
            ):
                gain = habit.share * alive * (1 - (shares[level] if level < len(shares) else 0.0))
                free = block and level > 1
                worth = min(worth, gain - rate * (seen + (0.0 if free else passes[-1] / count)))
                deep = -1 if free else level
                nodes.append((-worth, gain, seen, habit.share * habit.spread, place, deep, 0))
        nodes = sorted(there + nodes, key=WORTH)
        best, _, _ = spend(self.cost, load, nodes, passes)
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
            load: the step whatever is chosen, the roots of the trees included.
            by: the liberty to drop the rest.
        """
        nodes = offered(self.cost, drafts, self.rate)
        best, rate, line = spend(self.cost, load, nodes)
        if not load.pieces:
            self.rate = rate
        row = (line[best] / line[0] - 1) * load.decodes / best if best else 0.0  # what a row takes, in plain tokens
        if best and self._plain_is_due(load, rate * line[0] / load.decodes):
            return [draft.tree.part([0], by) for draft in drafts]
        if best < len(nodes):
            best += self._one_more(load.all_rows + best, nodes[best][1])
        kept: list[list[int]] = [[0] for _ in drafts]
        for _, _, _, _, place, _, node in nodes[:best]:
            if len(kept[place]) <= drafts[place].ceiling:
                kept[place].append(node)
        for draft, chosen in zip(drafts, kept, strict=True):
            state = self._states[draft.sequence]
            state.kept = max(len(chosen) - 1.0, _FADE * state.kept)
            for habit, first, end in draft.parts:
                mine = [draft.tree.survival[node] for node in chosen if first <= node < end]
                habit.pays(len(mine), sum(mine) - row * len(mine))
        return [draft.tree.part(sorted(chosen), by) for draft, chosen in zip(drafts, kept, strict=True)]

    def _one_more(self, rows: int, alive: float) -> int:
        """Whether to take one row more than seems best, for what its time tells: now and then, and where it may well be
        right while what such a step takes has hardly been measured."""
        self._cut += 1
        likely = alive > _LIKELY
        unknown = likely and not self.cost.prices.known and self.cost.samples(rows + 1) < _PLAIN_SAMPLES
        return int(unknown or self._cut % (self._more_every(rows + 1) if likely else _MORE_EVERY) == 0)

    def _more_every(self, rows: int) -> int:
        """After how many steps more than seems best is tried: soon where so many rows are known from a table alone."""
        return _MORE_EVERY if self.cost.samples(rows) else _MORE_SOON

    def _plain_is_due(self, load: Load, faster: float) -> bool:
        """Whether a step without drafts is worth its while for what it tells: not where drafting is clearly faster."""
        known = self.cost.prices.known
        if load.pieces or faster > _CLEAR:
            return False
        if self.cost.samples(load.rows) < (1 if known else _PLAIN_SAMPLES) and not (known and faster > _TABLE_ERROR):
            return True
        since = self._since_plain[load.rows] = self._since_plain.get(load.rows, 0) + 1
        return since > _PLAIN_EVERY

    def learn_step(self, load: Load, seconds: float) -> None:
        """A step took so long, drafting not counted. Few rows of prompts cost less than as many of trees."""
        while self._judged:
            self._judged.pop().close()
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
        right, missed = state.judge.learn(tokens)
        if right or missed:
            self._judged.append(state.lessons.calibration)
        state.accept(len(tokens) - 1)
        for habit in state.each.values():
            if habit.proposed is not None:
                habit.learn(tokens)
