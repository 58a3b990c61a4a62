"""Amounts of memory, as they are shown and as they are asked for."""

from __future__ import annotations

WRITTEN = "2 GiB is 2 * 2**30 in Python, 2G as a flag"
"""How ``cache_memory`` is written."""


def amount(size: int) -> str:
    """A number of bytes in the largest unit that is not above it, as in ``2.5 GiB``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:,.4g} {unit}"
    return f"{size} bytes"
