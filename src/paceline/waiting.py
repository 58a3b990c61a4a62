"""Those whose turn has not come."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.request import Sequence


class Waiting:
    """Sequences in the order of their turn. Nothing here takes time for each that waits, but for moving numbers."""

    def __init__(self) -> None:
        self._turns: list[tuple[int, int]] = []  # the next one's last, so that it is cheap to take
        self._members: dict[tuple[int, int], Sequence] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, sequence: Sequence) -> bool:
        return _key(sequence) in self._members

    @property
    def head(self) -> Sequence:
        """Whose turn it is next."""
        return self._members[self._turns[-1]]

    def add(self, sequence: Sequence) -> None:
        key = _key(sequence)
        insort(self._turns, key)
        self._members[key] = sequence

    def remove(self, sequence: Sequence) -> None:
        key = _key(sequence)
        del self._members[key]
        del self._turns[bisect_left(self._turns, key)]


def _key(sequence: Sequence) -> tuple[int, int]:
    priority, arrival = sequence.turn
    return -priority, -arrival
