"""What a pass does, and how its room is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.request import Sequence


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``start + rows - 1`` of what a sequence has committed.

    Attributes:
        scored: how many of the last rows are scored: the one that draws the first token, and for prompt logprobs all
            that have not been.
        draws: whether the first token is drawn behind it.
    """

    sequence: Sequence
    start: int
    rows: int
    scored: int
    draws: bool

    @classmethod
    def next(cls, sequence: Sequence, rows: int) -> Piece:
        """The next ``rows`` rows that a sequence has to take in."""
        start, end = sequence.planned, sequence.planned + rows
        draws = sequence.fresh and end == sequence.prompt_length
        scored = int(draws)
        if sequence.fresh and sequence.request.sampling.prompt_logprobs is not None:
            scored = max(0, end - max(start, len(sequence.prompt_logprobs) - 1))
        return cls(sequence, start, rows, scored, draws)


@dataclass(frozen=True)
class Plan:
    """What the next pass does: for each decoding sequence the most nodes that may be drafted, and pieces of prompts."""

    decodes: tuple[tuple[Sequence, int], ...]
    pieces: tuple[Piece, ...]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.pieces)


def in_turn(wanted: Seq[int], room: int) -> list[int]:
    """Share room so that who comes first gets most, and a short one does not wait for a long one before it: each takes
    half of what is left, the last one all; what is then left over goes round again."""
    shares = []
    for place, want in enumerate(wanted, 1):
        part = room if place == len(wanted) else (room + 1) // 2
        shares.append(max(0, min(want, part)))
        room -= shares[-1]
    for place, want in enumerate(wanted):
        more = max(0, min(want - shares[place], room))
        shares[place] += more
        room -= more
    return shares


def evenly(wanted: Seq[int], room: int) -> list[int]:
    """Share room so that nobody gets less than another who wants as much, the first of them one more where it does not
    come out even."""
    shares = [0] * len(wanted)
    for done, place in enumerate(sorted(range(len(wanted)), key=lambda place: (wanted[place], -place))):
        shares[place] = max(0, min(wanted[place], room // (len(wanted) - done)))
        room -= shares[place]
    return shares
