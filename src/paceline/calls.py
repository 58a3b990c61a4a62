"""Calls on their way through the loop: for whole answers, and for streams of chunks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.completion import Completion
from paceline.loop import Ticket
from paceline.news import Ends, Flow
from paceline.prepare import add_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.drafters import Drafter
    from paceline.front import Front
    from paceline.prepare import Prepared


class Call:
    """A call for the whole answers to some prompts.

    Args:
        each: the requests.
        single: whether the caller gave one prompt, not in a list.
    """

    def __init__(self, front: Front, each: Sequence[Prepared], single: bool) -> None:
        self._front = front
        self._each = each
        self._single = single
        self._choices = each[0].choices
        self._ends = Ends(len(each) * self._choices)
        self._ticket = Ticket(self._ends)
        self.over = self._ends.over

    def begin(self, drafters: Sequence[Drafter | None]) -> None:
        """Queue the requests, each with its drafter; ``over`` is then done with the last of them, or an error."""
        each = list(zip(self._each, drafters, strict=True))
        self._front.loop.begin(self._ticket, partial(add_all, self._front.engine, each))

    def cancel(self) -> None:
        """End all that was begun."""
        self._front.loop.cancel(self._ticket)

    def answers(self) -> Any:
        """A completion for each prompt, or a list of n; of all prompts a list, unless there was a single one."""
        every, n = [Completion.of(running) for running in self._ticket.sequences], self._choices
        answers = every if n == 1 else [every[first : first + n] for first in range(0, len(every), n)]
        return answers[0] if self._single else answers


class Following:
    """A call for chunks: not begun, on its way, over, or left.

    Args:
        ring: is called, on any thread, when there is something to take again.
    """

    def __init__(self, front: Front, prepared: Prepared, ring: Callable[[], object]) -> None:
        self._front = front  # a stream keeps its model
        self._prepared = prepared
        self._flow = Flow(prepared.choices, ring)
        self._ticket = Ticket(self._flow)
        self._begun = self._cancelled = self._left = False

    def cancel(self) -> None:
        """End the request. What it has come to still comes, to a completion with the finish reason "abort"."""
        self._cancelled = True
        if self._begun and not self._flow.over:
            self._front.loop.cancel(self._ticket)

    def _begin(self, drafter: Drafter | None) -> None:
        """Queue the request; that is done with the first chunk, so that a stream never begun holds nothing."""
        add = partial(add_all, self._front.engine, [(self._prepared, drafter)])
        self._begun = True
        self._front.loop.begin(self._ticket, add)
        if self._cancelled:
            self.cancel()

    def _leave(self) -> None:
        """End the request, and give nothing more."""
        self._left = True
        self.cancel()

    @property
    def _over(self) -> bool:
        return self._left or self._flow.over

    def __del__(self) -> None:
        self._leave()
