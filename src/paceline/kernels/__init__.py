"""The C library: built and loaded once a process, or, where that fails, missed with one warning."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import TYPE_CHECKING

from paceline.errors import KernelError
from paceline.kernels.build import built_library

if TYPE_CHECKING:
    from paceline.kernels.build import Built

REFERENCE = "torch reference"
PATHS = ("portable", "avx2", "avx512-vnni")
"""The instruction sets that the library is compiled for, from the one that every processor has to the best."""


class PacelineWarning(UserWarning):
    """Something works, but not as well as it could; the message says why."""


class Library:
    """The loaded library and what built it."""

    def __init__(self, built: Built) -> None:
        self.built = built
        try:
            self.c = ctypes.CDLL(str(built.library))
            self.c.pl_find_path.restype = self.c.pl_pool_create.restype = ctypes.c_void_p
            self.c.pl_find_path.argtypes = [ctypes.c_char_p]
            self.c.pl_path_name.restype = ctypes.c_char_p
            self.c.pl_path_name.argtypes = [ctypes.c_void_p]
        except (OSError, AttributeError) as error:
            raise KernelError(f"{built.library} cannot be loaded ({error}); remove it.") from error

    def path(self, name: str = "") -> int:
        """The address of the functions for one instruction set; "" is the best that the processor has.

        Raises:
            KernelError: the processor has no such path.
        """
        found = self.c.pl_find_path(name.encode())
        if not found:
            raise KernelError(f"this processor has no path '{name}'; take '' for the best it has.")
        return int(found)

    def path_name(self, name: str = "") -> str:
        return str(self.c.pl_path_name(self.path(name)).decode())


@cache
def library() -> Library | None:
    """The C library; None, after one warning, where it cannot be built: then plain torch takes its place."""
    try:
        return Library(built_library())
    except KernelError as error:
        warnings.warn(
            f"The C kernels are missing, and plain torch, which is many times slower, runs in their place: {error}",
            PacelineWarning,
            stacklevel=2,
        )
        return None


def describe() -> dict[str, str]:
    """What runs: ``path`` (avx512-vnni, avx2, portable, torch reference), ``compiler``, ``version``, ``library``."""
    found = library()
    if found is None:
        return {"path": REFERENCE, "compiler": "", "version": "", "library": ""}
    built = found.built
    return {
        "path": found.path_name(),
        "compiler": built.compiler,
        "version": built.version,
        "library": str(built.library),
    }
