"""What the loop trains, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from paceline.train.pack import Pack

FADING = 0.8
"""What a depth weighs against the one before it, in Medusa as in EAGLE-3."""


@dataclass(frozen=True)
class Measured:
    """What a pack says of a drafter.

    Attributes:
        loss: to be made smaller.
        right: for each depth of a draft how many first guesses were the target's own tokens, its tokens before them
            given.
        total: of how many.
    """

    loss: Tensor
    right: tuple[int, ...]
    total: tuple[int, ...]


class Objective(Protocol):
    """A drafter that learns: its parameters, what it needs of the target, and how wrong it is about a pack."""

    @property
    def network(self) -> nn.Module:
        """Whose parameters are trained."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs packs must hold, in order; the last is the input of the final norm."""

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each column of the guesses, int64 [N]."""

    def __call__(self, pack: Pack) -> Measured:
        """The loss of one pack."""

    def guess(self, pack: Pack, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each depth of drafts so deep, or as deep as the drafter drafts, the roots from which all the tokens up to
        there are in their answer, int64 [M] ascending, and what it guesses when those before are right: logits [M, N].
        """
