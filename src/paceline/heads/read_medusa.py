"""Readers of Medusa heads: the repository's own layout, and vLLM's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.errors import DrafterError, WeightsError
from paceline.heads.files import take
from paceline.heads.head import Head, Provenance
from paceline.heads.ids import read_token_map
from paceline.heads.spec import TARGET_IDS, MedusaSpec
from paceline.targets.families import HARMLESS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from paceline.heads.files import Files

_PREFIX = re.compile(r"^(medusa_heads|medusa_head)\.")
_ORIGINAL = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_ORIGINAL_KEYS = frozenset({"base_model_name_or_path", "medusa_num_heads", "medusa_num_layers", "version"})
_VLLM_KEYS = frozenset(
    {
        "base_model_name_or_path",
        "hidden_size",
        "max_paths",
        "max_seq_len",
        "medusa_choices",
        "medusa_fc_bias",
        "medusa_num_heads",
        "medusa_num_layers",
        "num_heads",
        "num_hidden_layers",
        "num_lookahead_tokens",
        "original_lm_head",
        "topk",
        "truncated_vocab_size",
        "version",
        "vocab_size",
    }
)


def is_original(names: Iterable[str]) -> bool:
    """Whether these are the tensors of the repository's own layout."""
    return any(_ORIGINAL.fullmatch(_PREFIX.sub("", name)) for name in names)


def is_vllm(names: Iterable[str]) -> bool:
    """Whether these are the tensors of vLLM's layout."""
    return any(re.match(r"blocks\.\d+\.layers\.\d+\.", _PREFIX.sub("", name)) for name in names)


def read_original(files: Files) -> Head:
    """Heads as `{head}.{layer}.linear.{weight,bias}` and `{head}.{layers}.weight`, counted in the file.

    Raises:
        WeightsError: a tensor is missing, surplus, misshapen or not finite.
        DrafterError: the configuration has a key that nothing reads.
    """
    _refuse_unknown(files, _ORIGINAL_KEYS | {"vocab_size", "hidden_size"})
    files = files.renamed(lambda name: _PREFIX.sub("", name))
    found = [match for name in files.tensors if (match := _ORIGINAL.fullmatch(name))]
    heads = _counted(files, {int(match[1]) for match in found})
    outputs = {int(match[2]) for match in found if not match[3]}
    if len(outputs) != 1:
        raise WeightsError(f"{files.path}: the heads do not all have one and the same number of layers.")
    layers = outputs.pop()
    logits = files.tensors.get(f"0.{layers}.weight")
    if logits is None or logits.dim() != 2:
        raise WeightsError(f"{files.path}: the tensor 0.{layers}.weight is missing; fetch the heads again.")
    rows, hidden = logits.shape
    bias = any(match[4] == "bias" for match in found)
    spec = MedusaSpec(hidden, rows, rows, heads, layers, bias)
    names, notes = _original_names(spec, files)
    notes += _compare(files, "medusa_num_heads", heads) + _compare(files, "medusa_num_layers", layers)
    for key, value in (("vocab_size", rows), ("hidden_size", hidden)):
        if files.config.get(key) not in (None, value):
            raise WeightsError(f"{files.path}: the heads have {key} {value}, the configuration {files.config[key]}.")
    tensors = take(files, spec.shapes(), names)
    return Head(spec, tensors, Provenance("medusa", str(files.path), _base(files.config)), {}, tuple(notes))


def _original_names(spec: MedusaSpec, files: Files) -> tuple[dict[str, str], list[str]]:
    """The stored name of each tensor; blocks that share their weights may be stored once."""
    names, shared = {}, False
    for head in range(spec.heads):
        for layer in range(spec.layers):
            once = layer > 0 and not any(
                f"{head}.{other}.linear.weight" in files.tensors for other in range(1, spec.layers)
            )
            shared |= once
            stem = f"{head}.{0 if once else layer}.linear"
            names[f"heads.{head}.layers.{layer}"] = f"{stem}.weight"
            names[f"heads.{head}.layers.{layer}.bias"] = f"{stem}.bias"
        names[f"heads.{head}.head"] = f"{head}.{spec.layers}.weight"
    if shared and files.config.get("medusa_num_layers") != spec.layers:
        raise WeightsError(
            f"{files.path}: the tensor 0.1.linear.weight is missing, and no configuration says that the heads have "
            f"{spec.layers} layers of shared weights."
        )
    return names, ["its residual blocks share their weights"] if shared else []


def read_vllm(files: Files) -> Head:
    """Heads as `blocks.{head}.layers.{layer}.{weight,bias}`, and `lm_heads.{head}.weight` or `lm_head.weight`.

    Raises:
        WeightsError: a tensor is missing, surplus, misshapen or not finite, or contradicts the configuration.
        DrafterError: the configuration has a key that nothing reads.
    """
    _refuse_unknown(files, _VLLM_KEYS)
    files = files.renamed(lambda name: _PREFIX.sub("", name))
    tensors, config = files.tensors, files.config
    blocks = [
        match for name in tensors if (match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name))
    ]
    heads = _counted(files, {int(match[1]) for match in blocks})
    layers = _counted(files, {int(match[2]) for match in blocks})
    first = tensors.get("blocks.0.layers.0.weight")
    if first is None or first.dim() != 2:
        raise WeightsError(f"{files.path}: the tensor blocks.0.layers.0.weight is missing; fetch the heads again.")
    place, logits = _logits(files, heads)
    vocab_size = config.get("vocab_size") or (logits.shape[0] if logits is not None else None)
    if not isinstance(vocab_size, int):
        raise WeightsError(f"{files.path}: neither the configuration nor a product says how many ids there are.")
    columns = config.get("truncated_vocab_size") or vocab_size
    if (columns < vocab_size) != ("token_map" in tensors):
        there = "there" if "token_map" in tensors else "missing"
        raise WeightsError(
            f"{files.path}: the heads have {columns} columns for {vocab_size} ids, but token_map is {there}."
        )
    if place == "target" and columns != vocab_size:
        raise WeightsError(f"{files.path}: the tensor lm_head.weight is missing, of which {columns} rows are needed.")
    bias = any(match[3] == "bias" for match in blocks)
    _check_said(files, {"medusa_fc_bias": bias, "hidden_size": first.shape[1], "num_hidden_layers": layers})
    spec = MedusaSpec(first.shape[1], vocab_size, columns, heads, layers, bias, place, columns < vocab_size)
    notes = _compare(files, "num_heads", heads)
    return Head(
        spec, _vllm_tensors(files, spec), Provenance("medusa (vllm)", str(files.path), _base(config)), {}, tuple(notes)
    )


def _logits(files: Files, heads: int) -> tuple[Literal["each", "shared", "target"], Tensor | None]:
    """Where the product that gives logits is, and the first of its tensors."""
    each = files.tensors.get("lm_heads.0.weight")
    one = files.tensors.get("lm_head.weight")
    if not files.config.get("original_lm_head"):
        return ("shared", one) if each is None and one is not None and heads else ("each", each)
    if one is not None:
        return "shared", one
    return ("shared", each) if each is not None else ("target", None)


def _vllm_tensors(files: Files, spec: MedusaSpec) -> dict[str, Tensor]:
    """The canonical tensors; products of all ids lose the rows that the token map leaves out."""
    names = {"head": "lm_head.weight" if "lm_head.weight" in files.tensors else "lm_heads.0.weight"}
    for head in range(spec.heads):
        names[f"heads.{head}.head"] = f"lm_heads.{head}.weight"
        for layer in range(spec.layers):
            names[f"heads.{head}.layers.{layer}"] = f"blocks.{head}.layers.{layer}.weight"
            names[f"heads.{head}.layers.{layer}.bias"] = f"blocks.{head}.layers.{layer}.bias"
    shapes = {name: shape for name, shape in spec.shapes().items() if name != TARGET_IDS}
    copies = _copies(files, names["head"]) if spec.head == "shared" else []
    if not spec.own_ids:
        return take(files, shapes, names, copies)
    ids = read_token_map(files.path, files.tensors["token_map"], spec.draft_vocab_size, spec.vocab_size)
    whole = {name for name in shapes if name.endswith("head") and _rows(files, names[name]) == spec.vocab_size}
    shapes.update(dict.fromkeys(whole, (spec.vocab_size, spec.hidden)))
    found = take(files, shapes, names, ("token_map", *copies))
    return {**{name: value[ids] if name in whole else value for name, value in found.items()}, TARGET_IDS: ids}


def _copies(files: Files, name: str) -> list[str]:
    """The products of the single heads where they are but copies of the one for all."""
    found = [other for other in files.tensors if re.fullmatch(r"lm_heads\.\d+\.weight", other)]
    return [other for other in found if torch.equal(files.tensors[other], files.tensors[name])]


def _rows(files: Files, name: str) -> int | None:
    tensor = files.tensors.get(name)
    return None if tensor is None or not tensor.dim() else int(tensor.shape[0])


def _counted(files: Files, found: set[int]) -> int:
    if found != set(range(len(found))):
        raise WeightsError(
            f"{files.path}: the numbers {', '.join(map(str, sorted(found)))} of its heads or layers have gaps; "
            "fetch the heads again."
        )
    return len(found)


def _check_said(files: Files, found: dict[str, Any]) -> None:
    for key, value in found.items():
        if files.config.get(key) not in (None, value):
            raise WeightsError(f"{files.path}: the heads have {key} {value}, the configuration {files.config[key]}.")


def _compare(files: Files, key: str, found: int) -> list[str]:
    said = files.config.get(key)
    return (
        [] if said in (None, found) else [f"{key} is {said} in its configuration; the file has {found}, which counts"]
    )


def _refuse_unknown(files: Files, known: frozenset[str]) -> None:
    for key, value in files.config.items():
        if key == "logit_scale" and value == 1:
            continue
        if key in known | HARMLESS | {"architectures", "model_type"} or key.startswith("_"):
            continue
        if value not in (None, False, [], {}, ""):
            raise DrafterError(f"{files.path}: heads with the configuration key {key} = {value!r} are not supported.")


def _base(config: dict[str, Any]) -> str | None:
    found = config.get("base_model_name_or_path")
    return found if isinstance(found, str) and found else None
