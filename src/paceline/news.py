"""What callers hear of their requests: their ends, or every step of them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from paceline.completion import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.request import Sequence


class Ends:
    """Listens for the ends of a call's sequences.

    Attributes:
        over: is done when all have ended, or with an error when the first of them broke off.
    """

    def __init__(self, count: int) -> None:
        self.over: Future[None] = Future()
        self.over.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it
        self._left = count

    def hear(self, sequence: Sequence) -> None:
        if sequence.error is not None:
            self.refuse(sequence.error)
        elif sequence.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self.over.set_result(None)

    def refuse(self, error: BaseException) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class Flow:
    """Listens for the tokens of one request. What its caller has not taken yet of an answer is one chunk, and grows.

    Args:
        count: how many answers there are.
        ring: is called, on the loop's thread, when there is something to take again.
    """

    def __init__(self, count: int, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._given = [0] * count
        self._left = count
        self._lock = Lock()
        self._chunks: dict[int, Chunk] = {}
        self._taken: Chunk | None = None
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether every answer was taken to its end, or the error that broke them off."""
        return not self._left

    def hear(self, sequence: Sequence) -> None:
        chunk = Chunk.of(sequence, self._given[sequence.request.choice])
        self._given[chunk.choice] += len(chunk.token_ids)
        if sequence.error is not None:
            chunk = replace(chunk, completion=None)
        if chunk.token_ids or chunk.completion:
            with self._lock:
                quiet = not self._chunks
                earlier = self._chunks.get(chunk.choice)
                self._chunks[chunk.choice] = chunk if earlier is None else earlier + chunk
            if quiet:
                self._ring()
        if sequence.error is not None:
            self.refuse(sequence.error)

    def refuse(self, error: BaseException) -> None:
        self._error = error
        self._ring()

    def take(self) -> Chunk | None:
        """The next chunk, if there is one.

        Raises:
            BaseException: what broke the request off, after the chunks before it.
        """
        with self._lock:
            chunk = self._taken = self._chunks.pop(next(iter(self._chunks))) if self._chunks else None
        if chunk is not None:
            self._left -= chunk.completion is not None
        elif self._error is not None:
            self._left = 0
            raise self._error
        return chunk

    def arrived(self) -> None:
        """What was taken last has come to whom it was for."""
        self._taken = None

    def untake(self) -> None:
        """Take back what was taken last, unless it has arrived: its way was interrupted."""
        with self._lock:
            chunk, self._taken = self._taken, None
            if chunk is not None:
                later = self._chunks.pop(chunk.choice, None)
                self._chunks = {chunk.choice: chunk if later is None else chunk + later, **self._chunks}
                self._left += chunk.completion is not None
