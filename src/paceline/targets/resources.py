"""What the machine has: memory and disk, compared with what is needed before they run out, and cores."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from paceline.amount import amount
from paceline.errors import ResourceError


def check_disk(folder: Path, needed: int) -> None:
    """Refuse what does not fit on the disk.

    Raises:
        ResourceError: with the needed and the free amount.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{folder} has {amount(free)} free, but {amount(needed)} are needed; "
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
            f"{what} needs {amount(needed)} of memory, but only {amount(free)} are free; "
            "take a smaller model or number format."
        )


def physical_cores() -> int:
    """How many cores the process may run on, hardware threads of one core counted once."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or 1
    cores = set()
    for processor in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(processor))
    return len(cores)
