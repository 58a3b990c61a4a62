"""The flattened rows of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """R rows of S segments, each a token tree or a piece of a prompt; M of them are scored.

    The path of a row, in order, is storage index 0 to ``context - 1`` of its sequence and then the rows of its
    own tree whose bits are set in ``visible``, which lie at storage index ``context + bit``. The k-th key of a
    path has path index k, and ``positions`` is the length of the path minus 1. In a layer with a window w a row
    sees only path indices above ``position - w``. A row's logits are a function of its path alone.

    Attributes:
        ids: int64 [R], token ids.
        positions: int32 [R], place on the row's own path.
        starts: int32 [S + 1], rows ``starts[s]`` to ``starts[s + 1] - 1`` belong to segment s.
        storage: int32 [R], index in its sequence's storage at which the row's keys and values are written.
        context: int32 [R], how many leading storage indices of its sequence the row sees: in a piece of a prompt
            up to and including itself, in a tree the committed ones before the root.
        visible: int64 [R], bit j is set where the row sees row j of its own tree; 0 in pieces of prompts.
        tables: for each cache group int32 [S, P], the page of every ``PAGE`` storage indices, -1 if unmapped.
        score: int64 [M], rows whose logits are wanted, ascending.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    storage: Tensor
    context: Tensor
    visible: Tensor
    tables: tuple[Tensor, ...]
    score: Tensor

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def segments(self) -> int:
        return self.starts.shape[0] - 1
