"""The pacer as an engine calls it: what it sees of a simulation, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.pacer import Pacer, Wish
from paceline.tree import Dropping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.drafters import Cost
    from paceline.tree import TokenTree


class Paced:
    """One drafter under a pacer.

    Args:
        name: the drafter's.
        cost: what drafting with it costs.
        believed: seconds of a step by rows.
    """

    def __init__(self, name: str, cost: Cost, believed: Mapping[int, float]) -> None:
        self._name, self._cost = name, cost
        self._pacer = Pacer()
        for rows, seconds in believed.items():
            self._pacer.rows.learn(rows, seconds)
        self._verified: dict[int, int] = {}

    def start(self, sequence: int) -> None:
        """A request comes."""
        self._pacer.start(sequence)

    def release(self, sequence: int) -> None:
        """A request is done."""
        self._pacer.release(sequence)

    def budgets(self, sequences: Sequence[int], ceilings: Sequence[int], contexts: Sequence[int]) -> list[int]:
        """How many drafts to ask for, for each sequence."""
        wishes = [Wish(s, self._name, most, self._cost) for s, most in zip(sequences, ceilings, strict=True)]
        self._verified = dict.fromkeys(sequences, 0)
        return self._pacer.budgets(wishes)

    def select(self, trees: Mapping[int, TokenTree], budgets: Sequence[int], seconds: float) -> dict[int, TokenTree]:
        """What is verified of trees that were drafted, for these budgets, in so many seconds."""
        asked, given = sum(budgets), sum(len(tree) - 1 for tree in trees.values())
        if not asked:
            return {}
        self._pacer.learn_draft(self._name, asked, given, seconds)
        weighed = [(sequence, self._pacer.weigh(sequence, tree)) for sequence, tree in trees.items()]
        chosen = self._pacer.select(weighed, len(self._verified) - len(trees), Dropping()) if weighed else []
        kept = dict(zip(trees, chosen, strict=True))
        self._verified.update((sequence, len(tree) - 1) for sequence, tree in kept.items())
        return kept

    def learn(self, seconds: float, truth: Mapping[int, Sequence[int]]) -> None:
        """The step took so long, and these tokens came of it."""
        self._pacer.learn_step(len(self._verified) + sum(self._verified.values()), seconds)
        for sequence, tokens in truth.items():
            self._pacer.learn_outcome(sequence, tokens, self._verified[sequence])
