"""What EAGLE drafters of all generations share: a head of their own cache, chains and trees.

Sources: Li et al., EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840). Row i of the head pairs the
target's state at place i with the token at place i + 1. Below the root the target has not been: there a row reads the
head's own output of the row above. When tokens are committed their rows are taken in anew, with the target's states.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.batch import Rows
from paceline.drafters import Method, Needs, Outcome, View
from paceline.drafters._candidates import WIDTH, candidates, tree_of, width_of
from paceline.drafters._heads import head_of
from paceline.drafters._room import with_room
from paceline.drafters._selftest import check_agreement, temporary_tables
from paceline.errors import ResourceError
from paceline.pages import PageTable
from paceline.targets.head_decoder import HeadDecoder
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.drafters import Models, Surroundings
    from paceline.heads.spec import EagleKind
    from paceline.options import Speculation
    from paceline.pages import CacheGroup, PagePool
    from paceline.shape import TreeShape
    from paceline.targets.load import Loaded

_LEVELS = 8  # of a tree; a chain is as long as its budget
_WORTH = 0.1  # tokens that a further level of a tree must promise: about what it costs, in passes of the target
_PIECE = 512  # rows that wait for a draft before they are taken in without one
_RANKS = tuple(0.6 / rank**2 for rank in range(1, MAX_NODES))  # where chances must not depend on what is drawn


@dataclass(slots=True)
class _State:
    """The head's view of one sequence: ``filled`` rows have keys in ``table``, and those behind them wait."""

    tokens: Sequence[int]
    table: PageTable
    filled: int = 0
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)  # the taps of further rows, in order
    last: tuple[Tensor, Tensor] | None = None  # logits and state that the last filled row gave

    @property
    def known(self) -> int:
        """How many rows the target's states are known of."""
        return self.filled + sum(taps[0].shape[0] for taps in self.waiting)

    def forget(self) -> None:
        """Start again from nothing."""
        self.filled, self.waiting, self.last = 0, [], None
        self.table.free()


class _Growth:
    """A tree in the making. Below the root a node's row follows those of its ancestors in the head's cache, where
    rows of the tree stand behind those of the committed tokens in the order in which they were expanded."""

    def __init__(self, view: View, state: _State, budget: int, levels: int, tree: int | TreeShape) -> None:
        self.view, self.state, self.levels, self.tree = view, state, levels, tree
        self.candidates = candidates(view.tokens[-1], budget, tree)
        self._masks: dict[int, int] = {0: 0}
        self._states: dict[int, Tensor] = {}

    def expand(self, nodes: Sequence[int], logits: Tensor, states: Tensor, ids: Tensor | None) -> None:
        """Draw the children of ``nodes`` from what their rows gave, logits [M, N] and states [M, hidden]."""
        self._states.update(zip(nodes, states.unbind(), strict=True))
        paths = [self.candidates.path(node) for node in nodes]
        drawn = self.view.draw(logits, paths, width_of(self.tree), nodes=nodes, ids=ids)
        for node, children in zip(nodes, drawn, strict=True):
            self.candidates.take(node, children, _RANKS)

    def frontier(self) -> list[int]:
        """What is expanded next; nothing where that would not pay."""
        self.levels -= 1
        room = MAX_NODES + 1 - len(self._masks)
        if self.levels <= 0:
            return []
        if not isinstance(self.tree, int):
            return self.candidates.frontier(room)
        nodes = self.candidates.frontier(min(self.tree, room))
        worth = sum(self.candidates.survival[node] for node in nodes)
        return nodes if self.tree == 1 or worth > _WORTH else []

    def add_rows(self, rows: Rows, nodes: Sequence[int]) -> list[Tensor]:
        """Add the nodes' rows to a pass; returns the states that they read.

        Raises:
            ResourceError: the cache is full; nothing is added.
        """
        found, state = self.candidates, self.state
        first = len(self._masks) - 1
        state.table.reserve(state.filled + first + len(nodes))
        for place, node in enumerate(nodes, first):
            self._masks[node] = self._masks[found.parents[node]] | 1 << place
        rows.level(
            [found.tokens[node] for node in nodes],
            [found.depths[node] - 1 for node in nodes],
            [self._masks[node] for node in nodes],
            state.filled,
            first,
            (state.table,),
        )
        return [self._states[found.parents[node]] for node in nodes]


class EagleDrafter:
    """Chains and trees from a head that reads the target's states, all sequences of a step in one pass a level.

    A sequence of which states were missed is decoded without it until they come, and one for which no page is free is
    until there are some. Where all wait for pages the last gives up its own, and with them what it has seen.
    """

    def __init__(
        self, name: str, head: HeadDecoder, pool: PagePool, max_model_len: int, tree: int | TreeShape = WIDTH
    ) -> None:
        """Draft with ``head``, whose keys live in ``pool``.

        Args:
            name: the method's.
            max_model_len: the longest sequence, in tokens.
            tree: the most nodes of a level that are expanded, and the most children of each, where 1 is a chain; or
                a shape to fill.
        """
        self.name = name
        self.needs = Needs(features=head.taps)
        self._head, self._pool, self._slabs, self._tree = head, pool, [pool.slab], tree
        self._limit = min(head.max_positions, max_model_len)
        self._states: dict[int, _State] = {}

    def start(self, view: View, valid: int) -> None:
        self._states[view.id] = _State(view.tokens, PageTable(self._pool, self._limit + MAX_NODES))

    def fork(self, parent: int, child: View) -> None:
        state = self._states[parent]
        table = state.table.fork(state.filled)
        self._states[child.id] = _State(child.tokens, table, state.filled, list(state.waiting), state.last)

    def rewind(self, sequence: int, length: int) -> None:
        """A row reads the token behind its state, so the last row goes too, unless its state still waits."""
        state = self._states[sequence]
        if length >= state.known:
            return
        rest = max(0, length - state.filled)
        joined = [torch.cat(taps)[:rest] for taps in zip(*state.waiting, strict=True)]
        state.waiting = [tuple(joined)] if rest else []
        if not rest:
            state.filled = max(0, length - 1)
            state.last = None

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            state.table.free()

    def length(self, sequence: int) -> int:
        return self._states[sequence].known

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the states of committed rows for the next draft; what is long is taken in at once."""
        for outcome in outcomes:
            state = self._states[outcome.id]
            seen = state.known - outcome.start
            if 0 <= seen < len(outcome.rows):
                state.waiting.append(tuple(outcome.features[tap][seen:] for tap in self._head.taps))
        self._fill([state for state in (self._states[outcome.id] for outcome in outcomes) if _is_long(state)])

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        trees = {view.id: TokenTree.root(view.tokens[-1]) for view in views}
        growing = [
            _Growth(view, self._states[view.id], budget, self._levels(view, budget), self._tree)
            for view, budget in zip(views, budgets, strict=True)
            if self._can_draft(view, budget)
        ]
        self._fill([growth.state for growth in growing if growth.state.waiting])
        growing = [growth for growth in growing if growth.state.last is not None and not growth.state.waiting]
        for growth in growing:
            assert growth.state.last is not None
            logits, state = growth.state.last
            growth.expand([0], logits[None], state[None], self._head.target_ids)
        level = [(growth, growth.frontier()) for growth in growing]
        while level := [(growth, nodes) for growth, nodes in level if nodes]:
            level = [(growth, growth.frontier()) for growth in self._grow(level)]
        trees.update({growth.view.id: growth.candidates.tree(self.name) for growth in growing})
        return [trees[view.id] for view in views]

    def _levels(self, view: View, budget: int) -> int:
        """How deep a tree may become: positions end, too."""
        return min(
            _LEVELS if self._tree != 1 and isinstance(self._tree, int) else budget, self._limit - len(view.tokens)
        )

    def _can_draft(self, view: View, budget: int) -> bool:
        state, rows = self._states[view.id], len(view.tokens) - 1
        ready = state.known == rows and (state.last is not None or bool(state.waiting))
        return budget > 0 and ready and self._levels(view, budget) > 0

    def _fill(self, states: Sequence[_State]) -> None:
        """Take in what waits, in one pass; what finds no room waits on."""
        filled = with_room(states, lambda state: state.table.reserve(state.known), _State.forget)
        if not filled:
            return
        rows = Rows()
        for state in filled:
            rows.piece(state.tokens[state.filled + 1 : state.known + 1], state.filled, (state.table,), 1)
        taps = [torch.cat(tap) for tap in zip(*(taps for state in filled for taps in state.waiting), strict=True)]
        logits, outputs = self._head.forward(rows.batch(), self._slabs, self._head.states(taps))
        for state, last in zip(filled, zip(logits.unbind(), outputs.unbind(), strict=True), strict=True):
            state.filled, state.waiting, state.last = state.known, [], last

    def _grow(self, level: Sequence[tuple[_Growth, Sequence[int]]]) -> list[_Growth]:
        """Expand nodes of every tree, in one pass; returns the trees that may go on. One without room is done."""
        rows = Rows()
        grown: list[tuple[_Growth, Sequence[int]]] = []
        states: list[Tensor] = []
        for growth, nodes in level:
            with suppress(ResourceError):
                states += growth.add_rows(rows, nodes)
                grown.append((growth, nodes))
        if grown:
            logits, outputs = self._head.forward(rows.batch(), self._slabs, torch.stack(states))
            end = 0
            for growth, nodes in grown:
                own = slice(end, end := end + len(nodes))
                growth.expand(nodes, logits[own], outputs[own], self._head.target_ids)
        return [growth for growth, _ in grown]


def _is_long(state: _State) -> bool:
    """Whether so much waits that it is taken in, and the token behind the last row is known."""
    return state.known - state.filled > _PIECE and state.known < len(state.tokens)


def method(kind: EagleKind) -> Method:
    """The method of heads of one kind."""
    return Method(
        partial(_make, kind),
        partial(_groups, kind),
        options=("model", "random", "tree", "rule"),
        model="needed",
        sampled=True,
        trees=True,
        shapes=True,
    )


def _make(kind: EagleKind, speculation: Speculation, around: Surroundings) -> EagleDrafter:
    """
    Raises:
        DrafterError: the head is of another kind, or does not fit the target.
        HubError, WeightsError: it cannot be read.
    """
    head = _decoder(kind, speculation, around)
    (pool,) = around.pools(head.groups)
    return EagleDrafter(kind, head, pool, around.max_model_len, tree_of(speculation))


def _groups(kind: EagleKind, speculation: Speculation, models: Models) -> Sequence[CacheGroup]:
    return _decoder(kind, speculation, models).groups


def _decoder(kind: EagleKind, speculation: Speculation, models: Models) -> HeadDecoder:
    key = kind, speculation.model, speculation.random
    return models.kept(key, lambda: _loaded(kind, speculation, models.target))


def _loaded(kind: EagleKind, speculation: Speculation, target: Loaded) -> HeadDecoder:
    """The head for its target; a trained one is tried out."""
    head = HeadDecoder(head_of(kind, speculation, target), target.decoder)
    if not speculation.random:
        check_agreement(str(speculation.model), target, head.taps, lambda *seen: _guesses(head, *seen))
    return head


def _guesses(head: HeadDecoder, tokens: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
    """The likeliest token two places after each state, int64 [len(tokens) - 1]."""
    rows, count = Rows(), len(tokens) - 1
    tables = temporary_tables(head.groups, count)
    rows.piece(tokens[1:], 0, tables, count)
    logits, _ = head.forward(rows.batch(), [table.pool.slab for table in tables], head.states(taps))
    best = logits.argmax(1)
    return best if head.target_ids is None else head.target_ids[best]
