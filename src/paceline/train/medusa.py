"""Medusa heads: every head guesses its token from the state that gave the last one (arXiv 2401.10774, section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.heads.medusa import MedusaNetwork
from paceline.heads.spec import MedusaSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.train.judge import Judge
    from paceline.train.objective import Measured
    from paceline.train.pack import Pack
    from paceline.train.shared import Shared


class MedusaObjective:
    """All heads learn together, each of less weight than the one before it."""

    def __init__(self, head: Head, shared: Shared, judge: Judge) -> None:
        assert isinstance(head.spec, MedusaSpec)
        self.network = MedusaNetwork(head.spec, head.tensors, head=shared.head)
        self.layers = (len(shared.spec.layers),)
        self._heads, self._shared = head.spec.heads, shared
        self._judge = judge

    @property
    def target_ids(self) -> Tensor:
        return self.network.target_ids

    def __call__(self, pack: Pack) -> Measured:
        guesses = self._judge.begin(pack)
        for head, (roots, outputs) in enumerate(self._outputs(pack, self._heads)):
            guesses.take(roots, outputs, self.network.product(head))
        return guesses.measured()

    def guess(self, pack: Pack, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        for head, (roots, outputs) in enumerate(self._outputs(pack, depth)):
            yield roots, outputs @ self.network.product(head).T

    def _outputs(self, pack: Pack, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each head the roots that are drafted from, and what its product reads there."""
        roots = pack.roots()
        for head in range(min(depth, self._heads)):
            roots = roots[pack.inside(roots, head)]
            yield roots, self.network.behind(head, self._shared.states(pack.states[roots, -1].float()))
