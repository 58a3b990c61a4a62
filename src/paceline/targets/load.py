"""From a model's name to a decoder that is ready: find, convert once, map into memory."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast, get_args

import psutil
import torch

from paceline.errors import OptionError, WeightsError
from paceline.folders import cache_folder, make_folder
from paceline.options import choice
from paceline.targets import hub, vocabulary
from paceline.targets.decoder import Decoder
from paceline.targets.json_files import read_object
from paceline.targets.linear import Format
from paceline.targets.packed import PACKING_VERSION, convert, open_packed, short_context
from paceline.targets.progress import shown
from paceline.targets.resources import check_memory, physical_cores
from paceline.targets.spec import ModelSpec, from_hf_config, uses_longrope
from paceline.targets.vocabulary import TokenizerParts
from paceline.targets.weights import FolderWeights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from paceline.targets.weights import WeightSource

_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Opened:
    """A converted model, mapped into memory.

    Attributes:
        name: what the model is called.
        spec: what it computes.
        tensors: its packed weights by name.
        dtype: their number format.
        tokenizer: tokenizer, stop ids, template, sampling defaults.
        path: the folder of its converted form.
        weight_bytes: size of the weights.
        fingerprint: text that changes whenever the model does.
        notes: what was chosen and is worth a line.
    """

    name: str
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    dtype: Format
    tokenizer: TokenizerParts
    path: Path
    weight_bytes: int
    fingerprint: str
    notes: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        """How many ids may be emitted: those that both the head and the tokenizer have."""
        return min(self.spec.vocab_size, self.tokenizer.size)


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to compute; the attributes are those of `Opened`, and the decoder."""

    name: str
    spec: ModelSpec
    decoder: Decoder
    tokenizer: TokenizerParts
    dtype: Format
    path: Path
    weight_bytes: int
    fingerprint: str
    notes: list[str]


def load(
    model: str = hub.DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    threads: int | None = None,
    max_model_len: int | None = None,
    progress: bool = False,
) -> Loaded:
    """Load a model, fetching and converting it first where that has not been done.

    Args:
        model: "smollm2-135m", a folder, a GGUF file, or a repository id.
        dtype: "int8", "bf16" or "fp32"; None is int8.
        kv_dtype: "bf16" or "fp32" of the cache; None is fp32 for fp32 weights, else bf16.
        threads: None is the physical cores that the process may use.
        max_model_len: the context limit in tokens; None is the model's own.
        progress: show on standard error how fetching and converting go on.

    Raises:
        ModelError: the model cannot be loaded.
        OptionError: a format is unknown, or `max_model_len` exceeds the model's own limit.
        ResourceError: memory or disk does not suffice.
    """
    opened = open_model(model, dtype=dtype, max_model_len=max_model_len, progress=progress)
    limit = opened.spec.max_positions
    if max_model_len is not None and max_model_len > limit:
        raise OptionError(f"max_model_len is {max_model_len}, but {opened.name} has at most {limit} tokens.")
    decoder = Decoder(
        opened.spec,
        opened.tensors,
        opened.dtype,
        threads=threads or physical_cores(),
        kv_dtype=_cache_dtype(kv_dtype, opened.dtype),
        max_model_len=max_model_len,
        vocab_size=opened.vocab_size,
    )
    return Loaded(
        name=opened.name,
        spec=opened.spec,
        decoder=decoder,
        tokenizer=opened.tokenizer,
        dtype=opened.dtype,
        path=opened.path,
        weight_bytes=opened.weight_bytes,
        fingerprint=opened.fingerprint,
        notes=opened.notes,
    )


def open_model(
    model: str = hub.DEFAULT_MODEL,
    *,
    dtype: str | None = None,
    max_model_len: int | None = None,
    progress: bool = False,
) -> Opened:
    """Find a model and map its converted form into memory; arguments and errors are those of `load`."""
    number_format = _format(dtype)
    located = hub.known(model) or hub.locate(model, progress=progress)
    entry = _entry(located, number_format)
    found, notes = _mapped(entry, max_model_len), []
    if found is None:
        notes.append(f"converted weights: {entry}")
        located = hub.locate(model, progress=progress)
        _convert(located, number_format, entry, progress)
        found = open_packed(entry / _WEIGHTS, max_model_len)
    spec, tensors = found
    size = (entry / _WEIGHTS).stat().st_size
    check_memory(size, f"loading {located.name} in {number_format}")
    tokenizer = TokenizerParts.saved(entry)
    return Opened(
        name=located.name,
        spec=spec,
        tensors=tensors,
        dtype=number_format,
        tokenizer=tokenizer,
        path=entry,
        weight_bytes=size,
        fingerprint=located.fingerprint,
        notes=[*notes, *_notes(spec, tokenizer, entry, max_model_len)],
    )


def _format(dtype: str | None) -> Format:
    if dtype is None:
        return "int8"
    choice("dtype", dtype, get_args(Format))
    return cast("Format", dtype)


def _cache_dtype(kv_dtype: str | None, dtype: Format) -> torch.dtype:
    if kv_dtype is None:
        return torch.float32 if dtype == "fp32" else torch.bfloat16
    known = {"fp32": torch.float32, "bf16": torch.bfloat16}
    choice("kv_dtype", kv_dtype, known)
    return known[kv_dtype]


def _entry(located: hub.Located, dtype: Format) -> Path:
    """The folder of the converted form; its name changes with the model, the format and the packing."""
    key = hashlib.sha256(f"{located.fingerprint}|{dtype}|{PACKING_VERSION}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w.-]+", "-", located.name)[:80]
    return cache_folder() / "packed" / f"{readable}-{dtype}-{key}"


def _mapped(entry: Path, max_model_len: int | None) -> tuple[ModelSpec, Mapping[str, Tensor]] | None:
    """The converted form, if there is one; what is broken is removed, to be made again."""
    if not (entry / _WEIGHTS).exists():
        return None
    try:
        return open_packed(entry / _WEIGHTS, max_model_len)
    except WeightsError:
        shutil.rmtree(entry)
        return None


def _convert(located: hub.Located, dtype: Format, entry: Path, progress: bool) -> None:
    """Make the converted form in a folder beside its place, and move it there when it is whole."""
    make_folder(entry.parent)
    _remove_abandoned(entry.parent)
    spec, source, parts, short = _read(located)
    partial = entry.with_name(f".{entry.name}.{os.getpid()}")
    make_folder(partial)
    try:
        with shown(f"converting {located.name} to {dtype}", progress) as advance:
            convert(spec, source, dtype, partial / _WEIGHTS, advance, short)
        parts.save(partial)
        try:
            partial.rename(entry)
        except OSError:
            if not (entry / _WEIGHTS).exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes left that were killed in the middle."""
    for partial in folder.glob(".*"):
        process = partial.suffix.removeprefix(".")
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(partial, ignore_errors=True)


def _read(
    located: hub.Located,
) -> tuple[ModelSpec, WeightSource, TokenizerParts, tuple[int, ModelSpec] | None]:
    """Specification, weights, tokenizer, and for longrope the specification of short contexts."""
    if located.is_gguf:
        from paceline.targets.gguf import GgufFile  # not needed once a model is converted

        file = GgufFile(located.path)
        limit = file.longrope_original
        file_short = None if limit is None else (limit, file.spec_for(limit))
        return file.spec, file, file.tokenizer_parts, file_short
    config = read_object(located.path / "config.json", WeightsError)
    spec = from_hf_config(config)
    original = uses_longrope(config)
    folder_short = None if original is None else (original, from_hf_config(config, original))
    parts = vocabulary.from_folder(located.path)
    return spec, FolderWeights(spec, located.path), parts, folder_short


def _notes(spec: ModelSpec, tokenizer: TokenizerParts, entry: Path, limit: int | None) -> list[str]:
    found = []
    original = short_context(entry / _WEIGHTS)
    if original is not None:
        short = limit is not None and limit <= original
        reach = f"up to {original} tokens" if short else f"of more than {original} tokens"
        found.append(f"longrope: the factors for contexts {reach} are used (max_model_len chooses)")
    if tokenizer.size > spec.vocab_size:
        found.append(f"the tokenizer has {tokenizer.size} ids, the model {spec.vocab_size}: higher ones cannot be used")
    return found
