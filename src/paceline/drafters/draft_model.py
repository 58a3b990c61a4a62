"""A smaller model of the same tokenizer drafts a chain, with a cache of its own.

Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). A token is drawn with the noise
that the target will use at the same position, so that the two agree as often as they can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.batch import Rows
from paceline.drafters import Method, Needs, Outcome, Surroundings, View
from paceline.errors import DrafterError, ResourceError
from paceline.pages import PageTable
from paceline.targets.vocabulary import compare_vocabularies
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.options import Speculation
    from paceline.pages import PagePool
    from paceline.targets import Target

_SURVIVAL = 0.8
_PIECE = 512  # rows of a prompt that the draft model takes in one pass


@dataclass(slots=True)
class _State:
    """``filled`` leading tokens have keys in ``tables``; the drafts that follow them there are ``drafts``."""

    tables: tuple[PageTable, ...]
    filled: int
    drafts: list[int]


@dataclass(slots=True)
class _Chain:
    view: View
    state: _State
    budget: int
    drafts: list[int]


class DraftModelDrafter:
    """Chains from a draft model, all sequences of a step in one pass a level."""

    name = "draft_model"
    needs = Needs()

    def __init__(self, model: Target, pools: Sequence[PagePool], max_model_len: int) -> None:
        """Draft with ``model``, whose cache groups live in ``pools``; sequences reach ``max_model_len`` tokens.

        A sequence that grows past the model's own context is decoded without it from there on.
        """
        self._model = model
        self._pools = tuple(pools)
        self._slabs = [pool.slab for pool in pools]
        self._capacity = max_model_len + MAX_NODES
        self._limit = min(model.max_positions, max_model_len)
        self._states: dict[int, _State] = {}

    def start(self, view: View, valid: int) -> None:
        tables = tuple(PageTable(pool, self._capacity) for pool in self._pools)
        self._states[view.id] = _State(tables, 0, [])

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
        self._states[child.id] = _State(tuple(tables), state.filled, [])

    def rewind(self, sequence: int, length: int) -> None:
        state = self._states[sequence]
        state.drafts = []
        if length < state.filled:  # rare: pages behind a window may be gone, so it starts again from nothing
            state.filled = 0
            for table in state.tables:
                table.free()

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            for table in state.tables:
                table.free()

    def length(self, sequence: int) -> int:
        return self._states[sequence].filled

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the keys of drafts that were accepted; the others are written over."""
        for outcome in outcomes:
            state = self._states[outcome.id]
            if state.drafts:
                kept = 0
                for draft, token in zip(state.drafts, outcome.rows[1:], strict=False):
                    if draft != token:
                        break
                    kept += 1
                state.filled += kept
                state.drafts = []

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        chains = [
            _Chain(view, self._states[view.id], min(budget, self._limit - len(view.tokens)), [])
            for view, budget in zip(views, budgets, strict=True)
        ]
        growing = [chain for chain in chains if chain.budget > 0]
        self._catch_up(growing)
        depth = 0
        while growing:
            self._grow(growing, depth)
            depth += 1
            growing = [chain for chain in growing if chain.budget > depth]
        return [self._tree(chain) for chain in chains]

    def _catch_up(self, chains: Sequence[_Chain]) -> None:
        """Take in what was committed since, but for the rows that the first level takes anyway."""
        for chain in chains:
            while len(chain.view.tokens) - chain.state.filled > _PIECE:
                rows = Rows()
                self._add(rows, chain, chain.view.tokens[chain.state.filled : chain.state.filled + _PIECE], 0)
                self._model.forward(rows.batch(), self._slabs)
                chain.state.filled += _PIECE

    def _grow(self, chains: Sequence[_Chain], depth: int) -> None:
        """Add one token to every chain."""
        rows = Rows()
        for chain in chains:
            state = chain.state
            self._add(rows, chain, [chain.drafts[-1]] if depth else chain.view.tokens[state.filled :], 1)
        logits = self._model.forward(rows.batch(), self._slabs).logits
        for place, chain in enumerate(chains):
            if depth:
                chain.state.drafts.append(chain.drafts[-1])
            else:
                chain.state.filled = len(chain.view.tokens)
            drawn = chain.view.draw(logits[place], chain.drafts, node=depth)
            if drawn.tokens:
                chain.drafts += drawn.tokens
            else:  # the rules leave no token that the draft model knows
                chain.budget = depth

    def _add(self, rows: Rows, chain: _Chain, tokens: Sequence[int], scored: int) -> None:
        state = chain.state
        start = state.filled + len(state.drafts)
        for table in state.tables:
            window = table.pool.group.window
            if window is not None:
                table.drop_before(min(start, len(chain.view.tokens) - 1) - window)
            table.reserve(start + len(tokens))
        rows.piece(tokens, start, state.tables, scored)

    def _tree(self, chain: _Chain) -> TokenTree:
        survival = [_SURVIVAL**depth for depth in range(1, len(chain.drafts) + 1)]
        return TokenTree.chain(chain.view.tokens[-1], chain.drafts, survival, self.name)


def _make(speculation: Speculation, around: Surroundings) -> DraftModelDrafter:
    if speculation.draft_layers is not None:
        model = around.prefix(speculation.draft_layers)
    else:
        assert speculation.model is not None
        loaded = around.draft_model(speculation.model)
        differences = compare_vocabularies(around.target.tokenizer, loaded.tokenizer)
        if differences:
            raise DrafterError(
                f"{speculation.model} cannot draft for {around.target.name}: {differences[0].rstrip('.')}; "
                "`paceline inspect` shows every check."
            )
        model = loaded.decoder
    return DraftModelDrafter(model, around.pools(model.groups), around.max_model_len)


METHOD = Method(_make, options=("model", "draft_layers"), model="needed", sampled=True)
