"""Grammar: where the request's constraint leaves one token alone, that token is drafted, and is right for certain.

The target would say nothing else there, so a chain of forced tokens (a keyword, a closing bracket, the name of a field)
costs one pass instead of one for each.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.drafters import Method, Needs, Outcome, View
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.constraint import Constraint, State


@dataclass(slots=True)
class _Place:
    """Where a sequence is in its language: ``state`` is that after its first ``seen`` tokens, ``start`` its prompt."""

    constraint: Constraint
    start: int
    seen: int
    state: State | None


class GrammarDrafter:
    """Chains of tokens that alone may follow; requests without a constraint get none."""

    name = "grammar"
    needs = Needs(cost="lookup", wish="constraint")

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def start(self, view: View, valid: int) -> None:
        if view.constraint is not None:
            length = view.prompt_length
            self._places[view.id] = _Place(view.constraint, length, length, view.constraint.initial())

    def fork(self, parent: int, child: View) -> None:
        if parent in self._places:
            self._places[child.id] = copy(self._places[parent])

    def rewind(self, sequence: int, length: int) -> None:
        place = self._places.get(sequence)
        if place is not None and length < place.seen:
            place.seen, place.state = place.start, place.constraint.initial()

    def release(self, sequence: int) -> None:
        self._places.pop(sequence, None)

    def length(self, sequence: int) -> int:
        place = self._places.get(sequence)
        return 0 if place is None else place.seen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: proposing reads the committed tokens themselves."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: View, budget: int) -> TokenTree:
        place = self._places.get(view.id)
        drafts = [] if place is None else _forced(place, view.tokens, budget)
        return TokenTree.chain(view.tokens[-1], drafts, [1.0] * len(drafts), self.name)


def _forced(place: _Place, tokens: Sequence[int], most: int) -> list[int]:
    """The tokens that must follow, up to the next choice or end; the one behind them is the target's own to say."""
    constraint = place.constraint
    for token in tokens[place.seen :]:
        if place.state is not None:
            place.state = constraint.advance(place.state, token)
    place.seen = max(place.seen, len(tokens))
    state, drafts = place.state, list[int]()
    while len(drafts) < most and state is not None:
        forced = constraint.forced(state)
        if forced is None:
            break
        drafts.append(forced)
        state = constraint.advance(state, forced)
    return drafts


METHOD = Method(lambda speculation, around: GrammarDrafter())
