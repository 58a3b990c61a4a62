"""A lock that threads get in turn."""

from __future__ import annotations

from threading import RLock, get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Turns:
    """A lock for ``with``: a thread that gives it back, and wants it again, comes after those that wait.

    A plain lock would go to the same thread step after step, for a waiting one wakes too late. Entering again from
    within is allowed, as when a stream is left behind and its end is collected in the middle of a step, or of the
    entering itself.
    """

    def __init__(self) -> None:
        self._next = RLock()
        self._lock = RLock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._holder == get_ident():
            self._enter()
        else:
            with self._next:
                self._enter()

    def _enter(self) -> None:
        self._lock.acquire()
        self._depth += 1  # first, so that who enters between these lines leaves the holder as it is
        self._holder = get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()
