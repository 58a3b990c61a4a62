"""The state of a training in one file, which is there whole or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import WeightsError
from paceline.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_NOTES = "notes"  # safetensors keeps texts by name


def save(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Write tensors, and what JSON can say beside them, in the place of the file that was there.

    Raises:
        ResourceError: it cannot be written; the old file stays.
    """
    stored = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    with replaced(path) as (partial,):
        save_file(stored, partial, metadata={_NOTES: json.dumps(notes)})


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote.

    Raises:
        WeightsError: the file is none of ours, or broken.
    """
    try:
        with safe_open(path, "pt") as file:
            notes: dict[str, Any] = json.loads((file.metadata() or {})[_NOTES])
            return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(f"{path} is no checkpoint of a training ({error}); remove it to begin anew.") from error
