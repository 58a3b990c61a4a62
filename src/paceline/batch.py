"""The flattened rows of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.pages import PageTable
    from paceline.tree import TokenTree


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


class Rows:
    """Collects the segments of one pass and lays them out as a batch."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._storage: list[int] = []
        self._context: list[int] = []
        self._visible: list[int] = []
        self._starts = [0]
        self._score: list[int] = []
        self._tables: list[Sequence[PageTable]] = []

    def tree(self, tree: TokenTree, base: int, tables: Sequence[PageTable]) -> None:
        """Add a token tree whose root follows ``base`` rows of its sequence's storage; every node is scored."""
        nodes = len(tree)
        self._score += range(len(self._ids), len(self._ids) + nodes)
        self._ids += tree.tokens
        self._positions += [base + depth for depth in tree.depths()]
        self._storage += range(base, base + nodes)
        self._context += [base] * nodes
        self._visible += tree.masks()
        self._close(tables)

    def piece(self, tokens: Sequence[int], start: int, tables: Sequence[PageTable], scored: int) -> None:
        """Add committed ``tokens`` from index ``start`` of their sequence on; the last ``scored`` are scored."""
        end = start + len(tokens)
        self._ids += tokens
        self._positions += range(start, end)
        self._storage += range(start, end)
        self._context += range(start + 1, end + 1)
        self._visible += [0] * len(tokens)
        self._score += range(len(self._ids) - scored, len(self._ids))
        self._close(tables)

    def level(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        masks: Sequence[int],
        base: int,
        first: int,
        tables: Sequence[PageTable],
    ) -> None:
        """Add nodes of a tree that grows level by level: ``first`` nodes of it are in storage from ``base`` on, and
        these follow. Every one is scored.

        Args:
            depths: how many nodes of the tree are above each.
            masks: for each a word whose bits are the node and those above it, by their places in the tree.
        """
        end = len(self._ids) + len(tokens)
        self._score += range(len(self._ids), end)
        self._ids += tokens
        self._positions += [base + depth for depth in depths]
        self._storage += range(base + first, base + first + len(tokens))
        self._context += [base] * len(tokens)
        self._visible += [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
        self._close(tables)

    def _close(self, tables: Sequence[PageTable]) -> None:
        self._starts.append(len(self._ids))
        self._tables.append(tables)

    def batch(self) -> Batch:
        return Batch(
            ids=torch.tensor(self._ids),
            positions=torch.tensor(self._positions, dtype=torch.int32),
            starts=torch.tensor(self._starts, dtype=torch.int32),
            storage=torch.tensor(self._storage, dtype=torch.int32),
            context=torch.tensor(self._context, dtype=torch.int32),
            visible=torch.tensor(self._visible),
            tables=tuple(torch.stack([table.tensor for table in group]) for group in zip(*self._tables, strict=True)),
            score=torch.tensor(self._score, dtype=torch.int64),
        )
