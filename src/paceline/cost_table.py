"""What steps and drafters cost on this machine, measured once and kept for the next start."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.cost import Load, Prices
from paceline.folders import cache_folder, make_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class CostTable:
    """Measured costs.

    Attributes:
        steps: loads, and the seconds that they took.
        drafters: for each drafter, by its name, seconds of asking it by the number of
            sequences: for a lookup for all of them, for one that drafts with a model of one pass.
    """

    steps: tuple[tuple[Load, float], ...]
    drafters: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    @property
    def prices(self) -> Prices:
        """What it says of steps."""
        return Prices.fit(self.steps)

    def save(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            ResourceError: the folder cannot be made.
        """
        make_folder(path.parent)
        partial = path.with_suffix(f".{os.getpid()}")
        steps = [{**asdict(load), "seconds": seconds} for load, seconds in self.steps]
        partial.write_text(json.dumps({"steps": steps, "drafters": dict(self.drafters)}), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> CostTable | None:
        """What was written; None where nothing is there, or nothing that could be true."""
        try:
            return cls._read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def _read(cls, found: Any) -> CostTable:
        steps = []
        for entry in found["steps"]:
            seconds = _positive(entry.pop("seconds"))
            load = Load(**{name: int(amount) for name, amount in entry.items()})
            if min(asdict(load).values()) < 0 or not load.all_rows:
                raise ValueError("a step has rows")
            steps.append((load, seconds))
        if not any(load.decodes <= 1 for load, _ in steps):
            raise ValueError("some steps are those of one sequence")
        drafters = {
            str(name): tuple((max(1, int(count)), _positive(seconds)) for count, seconds in entries)
            for name, entries in found["drafters"].items()
        }
        return cls(tuple(steps), drafters)


def _positive(seconds: Any) -> float:
    if not 0.0 < float(seconds) < math.inf:
        raise ValueError("seconds are positive")
    return float(seconds)


def table_path(**known: object) -> Path:
    """Where the table of a machine, a model and its form is kept."""
    digest = hashlib.sha256(repr(sorted(known.items())).encode()).hexdigest()
    return cache_folder() / "costs" / f"{digest[:24]}.json"
