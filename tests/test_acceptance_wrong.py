"""Liberties that keep the distribution, and wrong variants of drafts and rules: the enumeration catches each."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from paceline.acceptance import RULES, Outcome, ratio, recursive
from paceline.acceptance.rows import chance, excess, normalised, resumption
from tests.exact import (
    Dice,
    Model,
    Same,
    Shape,
    below,
    chain,
    drafts,
    emitted,
    extended,
    in_order,
)
from tests.test_acceptance_exact import CHAIN_RULES, PAIRS, TREE_RULES, pairs, wrong_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.acceptance import Coins, Row, Rows
    from paceline.acceptance.rows import Number
    from paceline.tree import TokenTree
    from tests.exact import Accept, Draw, Tokens

# Liberties that keep the distribution: what decides them is known before the draw.


def stops_after_a_weak_token_but_keeps_it(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    weak = prefix and q(prefix[:-1])[prefix[-1]] < Fraction(1, 3)
    return [] if weak else in_order(dice, q, prefix, count)


def drafts_by_the_highest_probability(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    return in_order(dice, q, prefix, count if max(q(prefix)) < Fraction(1, 2) else 1)


def keeps_the_first_of_the_draw_order(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    return in_order(dice, q, prefix, count)[: max(1, count - 1)]


SHAPES: list[Shape] = [chain(2), chain(3), (-1, 0, 0), (-1, 0, 0, 1, 1), (-1, 0, 0, 1, 2), (-1, 0, 1, 1)]


def fitting(rule: str) -> list[Shape]:
    return [shape for shape in SHAPES if RULES[rule].trees or shape == chain(len(shape) - 1)]


@pytest.mark.parametrize("rule", CHAIN_RULES + TREE_RULES)
@pytest.mark.parametrize(
    "draw",
    [
        stops_after_a_weak_token_but_keeps_it,
        drafts_by_the_highest_probability,
        keeps_the_first_of_the_draw_order,
    ],
)
def test_a_liberty_taken_before_the_draw_is_exact(draw: Draw, rule: str) -> None:
    for shape in fitting(rule):
        for pair in PAIRS:
            assert wrong_by(RULES[rule].accept, shape, 3, pair, draw) == 0


# Wrong drafts: what decides is the token that was drawn.


def sorts_siblings(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    return sorted(in_order(dice, q, prefix, count), key=lambda token: -q(prefix)[token])


def drops_weak_tokens(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    return [token for token in in_order(dice, q, prefix, count) if q(prefix)[token] >= Fraction(1, 3)]


def takes_the_likeliest(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    row = q(prefix)
    return sorted((i for i in range(len(row)) if row[i]), key=lambda token: -row[token])[:count]


def cuts_at_a_token_that_the_target_forbids(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    target = next(p for p, drafter in pairs(3) if drafter is q)
    return [token for token in in_order(dice, q, prefix, count) if target(prefix)[token]]


WRONG_DRAWS: list[tuple[Draw, list[str]]] = [
    (sorts_siblings, TREE_RULES),
    (drops_weak_tokens, CHAIN_RULES + TREE_RULES),
    (takes_the_likeliest, CHAIN_RULES + TREE_RULES),
    (cuts_at_a_token_that_the_target_forbids, CHAIN_RULES + TREE_RULES),
]


@pytest.mark.parametrize(
    ("draw", "rule"), [pytest.param(d, r, id=f"{d.__name__}-{r}") for d, rules in WRONG_DRAWS for r in rules]
)
def test_a_wrong_draft_is_caught(draw: Draw, rule: str) -> None:
    assert any(wrong_by(RULES[rule].accept, shape, 3, pair, draw) for shape in fitting(rule) for pair in PAIRS)


def test_the_known_bias_of_dropping_after_the_draw() -> None:
    """p = (.7, .3), q = (.5, .5), the second token dropped when drawn: (.85, .15) comes out."""
    p, q = Same(7, 3), Same(5, 5)
    draft = drafts(chain(1), q, lambda dice, q, prefix, count: [t for t in in_order(dice, q, prefix, count) if t == 0])
    mass = extended(emitted(ratio.accept, draft, p, q)[0], p, 2)
    assert mass[0, 0] + mass[0, 1] == Fraction(85, 100)


# Wrong rules: one line changed.


def forgets_to_renormalise_q(patch: pytest.MonkeyPatch, rule: str) -> None:
    def without(q: Row, token: int) -> Row:
        rest = q.copy()
        rest[token] = 0
        return rest

    patch.setattr(f"paceline.acceptance.{rule}.without", without)


def leaves_the_drawn_token_in_q(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.without", lambda q, token: q)


def draws_the_correction_from_p(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.normalised", lambda row, otherwise: otherwise)


def tries_siblings_against_all_of_p(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.excess", lambda p, q: p)


def draws_the_correction_from_the_distance(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.excess", lambda p, q: abs(p - q))


def inverts_the_ratio(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.chance", lambda p, q: chance(q, p) if p else 1)


def accepts_with_p_alone(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.chance", lambda p, q: p)


def stops_at_a_node_with_the_chance_to_reach_it(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.resumption", lambda rest, a: a)


def stops_at_a_node_with_the_rest_alone(patch: pytest.MonkeyPatch, rule: str) -> None:
    patch.setattr(f"paceline.acceptance.{rule}.resumption", lambda rest, a: min(1, rest))


WRONG_LINES: list[tuple[Callable[[pytest.MonkeyPatch, str], None], list[str]]] = [
    (forgets_to_renormalise_q, TREE_RULES),
    (leaves_the_drawn_token_in_q, TREE_RULES),
    (draws_the_correction_from_p, CHAIN_RULES + TREE_RULES),
    (tries_siblings_against_all_of_p, CHAIN_RULES + TREE_RULES),
    (draws_the_correction_from_the_distance, CHAIN_RULES + TREE_RULES),
    (inverts_the_ratio, CHAIN_RULES + TREE_RULES),
    (accepts_with_p_alone, CHAIN_RULES + TREE_RULES),
    (stops_at_a_node_with_the_chance_to_reach_it, ["block", "traversal"]),
    (stops_at_a_node_with_the_rest_alone, ["block", "traversal"]),
]


@pytest.mark.parametrize(
    ("breaks", "rule"), [pytest.param(b, r, id=f"{b.__name__}-{r}") for b, rules in WRONG_LINES for r in rules]
)
def test_a_wrong_line_is_caught(
    breaks: Callable[[pytest.MonkeyPatch, str], None], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch, rule)
    assert any(wrong_by(RULES[rule].accept, shape, 3, pair) for shape in fitting(rule) for pair in PAIRS)


# Wrong rules: another function, or the right one on other rows or coins.


def block_until_the_first_failure(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
    a: list[Number] = [1]
    for i, x in enumerate(tree.tokens[1:], 1):
        a.append(chance(a[i - 1] * p[i - 1][x], q[i - 1][x]))
    last = len(a) - 1
    tau = 0
    for i in range(1, last + 1):
        h = a[i] if i == last else resumption(excess(a[i] * p[i], q[i]).sum(), a[i])
        if not coins.accept(i, h):
            break
        tau = i
    rest = p[last] if tau == last else normalised(excess(a[tau] * p[tau], q[tau]), p[tau])
    return Outcome(list(range(tau + 1)), coins.pick(rest))


class Shared:
    """Coins that are the very numbers which drew the drafts: the first number below the mass up to a token drew it."""

    def __init__(self, dice: Coins, tree: TokenTree, q: Rows) -> None:
        self._dice, self._tree, self._q = dice, tree, q

    def accept(self, node: int, chance: Number) -> bool:
        if node == 0:
            return self._dice.accept(node, chance)
        row, token = self._q[self._tree.parents[node]], self._tree.tokens[node]
        return self._dice.accept(node, min(Fraction(1), max(Fraction(0), (chance - below(row, token)) / row[token])))

    def pick(self, weights: Row) -> int:
        return self._dice.pick(weights)


def sharing_numbers_with_the_draft(accept: Accept) -> Accept:
    return lambda tree, p, q, coins: accept(tree, p, q, Shared(coins, tree, q))


class Once:
    """Coins of which all siblings share one: after a failure no sibling can succeed with less."""

    def __init__(self, dice: Coins, tree: TokenTree) -> None:
        self._dice, self._tree = dice, tree
        self._above: dict[int, Number] = {}

    def accept(self, node: int, chance: Number) -> bool:
        parent = self._tree.parents[node]
        above = self._above.get(parent, 0)
        if chance <= above:
            return False
        self._above[parent] = chance
        return self._dice.accept(node, (chance - above) / Fraction(1 - above))

    def pick(self, weights: Row) -> int:
        return self._dice.pick(weights)


def sharing_numbers_among_siblings(accept: Accept) -> Accept:
    return lambda tree, p, q, coins: accept(tree, p, q, Once(coins, tree))


def reading_rows_one_off(accept: Accept) -> Accept:
    return lambda tree, p, q, coins: accept(tree, [p[max(0, parent)] for parent in tree.parents], q, coins)


def drawing_the_last_token_from_q(accept: Accept) -> Accept:
    def wrong(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
        rows = [p[node] if tree.children(node) else q[node] for node in range(len(tree))]
        return accept(tree, rows, q, coins)

    return wrong


def smoothing_q(accept: Accept) -> Accept:
    """The row at another temperature than the one that it was drawn at."""

    def wrong(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
        return accept(tree, p, [q[node] ** 2 / (q[node] ** 2).sum() for node in range(len(tree))], coins)

    return wrong


def stopping_at_the_first_failure(accept: Accept) -> Accept:
    return block_until_the_first_failure


WRONG_RULES: list[tuple[Callable[[Accept], Accept], list[str]]] = [
    (stopping_at_the_first_failure, ["block"]),
    (sharing_numbers_with_the_draft, CHAIN_RULES + TREE_RULES),
    (sharing_numbers_among_siblings, TREE_RULES),
    (reading_rows_one_off, CHAIN_RULES + TREE_RULES),
    (drawing_the_last_token_from_q, CHAIN_RULES + TREE_RULES),
    (smoothing_q, CHAIN_RULES + TREE_RULES),
]


@pytest.mark.parametrize(
    ("wrong", "rule"), [pytest.param(w, r, id=f"{w.__name__}-{r}") for w, rules in WRONG_RULES for r in rules]
)
def test_a_wrong_rule_is_caught(wrong: Callable[[Accept], Accept], rule: str) -> None:
    shapes_of_it = [chain(1), chain(2), chain(3)] if wrong is sharing_numbers_with_the_draft else fitting(rule)
    accept = wrong(RULES[rule].accept)
    assert any(wrong_by(accept, shape, 3, pair) for shape in shapes_of_it for pair in PAIRS)


def test_one_model_alone_can_miss_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there are several, and several shapes: without renormalisation some come out right all the same."""
    forgets_to_renormalise_q(monkeypatch, "recursive")
    found = [wrong_by(recursive.accept, (-1, 0, 1, 1), 3, pair) for pair in PAIRS]
    assert any(found)
    assert not all(found)
    assert not any(wrong_by(recursive.accept, (-1, 0, 0), 3, pair) for pair in PAIRS)
