"""How far fetching and converting have come: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Advance = Callable[[int, int], None]

_EVERY = 10.0  # seconds between two lines
_LOOKS = 0.2  # seconds between two looks at a folder


@contextmanager
def shown(text: str, wanted: bool) -> Iterator[Advance]:
    """What is told how much is done of how much; it shows that on standard error if ``wanted``."""
    if not wanted:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(text)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield Lines(text)


class Lines:
    """Says at once that something began, and then every ten seconds how far it has come."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._clock = clock
        self._last = clock()
        print(text, file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        if self._clock() - self._last >= _EVERY:
            self._last = self._clock()
            print(f"{self._text}: {done / total:.0%}", file=sys.stderr, flush=True)


@contextmanager
def watched(folder: Path, total: int, advance: Advance) -> Iterator[None]:
    """Tell ``advance``, while the block runs, how many of ``total`` bytes have come into a folder."""
    before, ended = _size(folder), Event()

    def look() -> None:
        while not ended.wait(_LOOKS):
            advance(min(max(_size(folder) - before, 0), total), total)

    thread = Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _size(folder: Path) -> int:
    """Bytes of all files in a folder, which others may be changing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
        except OSError:  # it is gone again
            continue
    return total
