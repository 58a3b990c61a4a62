"""Compiles the C library at the first load, into the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import KernelError
from paceline.folders import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parent / "csrc"

# Without contraction and re-association a float's value depends on the source alone. -Wno-psabi: vectors of 64
# bytes are passed between inlined functions only.
_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-Wno-psabi")
_AVX2 = ("-DPL_AVX2", "-mavx2", "-mfma")
_AVX512 = ("-DPL_AVX512", "-mavx2", "-mfma", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")))


@dataclass(frozen=True)
class Built:
    """A compiled library, and what made it."""

    library: Path
    compiler: str
    version: str


def compilers() -> Iterator[tuple[str, ...]]:
    """The commands that may be a working C compiler, best first: $CC, the system's, that of the ziglang wheel."""
    if os.environ.get("CC"):
        yield tuple(shlex.split(os.environ["CC"]))
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            yield (found,)
    if importlib.util.find_spec("ziglang") is not None:
        # zig aims at the machine it runs on unless told otherwise, and adds checks for undefined behaviour
        yield (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline", "-fno-sanitize=undefined")


def built_library() -> Built:
    """The library for this source, this compiler and these flags; compiled if the cache lacks it.

    Raises:
        KernelError: no compiler works; the message has what the last one said.
    """
    failure = "none was found; install gcc, clang, or the Python package ziglang"
    for command in compilers():
        folder = cache_folder() / "kernels" / _key(command)
        try:
            if not (folder / "build.json").exists():
                _compile(command, folder)
            made = json.loads((folder / "build.json").read_text())
            return Built(folder / "libpaceline.so", shlex.join(command), made["version"])
        except (OSError, subprocess.SubprocessError, KernelError) as error:
            failure = f"{shlex.join(command)}: {error}"
    raise KernelError(f"no C compiler works ({failure}).")


def _key(command: tuple[str, ...]) -> str:
    """A hash of all that shapes the library, found without running anything."""
    found = hashlib.sha256()
    tool = Path(shutil.which(command[0]) or command[0])
    stamp = tool.stat().st_mtime_ns if tool.exists() else 0
    parts = [*command, str(stamp), platform.machine(), sys.platform, *_FLAGS, *_AVX2, *_AVX512]
    found.update("\0".join(parts).encode())
    for source in sorted(SOURCES.rglob("*.[ch]")):
        found.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes())
    return found.hexdigest()[:16]


def _units() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """What is compiled, with its own flags: csrc/*.c once, csrc/paths/*.c once for each instruction set."""
    for source in sorted(SOURCES.glob("*.c")):
        yield source, ()
    for source in sorted(SOURCES.glob("paths/*.c")):
        yield source, ()
        if platform.machine().lower() in {"x86_64", "amd64"}:
            yield source, _AVX2
            yield source, _AVX512


def _compile(command: tuple[str, ...], folder: Path) -> None:
    """Compile in a folder of our own, then move it into place at once: several processes may build together."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as made:
        work = Path(made) / "out"
        work.mkdir()
        jobs, objects = [], []
        for number, (source, flags) in enumerate(_units()):
            objects.append(str(work / f"{number}.o"))
            arguments = [*command, *_FLAGS, *flags, "-c", str(source), "-o", objects[-1]]
            jobs.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        said = [job.communicate()[0] for job in jobs]
        for job, words in zip(jobs, said, strict=True):
            if job.returncode:
                raise KernelError(f"it ended with status {job.returncode}: {words.strip()[-400:]}")
        _run([*command, "-shared", "-pthread", *objects, "-lm", "-o", str(work / "libpaceline.so")])
        for name in objects:
            Path(name).unlink()
        version = _run([*command, "--version"]).splitlines()
        (work / "build.json").write_text(json.dumps({"version": version[0] if version else ""}))
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "build.json").exists():  # not simply made by another process meanwhile
                raise


def _run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise KernelError(f"it ended with status {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout
