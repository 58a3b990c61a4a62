"""What an output must satisfy: a protocol for grammars, and a small finite automaton over token ids.

States are values that never change, so a tree of drafts needs no undo: each row asks for the state after its own path.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.errors import OptionError, RequestError

State = Hashable
"""Where in its language a constraint is: a value, by which what is known of it may be kept."""


@runtime_checkable
class Constraint(Protocol):
    """Which tokens may follow which output. One object serves any number of requests, for it keeps nothing of them."""

    def initial(self) -> State:
        """The state before the first token of the output."""

    def advance(self, state: State, token: int) -> State | None:
        """The state after one more token; None where ``token`` is not allowed."""

    def allowed(self, state: State) -> Tensor:
        """The tokens that may follow: bool [N], any N; ids from N on may not.

        Where the output may end the ids that end it are among them. The tensor is not to be changed.
        """

    def forced(self, state: State) -> int | None:
        """The token that alone may follow, found without looking at all; None where there is a choice, or an end."""


class Guard:
    """A constraint as the rules of one request apply it.

    It says nothing of what is never emitted: of rows behind an id that ends the output, and of those behind a draft
    that is not allowed. Their state is None.

    A constraint is its caller's own code. Where it raises, each method raises RequestError, which ends that request
    alone and leaves those beside it.

    Args:
        constraint: what the output must satisfy.
        stop_ids: ids that end the output.
    """

    def __init__(self, constraint: Constraint, stop_ids: Collection[int]) -> None:
        self._constraint = constraint
        self._stop_ids = stop_ids

    def initial(self) -> State | None:
        """The state before the output."""
        with _answering():
            return self._constraint.initial()

    def follow(self, state: State | None, tokens: Iterable[int]) -> State | None:
        """The state after some more tokens."""
        for token in tokens:
            if state is None or token in self._stop_ids:
                return None
            with _answering():
                state = self._constraint.advance(state, token)
        return state

    def mask(self, row: Tensor, state: State | None) -> None:
        """Set to -inf what may not follow; ``row`` is float32 [vocab]."""
        if state is not None:
            with _answering():
                allowed = self._constraint.allowed(state)[: row.shape[0]]
                row[: allowed.shape[0]].masked_fill_(~allowed, -torch.inf)
            row[allowed.shape[0] :] = -torch.inf


@contextmanager
def _answering() -> Iterator[None]:
    """Say of what a constraint raises that it was the constraint."""
    try:
        yield
    except Exception as error:
        raise RequestError(f"the constraint failed with {type(error).__name__} ({error}); mend it.") from error


class TokenAutomaton:
    """A finite automaton over token ids.

    Args:
        transitions: for each state the tokens that may follow, each with the state after it. Only states that something
            follows need an entry.
        start: the state before the first token.
        accepting: the states in which the output may end.
        eos: the ids that end it, which may follow in accepting states and nowhere else.

    Raises:
        OptionError: an id is negative or no number, an id of ``eos`` is on a transition, or there are accepting states
            and no ``eos``.
    """

    def __init__(
        self,
        transitions: Mapping[Any, Mapping[int, Any]],
        start: State,
        accepting: Collection[Any],
        eos: int | Sequence[int],
    ) -> None:
        ends = (eos,) if isinstance(eos, int) else tuple(eos)
        _check(transitions, accepting, ends)
        targets = (state for arcs in transitions.values() for state in arcs.values())
        numbers: dict[State, int] = {}
        for state in (start, *transitions, *targets, *accepting):
            numbers.setdefault(state, len(numbers))
        self._end = len(numbers)
        self._arcs: dict[State, dict[int, int]] = {number: {} for number in range(len(numbers) + 1)}
        for state, arcs in transitions.items():
            self._arcs[numbers[state]] = {token: numbers[target] for token, target in arcs.items()}
        for state in accepting:
            self._arcs[numbers[state]].update(dict.fromkeys(ends, self._end))

    @property
    def highest(self) -> int:
        """The highest id that it allows; -1 where it allows none."""
        return max((token for arcs in self._arcs.values() for token in arcs), default=-1)

    @classmethod
    def from_texts(cls, texts: Iterable[Sequence[int]], eos: int | Sequence[int]) -> TokenAutomaton:
        """The automaton of exactly these outputs, each the ids of one text without its end.

        Raises:
            OptionError: there is none, or what the constructor refuses.
        """
        transitions: dict[int, dict[int, int]] = {0: {}}
        accepting = set()
        for text in texts:
            state = 0
            for token in text:
                state = transitions[state].setdefault(token, len(transitions))
                transitions.setdefault(state, {})
            accepting.add(state)
        if not accepting:
            raise OptionError("a constraint made from texts needs at least one.")
        return cls(transitions, 0, accepting, eos)

    def initial(self) -> State:
        return 0

    def advance(self, state: State, token: int) -> State | None:
        return self._arcs[state].get(token)

    def allowed(self, state: State) -> Tensor:
        ids = list(self._arcs[state])
        mask = torch.zeros(max(ids, default=-1) + 1, dtype=torch.bool)
        mask[torch.tensor(ids, dtype=torch.int64)] = True
        return mask

    def forced(self, state: State) -> int | None:
        arcs = self._arcs[state]
        if len(arcs) != 1:
            return None
        ((token, target),) = arcs.items()
        return None if target == self._end else token


def _check(transitions: Mapping[Any, Mapping[int, Any]], accepting: Collection[Any], eos: Sequence[int]) -> None:
    """Refuse what is no automaton over token ids."""
    tokens = [token for arcs in transitions.values() for token in arcs]
    for token in (*tokens, *eos):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise OptionError(f"a constraint's transitions carry token ids, and {token!r} is none.")
    if doubled := set(tokens) & set(eos):
        raise OptionError(f"token {min(doubled)} ends the output, so no transition of the constraint may carry it.")
    if accepting and not eos:
        raise OptionError("a constraint with accepting states needs eos, the ids that end the output there.")
