"""Token trees: what may be verified, what is cut, and what is seen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DrafterError
from paceline.tree import MAX_NODES, Dropping, TokenTree
from tests.toys import random_tree, trials


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Valid trees of every shape and size."""
    nodes = draw(st.integers(1, MAX_NODES))
    dice = random.Random(draw(st.integers(0, 2**32)))
    width, depth = draw(st.integers(1, 4)), draw(st.integers(1, MAX_NODES))
    return random_tree(dice, 7, [1, 2, 3], nodes - 1, width=width, depth=depth, vocab=50)


@trials(100)
@given(trees())
def test_masks_are_the_ancestors(tree: TokenTree) -> None:
    for node, mask in enumerate(tree.masks()):
        bits = [bit for bit in range(64) if mask >> bit & 1]
        assert bits == tree.path(node)
        assert tree.depths()[node] == len(bits) - 1
        assert -(1 << 63) <= mask < 1 << 63


def test_the_last_of_64_nodes_has_its_bit() -> None:
    tree = TokenTree.chain(0, list(range(1, MAX_NODES)), [1.0] * (MAX_NODES - 1), "x")
    tree.check(MAX_NODES)
    assert tree.masks()[-1] == -1
    assert tree.masks()[-2] == (1 << 63) - 1


@trials(100)
@given(trees(), st.integers(1, MAX_NODES))
def test_best_keeps_the_likeliest_and_stays_a_tree(tree: TokenTree, nodes: int) -> None:
    cut = tree.best(nodes, Dropping())
    cut.check(50)
    assert len(cut) == min(nodes, len(tree))
    assert sorted(cut.survival, reverse=True) == sorted(tree.survival, reverse=True)[: len(cut)]
    whole = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}
    assert {tuple(cut.tokens[n] for n in cut.path(node)) for node in range(len(cut))} <= whole


@trials(100)
@given(trees(), st.integers(1, MAX_NODES))
def test_head_is_whole(tree: TokenTree, nodes: int) -> None:
    head = tree.head(nodes)
    head.check(50)
    assert head.tokens == tree.tokens[:nodes]


def test_best_prefers_the_earlier_of_a_tie() -> None:
    tree = TokenTree([0, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.5, 0.5, 0.5], ["t"] * 4)
    assert tree.best(2, Dropping()).tokens == [0, 1]
    assert tree.best(3, Dropping()).tokens == [0, 1, 2]


def broken() -> dict[str, TokenTree]:
    """One tree of each kind that cannot be verified."""
    wide = ["x"] * 3
    return {
        "no node": TokenTree([], [], [], []),
        "a root with a parent": TokenTree([0, 1, 2], [0, 0, 1], [1.0] * 3, wide),
        "a second root": TokenTree([0, 1, 2], [-1, -1, 0], [1.0] * 3, wide),
        "a parent that comes later": TokenTree([0, 1, 2], [-1, 2, 0], [1.0] * 3, wide),
        "its own parent": TokenTree([0, 1, 2], [-1, 1, 0], [1.0] * 3, wide),
        "an id below 0": TokenTree([0, -1, 2], [-1, 0, 1], [1.0] * 3, wide),
        "an id beyond the vocabulary": TokenTree([0, 1, 50], [-1, 0, 1], [1.0] * 3, wide),
        "an id that is no integer": TokenTree([0, 1.5, 2], [-1, 0, 1], [1.0] * 3, wide),  # type: ignore[list-item]
        "a parent that is no integer": TokenTree([0, 1, 2], [-1, 0, 1.0], [1.0] * 3, wide),  # type: ignore[list-item]
        "siblings twice": TokenTree([0, 1, 1], [-1, 0, 0], [1.0] * 3, wide),
        "survival that rises": TokenTree([0, 1, 2], [-1, 0, 1], [1.0, 0.2, 0.3], wide),
        "survival above the root's": TokenTree([0, 1, 2], [-1, 0, 1], [0.4, 0.5, 0.3], wide),
        "survival below 0": TokenTree([0, 1, 2], [-1, 0, 1], [1.0, 0.2, -0.1], wide),
        "survival that is no number": TokenTree([0, 1, 2], [-1, 0, 1], [1.0, float("nan"), 0.1], wide),
        "fewer parents": TokenTree([0, 1, 2], [-1, 0], [1.0] * 3, wide),
        "fewer survivals": TokenTree([0, 1, 2], [-1, 0, 1], [1.0] * 2, wide),
        "fewer origins": TokenTree([0, 1, 2], [-1, 0, 1], [1.0] * 3, wide[:2]),
    }


@pytest.mark.parametrize("kind", broken())
def test_what_cannot_be_verified_is_refused(kind: str) -> None:
    with pytest.raises(DrafterError):
        broken()[kind].check(50)


def test_the_same_token_below_two_parents_is_legal() -> None:
    TokenTree([0, 1, 2, 3, 3], [-1, 0, 0, 1, 2], [1.0] * 5, ["x"] * 5).check(4)


def test_adding_refuses_orphans_and_the_65th_node() -> None:
    tree = TokenTree.root(3)
    for parent in (-1, 1):
        with pytest.raises(DrafterError, match="parent"):
            tree.add(parent, 1, 0.5, "x")
    for token in range(MAX_NODES - 1):
        tree.add(0, token, 0.5, "x")
    with pytest.raises(DrafterError, match="64"):
        tree.add(0, 99, 0.5, "x")
