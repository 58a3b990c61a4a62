"""Answers in a terminal: each token in the colour of where it came from."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.completion import Chunk

TARGET = "target"
COLOURS = {"green": 32, "cyan": 36, "magenta": 35, "yellow": 33, "blue": 34}


class Painter:
    """Prints an answer as it comes. Into pipes, and where NO_COLOR is set, it prints the text as it is.

    Args:
        origins: the drafters that earlier answers showed, in the order of their colours.
    """

    def __init__(self, origins: Iterable[str] = ()) -> None:
        console = Console()
        self.coloured = console.is_terminal and not console.no_color
        self._marks: deque[tuple[int, str]] = deque()  # up to which length of the text a token goes, and its origin
        self._length = 0
        self.origins = list(origins)  # those seen, the target left out

    def show(self, chunk: Chunk) -> None:
        """Print what a chunk adds."""
        if not self.coloured:
            sys.stdout.write(chunk.text)
        else:
            self._marks.extend(zip(chunk.offsets, chunk.origins or (), strict=False))
            for piece, origin in self._pieces(chunk.text):
                sys.stdout.write(self._painted(piece, origin))
        sys.stdout.flush()

    def end(self) -> None:
        """Close the last line."""
        sys.stdout.write("\n")
        sys.stdout.flush()

    def legend(self) -> str:
        """Which colour is which drafter."""
        colours = ", ".join(f"{self.colour(origin)}: {origin}" for origin in self.origins)
        return f"colours of drafted tokens: {colours}; without colour: the model's own"

    def colour(self, origin: str) -> str:
        """The colour of a drafter, by the order in which drafters appeared."""
        if origin not in self.origins:
            self.origins.append(origin)
        return list(COLOURS)[self.origins.index(origin) % len(COLOURS)]

    def _painted(self, piece: str, origin: str) -> str:
        piece = piece.replace("\x1b", "\u241b")  # a terminal would obey an escape
        return piece if origin == TARGET else f"\x1b[{COLOURS[self.colour(origin)]}m{piece}\x1b[0m"

    def _pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """The text cut where one token ends and the next begins."""
        while text:
            while self._marks and self._marks[0][0] <= self._length:
                self._marks.popleft()
            end, origin = self._marks[0] if self._marks else (self._length + len(text), TARGET)
            piece, text = text[: end - self._length], text[end - self._length :]
            self._length += len(piece)
            yield piece, origin
