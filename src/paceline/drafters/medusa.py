"""Medusa: heads that each guess one later token from the state that gave the last one.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.1. A head knows nothing of what the heads before it guess, so
every node of a depth has the same children; the tree is made of those that are likely to be right together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.drafters import Method, Needs, Outcome, Surroundings, View
from paceline.drafters._candidates import WIDTH, candidates, tree_of, width_of
from paceline.drafters._heads import head_of
from paceline.drafters._selftest import check_agreement
from paceline.targets.medusa_decoder import MedusaDecoder
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.options import Speculation
    from paceline.shape import TreeShape
    from paceline.targets.load import Loaded

# How often the first guess of each head is right, as published for a model of 7 B; the chances of later guesses fall
# with the square of their rank. They shape the tree where it must not depend on what is drawn.
_ACCURACIES = (0.56, 0.316, 0.201, 0.147, 0.118)


@dataclass(slots=True)
class _State:
    """Of the first ``known`` tokens the target has been seen; ``tap`` is what it gave at the last of them."""

    known: int
    tap: Tensor | None


class MedusaDrafter:
    """Chains and trees from Medusa heads, all sequences of a step in one product a head."""

    name = "medusa"

    def __init__(self, heads: MedusaDecoder, tree: int | TreeShape = WIDTH) -> None:
        """Draft with ``heads``; ``tree`` is the most children of a node, where 1 is a chain, or a shape to fill."""
        self.needs = Needs(features=(heads.tap,), cost="block")
        self._heads, self._tree = heads, tree
        self._states: dict[int, _State] = {}

    def start(self, view: View, valid: int) -> None:
        self._states[view.id] = _State(valid, None)

    def fork(self, parent: int, child: View) -> None:
        state = self._states[parent]
        self._states[child.id] = _State(state.known, state.tap)

    def rewind(self, sequence: int, length: int) -> None:
        state = self._states[sequence]
        if length < state.known:
            state.known, state.tap = length, None

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def length(self, sequence: int) -> int:
        return self._states[sequence].known

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Only the last state counts."""
        for outcome in outcomes:
            tap = outcome.features[self._heads.tap][-1].clone()
            self._states[outcome.id] = _State(outcome.start + len(outcome.rows), tap)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        trees = {view.id: TokenTree.root(view.tokens[-1]) for view in views}
        ready = [(view, budget) for view, budget in zip(views, budgets, strict=True) if self._can_draft(view, budget)]
        taps = [tap for view, _ in ready if (tap := self._states[view.id].tap) is not None]
        if taps:
            depth = min(self._heads.spec.heads, max(budget for _, budget in ready))
            logits = self._heads.forward(self._heads.states(torch.stack(taps)), depth)
            for place, (view, budget) in enumerate(ready):
                trees[view.id] = self._grow(view, budget, logits[:budget, place])
        return [trees[view.id] for view in views]

    def _can_draft(self, view: View, budget: int) -> bool:
        state = self._states[view.id]
        return budget > 0 and state.tap is not None and state.known == len(view.tokens) - 1

    def _grow(self, view: View, budget: int, logits: Tensor) -> TokenTree:
        """The likeliest nodes, given the logits of each depth."""
        found, width = candidates(view.tokens[-1], budget, self._tree), width_of(self._tree)
        nodes = [0]
        for depth, row in enumerate(logits):
            drawn = None
            for node in nodes:
                # The rules of a request may tell paths of one depth apart, but a draft need not be that exact, unless
                # it is to be compared with what it was drawn from.
                if drawn is None or drawn.q is not None:
                    drawn = view.draw(row[None], [found.path(node)], width, nodes=[node], ids=self._heads.target_ids)[0]
                found.take(node, drawn, _ranks(depth))
            nodes = found.frontier(MAX_NODES)
        return found.tree(self.name)


def _ranks(depth: int) -> list[float]:
    """The chances of the children of a node at ``depth``, by draw order."""
    first = _ACCURACIES[min(depth, len(_ACCURACIES) - 1)]
    return [first / rank**2 for rank in range(1, MAX_NODES)]


def _make(speculation: Speculation, around: Surroundings) -> MedusaDrafter:
    key = "medusa", speculation.model, speculation.random
    return MedusaDrafter(around.kept(key, lambda: _loaded(speculation, around.target)), tree_of(speculation))


def _loaded(speculation: Speculation, target: Loaded) -> MedusaDecoder:
    """The heads for their target; trained ones are tried out."""
    heads = MedusaDecoder(head_of("medusa", speculation, target), target.decoder)
    if not speculation.random:
        check_agreement(str(speculation.model), target, [heads.tap], lambda _, taps: _guesses(heads, taps[0]))
    return heads


def _guesses(heads: MedusaDecoder, tap: Tensor) -> Tensor:
    """The likeliest token two places after each state, int64 [R]."""
    best = heads.forward(heads.states(tap), 1)[0].argmax(1)
    return best if heads.target_ids is None else heads.target_ids[best]


METHOD = Method(
    _make, options=("model", "random", "tree", "rule"), model="needed", sampled=True, trees=True, shapes=True
)
