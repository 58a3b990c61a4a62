"""The files of a published head: its configuration and its tensors under the names that they have there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import WeightsError
from paceline.targets.hub import locate_head
from paceline.targets.json_files import read_object
from paceline.targets.weights import is_ignored, read_tensors, tensor_names, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Files:
    """What lies at `path`: the configuration, empty where there is none, and the tensors by stored name."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def renamed(self, change: Callable[[str], str]) -> Files:
        """The same under changed names.

        Raises:
            WeightsError: two names become one.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if change(name) in found:
                raise WeightsError(f"{self.path}: the tensor {change(name)} is there twice, with and without a prefix.")
            found[change(name)] = tensor
        return Files(self.path, self.config, found)


def open_files(name: str) -> Files:
    """Read a folder, one file of weights with `config.json` beside it, or a repository `owner/name`.

    Raises:
        HubError: nothing is there, or it cannot be fetched.
        WeightsError: a file is missing, broken, or holds anything but tensors.
    """
    path, files, config = _locate(name)
    tensors = read_tensors(files)
    return Files(path, config, {name: tensor for name, tensor in tensors.items() if not is_ignored(name)})


def peek(name: str) -> tuple[dict[str, Any], list[str]]:
    """The configuration and the stored names alone; arguments and errors are those of `open_files`."""
    _, files, config = _locate(name)
    return config, tensor_names(files)


def _locate(name: str) -> tuple[Path, list[Path], dict[str, Any]]:
    path = locate_head(name)
    if path.is_dir():
        return path, weight_files(path), _config(path)
    if path.suffix not in WEIGHT_ENDINGS:
        raise WeightsError(f"{path} is not a file of weights ({', '.join(WEIGHT_ENDINGS)}).")
    return path, [path], _config(path.parent)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_object(path, WeightsError) if path.exists() else {}


def take(
    files: Files, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], used: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors by canonical name, once each is known to be there, shaped right and finite, and no other is.

    Args:
        shapes: what there has to be, by canonical name.
        names: the stored name of each.
        used: further stored tensors that have been read already.

    Raises:
        WeightsError: naming the first tensor that is missing, misshapen, of another format, not finite, or surplus.
    """
    missing = [names[name] for name in shapes if names[name] not in files.tensors]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise WeightsError(f"{files.path}: the tensor {missing[0]} is missing{others}; fetch the head again.")
    surplus = sorted(files.tensors.keys() - {names[name] for name in shapes} - set(used))
    if surplus:
        others = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise WeightsError(
            f"{files.path}: nothing accounts for the tensor {surplus[0]}{others}; "
            "the head is not what its configuration says, or of a kind that paceline does not have."
        )
    found = {name: files.tensors[names[name]] for name in shapes}
    for name, tensor in found.items():
        check_tensor(files.path, names[name], tensor, shapes[name])
    return found


def check_tensor(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Check one floating-point tensor.

    Raises:
        WeightsError: it is misshapen, of a format that is not supported, or holds NaN or infinity.
    """
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{path}: the tensor {name} has the shape {list(tensor.shape)}, but the head asks for {list(shape)}."
        )
    if tensor.dtype not in FLOATS:
        raise WeightsError(f"{path}: the tensor {name} is stored as {tensor.dtype}, which is not supported.")
    if not bool(torch.isfinite(tensor).all()):
        raise WeightsError(f"{path}: the tensor {name} holds NaN or infinite weights; the head cannot be used.")
