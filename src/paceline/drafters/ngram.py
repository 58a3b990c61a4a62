"""Prompt lookup: what followed the last occurrence of the latest n tokens is likely to follow again.

Source: Saxena, "Prompt Lookup Decoding", 2023; here with an index that is updated in O(1) for each token, the longest
match first and among those the latest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters import Method, Needs, Outcome, Surroundings, View
from paceline.errors import DrafterError
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.options import Speculation


class _Index:
    """Where each n-gram of one sequence was last followed by something."""

    __slots__ = ("length", "places")

    def __init__(self) -> None:
        self.length = 0
        self.places: dict[tuple[int, ...], int] = {}


class NgramDrafter:
    """Chains copied from the sequence's own past, with no model at all."""

    name = "ngram"
    needs = Needs(cost="lookup")

    def __init__(self, shortest: int = 2, longest: int = 5) -> None:
        """Match at least ``shortest`` and at most ``longest`` tokens.

        Raises:
            DrafterError: ``1 <= shortest <= longest`` does not hold.
        """
        if not 1 <= shortest <= longest:
            raise DrafterError(
                f"prompt_lookup_min must be at least 1 and at most prompt_lookup_max, not {shortest} and {longest}."
            )
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[int, _Index] = {}

    def start(self, view: View, valid: int) -> None:
        index = self._indices[view.id] = _Index()
        self._extend(index, view.tokens, valid)

    def fork(self, parent: int, child: View) -> None:
        twin = self._indices[child.id] = _Index()
        twin.length = self._indices[parent].length
        twin.places = dict(self._indices[parent].places)

    def rewind(self, sequence: int, length: int) -> None:
        index = self._indices[sequence]
        if length < index.length:
            index.length = 0
            index.places.clear()

    def release(self, sequence: int) -> None:
        self._indices.pop(sequence, None)

    def length(self, sequence: int) -> int:
        return self._indices[sequence].length

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: proposing reads the committed tokens themselves."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: View, budget: int) -> TokenTree:
        tokens = view.tokens
        index = self._indices[view.id]
        self._extend(index, tokens, len(tokens))
        found = self._find(index, tokens) if budget else None
        if found is None:
            return TokenTree.root(tokens[-1])
        place, size = found
        # A continuation that runs into the end of the sequence goes on with what it has copied: a period repeats.
        drafts = list(tokens[place : place + budget])
        period = len(tokens) - place
        while len(drafts) < budget:
            drafts.append(drafts[len(drafts) - period])
        survival = [size / (size + depth) for depth in range(1, budget + 1)]
        return TokenTree.chain(tokens[-1], drafts, survival, self.name)

    def _extend(self, index: _Index, tokens: Sequence[int], length: int) -> None:
        """Note for every n-gram that ends before ``length - 1`` where it is continued."""
        places = index.places
        for end in range(max(index.length, 1), length):
            for size in self._sizes:
                if size <= end:
                    places[tuple(tokens[end - size : end])] = end
        index.length = max(index.length, length)

    def _find(self, index: _Index, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Where the longest n-gram at the end was last continued, and its length."""
        for size in self._sizes:
            if size < len(tokens):
                place = index.places.get(tuple(tokens[-size:]))
                if place is not None:
                    return place, size
        return None


def _make(speculation: Speculation, around: Surroundings) -> NgramDrafter:
    return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)


METHOD = Method(_make, options=("prompt_lookup_min", "prompt_lookup_max"))
