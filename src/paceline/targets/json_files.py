"""The JSON files that come with models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.errors import ModelError


def read_object(path: Path, error: type[ModelError]) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        ModelError: ``error``: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise error(f"{path} is not readable as JSON ({reason}); fetch it again.") from reason
    if not isinstance(found, dict):
        raise error(f"{path} does not hold a JSON object; fetch it again.")
    return found
