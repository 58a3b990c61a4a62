"""Targets: what turns a batch of rows into logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.pages import CacheGroup, Slab


@dataclass(frozen=True)
class Scores:
    """What one forward pass of R rows, M of them scored, brings.

    Attributes:
        logits: float32 [M, vocab_size], before any rule.
        hidden: float32 [M, hidden], the head's input (after the final norm).
        features: for each layer asked for float32 [R, hidden], the residual stream before that layer; the number
            of layers itself asks for what the final norm reads.
    """

    logits: Tensor
    hidden: Tensor
    features: dict[int, Tensor] = field(default_factory=dict)


class Target(Protocol):
    """A model whose rows are independent: a row's logits are a function of its own path alone."""

    @property
    def vocab_size(self) -> int:
        """How many ids may be emitted; rows of the head beyond it are padding."""

    @property
    def max_positions(self) -> int:
        """The longest path that the model can score, in tokens."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that need a cache."""

    def forward(self, batch: Batch, slabs: Sequence[Slab], features: Sequence[int] = ()) -> Scores:
        """Write the rows' keys and values into the slabs, then score the rows asked for."""
