"""EAGLE heads draft as they will: first from the target's states, then from their own (EAGLE-3's training-time test,
arXiv 2503.01840, section 3; with one step EAGLE-1's training, arXiv 2401.15077, section 4.2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.heads.eagle import EagleNetwork
from paceline.heads.spec import EagleSpec
from paceline.train.attention import blocks, unrolled_attention
from paceline.train.losses import against_states
from paceline.train.objective import FADING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.train.attention import Block
    from paceline.train.judge import Judge
    from paceline.train.objective import Measured
    from paceline.train.pack import Pack
    from paceline.train.shared import Shared

Pair = tuple["Tensor", "Tensor"]


class EagleObjective:
    """At depth d, the row of each root reads the token d + 1 places on, its own output at depth d - 1, and the keys
    that it would see in a draft: those of the target's states up to the root, and its own of the depths before.

    Args:
        steps: how deep it drafts in training; beyond that it will draft badly.
        keep: of the drafts of one depth the share that goes on to the next, drawn anew for every pack: a depth then
            costs less than the one above it, which more drafts reach.
        state_weight: of the distance to the target's states, for EAGLE-1 and 2.
    """

    def __init__(
        self,
        head: Head,
        shared: Shared,
        judge: Judge,
        *,
        steps: int = 3,
        keep: float = 1.0,
        state_weight: float = 1.0,
    ) -> None:
        assert isinstance(head.spec, EagleSpec)
        self.network = EagleNetwork(head.spec, head.tensors, embedding=shared.embedding, head=shared.head)
        final = len(shared.spec.layers)
        taps = head.spec.taps(final)
        self._taps = len(taps)
        self.layers = (*taps, final)
        self._spec, self._shared = head.spec, shared
        self._judge = judge
        self._steps, self._keep, self._state_weight = steps, keep, state_weight

    @property
    def target_ids(self) -> Tensor:
        return self.network.target_ids

    def __call__(self, pack: Pack) -> Measured:
        guesses, states = self._judge.begin(pack), self._states(pack)
        for depth, (roots, outputs) in enumerate(self._unroll(pack, states, self._steps, self._keep)):
            guesses.take(roots, self.network.normed(outputs), self.network.product)
            if self._spec.kind == "eagle":
                apart = against_states(outputs, states[roots + depth + 1]) / max(1, len(roots))
                guesses.loss = guesses.loss + self._state_weight * FADING**depth * apart
        return guesses.measured()

    def guess(self, pack: Pack, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        for roots, outputs in self._unroll(pack, self._states(pack), depth, 1.0):
            yield roots, self.network.logits(outputs)

    def _unroll(self, pack: Pack, states: Tensor, steps: int, keep: float) -> Iterator[tuple[Tensor, Tensor]]:
        """For each depth the roots that are drafted from, and the outputs there."""
        dice = torch.Generator().manual_seed(pack.seed)
        roots = pack.roots()
        outputs, context = self._begin(pack, states, roots)
        own: list[list[Pair]] = [[] for _ in context]
        for depth in range(steps):
            if depth:
                chosen = _chosen(pack.inside(roots, depth), keep, dice)
                roots = roots[chosen]
                own = [[(keys[:, chosen], values[:, chosen]) for keys, values in layer] for layer in own]
                outputs = self._go_on(pack, roots, depth, outputs[chosen], context, own)
            yield roots, outputs

    def _states(self, pack: Pack) -> Tensor:
        """What rows read where the target has been, float32 [R, fused * hidden]."""
        states = pack.states[:, : self._taps].flatten(1).float()
        return self._shared.states(states) if self._spec.kind == "eagle" else states

    def _begin(self, pack: Pack, states: Tensor, roots: Tensor) -> tuple[Tensor, list[Pair]]:
        """The roots' outputs on the target's states, and each layer's keys and values of all rows.

        The last row of an example has no token behind it. Its keys are of no use, and no root sees them.
        """
        network = self.network
        x, residual = network.entry(pack.tokens.roll(-1), network.fuse(states))
        context: list[Pair] = []
        for layer in range(self._spec.layers):
            x = network.before(layer, x)
            context.append((network.project(layer, "k", x, pack.places), network.project(layer, "v", x, pack.places)))
            asking = roots if layer == self._spec.layers - 1 else torch.arange(len(x))
            query = network.project(layer, "q", x[asking], pack.places[asking])
            attended = unrolled_attention(query, *context[layer], (), _layout(pack, asking))
            x = residual = network.behind(layer, residual[asking], attended)
        return x, context

    def _go_on(
        self, pack: Pack, roots: Tensor, depth: int, outputs: Tensor, context: list[Pair], own: list[list[Pair]]
    ) -> Tensor:
        """The outputs of the next depth; its keys and values join ``own``."""
        network, positions, layout = self.network, pack.places[roots] + depth, _layout(pack, roots)
        x, residual = network.entry(pack.tokens[roots + depth + 1], network.next_state(outputs))
        for layer in range(self._spec.layers):
            x = network.before(layer, x)
            query, keys, values = (network.project(layer, role, x, positions) for role in ("q", "k", "v"))
            own[layer].append((keys, values))
            x = residual = network.behind(
                layer, residual, unrolled_attention(query, *context[layer], own[layer], layout)
            )
        return x


def _chosen(inside: Tensor, keep: float, dice: torch.Generator) -> Tensor:
    """Which drafts go on: a share of those that stay inside their answers, ascending."""
    found = inside.nonzero()[:, 0]
    count = math.ceil(keep * len(found))
    return found[torch.randperm(len(found), generator=dice)[:count].sort().values]


def _layout(pack: Pack, rows: Tensor) -> list[Block]:
    return blocks(pack.starts[rows], pack.places[rows])
