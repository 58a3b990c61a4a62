"""What is kept of proposed trees: what pays by the costs that were measured, and never a rule's own draw."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.budget import Draft
from paceline.cost import Load
from paceline.options import Speculation
from paceline.pacer import Pacer
from paceline.price import Price
from paceline.targets.toy import ToyTarget
from paceline.tree import Drawn, Dropping, TokenTree
from tests.toys import VOCAB, Clock, Timed, ToyRun, TreeDrafter, path_rule, trials

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from paceline.drafters import View


def measured(cost: Callable[[int], float], sequences: int = 1) -> Pacer:
    """A pacer that knows what every number of rows costs, and has never seen a draft."""
    pacer = Pacer()
    for rows in range(1, 200):
        for _ in range(4):
            pacer.learn_step(Load(rows), cost(rows))
    for sequence in range(sequences):
        pacer.start(sequence)
    return pacer


def jump(rows: int) -> float:
    """Twice the time for two rows, and nothing more for more."""
    return 1.0 if rows == 1 else 2.0


def chain(chances: Seq[float], root: int = 0) -> TokenTree:
    survival = [math.prod(chances[: place + 1]) for place in range(len(chances))]
    return TokenTree.chain(root, list(range(1, len(chances) + 1)), survival, "x")


def kept(pacer: Pacer, *proposed: TokenTree, beside: int = 0) -> list[int]:
    """How many drafts stay of each tree."""
    return [len(tree) - 1 for tree in chosen(pacer, proposed, beside)]


def chosen(pacer: Pacer, proposed: Seq[TokenTree], beside: int = 0) -> list[TokenTree]:
    """The parts of trees that are kept, in a step that has ``beside`` rows more."""
    drafts = [Draft(sequence, 63, tree) for sequence, tree in enumerate(proposed)]
    sequences = len(proposed) + beside
    return pacer.select(drafts, Load(sequences, sequences), Dropping())


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree.root(draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 20))):
        parent = draw(st.integers(0, len(tree) - 1))
        token = draw(st.integers(0, 9))
        if token not in [tree.tokens[child] for child in tree.children(parent)]:
            tree.add(parent, token, tree.survival[parent] * draw(st.floats(0.0, 1.0)), draw(st.sampled_from("ab")))
    return tree


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    nodes = range(len(tree))
    return {tuple(tree.tokens[n] for n in tree.path(node)): tree.survival[node] for node in nodes}


@trials(80)
@given(
    proposed=st.lists(trees(), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.integers(1, 90), st.floats(0, 10)), max_size=25),
    beside=st.integers(0, 40),
    times=st.integers(1, 40),
)
def test_what_is_kept_is_a_part_of_what_is_given(
    proposed: list[TokenTree], steps: list[tuple[int, float]], beside: int, times: int
) -> None:
    """The likeliest part, with all parents, whatever was measured and however often it is asked."""
    pacer = Pacer()
    for sequence in range(len(proposed)):
        pacer.start(sequence)
    for rows, seconds in steps:
        pacer.learn_step(Load(rows), seconds)
    before = [paths(tree) for tree in proposed]
    for _ in range(times):
        for tree, given_, known in zip(chosen(pacer, proposed, beside), proposed, before, strict=True):
            tree.check(10)
            assert paths(given_) == known
            mine = paths(tree)
            assert mine.items() <= known.items()
            assert len(mine) == len(tree) <= len(given_)
            assert min(mine.values()) >= max([0.0, *(chance for path, chance in known.items() if path not in mine)])


@pytest.mark.parametrize(
    ("chances", "drafts"),
    [
        ([0.9] * 8, 8),  # 5.1 more tokens for twice the time
        ([0.9, 0.3], 2),  # 2.17 tokens for twice the time: both, though the second alone is worth little
        ([0.9, 0.05], 0),  # 1.945
        ([0.99], 0),
        ([0.5, 0.5, 0.5], 0),
        ([0.7] * 3, 3),  # 2.53
        ([1.0, 0.001], 2),  # once it is paid for, even this
    ],
)
def test_all_or_nothing_where_the_second_row_is_what_costs(chances: list[float], drafts: int) -> None:
    assert kept(measured(jump), chain(chances)) == [drafts]


@pytest.mark.parametrize(("each", "drafts"), [(0.0, 5), (0.05, 4), (0.2, 2), (0.4, 1), (0.7, 0)])
def test_a_part_where_every_row_has_its_price(each: float, drafts: int) -> None:
    """Chances of 0.6, 0.36, 0.22, 0.13, 0.08: more while a row brings more than the rate so far."""
    chances = [0.6**depth for depth in range(6)]

    def cost(rows: int) -> float:
        return 1 + each * (rows - 1)

    best = max(range(6), key=lambda count: sum(chances[: count + 1]) / cost(count + 1))
    assert best == drafts
    assert kept(measured(cost), chain([0.6] * 5)) == [drafts]


def test_a_budget_is_shared_by_chance() -> None:
    """Eight rows cost what one does and a ninth costs as much again: the likeliest five of all drafts get them."""
    pacer = measured(lambda rows: float(math.ceil(rows / 8)), 3)
    sure, fair, poor = chain([0.9] * 10), chain([0.5] * 10), chain([0.2] * 10)
    assert kept(pacer, sure, fair, poor) == [5, 0, 0]
    assert kept(pacer, chain([0.9, 0.9]), fair, poor) == [2, 2, 1]
    assert kept(pacer, poor, fair, chain([0.9, 0.9])) == [1, 2, 2]
    assert kept(pacer, sure, fair, poor, beside=4) == [1, 0, 0]
    assert kept(pacer, sure, fair, poor, beside=5) == [0, 0, 0]


def test_a_hopeless_tree_is_cut_to_its_root_beside_a_good_one() -> None:
    pacer = measured(lambda rows: 1 + 0.05 * (rows - 1), 2)
    assert kept(pacer, chain([0.01] * 9), chain([0.95] * 9)) == [0, 9]
    assert kept(pacer, chain([0.0] * 9), chain([1.0] * 9)) == [0, 9]


def test_one_row_more_is_tried_now_and_then_and_where_its_cost_is_unknown() -> None:
    pacer = measured(jump)
    counts = [kept(pacer, chain([0.2]))[0] for _ in range(64)]
    assert counts.count(1) == 2
    unknown = Pacer()
    unknown.start(0)
    for _ in range(5):
        unknown.learn_step(Load(1), 1.0)
        unknown.learn_step(Load(3), 3.0)
    assert kept(unknown, chain([0.5])) == [1]
    assert kept(unknown, chain([0.1])) == [0]  # hardly right: its cost does not matter
    for _ in range(2):
        unknown.learn_step(Load(2), 2.0)
    assert kept(unknown, chain([0.5])) == [0]


def test_a_lookup_is_asked_for_more_than_was_worth_it_of_late() -> None:
    pacer = measured(lambda rows: 1.0)
    lookup = Price("x", "lookup")

    def budgets(ceiling: int = 63) -> list[int]:
        return pacer.budgets(lookup, [Draft(0, ceiling, TokenTree.root(0))], Load(1))

    assert budgets() == [8]
    for length in (8, 24, 56):
        assert kept(pacer, chain([0.99] * length)) == [length]
        assert budgets() == [min(63, 8 + 2 * length)]
    kept(pacer, chain([0.9]))
    assert budgets()[0] > 40  # one short step says little
    for _ in range(60):
        kept(pacer, chain([0.9]))
    assert budgets()[0] <= 10
    assert budgets(3) == [3]
    assert budgets(0) == [0]


@pytest.mark.parametrize("cost", ["jump", "flat", "each"])
def test_steps_whose_drafts_are_hopeless_cost_nothing(cost: str) -> None:
    """A lookup that is always wrong and always sure of itself: after a few steps hardly a row is spent on it."""
    costs: dict[str, Callable[[int], float]] = {
        "jump": jump,
        "flat": lambda rows: 1.0,
        "each": lambda rows: 1 + 0.1 * (rows - 1),
    }
    rule, clock = path_rule(VOCAB, seed=81), Clock()
    run = ToyRun(rule, target=Timed(ToyTarget(rule, VOCAB), clock, costs[cost]), clock=clock)

    def bold(tokens: Seq[int], budget: int) -> TokenTree:
        return TokenTree.chain(tokens[-1], [300 % VOCAB] * budget, [0.95**d for d in range(1, budget + 1)], "bold")

    drafter = TreeDrafter(bold)
    settings = {"max_tokens": 200, "speculation": {"adaptive": True, "num_speculative_tokens": 20}}
    sequence = run.add([5], drafter, **settings, ignore_eos=True)  # type: ignore[arg-type]
    run.finish(sequence)
    plain = 199 * costs[cost](1) + costs[cost](1)
    assert clock.now < 1.08 * plain
    if cost != "flat":
        assert sequence.record.drafted < 40


class Drawing(TreeDrafter):
    """Draws a child or two below every node, as the rules want it, and thinks nothing of any of them."""

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        return [self._tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _tree(self, view: View, budget: int) -> TokenTree:
        tree = TokenTree.root(view.tokens[-1])
        width = 2 if self.name == "tree" else 1
        while (room := budget + 1 - len(tree)) > 0:
            node = len(tree) - 1
            path = [tree.tokens[n] for n in tree.path(node)[1:]]
            drawn = view.draw(path_rule(4, seed=92)([1, *path])[None], [path], min(width, room), nodes=[node])[0]
            assert tree.grow(node, Drawn(drawn.tokens, [0.001] * len(drawn.tokens), drawn.q), self.name)
        return tree


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("rule", ["coupled", "ratio", "block", "recursive", "traversal"])
def test_what_a_rule_forbids_to_drop_is_never_cut(rule: str, adaptive: bool) -> None:
    """Every drawn node is verified, however little it is worth; under the rule that allows it nearly all are cut."""
    table, clock = path_rule(4, seed=91, spread=1.0), Clock()
    each = 1.0 if rule == "coupled" else 0.01
    target = Timed(ToyTarget(table, 4), clock, lambda rows: 1 + each * (rows - 1))
    run = ToyRun(table, vocab=4, target=target, clock=clock)
    drafter = Drawing(lambda tokens, budget: TokenTree.root(0), "chain" if rule in ("ratio", "block") else "tree")
    given_: list[int] = []
    ask = drafter.propose

    def counting(views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        proposed = ask(views, budgets)
        given_.extend(len(tree) - 1 for tree in proposed)
        return proposed

    drafter.propose = counting  # type: ignore[method-assign]
    speculation = {"rule": rule, "adaptive": adaptive, "num_speculative_tokens": 5}
    settings = {"max_tokens": 120, "temperature": 1.0, "eos": (), "speculation": speculation}
    sequences = [run.add([1, n], drafter, seed=None, **settings) for n in range(2)]  # type: ignore[arg-type]
    run.finish(*sequences)
    verified = sum(sequence.record.drafted for sequence in sequences)
    if rule == "coupled" and adaptive:
        assert verified < 0.5 * sum(given_)
    else:
        assert verified == sum(given_) > 100


def test_the_lossy_rule_grants_the_liberty_too() -> None:
    """What is cut under it was likely to be refused anyway; the record says that it is lossy."""
    assert Speculation(rule="typical").adaptive
    table, clock = path_rule(4, seed=91, spread=1.0), Clock()
    run = ToyRun(table, vocab=4, target=Timed(ToyTarget(table, 4), clock, lambda rows: float(rows)), clock=clock)
    dice = random.Random(0)
    drafter = TreeDrafter(lambda t, b: TokenTree.chain(t[-1], [dice.randrange(4) for _ in range(b)], [0.001] * b, "x"))
    speculation = {"rule": "typical", "num_speculative_tokens": 5, "adaptive": True}
    sequence = run.add([1, 2], drafter, seed=None, temperature=1.0, max_tokens=120, eos=(), speculation=speculation)
    run.finish(sequence)
    assert sequence.record.lossless == "none"
    assert sequence.record.drafted < 0.5 * 5 * sequence.record.asked
