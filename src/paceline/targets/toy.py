"""A target without weights, for exact tests: it reads a row's path back out of the cache and looks the answer up.

What it returns depends on every token of the path and on nothing else, so a page mapped wrongly, a rejected row left
visible or a path committed out of order changes the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.pages import PAGE, CacheGroup
from paceline.targets import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.pages import Slab


class ToyTarget:
    """Scores each row with ``rule(path)``, float32 [vocab_size], where ``path`` is read from the slab.

    The cache holds the tokens themselves, as fp32, so ids stay below 2**24.
    """

    def __init__(
        self,
        rule: Callable[[list[int]], Tensor],
        vocab_size: int,
        max_positions: int = 4096,
        window: int | None = None,
    ) -> None:
        self.rule = rule
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.groups = (CacheGroup("toy", 1, 1, 1, torch.float32, window),)

    def forward(self, batch: Batch, slabs: Sequence[Slab], features: Sequence[int] = ()) -> Scores:
        keys, table = slabs[0].keys, batch.tables[0]
        sizes = batch.starts.diff().tolist()
        segment = torch.tensor([place for place, rows in enumerate(sizes) for _ in range(rows)])
        places = batch.storage.long()
        keys[table[segment, places // PAGE].long(), 0, 0, 0, places % PAGE] = batch.ids.float()
        paths = self.paths(batch, slabs, batch.score.tolist())
        logits = torch.stack([self.rule(path) for path in paths]) if paths else torch.empty(0, self.vocab_size)
        hidden = torch.tensor([[float(path[-1])] for path in paths]).reshape(-1, 1)
        taps = {layer: batch.ids.float().unsqueeze(1) + layer for layer in features}
        return Scores(logits, hidden, taps)

    def paths(self, batch: Batch, slabs: Sequence[Slab], rows: Sequence[int]) -> list[list[int]]:
        """What the cache holds for each of ``rows``, which ascend: its path, or the part of it in the window."""
        context, words, starts = batch.context.tolist(), batch.visible.tolist(), batch.starts.tolist()
        segment, stored = -1, []
        paths = []
        for row in rows:
            while row >= starts[segment + 1]:
                segment += 1
                stored = self._stored(batch.tables[0][segment], slabs[0].keys)
            bits = [context[row] + bit for bit in range(64) if words[row] >> bit & 1]
            places = [*range(context[row]), *bits]
            window = self.groups[0].window
            paths.append([int(stored[place]) for place in (places if window is None else places[-window:])])
        return paths

    @staticmethod
    def _stored(table: Tensor, keys: Tensor) -> list[float]:
        """Everything in one sequence's pages, NaN where none is mapped: to read that is an error."""
        held = keys[table.long(), 0, 0, 0]
        held[table < 0] = torch.nan
        stored: list[float] = held.flatten().tolist()
        return stored


def table_rule(vocab_size: int, seed: int = 0, spread: float = 3.0, memory: int = 3) -> Callable[[list[int]], Tensor]:
    """Random logits, fixed by the seed, that depend on the last ``memory`` tokens and on the length of the path."""

    def rule(path: list[int]) -> Tensor:
        key = seed
        for token in (len(path), *path[-memory:]):
            key = (key * 1_000_003 + token + 1) % (2**31 - 1)
        generator = torch.Generator().manual_seed(key)
        return torch.randn(vocab_size, generator=generator) * spread

    return rule


def script_rule(
    vocab_size: int, script: Sequence[int], prompt_length: int, margin: float = 8.0
) -> Callable[[list[int]], Tensor]:
    """The argmax after ``prompt_length + k`` tokens is ``script[k]`` whatever came before; after its end, the last."""

    def rule(path: list[int]) -> Tensor:
        row = torch.zeros(vocab_size)
        row[script[min(max(len(path) - prompt_length, 0), len(script) - 1)]] = margin
        return row

    return rule
