"""Trees that grow within a budget, as learned drafters grow them, keep the distribution: by exact enumeration.

Where a row has fewer possible tokens than children are wanted, the places that they leave go to nodes of other
branches. So whether a node is verified may depend on tokens of other branches, though never on its own or on one below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.acceptance import RULES
from paceline.drafters._candidates import Candidates, ShapedCandidates
from paceline.shape import TreeShape
from paceline.tree import Drawn, TokenTree
from tests.exact import Dice, Draft, Model, Tokens, depth, distance, drafts, emitted, in_order, outcomes

if TYPE_CHECKING:
    from collections.abc import Callable
    from fractions import Fraction

VOCAB = 3
RULES_FOR_TREES = ["recursive", "traversal"]
PAIRS = [(Model(seed, VOCAB), Model(seed + 90, VOCAB, zeros=0.5)) for seed in range(4)]
WITHOUT_ZEROS = [(Model(seed, VOCAB), Model(seed + 50, VOCAB)) for seed in range(4)]
RANKS = (0.7, 0.3, 0.2)


def grown(q: Model, found: Callable[[], Candidates], width: int, levels: int) -> list[Draft]:
    """All that a drafter can propose, level by level."""

    def run(dice: Dice) -> tuple[TokenTree, list[Tokens]]:
        candidates, nodes = found(), [0]
        for _ in range(levels):
            for node in nodes:
                path = tuple(candidates.path(node))
                tokens = in_order(dice, q, path, width)
                candidates.take(node, Drawn(tokens, [0.0] * len(tokens), q(path)), RANKS)
            nodes = candidates.frontier(width)
        tree = candidates.tree("exact")
        prefixes = [tuple(tree.tokens[above] for above in tree.path(node)[1:]) for node in range(len(tree))]
        assert all((tree.q[node] == q(prefixes[node])).all() for node in set(tree.parents[1:]))
        return tree, prefixes

    return [Draft(dice.weight, *result) for dice, result in outcomes(run)]


def wrong_by(rule: str, made: list[Draft], p: Model, q: Model) -> Fraction:
    length = 1 + max(depth(tuple(draft.tree.parents)) for draft in made)
    return distance(emitted(RULES[rule].accept, made, p, q)[0], p, length)


@pytest.mark.parametrize("rule", RULES_FOR_TREES)
@pytest.mark.parametrize(("width", "budget", "levels"), [(1, 2, 2), (2, 3, 2), (3, 4, 2), (2, 4, 3)])
def test_a_tree_that_grows_within_its_budget_is_exact(width: int, budget: int, levels: int, rule: str) -> None:
    sizes = set()
    for p, q in PAIRS:
        made = grown(q, lambda: Candidates(0, budget), width, levels)
        sizes |= {len(draft.tree) for draft in made}
        assert wrong_by(rule, made, p, q) == 0
    assert max(sizes) == budget + 1


@pytest.mark.parametrize("rule", RULES_FOR_TREES)
def test_a_tree_of_a_given_shape_is_exact(rule: str) -> None:
    shape = TreeShape.parse([[0], [0, 0], [1], [1, 0], [0, 1]])
    for p, q in PAIRS:
        for budget in (3, 5):
            made = grown(q, lambda budget=budget: ShapedCandidates(0, budget, shape), shape.width, 2)  # type: ignore[misc]
            assert wrong_by(rule, made, p, q) == 0


@pytest.mark.parametrize("rule", RULES_FOR_TREES)
@pytest.mark.parametrize("decides", [1, 2], ids=["its parent", "its parent's later sibling"])
def test_a_node_may_depend_on_a_token_beside_it_or_above(decides: int, rule: str) -> None:
    """The first child has a child only where the first, or the second, is token 0."""
    for p, q in WITHOUT_ZEROS:
        made = drafts((-1, 0, 0, 1), q)
        kept = [
            draft if draft.tree.tokens[decides] == 0 else Draft(draft.weight, draft.tree.head(3), draft.prefixes[:3])
            for draft in made
        ]
        assert wrong_by(rule, kept, p, q) == 0


@pytest.mark.parametrize("rule", RULES_FOR_TREES)
def test_a_node_may_not_depend_on_a_token_below_it(rule: str) -> None:
    """Both of a chain go where the second is token 0."""
    found = []
    for p, q in WITHOUT_ZEROS:
        made = drafts((-1, 0, 1), q)
        kept = [Draft(d.weight, TokenTree.root(0), [()]) if d.tree.tokens[2] == 0 else d for d in made]
        found.append(wrong_by(rule, kept, p, q))
    assert any(found)
