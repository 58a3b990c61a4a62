"""A tree that grows level by level, and the likeliest of its nodes within a budget.

Source: the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4): the best nodes of a level are
expanded, and of all that was drafted the best are kept.
"""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import TYPE_CHECKING

from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.options import Speculation
    from paceline.tree import Drawn, Row

WIDTH = 10
"""The most children of a node, and the most nodes of a level that cost a pass to expand: as EAGLE-2 has it."""


def tree_width(speculation: Speculation) -> int:
    """The width that is asked for; 1 is a chain."""
    if isinstance(speculation.tree, int):
        return speculation.tree
    return 1 if speculation.tree == "none" else WIDTH


class Candidates:
    """Drafted nodes of one tree, node 0 its root; a node that cannot be among the best any more is not taken.

    Which nodes are taken, kept and offered for expansion depends on their chances alone.
    """

    def __init__(self, root: int, budget: int) -> None:
        """Keep ``budget`` nodes below ``root``."""
        self.tokens, self.parents, self.survival, self.depths = [root], [-1], [1.0], [0]
        self.q: dict[int, Row] = {}
        self._budget = budget
        self._best: list[float] = []  # a heap of the survivals of the best nodes
        self._newest = 1  # where the newest level begins

    def take(self, node: int, drawn: Drawn, ranks: Sequence[float]) -> None:
        """Add drawn children of ``node``.

        Where a rule of acceptance forbids that what is kept depends on what was drawn, ``ranks``, falling chances by
        draw order, stand in for the chances: then the shape of a tree is fixed, and the first drawn are kept.
        """
        chances: Sequence[float] = drawn.chances
        if drawn.q is not None:
            self.q[node] = drawn.q
            chances = ranks[: len(drawn.tokens)]
        for token, chance in zip(drawn.tokens, chances, strict=True):
            survival = self.survival[node] * chance
            if len(self._best) < self._budget:
                heappush(self._best, survival)
            elif survival > self._best[0]:
                heapreplace(self._best, survival)
            else:
                break  # chances fall in draw order
            self.tokens.append(token)
            self.parents.append(node)
            self.survival.append(survival)
            self.depths.append(self.depths[node] + 1)

    def frontier(self, width: int) -> list[int]:
        """The best ``width`` nodes of those taken since the last call, in order, without those whose children could
        not be kept."""
        full = len(self._best) >= self._budget
        lowest = self._best[0] if full else -1.0
        new = [node for node in range(self._newest, len(self.tokens)) if self.survival[node] > lowest]
        self._newest = len(self.tokens)
        return sorted(sorted(new, key=lambda node: -self.survival[node])[:width])

    def path(self, node: int) -> list[int]:
        """The tokens between the root and the children of ``node``."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def tree(self, origin: str) -> TokenTree:
        """The best nodes; ties go to the earlier node."""
        ranked = sorted(range(1, len(self.tokens)), key=lambda node: -self.survival[node])
        tree, place = TokenTree.root(self.tokens[0]), {0: 0}
        for node in sorted(ranked[: self._budget]):
            parent = place[self.parents[node]]
            place[node] = tree.add(parent, self.tokens[node], self.survival[node], origin)
            if self.parents[node] in self.q:
                tree.q[parent] = self.q[self.parents[node]]
        return tree
