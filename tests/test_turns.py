"""Turns: entered again from anywhere, also while they are being entered."""

from __future__ import annotations

from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any

from paceline.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable


class _Meddled:
    """A lock with which something happens as soon as it is had for the first time."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._lock = RLock()
        self._happens: Callable[[], None] | None = happens

    def acquire(self) -> None:
        self._lock.acquire()
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()

    def release(self) -> None:
        self._lock.release()


def test_what_is_collected_while_they_are_entered_may_enter_too() -> None:
    turns: Any = Turns()
    seen: list[str] = []
    waiting = Thread(target=lambda: entered(turns, seen, "the other"), daemon=True)
    inside = Event()

    def collected() -> None:
        entered(turns, seen, "collected")

    def first() -> None:
        with turns:
            waiting.start()
            while not inside.is_set():
                inside.wait(0.01)
            collected()
            seen.append("first")

    turns._lock = _Meddled(collected)
    turns._next = _Watched(turns._next, inside)
    thread = Thread(target=first, daemon=True)
    thread.start()
    thread.join(20)
    waiting.join(20)
    assert seen == ["collected", "collected", "first", "the other"]


class _Watched:
    """A lock that tells when a second thread holds it."""

    def __init__(self, lock: Any, told: Event) -> None:
        self._lock, self._told, self._count = lock, told, 0

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._count += 1
        if self._count == 3:  # the first thread, what it collects, the other
            self._told.set()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


def entered(turns: Turns, seen: list[str], name: str) -> None:
    with turns:
        seen.append(name)
