"""Token recycling: what the target thought likely after a token before, rejected or not, it may think likely again.

Source: Luo et al. 2024, "Token Recycling" (arXiv 2408.08696). The tree's shape is fixed, by a file
or by how often each successor is right; only its tokens are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafters import Method, Needs, Outcome, Surroundings, View
from paceline.errors import OptionError
from paceline.shape import best_first
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.options import Speculation
    from paceline.shape import TreeShape

WIDTH = 8
"""How many successors of a token are kept."""

# How often the successor of each rank is right; the order of growth follows from it, the pacer corrects the rest.
_CHANCES = (0.45, 0.1, 0.05, 0.035, 0.025, 0.02, 0.015, 0.01)
_SPARE = 2  # shapes are so many times larger than a tree, for the places of tokens that were never seen
_TABLES = 16


@dataclass(frozen=True)
class _Shape:
    """A tree without its tokens, the nodes that matter most first; node 0 is the root.

    Attributes:
        parents, ranks: of each node; the root's count for nothing.
        survival: the estimated chance of each node.
    """

    parents: Sequence[int]
    ranks: Sequence[int]
    survival: Sequence[float]

    @classmethod
    def likeliest(cls, width: int) -> _Shape:
        """The likeliest nodes where every node has ``width`` children, with some to spare."""
        return cls(*best_first([_CHANCES[:width]], _SPARE * MAX_NODES))


@dataclass(slots=True)
class _State:
    """A sequence's isolation key, and the outcomes that may turn out to lie behind the end of its answer."""

    key: str | None
    waiting: list[Outcome] = field(default_factory=list)


class RecyclingDrafter:
    """Trees out of one table of the likeliest successors of every token, for each isolation key."""

    name = "recycling"

    def __init__(
        self, vocab_size: int, *, width: int = WIDTH, shape: TreeShape | None = None, tables: int = _TABLES
    ) -> None:
        """Keep the successors of ``vocab_size`` tokens.

        Args:
            vocab_size: ids below it are proposed.
            width: the most children of a node; 1 is a chain.
            shape: the tree to fill, in place of the likeliest one of that width.
            tables: how many isolation keys are remembered, those used last.

        Raises:
            OptionError: a node of the shape has more children than successors are kept.
        """
        self.needs = Needs(top_k=min(WIDTH, vocab_size), cost="lookup", ended=self._end)
        self._vocab_size = vocab_size
        self._shape = self._filled(shape) if shape else _Shape.likeliest(min(width, self.needs.top_k))
        self._limit = tables
        self._tables: dict[str | None, NDArray[np.int32]] = {}
        self._states: dict[int, _State] = {}

    def _filled(self, shape: TreeShape) -> _Shape:
        if shape.width > self.needs.top_k:
            raise OptionError(
                f"the tree gives a node {shape.width} children, and recycling knows {self.needs.top_k} successors of a "
                "token; leave out the others."
            )
        return _Shape(shape.parents, shape.ranks, shape.survival([_CHANCES]))

    def start(self, view: View, valid: int) -> None:
        self._states[view.id] = _State(view.cache_salt)

    def fork(self, parent: int, child: View) -> None:
        self._states[child.id] = _State(child.cache_salt)

    def rewind(self, sequence: int, length: int) -> None:
        """Nothing to do: what the target thought likely stays so."""

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """What is kept belongs to no place of the sequence."""
        return 0

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take note of what has been delivered; the rest waits until it has been."""
        for outcome in outcomes:
            state = self._states[outcome.id]
            state.waiting.append(outcome)
            self._learn(state, outcome.delivered)

    def _learn(self, state: _State, delivered: int | None) -> None:
        """Learn from the outcomes that lie within the first ``delivered`` tokens."""
        while state.waiting and (delivered is None or _reach(state.waiting[0]) <= delivered):
            self._note(state.key, state.waiting.pop(0))

    def _end(self, view: View) -> None:
        """Learn what was delivered of an answer that has ended."""
        state, end = self._states.get(view.id), len(view.tokens)
        if state is not None:
            self._learn(state, end)
            for outcome in state.waiting:
                scored = [(path, ids) for path, ids in outcome.scored if outcome.start + len(path) + 1 < end]
                if scored or not outcome.scored:
                    rows = outcome.rows[: max(0, end - outcome.start)]
                    self._note(state.key, replace(outcome, rows=rows, token=None, scored=scored))
            state.waiting.clear()

    def _note(self, key: str | None, outcome: Outcome) -> None:
        """Write the successors of every scored row's token over what was known of it.

        Of a prompt, whose rows are not scored, the token that follows each is noted where nothing was known.
        """
        table = self._table(key)
        if outcome.scored:
            tokens = [path[-1] if path else outcome.rows[0] for path, _ in outcome.scored]
            table[tokens] = [ids for _, ids in outcome.scored]
        else:
            text = np.array([*outcome.rows, *([] if outcome.token is None else [outcome.token])])
            new = np.flatnonzero(table[text[:-1], 0] == self._vocab_size)
            table[text[new], 0] = text[new + 1]

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        for view in views:
            if view.id in self._states:
                self._learn(self._states[view.id], view.delivered)
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
        """Fill the shape; where a token was never seen no node below it is known, and the next ones move up."""
        successor = self._table(view.cache_salt).item
        tree = TokenTree.root(view.tokens[-1])
        place: dict[int, int] = {0: 0}
        shape = zip(self._shape.parents, self._shape.ranks, self._shape.survival, strict=True)
        for node, (above, rank, survival) in enumerate(shape):
            if len(tree) > budget:
                break
            parent = place.get(above) if node else None
            if parent is None:
                continue
            token = successor(tree.tokens[parent], rank)
            if token != self._vocab_size:
                place[node] = tree.add(parent, token, survival, self.name)
        return tree


def _reach(outcome: Outcome) -> int:
    """How many tokens there are with those of an outcome."""
    return outcome.start + len(outcome.rows) + (outcome.token is not None)


def _make(speculation: Speculation, around: Surroundings) -> RecyclingDrafter:
    """
    Raises:
        OptionError: the tree gives a node more children than successors are kept.
    """
    vocab_size = around.target.decoder.vocab_size
    return RecyclingDrafter(vocab_size, width=speculation.width(WIDTH), shape=speculation.shape)


METHOD = Method(_make, options=("tree",), trees=True, shapes=True)
