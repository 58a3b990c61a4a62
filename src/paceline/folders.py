"""Where paceline keeps on this machine what it fetched, converted and compiled."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import ResourceError


def cache_folder() -> Path:
    """$PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline; not created here."""
    own = os.environ.get("PACELINE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline"


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, and those above it.

    Raises:
        ResourceError: that is not allowed, or not possible, there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"the folder {folder} cannot be made ({error.strerror}): set PACELINE_CACHE to one that can be written."
        ) from error
