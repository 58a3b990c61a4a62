"""Token recycling: what the target thought likely after a token before, rejected or not, it may think likely again.

Source: Luo et al. 2024, "Token Recycling" (arXiv 2408.08696). The tree's shape is fixed; only its tokens are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.drafters import Method, Needs, Outcome, Surroundings, View
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.options import Speculation

WIDTH = 8
"""How many successors of a token are kept."""

# How often the successor of each rank is right; the order of growth follows from it, the pacer corrects the rest.
_CHANCES = (0.5, 0.13, 0.07, 0.05, 0.04, 0.03, 0.025, 0.02)
_SPARE = 2  # shapes are so many times larger than a tree, for the places of tokens that were never seen
_TABLES = 16


@dataclass(frozen=True)
class _Shape:
    """A tree without its tokens, likeliest nodes first; node 0 is the root.

    Attributes:
        parents, ranks: of each node, int64 [N]; the root's count for nothing.
        survival: the estimated chance of each node.
        levels: the nodes of each depth below the root, int64.
    """

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]
    survival: NDArray[np.float64]
    levels: tuple[NDArray[np.int64], ...]


@cache
def _shape(width: int) -> _Shape:
    """The likeliest nodes where every node has ``width`` children."""
    parents, ranks, survival, depths = [0], [0], [1.0], [0]
    waiting: list[tuple[float, int, int]] = []
    newest = 0
    while len(parents) <= _SPARE * MAX_NODES:
        for rank in range(width):
            heappush(waiting, (-survival[newest] * _CHANCES[rank], newest, rank))
        negative, parent, rank = heappop(waiting)
        newest = len(parents)
        parents.append(parent)
        ranks.append(rank)
        survival.append(-negative)
        depths.append(depths[parent] + 1)
    levels = [np.flatnonzero(np.array(depths) == depth) for depth in range(1, max(depths) + 1)]
    return _Shape(np.array(parents), np.array(ranks), np.array(survival), tuple(levels))


class RecyclingDrafter:
    """Trees out of one table of the likeliest successors of every token, for each isolation key."""

    name = "recycling"

    def __init__(self, vocab_size: int, *, width: int = WIDTH, tables: int = _TABLES) -> None:
        """Keep the successors of ``vocab_size`` tokens.

        Args:
            vocab_size: ids below it are proposed.
            width: the most children of a node; 1 is a chain.
            tables: how many isolation keys are remembered, those used last.
        """
        self.needs = Needs(top_k=min(WIDTH, vocab_size))
        self._vocab_size = vocab_size
        self._shape = _shape(min(width, self.needs.top_k))
        self._limit = tables
        self._tables: dict[str | None, NDArray[np.int32]] = {}
        self._keys: dict[int, str | None] = {}

    def start(self, view: View, valid: int) -> None:
        self._keys[view.id] = view.cache_salt

    def fork(self, parent: int, child: View) -> None:
        self._keys[child.id] = child.cache_salt

    def rewind(self, sequence: int, length: int) -> None:
        """Nothing to do: what the target thought likely stays so."""

    def release(self, sequence: int) -> None:
        self._keys.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """Nothing is kept of a sequence but its key."""
        return 0

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Write the successors of every scored row's token over what was known of it.

        Of a prompt, whose rows are not scored, the token that follows each is noted where nothing was known.
        """
        for outcome in outcomes:
            table = self._table(self._keys[outcome.id])
            if outcome.scored:
                tokens = [path[-1] if path else outcome.rows[0] for path, _ in outcome.scored]
                table[tokens] = torch.stack([ids for _, ids in outcome.scored]).numpy()
            else:
                text = np.array([*outcome.rows, *([] if outcome.token is None else [outcome.token])])
                new = np.flatnonzero(table[text[:-1], 0] == self._vocab_size)
                table[text[new], 0] = text[new + 1]

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _table(self, key: str | None) -> NDArray[np.int32]:
        """The table of a key, int32 [vocab + 1, top-k]: one more token stands for none, and is its own successor."""
        table = self._tables.pop(key, None)
        if table is None:
            table = np.full((self._vocab_size + 1, self.needs.top_k), self._vocab_size, np.int32)
        self._tables[key] = table
        while len(self._tables) > self._limit:
            del self._tables[next(iter(self._tables))]
        return table

    def _tree(self, view: View, budget: int) -> TokenTree:
        shape, table = self._shape, self._table(view.cache_salt)
        tokens = np.full(len(shape.parents), self._vocab_size)
        tokens[0] = view.tokens[-1]
        for level in shape.levels[:budget]:
            tokens[level] = table[tokens[shape.parents[level]], shape.ranks[level]]
        # Where a token was never seen, no node below it is known either, and the next likeliest ones move up.
        known = np.flatnonzero(tokens != self._vocab_size)[: budget + 1]
        parents = np.searchsorted(known, shape.parents[known])
        return TokenTree(
            tokens[known].tolist(),
            [-1, *parents[1:].tolist()],
            shape.survival[known].tolist(),
            ["target", *[self.name] * (len(known) - 1)],
        )


def _make(speculation: Speculation, around: Surroundings) -> RecyclingDrafter:
    return RecyclingDrafter(around.target.decoder.vocab_size, width=speculation.width(WIDTH))


METHOD = Method(_make, options=("tree",), trees=True)
