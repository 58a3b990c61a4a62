"""Prediction: a text that the caller expects, such as the old form of an edited file, is followed where the output
follows it.

Where the output leaves the text, it is joined again at the place to which the latest tokens of the output lead; as
long as they lead nowhere, a few of them are taken for replaced ones. The text is a hint, as in OpenAI's predicted
outputs: it changes no token.
"""

from __future__ import annotations

from bisect import bisect_left
from copy import copy
from typing import TYPE_CHECKING

from paceline.drafters import Method, Needs, Outcome, View
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

_SURE = 4
"""Runs of so many tokens say where the output is, wherever they are found."""
_SIZES = (2 * _SURE, _SURE, 2, 1)
"""The runs that are looked up, the longest first."""
_NEAR = 64
"""Shorter runs than sure ones count only so many tokens ahead of where the output left the text."""
_PATIENCE = 3
"""How many tokens in a row may be taken for replaced ones."""


class Places:
    """Where runs of tokens end in a text."""

    def __init__(self, text: tuple[int, ...]) -> None:
        self.text = text
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(text) + 1):
            for size in _SIZES:
                if size <= end:
                    self._ends.setdefault(text[end - size : end], []).append(end)

    def find(self, output: Sequence[int], left: int) -> tuple[int, int] | None:
        """Where the text goes on after the longest run with which ``output`` ends, and that run's length.

        Of several places it is the first at or behind ``left``, and where there is none the last before it.

        Args:
            output: the latest tokens, at least as many as the longest run has where there are so many.
            left: how many tokens of the text the output had followed when it left it.
        """
        for size in _SIZES:
            ends = self._ends.get(tuple(output[-size:]), ()) if size <= len(output) else ()
            ahead = bisect_left(ends, left)
            if size < _SURE:
                if ahead < len(ends) and ends[ahead] <= left + _NEAR:
                    return ends[ahead], size
            elif ends:
                return ends[min(ahead, len(ends) - 1)], size
        return None


class _Course:
    """How one output has followed its prediction.

    Attributes:
        places: the prediction.
        start: where the output starts among the sequence's tokens.
        seen: how many of the sequence's tokens are taken in.
        place: the token of the prediction that should come next; None where nobody knows.
        run: how many tokens in a row agreed before it.
        replaced: how many did not, one for one.
        left: the last place of which a run was sure.
    """

    __slots__ = ("left", "place", "places", "replaced", "run", "seen", "start")

    def __init__(self, places: Places, start: int) -> None:
        self.places = places
        self.start = start
        self.restart()

    def restart(self) -> None:
        """The output is expected to begin as the prediction does."""
        self.seen = self.start
        self.place: int | None = 0
        self.run = _SURE
        self.replaced = 0
        self.left = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what the sequence's tokens have become."""
        text = self.places.text
        for seen in range(self.seen, len(tokens)):
            place = self.place
            if place is not None and place < len(text) and text[place] == tokens[seen]:
                self.place, self.run, self.replaced = place + 1, self.run + 1, 0
            else:
                self._join(tokens[max(self.start, seen + 1 - _SIZES[0]) : seen + 1])
            if self.place is not None and self.run >= _SURE:
                self.left = self.place
        self.seen = max(self.seen, len(tokens))

    def _join(self, output: Sequence[int]) -> None:
        """Find the place again after a token that the prediction did not have."""
        found = self.places.find(output, self.left)
        if found is not None:
            (self.place, self.run), self.replaced = found, 0
        elif self.place is not None and self.replaced < _PATIENCE:
            self.place, self.run, self.replaced = self.place + 1, 0, self.replaced + 1
        else:
            self.place, self.run = None, 0


class PredictionDrafter:
    """Chains out of the text that the caller expects."""

    name = "prediction"
    needs = Needs(cost="lookup", wish="prediction")

    def __init__(self) -> None:
        self._courses: dict[int, _Course] = {}

    def start(self, view: View, valid: int) -> None:
        # The answers to one request share the object; an equal text of another's would show in the timing.
        known = (course.places for course in self._courses.values() if course.places.text is view.prediction)
        self._courses[view.id] = _Course(next(known, None) or Places(view.prediction), view.prompt_length)

    def fork(self, parent: int, child: View) -> None:
        self._courses[child.id] = copy(self._courses[parent])

    def rewind(self, sequence: int, length: int) -> None:
        course = self._courses[sequence]
        if length < course.seen:
            course.restart()

    def release(self, sequence: int) -> None:
        self._courses.pop(sequence, None)

    def length(self, sequence: int) -> int:
        return self._courses[sequence].seen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: proposing reads the committed tokens themselves."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: View, budget: int) -> TokenTree:
        course = self._courses[view.id]
        course.follow(view.tokens)
        if course.place is None:
            return TokenTree.root(view.tokens[-1])
        drafts = list(course.places.text[course.place : course.place + budget])
        # After a run of r tokens that agreed one more does with (r + 1) / (r + 2), Laplace's rule of succession.
        survival = [(course.run + 1) / (course.run + 1 + depth) for depth in range(1, len(drafts) + 1)]
        return TokenTree.chain(view.tokens[-1], drafts, survival, self.name)


METHOD = Method(lambda speculation, around: PredictionDrafter())
