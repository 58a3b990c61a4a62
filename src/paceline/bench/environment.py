"""What a measurement was taken with: the head of every report, and part of every line of a journal."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import paceline
from paceline.kernels import describe
from paceline.machine import machine
from paceline.targets.resources import physical_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.front import Front
    from paceline.prompts import Prompt

_PACKAGE = Path(paceline.__file__).parent
_APART = ("cli", "prompts", "demo.py", "train")  # what shows results, is named in the settings, or makes weights


def environment(llm: Front | None = None) -> dict[str, Any]:
    """Processor, system, versions, commit and kernels, and how the model was loaded, as JSON has it."""
    kernels = describe()
    found: dict[str, Any] = {
        "machine": machine(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": physical_cores(),
        "logical_cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernels": kernels["path"],
        "compiler": " ".join(f"{kernels['compiler']} {kernels['version']}".split()),
        "versions": {
            "python": platform.python_version(),
            **{package: installed(package) for package in ("paceline", "torch", "tokenizers")},
        },
        "commit": commit(),
        "code": code(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if llm is not None:
        found |= {"model": llm.loaded.name, "dtype": llm.loaded.dtype, **_options(llm)}
    return found


def _options(llm: Front) -> dict[str, Any]:
    cache_dtype = str(llm.loaded.decoder.groups[0].dtype).removeprefix("torch.")
    return {
        "kv_dtype": cache_dtype,
        "threads": llm.options.threads or physical_cores(),
        "max_model_len": llm.max_model_len,
        "max_num_seqs": llm.options.max_num_seqs,
    }


def installed(package: str) -> str:
    """The version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def commit() -> str | None:
    """The commit of the checkout that the package runs from, ``+`` added where it was changed; None elsewhere."""
    root = _PACKAGE.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", str(_PACKAGE))
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@cache
def code() -> str:
    """A digest of all sources that a figure depends on: a commit changes with every line of documentation too."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        inside = path.relative_to(_PACKAGE)
        if path.suffix in (".py", ".c", ".h") and inside.parts[0] not in _APART:
            digest.update(f"{inside.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def settings(llm: Front, prompts: Sequence[Prompt], **others: Any) -> dict[str, Any]:
    """What the figures of a model on some prompts depend on; ``others`` are those of the measurement."""
    spoken = repr([(prompt.id, prompt.category, prompt.turns) for prompt in prompts])
    loaded = _options(llm)
    return {
        "model": llm.loaded.name,
        "fingerprint": llm.loaded.fingerprint,
        "dtype": llm.loaded.dtype,
        **{key: loaded[key] for key in ("kv_dtype", "threads")},
        "prompts": hashlib.sha256(spoken.encode()).hexdigest()[:16],
        **others,
    }
