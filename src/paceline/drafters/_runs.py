"""How often every run of tokens occurred in some texts, and what followed it.

A suffix tree in its smallest form: runs that end at the same places are one state, so that texts of n tokens take at
most 2 n states however they repeat (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text").
"""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

BREADTH = 8
"""How many continuations of a run are told apart, the most frequent ones."""


class State:
    """All runs that end at the same places: one of ``length`` tokens and its ends that are longer than ``link``'s.

    Attributes:
        length: of the longest of them, in tokens.
        link: the state of the longest end of these runs that also occurs elsewhere; None for the empty run.
        after: the state of these runs with one more token, by that token.
        count: at how many places they end.
        followed: at how many of these a token follows.
        last: the last of these places.
        likely: the most frequent tokens that follow, of equally frequent ones the latest first; None until asked for.
    """

    __slots__ = ("after", "count", "followed", "last", "length", "likely", "link")

    def __init__(self, length: int, link: State | None) -> None:
        self.length = length
        self.link = link
        self.after: dict[int, State] = {}
        self.count = 0
        self.followed = 0
        self.last = 0
        self.likely: list[int] | None = None

    def continuations(self, width: int) -> list[tuple[int, float, State]]:
        """The ``width`` most frequent tokens that follow, at most :data:`BREADTH`: token, share and state.

        Of equally frequent ones the one seen latest comes first.
        """
        after = self.after
        if self.likely is None:
            self.likely = nlargest(BREADTH, after, key=lambda token: (after[token].count, after[token].last))
        return [(token, after[token].count / self.followed, after[token]) for token in self.likely[:width]]

    def rank(self, token: int) -> None:
        """Move a token that just followed to its place among the likely ones."""
        if self.likely is None:
            return
        likely, after = self.likely, self.after
        if token in likely:
            likely.remove(token)
        count, place = after[token].count, 0
        while place < len(likely) and after[likely[place]].count > count:
            place += 1
        likely.insert(place, token)
        del likely[BREADTH:]


class Runs:
    """The runs of some texts, the last of which may still grow.

    Counts are right for runs of at most ``depth`` tokens; what follows is asked of shorter ones alone.

    Attributes:
        depth: see above.
        size: how many states there are: what the memory goes with, about 350 bytes each.
        length: how many tokens the texts have together.
        texts: how many texts were finished.
        ends: the states of what the growing text ends with, from at most ``depth`` tokens down to the empty run.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.size = 1
        self.length = 0
        self.texts = 0
        self.root = State(0, None)
        self.ends = [self.root]
        self._newest = self.root  # the state of the whole growing text

    def add(self, text: Iterable[int]) -> None:
        """Take in a whole text."""
        for token in text:
            self.push(token)
        self.texts += 1
        self._newest = self.root
        self.ends = [self.root]

    def push(self, token: int) -> None:
        """Let the text grow by a token."""
        before = self.ends
        for state in before:
            state.followed += 1
        self._newest = self._grow(token)
        state = shortened(before[0].after[token], self.depth)
        self.ends = chain(state)
        self.length += 1
        for state in self.ends:
            state.count += 1
            state.last = self.length
        for state in before:
            state.rank(token)

    def _grow(self, token: int) -> State:
        """The state of the growing text with one more token, which is made where there is none."""
        known = self._newest.after.get(token)
        if known is not None:  # an earlier text begins in the same way
            return self._split(self._newest, token, known)
        grown = State(self._newest.length + 1, self.root)
        self.size += 1
        state: State | None = self._newest
        while state is not None and token not in state.after:
            state.after[token] = grown
            state = state.link
        if state is not None:
            grown.link = self._split(state, token, state.after[token])
        return grown

    def _split(self, state: State, token: int, longer: State) -> State:
        """The state of the runs of ``state`` and a token, parted from the runs of ``longer`` that are longer still."""
        if longer.length == state.length + 1:
            return longer
        part = State(state.length + 1, longer.link)
        self.size += 1
        part.after = dict(longer.after)
        part.count, part.followed, part.last = longer.count, longer.followed, longer.last
        longer.link = part
        parent: State | None = state
        while parent is not None and parent.after.get(token) is longer:
            parent.after[token] = part
            parent = parent.link
        return part

    def follow(self, state: State, matched: int, token: int) -> tuple[State, int]:
        """From the longest end of another text that occurs here, its state and length, to that after its next token."""
        while token not in state.after:
            if state.link is None:
                return state, 0
            state = state.link
            matched = state.length
        matched = min(matched + 1, self.depth)
        return shortened(state.after[token], matched), matched


def shortened(state: State, length: int) -> State:
    """The state of the last ``length`` tokens of a state's runs."""
    while state.link is not None and state.link.length >= length:
        state = state.link
    return state


def chain(state: State) -> list[State]:
    """A state and those of its shorter ends, down to the empty run."""
    states = [state]
    while (link := states[-1].link) is not None:
        states.append(link)
    return states
