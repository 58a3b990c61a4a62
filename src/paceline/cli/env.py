"""``paceline env``: what runs here."""

import os
import platform
import shutil
from typing import Any

import psutil

from paceline.bench.environment import installed
from paceline.cli.flags import verb
from paceline.cli.model import AsJson
from paceline.cli.output import plain_warnings, print_json
from paceline.folders import cache_folder
from paceline.kernels import describe
from paceline.machine import processor
from paceline.targets.resources import physical_cores

LIBRARIES = ("torch", "tokenizers", "safetensors", "gguf", "huggingface-hub", "numpy", "jinja2", "typer")


@verb()
def env(*, as_json: AsJson = False) -> int:
    with plain_warnings():
        found = environment()
    if as_json:
        print_json(found)
    else:
        for name, value in _lines(found):
            print(f"{name + ':':<16}{value}")
    return 0


def environment() -> dict[str, Any]:
    """Versions, processor, kernels, folders and memory; sizes in bytes."""
    memory, folder = psutil.virtual_memory(), cache_folder()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return {
        "versions": {
            "paceline": installed("paceline"),
            "python": platform.python_version(),
            **{name: installed(name) for name in LIBRARIES},
        },
        "system": platform.platform(),
        "processor": processor(),
        "cores": {"physical": physical_cores(), "logical": os.cpu_count() or 1},
        "kernels": describe(),
        "cache": {"folder": str(folder), "free": shutil.disk_usage(there).free},
        "memory": {"total": memory.total, "free": memory.available},
    }


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    versions, kernels, memory = found["versions"], found["kernels"], found["memory"]
    compiler = f"{kernels['version']} ({kernels['compiler']})" if kernels["compiler"] else "none that works"
    return [
        ("paceline", f"{versions['paceline']} on Python {versions['python']}"),
        ("libraries", ", ".join(f"{name} {versions[name]}" for name in LIBRARIES)),
        ("system", found["system"]),
        ("processor", found["processor"]),
        ("threads", f"{found['cores']['physical']} cores of this process, {found['cores']['logical']} logical in all"),
        ("kernels", kernels["path"]),
        ("compiler", compiler),
        ("library", kernels["library"] or "none"),
        ("cache folder", f"{found['cache']['folder']} ({_size(found['cache']['free'])} free)"),
        ("memory", f"{_size(memory['free'])} free of {_size(memory['total'])}"),
    ]


def _size(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
