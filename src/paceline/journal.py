"""Files of JSON lines that grow line by line, and outlive being cut off in the middle of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """The lines of a file, from which a last line that was cut is removed."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    # Not splitlines(): a line separator inside a text is no end of a line.
    return whole.decode("utf-8", errors="replace").split("\n")[:-1]


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add a line to a file, which is made, with its folder, where there is none.

    Raises:
        ResourceError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error}.") from error
