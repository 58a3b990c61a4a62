"""Files that are there whole or not at all, whenever their writer is killed."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from paceline.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def replaced(*paths: Path) -> Iterator[list[Path]]:
    """Let the block write other files, and put them in the places of ``paths`` once all of them are on the disk.

    Where the last of ``paths`` is there, all are of one writing: it goes before the first of the others changes, and
    comes after them. One file alone is changed in one stroke.

    Raises:
        ResourceError: they cannot be written; what was there stays.
    """
    partial = [path.with_name(f".{path.name}.partial") for path in paths]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        for path in partial:
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        if len(paths) > 1:
            paths[-1].unlink(missing_ok=True)
        for written, path in zip(partial, paths, strict=True):
            written.replace(path)
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"{paths[-1]} cannot be written ({error}): what was there before stays.") from error
    finally:
        with suppress(OSError):  # there may be no folder
            for path in partial:
                path.unlink(missing_ok=True)
