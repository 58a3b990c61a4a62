"""What this machine is called."""

from __future__ import annotations

import platform
from pathlib import Path

from paceline.targets.resources import physical_cores


def machine() -> str:
    """The processor's name and how many of its cores the process may use."""
    return f"{processor()} x {physical_cores()}"


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not on every system
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
