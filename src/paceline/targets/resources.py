"""Needed and free memory and disk, compared before they run out."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import psutil

from paceline.errors import ResourceError

if TYPE_CHECKING:
    from pathlib import Path


def check_disk(folder: Path, needed: int) -> None:
    """Refuse what does not fit on the disk.

    Raises:
        ResourceError: with the needed and the free amount.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{folder} has {free / 1e9:.2f} GB free, but {needed / 1e9:.2f} GB are needed; "
            "make room or set PACELINE_CACHE to a folder on another disk."
        )


def check_memory(needed: int, what: str) -> None:
    """Refuse what does not fit into the free memory.

    Raises:
        ResourceError: with the needed and the free amount.
    """
    free = psutil.virtual_memory().available
    if free < needed:
        raise ResourceError(
            f"{what} needs {needed / 1e9:.2f} GB of memory, but only {free / 1e9:.2f} GB are free; "
            "take a smaller model or number format."
        )
