"""A lock that threads get in turn."""

from __future__ import annotations

from threading import Lock, RLock, get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Turns:
    """A lock for ``with``: a thread that gives it back, and wants it again, comes after those that wait.

    A plain lock would go to the same thread step after step, for a waiting one wakes too late. Entering again from
    within is allowed, as when a stream is left behind and its end is collected in the middle of a step.
    """

    def __init__(self) -> None:
        self._next = Lock()
        self._lock = RLock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._holder == get_ident():
            self._lock.acquire()
        else:
            with self._next:
                self._lock.acquire()
        self._holder = get_ident()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()
