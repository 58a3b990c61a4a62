"""The states of a target over texts, taken when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.batch import Rows
from paceline.errors import ContextLengthError
from paceline.pages import PagePool, PageTable, pages_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.targets.decoder import Decoder

_PIECE = 512  # rows of one pass
_MEMORY = 1 << 30


class Taps:
    """The inputs of some layers of a target, for every token of a text: one pass of the target over all of it.

    They are the bits that a drafter gets when the text is decoded, as a row depends on its own path alone.
    """

    def __init__(self, target: Decoder, layers: Sequence[int], memory: int = _MEMORY) -> None:
        """Tap ``layers`` (their number taps what the final norm reads).

        Args:
            memory: bytes of states that are kept for the next time; beyond them the target runs again.
        """
        self.layers = tuple(layers)
        self._target, self._free = target, memory
        self._kept: dict[tuple[int, ...], list[Tensor]] = {}

    def __call__(self, tokens: Sequence[int]) -> list[Tensor]:
        """For each layer float32 [T, hidden].

        Raises:
            ContextLengthError: the text is longer than the target's context.
        """
        key = tuple(tokens)
        if key in self._kept:
            return self._kept[key]
        if len(key) > self._target.max_positions:
            raise ContextLengthError(
                f"a text has {len(key)} tokens and the target's context {self._target.max_positions}: shorten it."
            )
        states = self._run(key)
        size = sum(state.nbytes for state in states)
        if size <= self._free:
            self._kept[key] = states
            self._free -= size
        return states

    def _run(self, tokens: Sequence[int]) -> list[Tensor]:
        pools = [PagePool(group, pages_for(len(tokens))) for group in self._target.groups]
        tables = [PageTable(pool, len(tokens)) for pool in pools]
        for table in tables:
            table.reserve(len(tokens))
        pieces: list[dict[int, Tensor]] = []
        for start in range(0, len(tokens), _PIECE):
            rows = Rows()
            rows.piece(tokens[start : start + _PIECE], start, tables, 0)
            scores = self._target.forward(rows.batch(), [pool.slab for pool in pools], sorted(set(self.layers)))
            pieces.append(scores.features)
        return [torch.cat([piece[layer] for piece in pieces]) for layer in self.layers]
