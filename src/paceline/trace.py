"""What the pacer decided, step by step, in a file: one line of JSON for each step."""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any

from paceline.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.budget import Draft
    from paceline.cost import Load
    from paceline.tree import TokenTree


class Trace:
    """Writes to a file that is made anew.

    Raises:
        ResourceError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ResourceError(f"the trace {path} cannot be written ({error.strerror}): name another file.") from error
        weakref.finalize(self, self._file.close)
        self._sequences: list[dict[str, Any]] = []

    def chosen(self, drafts: Sequence[Draft], trees: Sequence[TokenTree]) -> None:
        """Of what was drafted in this step, ``trees`` are verified."""
        self._sequences = [
            {
                "id": draft.sequence,
                "offered": len(draft.tree) - 1,
                "kept": len(tree) - 1,
                "survival": [round(chance, 4) for chance in tree.survival[1:]],
                "drafters": tree.origin[1:],
            }
            for draft, tree in zip(drafts, trees, strict=True)
        ]

    def step(self, load: Load, predicted: float, measured: float) -> None:
        """The step is over; seconds without drafting."""
        line = {
            "rows": load.rows,
            "sequences": load.decodes,
            "prompt_rows": load.pieces,
            "context": load.read,
            "predicted": predicted,
            "measured": measured,
            "drafts": self._sequences,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._sequences = []
