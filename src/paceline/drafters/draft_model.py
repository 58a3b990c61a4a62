"""A smaller model drafts chains and trees, with a cache of its own and, where it must, in a vocabulary of its own.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318); other vocabularies: Timor et al.
2025 (arXiv 2502.05202). A token is drawn with the noise that the target will use at the same position, so that the two
agree as often as they can.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from paceline.acceptance import RULES
from paceline.batch import Rows
from paceline.bridges import bridge
from paceline.bridges.agreeing import Agreeing
from paceline.drafters import Method, Needs, Outcome, View
from paceline.drafters._candidates import candidates, tree_of, width_of
from paceline.drafters._room import with_room
from paceline.errors import ResourceError
from paceline.pages import PageTable
from paceline.text import Tokenizer
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.bridges import Bridge, Kind, Reading
    from paceline.drafters import Models, Surroundings
    from paceline.options import Speculation
    from paceline.pages import CacheGroup, PagePool
    from paceline.shape import TreeShape
    from paceline.targets import Target

_PIECE = 512  # rows of a prompt that the draft model takes in one pass
_LEVELS = 8  # of a tree; a chain is as long as its budget
_RANKS = tuple(0.7 / rank**2 for rank in range(1, MAX_NODES))  # where chances must not depend on what is drawn


@dataclass(slots=True)
class _State:
    """What the draft model holds of one sequence.

    Attributes:
        reading: the sequence in the draft model's ids.
        tables: where keys and values are.
        filled: how many leading ids have keys.
        held: for each row behind those the draft model's id, and the place among them of the row above, or -1.
    """

    reading: Reading
    tables: tuple[PageTable, ...]
    filled: int = 0
    held: list[tuple[int, int]] = field(default_factory=list)

    def settle(self) -> None:
        """Read what was committed since, and keep the rows that still stand for it, drafted ones too.

        One id at least is left to take in: logits come with it.
        """
        kept = self.reading.update()
        ids = self.reading.ids
        if kept < self.filled:
            self.filled = kept
        elif self.held:
            path = self._followed(ids)
            for table in self.tables:
                table.commit(self.filled, path)
            self.filled += len(path)
        self.held.clear()
        self.filled = max(0, min(self.filled, len(ids) - 1))

    def _followed(self, ids: Sequence[int]) -> list[int]:
        """The places of drafted rows that are those of the next ids."""
        path, above = list[int](), -1
        for token in ids[self.filled : self.filled + len(self.held)]:
            above = next((place for place, row in enumerate(self.held) if row == (token, above)), -1)
            if above < 0:
                break
            path.append(above)
        return path

    def forget(self) -> None:
        """Start again from nothing."""
        self.held.clear()
        self.filled = 0
        for table in self.tables:
            table.free()

    def reserve(self, rows: int) -> None:
        """Map so many rows, and give up the pages that none of those still to come sees: what is settled stays.

        Raises:
            ResourceError: too few pages are free.
        """
        keep = min(self.filled, self.reading.settled, len(self.reading.ids) - 1)
        for table in self.tables:
            window = table.pool.group.window
            if window is not None:
                table.drop_before(keep - window)
            table.reserve(rows)


class _Growth:
    """A tree in the making."""

    def __init__(self, view: View, state: _State, budget: int, levels: int, tree: int | TreeShape) -> None:
        self.view, self.state, self.budget, self.levels = view, state, budget, levels
        self.found = candidates(view.tokens[-1], budget, tree)
        self._width = width_of(tree)
        self._expanded = tree if isinstance(tree, int) else MAX_NODES  # of a level, at most
        self._places: dict[int, int] = {0: -1}
        self._masks: dict[int, int] = {0: 0}

    def expand(self, node: int, logits: Tensor, vocabularies: Bridge) -> None:
        """Draw the children of ``node`` from what its row gave."""
        drawn = vocabularies.draw(self.view, logits, self.found.path(node), self._width, node)
        self.found.take(node, drawn, _RANKS)

    def frontier(self) -> list[int]:
        """The nodes to expand next."""
        self.levels -= 1
        room = MAX_NODES - len(self.state.held)
        return self.found.frontier(min(self._expanded, room)) if self.levels > 0 else []

    def add_rows(self, rows: Rows, nodes: Sequence[int], vocabularies: Bridge) -> None:
        """Add the nodes' rows to a pass; a row sees those of the nodes above it.

        Raises:
            ResourceError: the cache is full; nothing is added.
        """
        found, state = self.found, self.state
        held, places, masks = state.held, self._places, self._masks
        first = len(held)
        state.reserve(state.filled + first + len(nodes))
        ids = vocabularies.own([found.tokens[node] for node in nodes])
        for place, (token, node) in enumerate(zip(ids, nodes, strict=True), first):
            above = found.parents[node]
            held.append((token, places[above]))
            places[node] = place
            masks[node] = masks[above] | 1 << place
        depths = [found.depths[node] - 1 for node in nodes]
        rows.level(ids, depths, [masks[node] for node in nodes], state.filled, first, state.tables)


class DraftModelDrafter:
    """Chains and trees from a draft model, all sequences of a step in one pass a level."""

    name = "draft_model"
    needs = Needs()

    def __init__(
        self,
        model: Target,
        pools: Sequence[PagePool],
        max_model_len: int,
        vocabularies: Bridge | None = None,
        tree: int | TreeShape = 1,
    ) -> None:
        """Draft with ``model``, whose cache groups live in ``pools``.

        A sequence that grows past the model's own context, or beyond what it can read, is decoded without it, and one
        for which no page is free is until there are some.

        Args:
            max_model_len: the longest sequence, in tokens.
            vocabularies: the bridge from the model's ids to the target's; without it they are the same.
            tree: the most nodes of a level that are expanded, and the most children of each, where 1 is a chain; or
                a shape to fill.
        """
        self._model = model
        self._pools = tuple(pools)
        self._slabs = [pool.slab for pool in pools]
        self._capacity = max_model_len + MAX_NODES
        self._limit = min(model.max_positions, max_model_len)
        self._bridge: Bridge = vocabularies or Agreeing(model.vocab_size, model.vocab_size)
        self._tree = tree
        self._states: dict[int, _State] = {}

    def start(self, view: View, valid: int) -> None:
        tables = tuple(PageTable(pool, self._capacity) for pool in self._pools)
        self._states[view.id] = _State(self._bridge.reading(view.tokens), tables)

    def fork(self, parent: int, child: View) -> None:
        state = self._states[parent]
        tables: list[PageTable] = []
        try:
            for table in state.tables:
                tables.append(table.fork(state.filled))
        except ResourceError:
            for table in tables:
                table.free()
            raise
        reading = state.reading.fork(child.tokens)
        self._states[child.id] = _State(reading, tuple(tables), state.filled)

    def rewind(self, sequence: int, length: int) -> None:
        state = self._states[sequence]
        state.held.clear()
        if length < self.length(sequence):  # rare
            state.forget()

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            for table in state.tables:
                table.free()

    def length(self, sequence: int) -> int:
        state = self._states[sequence]
        return state.reading.covers(state.filled)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the rows of drafts that were accepted; the others are written over."""
        for outcome in outcomes:
            state = self._states[outcome.id]
            if state.held:
                state.settle()

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        trees = [TokenTree.root(view.tokens[-1]) for view in views]
        growing = {
            place: _Growth(view, self._states[view.id], budget, levels, self._tree)
            for place, (view, budget) in enumerate(zip(views, budgets, strict=True))
            if (levels := self._levels(view, budget)) > 0
        }
        level = [(growth, growth.frontier()) for growth in self._begin(list(growing.values()))]
        while level := [(growth, nodes) for growth, nodes in level if nodes]:
            level = [(growth, growth.frontier()) for growth in self._grow(level)]
        for place, growth in growing.items():
            tree = self._bridge.tree(growth.found, growth.view, growth.state.reading, self.name)
            dropping = growth.view.dropping
            trees[place] = tree if dropping is None else tree.best(growth.budget + 1, dropping)
        return trees

    def _levels(self, view: View, budget: int) -> int:
        """How many levels can be drafted; none where the draft model cannot read the text, or its context ends."""
        if budget <= 0:
            return 0
        state = self._states[view.id]
        state.settle()
        room = self._limit - len(state.reading.ids)
        deepest = min(budget, _LEVELS) if isinstance(self._tree, int) and self._tree > 1 else budget
        return min(deepest, room) if state.reading.ready and state.reading.ids else 0

    def _begin(self, growing: Sequence[_Growth]) -> list[_Growth]:
        """Take in what was committed since, and draft the first level; returns those for which there is room."""
        begun = with_room(growing, lambda growth: self._catch_up(growth.state), lambda growth: growth.state.forget())
        rows = Rows()
        for state in (growth.state for growth in begun):
            rows.piece(state.reading.ids[state.filled :], state.filled, state.tables, 1)
        if begun:
            logits = self._model.forward(rows.batch(), self._slabs).logits
            for growth, row in zip(begun, logits.unbind(), strict=True):
                growth.state.filled = len(growth.state.reading.ids)
                growth.expand(0, row, self._bridge)
        return begun

    def _catch_up(self, state: _State) -> None:
        """Take in the pieces of a long text, but for the last, for which pages are reserved.

        Raises:
            ResourceError: too few pages are free, which as a rule turns out before any piece is taken in.
        """
        ids = state.reading.ids
        for table in state.tables:
            if table.pool.group.window is None:
                table.reserve(len(ids))
        while len(ids) - state.filled > _PIECE:
            rows, end = Rows(), state.filled + _PIECE
            state.reserve(end)
            rows.piece(ids[state.filled : end], state.filled, state.tables, 0)
            self._model.forward(rows.batch(), self._slabs)
            state.filled = end
        state.reserve(len(ids))

    def _grow(self, level: Sequence[tuple[_Growth, Sequence[int]]]) -> list[_Growth]:
        """Expand nodes of every tree, in one pass; returns the trees that may go on. One without room is done."""
        rows = Rows()
        grown: list[tuple[_Growth, Sequence[int]]] = []
        for growth, nodes in level:
            with suppress(ResourceError):
                growth.add_rows(rows, nodes, self._bridge)
                grown.append((growth, nodes))
        if grown:
            logits = iter(self._model.forward(rows.batch(), self._slabs).logits.unbind())
            for growth, nodes in grown:
                for node in nodes:
                    growth.expand(node, next(logits), self._bridge)
        return [growth for growth, _ in grown]


def _make(speculation: Speculation, around: Surroundings) -> DraftModelDrafter:
    """
    Raises:
        DrafterError: the vocabularies do not fit, or the rule does not fit the bridge between them.
    """
    target, tree = around.target, 1 if speculation.tree == "auto" else tree_of(speculation)
    if speculation.draft_layers is not None:
        model, vocabularies = around.prefix(speculation.draft_layers), None
    else:
        draft = around.draft_model(str(speculation.model))
        model = draft.decoder
        rule = RULES.get(speculation.rule)
        vocabularies = bridge(
            Tokenizer.from_parts(target.tokenizer),
            Tokenizer.from_parts(draft.tokenizer),
            target_rows=target.decoder.vocab_size,
            draft_rows=model.vocab_size,
            kind=cast("Kind", speculation.vocabulary),
            sampled=rule is not None and rule.sampled,
        )
    return DraftModelDrafter(model, around.pools(model.groups), around.max_model_len, vocabularies, tree)


def _groups(speculation: Speculation, models: Models) -> Sequence[CacheGroup]:
    if speculation.draft_layers is not None:
        return models.prefix(speculation.draft_layers).groups
    return models.draft_model(str(speculation.model)).decoder.groups


METHOD = Method(
    _make,
    _groups,
    options=("model", "draft_layers", "tree", "rule", "vocabulary"),
    model="needed",
    sampled=True,
    trees=True,
    shapes=True,
)
