"""Weights from Hugging Face folders under canonical names: memory-mapped, every tensor accounted for.

Canonical names: embedding, norm, head, and for layer i `layers.{i}.` with q, k, v, o, gate, up, down (and
`.bias`), attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm. `ModelSpec.shapes` lists those
that a model has.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from paceline.targets.spec import ModelSpec

# What a checkpoint may hold besides the language model, and stored tables that are computed anew.
_IGNORED = (
    re.compile(r"(model\.)?vision_tower\."),
    re.compile(r"(model\.)?vision_model\."),
    re.compile(r"(model\.)?multi_modal_projector\."),
    re.compile(r".*rotary_emb\.inv_freq$"),
)
_FLOATS = {"F32", "F16", "BF16"}
_TORCH_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class WeightSource(Protocol):
    """Weights by canonical name."""

    def names(self) -> set[str]:
        """Every canonical name that `get` answers."""

    def get(self, name: str) -> Tensor:
        """The tensor, float32, bfloat16 or float16, read when it is asked for; products are [out, in]."""


@dataclass(frozen=True)
class Place:
    """Where a canonical weight lies: a stored tensor, or `rows` (first, last + 1) of its `total` rows."""

    tensor: str
    rows: tuple[int, int] | None = None
    total: int = 0


def account(
    spec: ModelSpec,
    places: Mapping[str, Place],
    present: Mapping[str, tuple[int, ...]],
    accounted: Iterable[str],
    where: Path,
) -> None:
    """Check that every weight is there with its shape, and that every stored tensor has a use.

    Args:
        places: where each canonical weight should be.
        present: the stored tensors and their shapes.
        accounted: stored tensors that have another use, or none that matters.

    Raises:
        WeightsError: naming the first tensor that is missing, misshapen, or not accounted for.
    """
    missing = []
    for name, shape in spec.shapes().items():
        place = places[name]
        found = present.get(place.tensor)
        expected = (place.total, *shape[1:]) if place.rows else shape
        if found is None:
            missing.append(place.tensor)
        elif found != expected:
            raise WeightsError(
                f"{where}: the tensor {place.tensor} has the shape {list(found)}, "
                f"but the configuration asks for {list(expected)}."
            )
    missing = list(dict.fromkeys(missing))
    if missing:
        raise WeightsError(f"{where}: the tensor {missing[0]} is missing{_others(missing)}; fetch the model again.")
    used = {places[name].tensor for name in spec.shapes()}
    surplus = sorted(present.keys() - used - set(accounted))
    if surplus:
        raise WeightsError(
            f"{where}: nothing accounts for the tensor {surplus[0]}{_others(surplus)}; "
            "the model is not what its configuration says."
        )


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


LAYER_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "qkv": "self_attn.qkv_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def _folder_places(spec: ModelSpec, prefix: str, head: str) -> dict[str, Place]:
    """Where a Hugging Face folder keeps each weight."""
    names = dict(LAYER_NAMES)
    if spec.pre_norms and spec.post_norms:
        names["mlp_norm"] = "pre_feedforward_layernorm"
    outer = {"embedding": f"{prefix}embed_tokens.weight", "norm": f"{prefix}norm.weight", "head": head}
    return places(spec, outer, f"{prefix}layers", names)


def places(spec: ModelSpec, outer: Mapping[str, str], layers: str, names: Mapping[str, str]) -> dict[str, Place]:
    """Where a checkpoint keeps each canonical weight.

    Args:
        outer: what it calls the weights outside the layers.
        layers: what stands before the number of a layer.
        names: what it calls each role in a layer, and the fused "qkv" and "gate_up" of Phi-3.
    """
    fused = _fused_rows(spec) if spec.family == "phi3" else {}
    found = {name: Place(tensor) for name, tensor in outer.items()}
    for name in spec.shapes():
        if name.startswith("layers."):
            _, layer, role, *suffix = name.split(".")
            whole, rows, total = fused.get(role, (role, None, 0))
            ending = suffix[0] if suffix else "weight"
            found[name] = Place(f"{layers}.{layer}.{names[whole]}.{ending}", rows, total)
    return found


def _fused_rows(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, int], int]]:
    """For each role in a fused tensor: "qkv" or "gate_up", its rows, and the rows of the whole."""
    q, kv, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate
    return {
        "q": ("qkv", (0, q), q + 2 * kv),
        "k": ("qkv", (q, q + kv), q + 2 * kv),
        "v": ("qkv", (q + kv, q + 2 * kv), q + 2 * kv),
        "gate": ("gate_up", (0, inner), 2 * inner),
        "up": ("gate_up", (inner, 2 * inner), 2 * inner),
    }


class FolderWeights:
    """The weights of a Hugging Face folder.

    Args:
        spec: what its `config.json` says.
        owned: prefixes of stored tensors that belong to a drafter.

    Raises:
        WeightsError: no weights, a missing, broken or cut file, or a tensor that is missing, misshapen, or
            not accounted for.
    """

    def __init__(self, spec: ModelSpec, folder: Path, owned: tuple[str, ...] = ()) -> None:
        self._spec = spec
        self._folder = folder
        self._store = _open_store(folder)
        present = self._store.shapes()
        embedding = [name for name in present if name.endswith("embed_tokens.weight") and not is_ignored(name)]
        if len(embedding) != 1:
            raise WeightsError(f"{folder}: found {len(embedding)} tensors named embed_tokens.weight, not one.")
        prefix = embedding[0].removesuffix("embed_tokens.weight")
        heads = [name for name in present if name.endswith("lm_head.weight") and not is_ignored(name)]
        head = heads[0] if heads else "lm_head.weight"
        self._places = _folder_places(spec, prefix, head)
        accounted = [name for name in present if is_ignored(name) or name.startswith(owned or ("\0",))]
        if spec.tied and heads:
            self._check_tied_head(embedding[0], head)
            accounted.append(head)
        account(spec, self._places, present, accounted, folder)

    def _check_tied_head(self, embedding: str, head: str) -> None:
        if not torch.equal(self._store.get(embedding), self._store.get(head)):
            raise WeightsError(
                f"{self._folder}: the configuration ties head and embedding, but {head} is stored and differs."
            )

    def names(self) -> set[str]:
        """Every canonical name of the specification."""
        return set(self._spec.shapes())

    def get(self, name: str) -> Tensor:
        """The tensor; a Gemma norm's 1 is added, so that all norms are x * w."""
        place = self._places[name]
        tensor = self._store.get(place.tensor)
        if place.rows:
            tensor = tensor[place.rows[0] : place.rows[1]]
        if self._spec.family in {"gemma2", "gemma3"} and name.endswith("norm"):
            tensor = tensor.float() + 1.0
        return tensor


SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def folder_fingerprint(folder: Path) -> str:
    """The fingerprint of all files of a folder that loading reads.

    Raises:
        WeightsError: the folder has no weights, or a shard is missing.
    """
    small = [folder / name for name in SMALL_FILES if (folder / name).exists()]
    return fingerprint([*small, *weight_files(folder)])


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of paths, sizes and modification times, links followed."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def is_ignored(name: str) -> bool:
    """Whether a stored tensor does not matter for text."""
    return any(pattern.match(name) for pattern in _IGNORED)


class _Store(Protocol):
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def get(self, name: str) -> Tensor: ...


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, safetensors before torch's own format.

    Raises:
        WeightsError: the folder has no weights, its index is broken, or a shard is missing.
    """
    for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single = folder / f"{stem}.{ending}.index.json", folder / f"{stem}.{ending}"
        if index.exists():
            return _shards(index)
        if single.exists():
            return [single]
    for endings in ((".safetensors",), (".bin", ".pt", ".pth")):
        others = sorted(path for path in folder.iterdir() if path.suffix in endings and not _is_training(path))
        if len(others) == 1:
            return others
        if others:
            raise WeightsError(f"{folder}: {len(others)} files of weights and no index that says which belong.")
    raise WeightsError(f"{folder} has no weights (model.safetensors, its shards, or pytorch_model.bin).")


def _is_training(path: Path) -> bool:
    return path.stem in {"training_args", "optimizer", "scheduler"} or path.stem.startswith("rng_state")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is not a readable index of shards; fetch it again.") from error
    if not all(isinstance(name, str) and name == index.parent.joinpath(name).name for name in names):
        raise WeightsError(f"{index} names files outside its folder, which is refused.")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise WeightsError(
            f"{index.parent}: the shard {missing[0]} is missing{_others(missing)}; fetch the model again."
        )
    return [index.parent / name for name in names]


def _open_store(folder: Path) -> _Store:
    files = weight_files(folder)
    return _SafetensorsStore(files) if files[0].suffix == ".safetensors" else _TorchStore(files)


class _SafetensorsStore:
    """Shards, memory-mapped; nothing is read before it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        self._owner: dict[str, Any] = {}
        for path in files:
            try:
                handle: Any = safe_open(path, framework="pt")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is broken or cut ({error}); fetch it again.") from error
            for name in names:
                if name in self._owner:
                    raise WeightsError(f"{path}: the tensor {name} is in two shards.")
                self._owner[name] = handle

    def names(self) -> list[str]:
        return list(self._owner)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, handle in self._owner.items():
            part = handle.get_slice(name)
            if part.get_dtype() not in _FLOATS and not is_ignored(name):
                raise WeightsError(f"the tensor {name} is stored as {part.get_dtype()}, which is not supported.")
            found[name] = tuple(part.get_shape())
        return found

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._owner[name].get_tensor(name)
        return tensor


class _TorchStore:
    """Torch's own format, read without running anything that it holds."""

    def __init__(self, files: list[Path]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in files:
            self._tensors.update(_load_torch(path))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _TORCH_FLOATS and not is_ignored(name):
                raise WeightsError(f"the tensor {name} is stored as {tensor.dtype}, which is not supported.")
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Every tensor of some files of weights of one kind, of any number format, under its stored name.

    Raises:
        WeightsError: a file is broken or cut, holds anything but tensors, or repeats a name.
    """
    if files[0].suffix == ".safetensors":
        store = _SafetensorsStore(files)
        return {name: store.get(name) for name in store.names()}
    found: dict[str, Tensor] = {}
    for path in files:
        tensors = _load_torch(path)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise WeightsError(f"{path}: the tensor {twice[0]} is in two shards.")
        found.update(tensors)
    return found


def tensor_names(files: list[Path]) -> list[str]:
    """The stored names of all tensors of some files of weights of one kind; errors are those of `read_tensors`."""
    if files[0].suffix == ".safetensors":
        return _SafetensorsStore(files).names()
    return [name for path in files for name in _load_torch(path)]


def _load_torch(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"  # the older format cannot be mapped
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # the unpickler raises whatever a broken or hostile file makes it
        reason = str(error).split("\n")[0][:200]
        raise WeightsError(
            f"{path} cannot be read as plain tensors ({reason}); nothing else is ever loaded from such a file."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise WeightsError(f"{path} does not hold a table of tensors.")
    return found
