"""The pacer as an engine calls it: what it sees of a simulation, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.budget import Draft
from paceline.cost import Load, Price, Prices
from paceline.pacer import Pacer
from paceline.tree import Dropping, TokenTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.drafters import Cost


class Paced:
    """One drafter under a pacer.

    Args:
        name: the drafter's.
        cost: what drafting with it costs.
        believed: steps as they were measured beforehand, in seconds.
    """

    def __init__(self, name: str, cost: Cost, believed: Sequence[tuple[Load, float]]) -> None:
        self._price = Price(name, cost)
        self._pacer = Pacer(Prices.fit(believed))
        self._drafts: list[Draft] = []

    def start(self, sequence: int) -> None:
        """A request comes."""
        self._pacer.start(sequence)

    def release(self, sequence: int) -> None:
        """A request is done."""
        self._pacer.release(sequence)

    def budgets(self, sequences: Sequence[int], ceilings: Sequence[int], contexts: Sequence[int]) -> list[int]:
        """How many drafts to ask for, for each sequence."""
        self._drafts = [
            Draft(sequence, most, TokenTree.root(0), context)
            for sequence, most, context in zip(sequences, ceilings, contexts, strict=True)
        ]
        return self._pacer.budgets(self._price, self._drafts, self._load())

    def select(self, trees: Mapping[int, TokenTree], budgets: Sequence[int], seconds: float) -> dict[int, TokenTree]:
        """What is verified of trees that were drafted, for these budgets, in so many seconds."""
        drafts = [draft for draft in self._drafts if draft.sequence in trees]
        if not drafts:
            return {}
        asked = [(d.sequence, budget) for d, budget in zip(self._drafts, budgets, strict=True) if d.sequence in trees]
        self._pacer.learn_draft(self._price, asked, [trees[draft.sequence] for draft in drafts], seconds)
        for draft in drafts:
            tree = trees[draft.sequence]
            draft.tree = self._pacer.weigh(draft.sequence, tree)
            draft.parts.append((self._pacer.habits(draft.sequence).of(self._price), 1, len(tree)))
        for draft, tree in zip(drafts, self._pacer.select(drafts, self._load(), Dropping()), strict=True):
            draft.tree = tree
            draft.parts.clear()
        return {draft.sequence: draft.tree for draft in drafts}

    def learn(self, seconds: float, truth: Mapping[int, Sequence[int]]) -> None:
        """The step took so long, and these tokens came of it."""
        self._pacer.learn_step(self._load(), seconds)
        for sequence, tokens in truth.items():
            self._pacer.learn_outcome(sequence, tokens)

    def _load(self) -> Load:
        rows = [1 if draft.parts else len(draft.tree) for draft in self._drafts]
        read = sum(draft.context for draft in self._drafts)
        seen = sum(draft.context * nodes for draft, nodes in zip(self._drafts, rows, strict=True))
        return Load(sum(rows), len(self._drafts), 0, read, seen)
