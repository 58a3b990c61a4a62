"""The pacer with costs and chances that are given to it: it finds what pays, and gives up what does not."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.budget import Draft
from paceline.cost import Load, Price, StepCost
from paceline.pacer import Pacer
from paceline.survival import Survival
from paceline.targets.toy import ToyTarget
from paceline.tree import Dropping, TokenTree
from tests.toys import VOCAB, Clock, ScriptedDrafter, Timed, ToyRun, alone, oracle, path_rule, same, trials, wrong

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

RIGHT, WRONG = 1, 2

COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1.0,
    "3% a row": lambda rows: 1 + 0.03 * (rows - 1),
    "10% a row": lambda rows: 1 + 0.1 * (rows - 1),
    "30% a row": lambda rows: 1 + 0.3 * (rows - 1),
    "linear": lambda rows: float(rows),
    "tiles of 8": lambda rows: 1.0 + 0.6 * ((rows - 1) // 8),
    "a step at 2": lambda rows: 1.0 if rows == 1 else 1.5 + 0.02 * rows,
}


def _always(right: float) -> Callable[[int], float]:
    return lambda done: right


def _chain(length: int, origin: str) -> TokenTree:
    return TokenTree.chain(0, [RIGHT] * length, [0.8**d for d in range(1, length + 1)], origin)


def _drafts(ceilings: Seq[int]) -> list[Draft]:
    return [Draft(sequence, ceiling, TokenTree.root(0)) for sequence, ceiling in enumerate(ceilings)]


def _roots(sequences: int) -> Load:
    return Load(sequences, sequences)


def _put(pacer: Pacer, price: Price, draft: Draft, tree: TokenTree) -> None:
    draft.tree = pacer.weigh(draft.sequence, tree)
    draft.parts.append((pacer.habits(draft.sequence).of(price), 1, len(tree)))


@dataclass
class Ride:
    """Sequences that are decoded with a pacer, or with a fixed length, on a clock of their own."""

    cost: Callable[[int], float]
    right: Callable[[int], float]
    each: float = 0.02
    ceiling: int = 5
    sequences: int = 1
    fixed: int | None = None
    seed: int = 0
    pacer: Pacer = field(default_factory=Pacer)
    now: float = 0.0
    log: list[tuple[int, float, list[int]]] = field(default_factory=list)

    def go(self, tokens: int) -> Ride:
        dice, price = random.Random(self.seed), Price("x")
        for sequence in range(self.sequences):
            self.pacer.start(sequence)
        done = 0
        while done < tokens * self.sequences:
            drafts, load = _drafts([self.ceiling] * self.sequences), _roots(self.sequences)
            budgets = [self.fixed or 0] * self.sequences
            if self.fixed is None:
                budgets = self.pacer.budgets(price, drafts, load)
            assert all(0 <= budget <= self.ceiling for budget in budgets)
            trees = [_chain(budget, "x") for budget in budgets]
            asked = [(place, budget) for place, budget in enumerate(budgets) if budget]
            drafting = self.each * max(budgets)
            if self.fixed is None:
                if asked:
                    self.pacer.learn_draft(price, asked, [trees[place] for place, _ in asked], drafting)
                for place, _ in asked:
                    _put(self.pacer, price, drafts[place], trees[place])
                trees = self.pacer.select(drafts, load, Dropping())
            rows = sum(map(len, trees))
            took = self.cost(rows)
            self.pacer.learn_step(Load(rows, self.sequences), took)
            self.now += took + drafting
            for sequence, tree in enumerate(trees):
                truth: list[int] = []
                while len(truth) < len(tree) and WRONG not in truth:
                    truth.append(RIGHT if dice.random() < self.right(done) else WRONG)
                self.pacer.learn_outcome(sequence, truth)
                done += len(truth)
            self.log.append((done, self.now, [len(tree) - 1 for tree in trees]))
        return self

    def speed(self, after: int = 0) -> float:
        """Tokens a second once ``after`` tokens are there."""
        done, now, _ = next(entry for entry in self.log if entry[0] >= after)
        return (self.log[-1][0] - done) / (self.now - now)


@pytest.mark.parametrize("each", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_about_as_fast_as_the_best_fixed_length(cost: str, each: float) -> None:
    for right in (0.0, 0.3, 0.6, 0.9, 1.0):
        mine = Ride(COSTS[cost], _always(right), each).go(800).speed(64)
        fixed = [Ride(COSTS[cost], _always(right), each, fixed=k, seed=1).go(800).speed(64) for k in range(6)]
        assert mine > 0.87 * max(fixed), right


@pytest.mark.parametrize("cost", COSTS)
def test_it_is_about_as_fast_as_the_best_fixed_length_for_a_batch(cost: str) -> None:
    for right in (0.0, 0.5, 0.9):
        mine = Ride(COSTS[cost], _always(right), sequences=4).go(400).speed(256)
        fixed = [Ride(COSTS[cost], _always(right), sequences=4, fixed=k, seed=1).go(400).speed(256) for k in range(6)]
        assert mine > 0.87 * max(fixed), right


@pytest.mark.parametrize("sequences", [1, 3, 8])
@pytest.mark.parametrize("cost", COSTS)
def test_a_useless_drafter_costs_next_to_nothing(cost: str, sequences: int) -> None:
    """Less than 5 % slower than plain after 64 tokens, whatever rows and drafts cost."""
    for each in (0.01, 0.2):
        ride = Ride(COSTS[cost], lambda _: 0.0, each, sequences=sequences).go(400)
        plain = sequences / COSTS[cost](sequences)
        assert ride.speed(64 * sequences) > 0.95 * plain
        if COSTS[cost](2) > 1.0:
            late = [budgets for done, _, budgets in ride.log if done > 200 * sequences]
            assert sum(map(sum, late)) < 0.06 * len(late) * sequences


@pytest.mark.parametrize("ceiling", [1, 5, 20])
@pytest.mark.parametrize("cost", [name for name in COSTS if name != "linear"])
def test_a_perfect_drafter_gets_all_that_is_allowed(cost: str, ceiling: int) -> None:
    """Wherever a row more costs less than a token is worth; some steps without drafts are spent on measuring."""
    ride = Ride(COSTS[cost], lambda _: 1.0, ceiling=ceiling).go(100 * ceiling)
    budgets = [budgets[0] for _, _, budgets in ride.log]
    full = budgets.index(ceiling)
    assert full <= 12
    assert budgets[full:].count(ceiling) > 0.9 * len(budgets[full:])


@pytest.mark.parametrize("each", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("cost", [name for name in COSTS if name != "linear"])
def test_a_drafter_that_turns_perfect_is_used_again(cost: str, each: float) -> None:
    """Wrong for 300 tokens, then always right: it is tried within one rest, and then up at once."""
    ride = Ride(COSTS[cost], lambda done: float(done >= 300), each).go(700)
    again = next(done for done, _, budgets in ride.log if done >= 300 and budgets == [5])
    assert again < 300 + 150
    late = [budgets for done, _, budgets in ride.log if done > 500]
    assert late.count([5]) > 0.9 * len(late)


def test_a_drafter_that_turns_useless_is_put_to_rest() -> None:
    ride = Ride(COSTS["10% a row"], lambda done: float(done < 300)).go(600)
    rest = next(done for done, _, budgets in ride.log if done > 306 and budgets == [0])
    assert rest < 400
    assert ride.speed(450) > 0.95


@pytest.mark.parametrize("cost", COSTS)
def test_one_slow_step_of_each_kind_is_forgotten(cost: str) -> None:
    """The first step of every number of rows takes ten times as long: pages are touched, caches are cold."""
    seen: set[int] = set()

    def cold(rows: int) -> float:
        first = rows not in seen
        seen.add(rows)
        return COSTS[cost](rows) * (10 if first else 1)

    for right in (0.0, 1.0):
        seen.clear()
        mine = Ride(cold, _always(right)).go(800).speed(400)
        best = max(Ride(COSTS[cost], _always(right), fixed=k).go(100).speed() for k in (0, 5))
        assert mine > 0.93 * best


def test_steps_that_get_slower_do_not_hide_that_plain_ones_do_too() -> None:
    """As the context grows all rows cost more; what was measured without drafts long ago is measured again."""
    ride = Ride(COSTS["3% a row"], lambda _: 0.8)
    steps = 0

    def growing(rows: int) -> float:
        nonlocal steps
        steps += 1
        return COSTS["3% a row"](rows) * (1 + steps / 200)

    ride.cost = growing
    ride.go(3000)
    late = [budgets[0] for done, _, budgets in ride.log if done > 1000]
    assert sum(late) / len(late) > 3


def test_two_drafters_are_told_apart() -> None:
    """One is right and one is wrong, in the same steps: each gets its due."""
    pacer, good, bad = Pacer(), Price("good"), Price("bad", number=1)
    pacer.start(0)
    pacer.start(1)
    log = []
    for _ in range(200):
        drafts = _drafts([4, 4])
        for draft, price in zip(drafts, (good, bad), strict=True):
            (budget,) = pacer.budgets(price, [draft], _roots(2))
            if budget:
                tree = _chain(budget, price.name)
                pacer.learn_draft(price, [(draft.sequence, budget)], [tree], 0.01)
                _put(pacer, price, draft, tree)
        trees = pacer.select(drafts, _roots(2), Dropping())
        log.append([len(tree) - 1 for tree in trees])
        pacer.learn_step(Load(sum(map(len, trees)), 2), 0.8 + 0.1 * sum(map(len, trees)))
        pacer.learn_outcome(0, [RIGHT] * len(trees[0]))
        pacer.learn_outcome(1, [WRONG])
    late = log[100:]
    assert sum(good == 4 for good, _ in late) > 90
    assert sum(bad for _, bad in late) < 10


@pytest.mark.parametrize("cost", ["level", "block", "lookup"])
def test_a_drafter_that_takes_long_and_says_nothing_is_put_to_rest(cost: Any) -> None:
    pacer, price = Pacer(), Price("mute", cost)
    pacer.start(0)
    asked = 0
    for _ in range(200):
        drafts = _drafts([5])
        (budget,) = pacer.budgets(price, drafts, _roots(1))
        if budget:
            asked += 1
            pacer.learn_draft(price, [(0, budget)], [_chain(0, "mute")], 0.5)
            _put(pacer, price, drafts[0], _chain(0, "mute"))
        pacer.select(drafts, _roots(1), Dropping())
        pacer.learn_step(_roots(1), 1.0)
        pacer.learn_outcome(0, [RIGHT])
    assert asked < 20


@trials(30)
@given(
    ceilings=st.lists(st.integers(0, 63), max_size=8),
    rows=st.lists(st.tuples(st.integers(1, 80), st.floats(-1, 10)), max_size=20),
    outcomes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 10), st.booleans()), max_size=30),
    pieces=st.integers(0, 70),
    cost=st.sampled_from(["level", "block", "lookup"]),
)
def test_budgets_stay_between_nothing_and_the_ceiling(
    ceilings: list[int],
    rows: list[tuple[int, float]],
    outcomes: list[tuple[int, int, bool]],
    pieces: int,
    cost: Any,
) -> None:
    """Whatever was learned, steps that took no time at all, and clocks that jump, included."""
    pacer, price = Pacer(), Price("x", cost)
    for sequence in range(8):
        pacer.start(sequence)
    for count, seconds in rows:
        pacer.learn_step(Load(count), seconds)
        pacer.learn_draft(price, [(0, count)], [_chain(count // 2, "x")], seconds)
    for sequence, accepted, missed in outcomes:
        pacer.learn_draft(price, [(sequence, 20)], [_chain(accepted + missed, "x")], 0.1)
        pacer.weigh(sequence, _chain(accepted + missed, "x"))
        pacer.learn_outcome(sequence, [*[RIGHT] * accepted, *[WRONG] * missed])
    for _ in range(20):
        budgets = pacer.budgets(price, _drafts(ceilings), Load(max(1, len(ceilings)), max(1, len(ceilings)), pieces))
        assert len(budgets) == len(ceilings)
        assert all(0 <= budget <= ceiling for budget, ceiling in zip(budgets, ceilings, strict=True))


def test_rounds_without_drafts_teach_nothing_and_cut_ones_only_what_they_saw() -> None:
    survival = Survival()
    survival.learn(0, False)
    assert survival.alive(5) == Survival().alive(5)
    survival.learn(2, False)  # the last round before max_tokens had room for two
    assert [d.judged for d in survival.depths] == [1, 1]


@trials(60)
@given(outcomes=st.lists(st.tuples(st.integers(0, 10), st.booleans()), max_size=60))
def test_survival_falls_with_depth(outcomes: list[tuple[int, bool]]) -> None:
    survival = Survival()
    for accepted, missed in outcomes:
        survival.learn(accepted, missed)
    alive = survival.alive(12)
    assert alive == sorted(alive, reverse=True)
    assert all(0 <= chance <= 1 for chance in alive)


def test_the_chance_at_a_depth_counts_who_got_there() -> None:
    survival = Survival()
    for _ in range(400):
        survival.learn(1, True)
    assert survival.alive(2)[0] > 0.97
    assert survival.alive(2)[1:] == pytest.approx([0.0], abs=0.1) or len(survival.alive(2)) == 1


def test_row_costs_between_and_beyond_what_was_measured() -> None:
    cost = StepCost()
    assert cost(Load(5)) > cost(Load(1)) == 1.0
    cost.learn(Load(2), 1.0)
    cost.learn(Load(6), 1.4)
    assert cost(Load(4)) == pytest.approx(1.2, abs=0.01)
    assert cost(Load(1)) < 1.0
    assert 1.4 < cost(Load(10)) < 1.8
    assert cost(Load(64)) < cost(Load(300)) < cost(Load(3000))


def test_fewer_rows_never_seem_to_take_longer_than_more() -> None:
    """A count that was measured while something else ran is corrected by larger ones that were not."""
    cost = StepCost()
    for count, seconds in ((1, 1.0), (2, 1.9), (3, 1.8), (7, 1.2), (8, 1.5)):
        cost.learn(Load(count), seconds)
    line = cost.line(Load(1), 7)
    assert line == sorted(line)
    assert (line[0], line[1], line[2], line[6], line[7]) == pytest.approx((1.0, 1.2, 1.2, 1.2, 1.5))


def test_a_request_that_is_over_is_forgotten() -> None:
    pacer = Pacer()
    pacer.start(3)
    pacer.release(3)
    pacer.release(3)
    assert not pacer._states


class Costly(ScriptedDrafter):
    """Charges the clock for every node that it is asked for."""

    clock: Clock
    asked: list[int]

    def propose(self, views: Seq[Any], budgets: Seq[int]) -> list[TokenTree]:
        self.asked += budgets
        self.clock.now += 0.05 * sum(budgets)
        return super().propose(views, budgets)


RULE = path_rule(VOCAB, seed=51)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_engine_tells_the_pacer_what_it_needs(right: bool, lag: int) -> None:
    """The whole loop on an injected clock, beside a request without a drafter and one of a fixed length."""
    clock = Clock()
    expected = [alone(RULE, [n], max_tokens=120) for n in range(3)]
    target = Timed(ToyTarget(RULE, VOCAB), clock, lambda rows: 1 + 0.05 * (rows - 1))
    run = ToyRun(RULE, target=target, clock=clock, lag=lag)
    drafter = Costly((oracle if right else wrong)(expected[0].output, 1), name="costly")
    drafter.clock, drafter.asked = clock, []
    sequence = run.add([0], drafter, max_tokens=120, speculation={"adaptive": True})
    beside = run.add([1], max_tokens=120)
    fixed = run.add(
        [2], ScriptedDrafter(lambda t, b: [1] * b), max_tokens=120, speculation={"num_speculative_tokens": 2}
    )
    run.finish(sequence, beside, fixed)
    for mine, reference in zip((sequence, beside, fixed), expected, strict=True):
        same(mine, reference)
    if right:
        assert drafter.asked.count(5) > 0.8 * len(drafter.asked)
        assert sequence.record.steps < 40
    else:
        assert sum(drafter.asked[20:]) < 12
    assert fixed.record.drafted >= 2 * (fixed.record.steps - 4)


def test_what_was_learned_of_costs_stays_and_of_a_request_goes() -> None:
    clock = Clock()
    target = Timed(ToyTarget(RULE, VOCAB), clock, lambda rows: 1 + 0.01 * rows)
    run = ToyRun(RULE, target=target, clock=clock)
    for _ in range(2):
        sequence = run.add([0], ScriptedDrafter(lambda t, b: [1] * b), max_tokens=20, speculation={"adaptive": True})
        run.finish(sequence)
    assert run.engine.pacer.cost(Load(1)) == pytest.approx(1.01)
    assert not run.engine.pacer._states
