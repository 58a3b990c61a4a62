"""A tree of drafted tokens below the last committed one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import DrafterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Row = NDArray[Any]

MAX_NODES = 64
"""The most nodes of a tree, the root counted: one 64-bit word says which of them a row sees."""


class Dropping:
    """The liberty to drop nodes after a look at them.

    Only rules under which the output is right whatever was drafted grant it. Under the others whether a drawn token is
    sent to verification may not depend on the token: what is drawn stays, in the order in which it was drawn.
    """


@dataclass(frozen=True, slots=True)
class Drawn:
    """Children of one node, in the order in which they were drawn.

    Attributes:
        tokens: their ids, no two the same.
        chances: the estimated chance of each that the target chooses it after its parent; for budgets alone.
        q: float64 [vocab], what they were drawn from without replacement, where the rule of acceptance needs it.
    """

    tokens: list[int]
    chances: list[float]
    q: Row | None = None


@dataclass(slots=True)
class TokenTree:
    """Node 0 is the pending root: the last committed token, whose keys are not in the cache yet.

    Attributes:
        tokens: the token of each node.
        parents: the parent of each node, always of a smaller index; -1 for the root.
        survival: the estimated probability that a node and all its ancestors are accepted; for budgets alone.
        origin: the name of the drafter that proposed the node; "target" for the root.
        q: for each node whose children were drawn from probabilities, those: float64 [vocab].
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    survival: list[float] = field(default_factory=lambda: [1.0])
    origin: list[str] = field(default_factory=lambda: ["target"])
    q: dict[int, Row] = field(default_factory=dict)

    @classmethod
    def root(cls, token: int) -> TokenTree:
        return cls([token])

    @classmethod
    def chain(cls, root: int, drafts: list[int], survival: list[float], origin: str) -> TokenTree:
        n = len(drafts)
        return cls([root, *drafts], list(range(-1, n)), [1.0, *survival], ["target", *[origin] * n])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, survival: float, origin: str) -> int:
        """Append a child of ``parent`` and return its index.

        Raises:
            DrafterError: the parent does not exist, or the tree is full.
        """
        if not 0 <= parent < len(self.tokens):
            raise DrafterError(f"node {len(self.tokens)} names parent {parent}, which does not stand before it.")
        if len(self.tokens) == MAX_NODES:
            raise DrafterError(f"a token tree has at most {MAX_NODES} nodes, the root counted.")
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(survival)
        self.origin.append(origin)
        return len(self.tokens) - 1

    def grow(self, parent: int, drawn: Drawn, origin: str) -> list[int]:
        """Append drawn children of ``parent`` and return their indices; the errors are those of :meth:`add`."""
        above = self.survival[parent]
        if drawn.q is not None:
            self.q[parent] = drawn.q
        return [
            self.add(parent, token, above * chance, origin)
            for token, chance in zip(drawn.tokens, drawn.chances, strict=True)
        ]

    def depths(self) -> list[int]:
        """How many tokens below the root each node is."""
        depths = [0] * len(self.parents)
        for node, parent in enumerate(self.parents[1:], 1):
            depths[node] = depths[parent] + 1
        return depths

    def masks(self) -> list[int]:
        """For each node a 64-bit word, as a signed integer, whose bits are the node and its ancestors."""
        masks = [1] * len(self.parents)
        for node, parent in enumerate(self.parents[1:], 1):
            masks[node] = masks[parent] | (1 << node)
        return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        nodes = [node]
        while (node := self.parents[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def head(self, nodes: int) -> TokenTree:
        """The tree of the first ``nodes`` nodes; a parent stands before its children, so it is whole."""
        return TokenTree(self.tokens[:nodes], self.parents[:nodes], self.survival[:nodes], self.origin[:nodes])

    def best(self, nodes: int, by: Dropping) -> TokenTree:
        """The ``nodes`` nodes with the highest survival, in their old order; ties go to the earlier node.

        Survival never rises from a parent to a child, so the parents of what stays stay too.
        """
        if len(self) <= nodes:
            return self
        ranked = sorted(range(len(self)), key=lambda node: (-self.survival[node], node))
        return self.part(sorted(ranked[:nodes]), by)

    def part(self, kept: list[int], by: Dropping) -> TokenTree:
        """The nodes ``kept``, which ascend; with each of them its parent is kept."""
        if len(kept) == len(self):
            return self
        place = {node: i for i, node in enumerate(kept)}
        return TokenTree(
            [self.tokens[n] for n in kept],
            [place[self.parents[n]] if n else -1 for n in kept],
            [self.survival[n] for n in kept],
            [self.origin[n] for n in kept],
        )

    def merge(self, other: TokenTree) -> None:
        """Add what another tree has beside this one, as long as there is room: common prefixes are one.

        Of a node that both have the estimate stays; what is added below it keeps its chance after its parent.
        """
        known = {(parent, token): n for n, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))}
        place = {0: 0}
        for node in range(1, len(other)):
            above = other.parents[node]
            parent = place.get(above)
            if parent is None:
                continue
            same = known.get((parent, other.tokens[node]))
            if same is None and len(self) < MAX_NODES:
                whole = other.survival[above]
                chance = other.survival[node] / whole if whole > 0.0 else 0.0
                same = self.add(parent, other.tokens[node], self.survival[parent] * chance, other.origin[node])
                known[parent, other.tokens[node]] = same
            if same is not None:
                place[node] = same

    def follow(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """How many of the tokens behind the root are drafted in a row, and whether other tokens are in the next's
        place."""
        node, right = 0, 0
        for token in tokens:
            children = [n for n in range(node + 1, len(self)) if self.parents[n] == node]
            node = next((n for n in children if self.tokens[n] == token), 0)
            if not node:
                return right, bool(children)
            right += 1
        return right, False

    def check(self, vocab_size: int) -> None:
        """Raise unless the tree, cut to :data:`MAX_NODES` nodes, is one that can be verified.

        Raises:
            DrafterError: no node, lists of unequal length, an orphan or a cycle, an id out of range, a sibling
                proposed twice, a survival that rises on the way down.
        """
        n = len(self.tokens)
        if not n == len(self.parents) == len(self.survival) == len(self.origin):
            raise DrafterError("tokens, parents, survival and origin of a token tree differ in length.")
        if not n:
            raise DrafterError("a token tree has at least its root.")
        if not all(isinstance(number, int) for number in (*self.tokens, *self.parents)):
            raise DrafterError("tokens and parents of a token tree are integers.")
        if self.parents[0] != -1:
            raise DrafterError("node 0 of a token tree is its root and has no parent.")
        seen: set[tuple[int, int]] = set()
        for node in range(1, n):
            parent, token = self.parents[node], self.tokens[node]
            if not 0 <= parent < node:
                raise DrafterError(f"node {node} names parent {parent}, which does not stand before it.")
            if not 0 <= token < vocab_size:
                raise DrafterError(f"node {node} holds token {token}, outside 0 to {vocab_size - 1}.")
            if (parent, token) in seen:
                raise DrafterError(f"node {parent} has two children with token {token}.")
            if not 0.0 <= self.survival[node] <= self.survival[parent]:
                raise DrafterError(f"the survival of node {node} is negative or above its parent's.")
            seen.add((parent, token))

    def check_drawn(self, vocab_size: int) -> None:
        """Raise unless every node below the root can have been drawn from a row that its parent's children have.

        Raises:
            DrafterError: a row is missing or of another length, or gives a child no chance.
        """
        for node, parent in enumerate(self.parents[1:], 1):
            row = self.q.get(parent)
            if row is None or row.shape != (vocab_size,):
                raise DrafterError(
                    f"the children of node {parent} come without the {vocab_size} chances of their draw."
                )
            if not 0.0 < row[self.tokens[node]] <= 1.0:
                raise DrafterError(f"node {node} was drawn with a chance of {row[self.tokens[node]]}.")
