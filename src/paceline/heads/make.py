"""Heads from nothing: of the right shapes for a target, with random weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.errors import DrafterError
from paceline.heads.head import Head, Provenance
from paceline.heads.spec import TARGET_IDS, EagleSpec, MedusaSpec, usual_features
from paceline.targets.spec import from_hf_config

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.heads.spec import EagleKind, HeadSpec
    from paceline.targets.spec import ModelSpec

HeadKind = Literal["medusa", "eagle", "eagle3"]
_COLUMNS = 8192  # of an EAGLE-3 head, unless said otherwise
_HEADS = 4


FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


def random_head(
    kind: HeadKind,
    target: ModelSpec,
    seed: int = 0,
    *,
    draft_vocab_size: int | None = None,
    target_ids: Sequence[int] | None = None,
    features: Sequence[int] | None = None,
    flags: Collection[str] = (),
    heads: int = _HEADS,
    layers: int = 1,
    head: Literal["each", "shared", "target"] = "target",
    intermediate: int | None = None,
) -> Head:
    """A head for ``target`` with weights drawn from a normal distribution, a function of the seed alone.

    Products have the standard deviation 1 / sqrt(inputs), norms are 1, biases 0.

    Args:
        draft_vocab_size: columns of the head; None is all ids, of an EAGLE-3 head at most 8,192.
        target_ids: the ids of the columns; None draws them.
        features: EAGLE-3's states by the number of layers executed before them; None is 2, n // 2, n - 3, or the
            first, the middle and the last where the target has too few layers for that.
        flags: those of `FLAGS` that are on in an EAGLE-3 head, see `EagleSpec`.
        heads: how many Medusa heads.
        layers: layers of an EAGLE head, residual blocks of a Medusa head.
        head: where Medusa heads have the product that gives logits; with fewer ids than the target's not there.
        intermediate: width of an EAGLE layer's MLP; None is the target's.

    Raises:
        DrafterError: the columns, features or flags do not fit the target or one another.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = _columns(kind, target, draft_vocab_size, target_ids, generator)
    columns = target.vocab_size if ids is None else len(ids)
    config: dict[str, object] = {}
    spec: HeadSpec
    if kind == "medusa":
        place = "each" if ids is not None and head == "target" else head
        spec = MedusaSpec(target.hidden, target.vocab_size, columns, heads, layers, True, place, ids is not None)
    else:
        config = _layer_config(target, layers, intermediate or target.intermediate)
        spec = replace(_eagle(kind, target, config), draft_vocab_size=columns, own_ids=ids is not None)
        if kind == "eagle3":
            taps = _features(target, features)
            spec = replace(spec, features=taps, fused=len(taps), **_flags(flags))
        elif features or flags:
            raise DrafterError("features and flags belong to an EAGLE-3 head, not to one of kind 'eagle'.")
    floats = [(name, shape) for name, shape in spec.shapes().items() if name != TARGET_IDS]
    tensors = {name: _drawn(name, shape, generator) for name, shape in floats}
    if ids is not None:
        tensors[TARGET_IDS] = torch.tensor(ids)
    return Head(spec, tensors, Provenance("random"), config)


def _eagle(kind: EagleKind, target: ModelSpec, config: dict[str, object]) -> EagleSpec:
    model = from_hf_config(config)
    rope = model.layers[0].rope
    assert rope is not None  # every layer of a llama has positions
    return replace(EagleSpec.like(kind, model, rope), fc_bias=kind == "eagle", own_head=kind == "eagle3")


def _flags(names: Collection[str]) -> dict[str, Any]:
    unknown = sorted(set(names) - set(FLAGS))
    if unknown:
        raise DrafterError(f"an EAGLE-3 head has no flag '{unknown[0]}' (only {', '.join(FLAGS)}).")
    if {"fc_norm", "norm_before_fc"} <= set(names):
        raise DrafterError("fc_norm and norm_before_fc exclude each other.")
    return dict.fromkeys(names, True)


def _features(target: ModelSpec, features: Sequence[int] | None) -> tuple[int, ...]:
    layers = len(target.layers)
    if features is not None:
        found = tuple(features)
        if not found or sorted(set(found)) != list(found) or found[0] < 0 or found[-1] > layers:
            raise DrafterError(f"features must ascend within 0 to {layers}, but they are {list(found)}.")
        return found
    first, middle, last = usual_features(layers)
    if first < middle < last:
        return first, middle, last
    return tuple(dict.fromkeys((0, layers // 2, layers)))


def _columns(
    kind: HeadKind, target: ModelSpec, size: int | None, given: Sequence[int] | None, generator: torch.Generator
) -> list[int] | None:
    """The ids of the head's columns; None where column i is id i."""
    rows = target.vocab_size
    if given is not None:
        if len(set(given)) != len(given) or not given or min(given) < 0 or max(given) >= rows:
            raise DrafterError(f"target_ids must be different ids from 0 to {rows - 1}.")
        size = len(given)
    size = size or (min(rows, _COLUMNS) if kind == "eagle3" else rows)
    if kind == "eagle" and size != rows:
        raise DrafterError("an EAGLE head of kind 'eagle' drafts with the target's own head, thus with all its ids.")
    if size > rows:
        raise DrafterError(f"the head cannot have {size} columns, since the target has {rows} ids.")
    if given is not None:
        return list(given)
    return None if size == rows else torch.randperm(rows, generator=generator)[:size].sort().values.tolist()


def _layer_config(target: ModelSpec, layers: int, intermediate: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": target.hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": layers,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
    }


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.randn(shape, generator=generator) / math.sqrt(shape[1])
