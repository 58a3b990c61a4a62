"""The states of a target over texts, taken when they are needed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from paceline.batch import Rows
from paceline.errors import ContextLengthError
from paceline.pages import PagePool, PageTable, pages_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paceline.targets.decoder import Decoder
    from paceline.train.examples import Example

_PIECE = 512  # rows of one pass
_MEMORY = 1 << 30


class Features:
    """The inputs of some layers of a target, for every token of a text: one pass of the target over all of it.

    They are the bits that a drafter gets when the text is decoded, as a row depends on its own path alone, rounded to
    bfloat16.

    Attributes:
        layers: the layers; their number taps what the final norm reads.
        rows: how many rows the target has been asked for.
        seconds: what that took.
    """

    def __init__(self, target: Decoder, layers: Sequence[int], memory: int = _MEMORY) -> None:
        """Tap ``layers``.

        Args:
            memory: bytes of states that are kept for the next time; beyond them the target runs again.
        """
        self.layers = tuple(layers)
        self.rows, self.seconds = 0, 0.0
        self._target, self._free = target, memory
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, examples: Sequence[Example]) -> list[Tensor]:
        """For each example bfloat16 [T, layers, hidden].

        Raises:
            ContextLengthError: a text is longer than the target's context.
        """
        texts = list(dict.fromkeys(example.tokens for example in examples if example.tokens not in self._kept))
        longest = max(map(len, texts), default=0)
        if longest > self._target.max_positions:
            raise ContextLengthError(
                f"a text has {longest} tokens and the target's context {self._target.max_positions}: shorten it."
            )
        found = dict(zip(texts, self._run(texts), strict=True)) if texts else {}
        for tokens, states in found.items():
            if states.nbytes <= self._free:
                self._kept[tokens] = states
                self._free -= states.nbytes
        return [
            found[example.tokens] if example.tokens in found else self._kept[example.tokens] for example in examples
        ]

    def _run(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        begun = time.perf_counter()
        pools = [PagePool(group, sum(pages_for(len(text)) for text in texts)) for group in self._target.groups]
        longest = max(map(len, texts))
        tables = [[PageTable(pool, longest) for pool in pools] for _ in texts]
        for text, own in zip(texts, tables, strict=True):
            for table in own:
                table.reserve(len(text))
        hidden = self._target.spec.hidden
        states = [torch.empty(len(text), len(self.layers), hidden, dtype=torch.bfloat16) for text in texts]
        for pieces in _passes([len(text) for text in texts]):
            rows = Rows()
            for number, start, end in pieces:
                rows.piece(texts[number][start:end], start, tables[number], 0)
            scores = self._target.forward(rows.batch(), [pool.slab for pool in pools], sorted(set(self.layers)))
            sizes = [end - start for _, start, end in pieces]
            for place, layer in enumerate(self.layers):
                parts = torch.split(scores.features[layer], sizes)
                for (number, start, end), part in zip(pieces, parts, strict=True):
                    states[number][start:end, place] = part
        self.rows += sum(map(len, texts))
        self.seconds += time.perf_counter() - begun
        return states


def _passes(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Full passes of pieces (number of the text, start, end), in order; a text is in each of them once at most."""
    pieces: list[tuple[int, int, int]] = []
    room = _PIECE
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            pieces.append((number, start, end))
            room -= end - start
            start = end
            if not room:
                yield pieces
                pieces, room = [], _PIECE
    if pieces:
        yield pieces
