"""The one runner: a measurement is made of cells, each written down as it is taken, so that it goes on where it
stopped."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from paceline.errors import OptionError
from paceline.journal import append, whole_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_STAMPS = ("code", "machine")
"""What makes a cell comparable, besides its settings: one taken on other code or another machine is taken again."""


class Runner:
    """Takes cells, or finds them in a file of an earlier run.

    Args:
        path: a JSONL file that is read and continued; None keeps nothing.
        environment: what the cells are taken with; ``code`` and ``machine`` must match for a cell to count.
        settings: all that a cell's result depends on besides its name.
        tell: is told of every cell that was taken, with a line of text.

    Raises:
        OptionError: the file is not one of ours.
        ResourceError: it cannot be written.
    """

    def __init__(
        self,
        path: Path | None,
        environment: Mapping[str, Any],
        settings: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        self.environment = dict(environment)
        self.settings = json.loads(json.dumps(settings))
        self.taken = self.found = 0
        self._path = path
        self._tell = tell
        self._cells = {} if path is None or not path.exists() else self._read(path)

    def cell(self, name: Mapping[str, Any], take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of the cell called ``name``: as written down, else ``take()``, which is written down now."""
        key = _key(name)
        if key in self._cells:
            self.found += 1
            return self._cells[key]
        result: dict[str, Any] = json.loads(json.dumps(take()))
        self._cells[key] = result
        self.taken += 1
        self._write({"cell": dict(name), "settings": self.settings, "result": result})
        self._tell(" · ".join(str(value) for value in name.values() if value is not None))
        return result

    def has(self, name: Mapping[str, Any]) -> bool:
        """Whether the cell was taken."""
        return _key(name) in self._cells

    def _read(self, path: Path) -> dict[str, dict[str, Any]]:
        stamps = {stamp: self.environment.get(stamp) for stamp in _STAMPS}
        cells: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(whole_lines(path), 1):
            try:
                entry = json.loads(line)
                fits = entry["settings"] == self.settings and all(entry[s] == v for s, v in stamps.items())
                if fits:
                    cells[_key(entry["cell"])] = entry["result"]
            except (ValueError, KeyError, TypeError) as error:
                raise OptionError(f"{path}, line {number}: no cell of a measurement ({error!r}).") from error
        return cells

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        stamps = {key: self.environment.get(key) for key in ("commit", *_STAMPS, "versions")}
        entry |= {**stamps, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        append(self._path, entry)


def _key(name: Mapping[str, Any]) -> str:
    return json.dumps(name, sort_keys=True)
