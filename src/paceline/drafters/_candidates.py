"""A tree that grows level by level, and the likeliest of its nodes within a budget.

Source: the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4): the best nodes of a level are
expanded, and of all that was drafted the best are kept.
"""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import TYPE_CHECKING

from paceline.tree import MAX_NODES, Drawn, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.options import Speculation
    from paceline.shape import TreeShape
    from paceline.tree import Row

WIDTH = 10
"""The most children of a node, and the most nodes of a level that cost a pass to expand: as EAGLE-2 has it."""


def tree_of(speculation: Speculation) -> int | TreeShape:
    """The width that is asked for, where 1 is a chain, or the shape of a file."""
    if speculation.shape is not None:
        return speculation.shape
    return speculation.width(MAX_NODES - 1 if isinstance(speculation.tree, int) else WIDTH)


def width_of(tree: int | TreeShape) -> int:
    """The most children of a node."""
    return tree if isinstance(tree, int) else tree.width


def candidates(root: int, budget: int, tree: int | TreeShape) -> Candidates:
    """A tree to grow, of any shape that pays or of one that is given."""
    return Candidates(root, budget) if isinstance(tree, int) else ShapedCandidates(root, budget, tree)


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


class ShapedCandidates(Candidates):
    """Drafted nodes of a tree whose shape is given: all of them are kept."""

    def __init__(self, root: int, budget: int, shape: TreeShape) -> None:
        """Fill the first ``budget`` nodes of ``shape``."""
        super().__init__(root, budget)
        self._children: dict[int, list[int]] = {}
        for place, parent in enumerate(shape.head(budget).parents[1:], 1):
            self._children.setdefault(parent, []).append(place)
        self._places = [0]

    def take(self, node: int, drawn: Drawn, ranks: Sequence[float]) -> None:
        places = self._children.get(self._places[node], [])[: len(drawn.tokens)]
        kept = Drawn(drawn.tokens[: len(places)], drawn.chances[: len(places)], drawn.q)
        super().take(node, kept, ranks)
        self._places += places

    def frontier(self, width: int) -> list[int]:
        """The new nodes that have children in the shape, at most ``width`` of them."""
        new = [node for node in range(self._newest, len(self.tokens)) if self._places[node] in self._children]
        self._newest = len(self.tokens)
        return new[:width]
