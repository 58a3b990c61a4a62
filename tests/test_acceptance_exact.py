"""Tier 0 of the rules that need q: every draft and every coin, in fractions, on models of fractions."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.acceptance import RULES, block, ratio, recursive, traversal
from tests.exact import (
    Model,
    Same,
    Shape,
    chain,
    depth,
    distance,
    drafts,
    emitted,
    fractions,
    in_order,
    outcomes,
    shapes,
)

if TYPE_CHECKING:
    from tests.exact import Accept, Draft, Draw

CHAIN_RULES = ["ratio", "block"]
TREE_RULES = ["recursive", "traversal"]


@cache
def pairs(vocab: int) -> list[tuple[Model, Model]]:
    """Three random targets and drafters; then with impossible tokens, with equal rows at some places, and at all."""
    made = [(Model(10 + i, vocab), Model(20 + i, vocab)) for i in range(3)]
    made.append((Model(13, vocab, zeros=0.4), Model(23, vocab, zeros=0.4)))
    target = Model(14, vocab)
    made.append((target, Model(24, vocab, like=target, lengths=(0, 2))))
    made.append((target, target))
    return made


@cache
def made(shape: Shape, vocab: int, pair: int, draw: Draw = in_order) -> list[Draft]:
    return drafts(shape, pairs(vocab)[pair][1], draw)


def wrong_by(accept: Accept, shape: Shape, vocab: int, pair: int, draw: Draw = in_order) -> Fraction:
    """Total variation between what is emitted and the target."""
    p, q = pairs(vocab)[pair]
    mass, _ = emitted(accept, made(shape, vocab, pair, draw), p, q)
    return distance(mass, p, depth(shape) + 1)


def accepted(rule: str, shape: Shape, vocab: int, pair: int) -> Fraction:
    p, q = pairs(vocab)[pair]
    return emitted(RULES[rule].accept, made(shape, vocab, pair), p, q)[1]


PAIRS = range(6)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", CHAIN_RULES + TREE_RULES)
def test_chains_have_the_targets_distribution(rule: str, pair: int) -> None:
    for length in range(4):
        assert wrong_by(RULES[rule].accept, chain(length), 4, pair) == 0


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_trees_have_the_targets_distribution(nodes: int, rule: str, pair: int) -> None:
    """All ordered trees of up to 5 nodes."""
    for shape in shapes(nodes, 3):
        assert wrong_by(RULES[rule].accept, shape, 3, pair) == 0


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_trees_of_five_drafts_have_the_targets_distribution(rule: str, pair: int) -> None:
    for shape in shapes(6, 3):
        assert wrong_by(RULES[rule].accept, shape, 3, pair) == 0


def test_all_shapes_are_there() -> None:
    """The Catalan numbers, less the one tree whose root has four children."""
    assert [len(shapes(nodes, 3)) for nodes in range(1, 6)] == [1, 1, 2, 5, 13]
    assert len(set(shapes(6, 5))) == 42


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(shapes(4, 3) + shapes(3, 3)), st.sampled_from([0.0, 0.3, 0.6]))
def test_any_model_gives_the_targets_distribution(seed: int, shape: Shape, zeros: float) -> None:
    p, q = Model(seed, 3, zeros), Model(seed + 1, 3, zeros)
    for rule in TREE_RULES + CHAIN_RULES * (shape == chain(len(shape) - 1)):
        mass, _ = emitted(RULES[rule].accept, drafts(shape, q), p, q)
        assert distance(mass, p, depth(shape) + 1) == 0


# Which rule accepts more, and where they are one.


def test_block_accepts_at_least_as_many_as_ratio() -> None:
    gains = [
        accepted("block", chain(k), 4, pair) - accepted("ratio", chain(k), 4, pair) for k in (2, 3) for pair in PAIRS
    ]
    assert min(gains) >= 0
    assert sum(gain > 0 for gain in gains) >= 6


def test_traversal_accepts_at_least_as_many_as_recursive() -> None:
    gains = [
        accepted("traversal", shape, 3, pair) - accepted("recursive", shape, 3, pair)
        for nodes in (2, 3, 4, 5)
        for shape in shapes(nodes, 3)
        for pair in PAIRS
    ]
    assert min(gains) >= 0
    assert sum(gain > 0 for gain in gains) >= 30


def test_one_more_child_never_hurts() -> None:
    for rule in TREE_RULES:
        for pair in PAIRS:
            counts = [accepted(rule, (-1, *[0] * children), 3, pair) for children in range(4)]
            assert counts == sorted(counts)
    # Where siblings cover all that is possible, without replacement, one of them is always accepted.
    assert accepted("recursive", (-1, 0, 0, 0), 3, 0) == accepted("traversal", (-1, 0, 0, 0), 3, 0) == 1


def test_a_drafter_that_equals_its_target_is_always_accepted() -> None:
    for rule in CHAIN_RULES + TREE_RULES:
        assert accepted(rule, chain(3), 4, 5) == 3


@pytest.mark.parametrize(("whole", "step"), [("traversal", "block"), ("recursive", "ratio")])
@pytest.mark.parametrize("pair", PAIRS)
def test_on_a_chain_the_rule_for_trees_is_the_one_for_chains(whole: str, step: str, pair: int) -> None:
    """Draft by draft: the same paths with the same probabilities and the same weights of the last token."""

    def all_outcomes(rule: str, draft: Draft) -> list[tuple[Fraction, list[int], list[Fraction]]]:
        p, q = pairs(4)[pair]
        target, drafter = ([model(prefix) for prefix in draft.prefixes] for model in (p, q))
        found = outcomes(lambda dice: RULES[rule].accept(draft.tree, target, drafter, dice))
        return sorted((d.weight, o.path, list(d.weights / d.weights.sum())) for d, o in found)

    for draft in made(chain(3), 4, pair):
        assert all_outcomes(whole, draft) == all_outcomes(step, draft)


def test_known_numbers() -> None:
    """The example of the paper on block verification: 10/9 accepted token by token, 11/9 by blocks."""
    p, q = Same(1, 2), Same(2, 1)
    found = {rule: emitted(RULES[rule].accept, drafts(chain(2), q), p, q)[1] for rule in CHAIN_RULES + TREE_RULES}
    assert found == {
        "ratio": Fraction(10, 9),
        "recursive": Fraction(10, 9),
        "block": Fraction(11, 9),
        "traversal": Fraction(11, 9),
    }


def test_ratio_accepts_what_both_rows_share() -> None:
    for pair in PAIRS:
        p, q = (model(()) for model in pairs(4)[pair])
        assert accepted("ratio", chain(1), 4, pair) == np.minimum(p, q).sum()


def test_the_enumeration_sees_what_it_should() -> None:
    """The dice visit each outcome once, with its probability."""
    row = fractions(1, 2, 3)
    found = {(o, a): d.weight for d, (o, a) in outcomes(lambda d: (d.choose(row), d.accept(1, Fraction(1, 4))))}
    assert found == {(i, a): row[i] * Fraction(1 + 2 * (not a), 4) for i in range(3) for a in (True, False)}
    model = Model(1, 3)
    order: Any = {tuple(draft.tree.tokens[1:]): draft.weight for draft in drafts((-1, 0, 0), model)}
    q = model(())
    assert order == {(i, j): q[i] * q[j] / (1 - q[i]) for i in range(3) for j in range(3) if i != j}


def test_rules_are_the_ones_of_their_files() -> None:
    named = {"ratio": ratio, "block": block, "recursive": recursive, "traversal": traversal}
    assert all(RULES[name].accept is module.accept for name, module in named.items())
    assert {name for name, rule in RULES.items() if rule.lossless == "distribution"} == set(named)
    assert [name for name, rule in RULES.items() if not rule.sampled] == ["typical"]
