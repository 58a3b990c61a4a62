"""Converted models: one memory-mapped file with every weight in the layout that the kernels read.

The container is that of safetensors (an 8-byte length, a JSON header, the tensors), so that any of its readers can
look inside. Tensors start at multiples of 64 bytes; what lies between them is named `pad.N`.
"""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from paceline.amount import amount
from paceline.errors import ResourceError, WeightsError
from paceline.targets.linear import Format, pack_embedding, pack_linear, packed_bytes
from paceline.targets.resources import check_disk, check_memory
from paceline.targets.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from paceline.targets.weights import WeightSource

    Progress = Callable[[int, int], None]

PACKING_VERSION = 1
_ALIGNMENT = 64
_CHUNK = 8192  # rows, a multiple of the lanes of a packed block
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int16: "I16",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def convert(
    spec: ModelSpec,
    source: WeightSource,
    dtype: Format,
    path: Path,
    progress: Progress | None = None,
    short: tuple[int, ModelSpec] | None = None,
) -> None:
    """Write the packed form of a model to `path`, layer by layer; `path` appears only when it is whole.

    Args:
        spec: the model.
        source: its weights.
        dtype: number format of the products.
        progress: called with the steps done and their number.
        short: for longrope, the context in tokens up to which another specification applies, and that one.

    Raises:
        ResourceError: the disk or the memory is too small; both numbers are in the message.
        WeightsError: from `source`.
    """
    needed = packed_size(spec, dtype)
    check_disk(path.parent, needed)
    check_memory(working_memory(spec), f"converting a model with {spec.vocab_size} ids of {spec.hidden} values")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    metadata = {"packing": str(PACKING_VERSION), "format": dtype, "spec": spec.to_json()}
    if short is not None:
        metadata |= {"short_context": str(short[0]), "short_spec": short[1].to_json()}
    try:
        with partial.open("wb") as file:
            steps = _packed(spec, source, dtype)
            _Writer(file, metadata, len(spec.layers)).write(steps, len(spec.layers) + 2, progress)
        partial.replace(path)
    except OSError as error:
        raise ResourceError(f"{path} could not be written, {amount(needed)} are needed ({error}).") from error
    finally:
        partial.unlink(missing_ok=True)


def open_packed(path: Path, max_model_len: int | None = None) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """Map a packed file into memory; nothing is read before it is used.

    Args:
        max_model_len: the context limit in tokens, which decides between two sets of longrope factors.

    Raises:
        WeightsError: the file is broken, cut, or of another version.
    """
    header, start = _header(path)
    metadata = header.pop("__metadata__", {})
    if metadata.get("packing") != str(PACKING_VERSION):
        raise WeightsError(f"{path} was packed by another version; remove it.")
    size = path.stat().st_size
    if any(start + entry["data_offsets"][1] > size for entry in header.values()):
        raise WeightsError(f"{path} is cut; remove it.")
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {
        name: whole[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        .view(_DTYPES[entry["dtype"]])
        .view(entry["shape"])
        for name, entry in header.items()
        if not name.startswith("pad.")
    }
    short = metadata.get("short_context")
    use_short = short is not None and max_model_len is not None and max_model_len <= int(short)
    return ModelSpec.from_json(metadata["short_spec" if use_short else "spec"]), tensors


def short_context(path: Path) -> int | None:
    """For longrope the context in tokens up to which the factors for short contexts apply."""
    found = _header(path)[0]["__metadata__"].get("short_context")
    return None if found is None else int(found)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 28)))
    except (OSError, ValueError, struct.error) as error:
        raise WeightsError(f"{path} is broken ({error}); remove it.") from error
    return header, 8 + length


def _packed(spec: ModelSpec, source: WeightSource, dtype: Format) -> Iterator[dict[str, Tensor]]:
    """Everything that the decoder reads, in steps of one layer."""

    def product(name: str, parts: list[str]) -> dict[str, Tensor]:
        weight = _joined([source.get(part) for part in parts])
        biased = [f"{part}.bias" in source.names() for part in parts]
        if any(biased) and not all(biased):
            raise WeightsError(f"{name} has a bias for some of its parts only.")
        bias = _joined([source.get(f"{part}.bias") for part in parts]) if any(biased) else None
        found = _in_chunks(weight, lambda rows, values: pack_linear(rows, values, dtype), bias)
        return {f"{name}.{key}": tensor for key, tensor in found.items()}

    embedding = _in_chunks(source.get("embedding"), lambda rows, _: pack_embedding(rows, dtype))
    yield {f"embedding.{key}": tensor for key, tensor in embedding.items()}
    for index in range(len(spec.layers)):
        layer = f"layers.{index}"
        found = product(f"{layer}.qkv", [f"{layer}.{role}" for role in "qkv"])
        found |= product(f"{layer}.o", [f"{layer}.o"])
        found |= product(f"{layer}.gate_up", [f"{layer}.gate", f"{layer}.up"])
        found |= product(f"{layer}.down", [f"{layer}.down"])
        norms = [name for name in spec.shapes() if name.startswith(f"{layer}.") and name.endswith("norm")]
        yield found | {name: source.get(name).float() for name in norms}
    yield product("head", ["embedding" if spec.tied else "head"]) | {"norm": source.get("norm").float()}


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _in_chunks(
    weight: Tensor, pack: Callable[[Tensor, Tensor | None], dict[str, Tensor]], bias: Tensor | None = None
) -> dict[str, Tensor]:
    """Pack some thousand rows at a time: the head of a small model is larger than all the rest together."""
    pieces = []
    for first in range(0, len(weight), _CHUNK):
        rows = slice(first, first + _CHUNK)
        pieces.append(pack(weight[rows], None if bias is None else bias[rows]))
    return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}


class _Writer:
    """Writes tensors as they come, and the header, for which room is kept, at the end."""

    def __init__(self, file: BinaryIO, metadata: dict[str, str], layers: int) -> None:
        self._file = file
        self._entries: dict[str, Any] = {"__metadata__": metadata}
        # at most 40 tensors a layer, pads counted, of at most 150 characters
        room = len(json.dumps(metadata)) + 6000 * (layers + 2)
        self._start = -(-(room + 8) // 4096) * 4096
        self._end = 0

    def write(self, steps: Iterator[dict[str, Tensor]], total: int, progress: Progress | None) -> None:
        self._file.seek(self._start)
        for done, tensors in enumerate(steps, start=1):
            for name, tensor in tensors.items():
                self._append(name, tensor.detach().contiguous())
            if progress is not None:
                progress(done, total)
        header = json.dumps(self._entries).encode()
        length = self._start - 8
        if len(header) > length:
            raise WeightsError(f"the header has {len(header)} bytes, but only {length} were kept for it.")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", length) + header.ljust(length))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _append(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self._note(name, _NAMES[tensor.dtype], list(tensor.shape), size)
        self._file.write(tensor.flatten().view(torch.uint8).numpy().data)
        gap = -size % _ALIGNMENT
        if gap:
            self._note(f"pad.{len(self._entries)}", "U8", [gap], gap)
            self._file.write(bytes(gap))

    def _note(self, name: str, dtype: str, shape: list[int], size: int) -> None:
        offsets = [self._end, self._end + size]
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        self._end += size


# Sizes, and whether there is room for them.


def packed_size(spec: ModelSpec, dtype: Format) -> int:
    """About how many bytes the packed form takes, on disk and in memory."""
    rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = (
        packed_bytes(rows + 2 * kv_rows, spec.hidden, dtype)
        + packed_bytes(spec.hidden, rows, dtype)
        + packed_bytes(2 * spec.intermediate, spec.hidden, dtype)
        + packed_bytes(spec.hidden, spec.intermediate, dtype)
    )
    width = {"int8": 1, "bf16": 2, "fp32": 4}[dtype]
    embedding = spec.vocab_size * (spec.hidden * width + 4)
    return layer * len(spec.layers) + packed_bytes(spec.vocab_size, spec.hidden, dtype) + embedding


def working_memory(spec: ModelSpec) -> int:
    """About how many bytes the conversion holds at a time: the largest tensor in float32, three times."""
    largest = max(spec.vocab_size, 2 * spec.intermediate, spec.heads * spec.head_dim) * spec.hidden
    return 12 * largest
