"""Drafts and drafters that do wrong under every rule: such a step goes on without them, and nothing else changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from paceline.tree import TokenTree
from tests.test_engine_coupled import fits
from tests.test_engine_rules import (
    ALL,
    SHAPES,
    TREE,
    VOCAB,
    WRONG_SEEDS,
    TableDrafter,
    answers,
    counted,
    joint,
    long_answer,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from paceline.drafters import View


def too_much(tree: TokenTree) -> TokenTree:
    while len(tree) < 12:
        node = len(tree) - 1
        tree.q[node] = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64).numpy()
        tree.add(node, 1, 0.0, "table")
    return tree


def out_of_range(tree: TokenTree) -> TokenTree:
    tree.tokens[-1] = VOCAB
    return tree


def twice(tree: TokenTree) -> TokenTree:
    tree.add(tree.parents[1], tree.tokens[1], 0.0, "table")
    return tree


def an_orphan(tree: TokenTree) -> TokenTree:
    tree.parents[-1] = 40
    return tree


def without_what_it_was_drawn_from(tree: TokenTree) -> TokenTree:
    tree.q.clear()
    return tree


def drawn_from_nothing(tree: TokenTree) -> TokenTree:
    tree.q = {node: row * 0 for node, row in tree.q.items()}
    return tree


def drawn_from_too_little(tree: TokenTree) -> TokenTree:
    tree.q = {node: row[:-1] for node, row in tree.q.items()}
    return tree


def drawn_from_no_number(tree: TokenTree) -> TokenTree:
    tree.q = {node: row * math.nan for node, row in tree.q.items()}
    return tree


def another_root(tree: TokenTree) -> TokenTree:
    tree.tokens[0] = (tree.tokens[0] + 1) % VOCAB
    return tree


@dataclass
class Wayward(TableDrafter):
    """At every second call it raises, or does ``wrong`` to its trees; or says nothing."""

    wrong: Callable[[TokenTree], TokenTree] | None = None
    silent: bool = False

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        trees = super().propose(views, budgets)
        if self.calls % 2 == 0:
            if self.silent:
                return [TokenTree.root(view.tokens[-1]) for view in views]
            if self.wrong is None:
                raise RuntimeError("not today")
            return [self.wrong(tree) for tree in trees]
        return trees


OF_ANY_RULE = [None, out_of_range, twice, an_orphan, another_root]
OF_DRAWS = [
    too_much,
    without_what_it_was_drawn_from,
    drawn_from_nothing,
    drawn_from_too_little,
    drawn_from_no_number,
]


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [*((w, rule) for w in OF_ANY_RULE for rule in ALL), *((w, rule) for w in OF_DRAWS for rule in SHAPES)],
)
def test_a_wrong_draft_costs_its_step_and_nothing_else(
    wrong: Callable[[TokenTree], TokenTree] | None, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is that of a drafter which says nothing at those steps; one line is logged for each of them."""
    shape = SHAPES.get(rule, TREE)
    drafter = Wayward(shape=shape, wrong=wrong)
    sequence = long_answer(rule, drafter)
    assert len(caplog.records) == drafter.calls // 2 > 1
    assert "table" in caplog.text
    assert sequence.output == long_answer(rule, Wayward(shape=shape, silent=True)).output
    assert sequence.error is None
    assert sequence.record.disabled_reason is None
    assert sequence.record.accepted > 0


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_a_drafter_that_fails_at_every_second_step_leaves_the_distribution(rule: str) -> None:
    sequences = answers(rule, Wayward(shape=SHAPES[rule], wrong=out_of_range), WRONG_SEEDS)
    assert fits(counted(sequences), joint())
    assert sum(s.record.accepted for s in sequences) > 100


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_tree_under_a_rule_for_chains_is_left_out(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    sequence = long_answer(rule, TableDrafter(shape=TREE))
    assert caplog.records
    assert sequence.error is None
    assert len(sequence.output) == 24
