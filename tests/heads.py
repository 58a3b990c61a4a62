"""Tiny EAGLE and Medusa heads with random weights for the tiny decoders of `tests/decoders.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.heads.head import Head, Provenance
from paceline.heads.spec import TARGET_IDS, EagleSpec, MedusaSpec
from tests.decoders import VOCAB, rope_spec

if TYPE_CHECKING:
    from paceline.heads.spec import EagleKind, HeadSpec

EAGLES: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle"},
    "eagle, bias and two layers": {"kind": "eagle", "fc_bias": True, "layers": 2, "biases": ("q", "k", "v")},
    "eagle3": {"kind": "eagle3"},
    "eagle3, own width": {
        "kind": "eagle3",
        "hidden": 33,
        "own_embedding": True,
        "heads": 3,
        "kv_heads": 1,
        "layers": 2,
    },
    "eagle3, few ids": {"kind": "eagle3", "draft_vocab_size": 37, "own_ids": True, "norm_before_residual": True},
    "eagle3.1": {"kind": "eagle3", "fc_norm": True, "norm_output": True, "qk_norm": True, "fc_bias": True},
    "eagle3, one norm": {"kind": "eagle3", "norm_before_fc": True, "fused": 2, "features": (0, 2), "own_head": False},
}


def eagle_spec(kind: EagleKind, **changes: Any) -> EagleSpec:
    """A head for `tests.decoders.tiny_spec`, which has 2 layers."""
    spec = EagleSpec(
        kind=kind,
        hidden=40,
        target_hidden=40,
        intermediate=56,
        heads=4,
        kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        activation="silu",
        rope=rope_spec(),
        max_positions=512,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        features=(0, 1, 2) if kind == "eagle3" else (),
        fused=3 if kind == "eagle3" else 1,
        own_head=kind == "eagle3",
    )
    return replace(spec, **changes)


def random_weights(spec: HeadSpec, seed: int = 0) -> Head:
    """Products of variance 1 / inputs, norms around 1; target ids in no order."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in spec.shapes().items():
        values = torch.randn(shape, generator=generator)
        if name == TARGET_IDS:
            values = torch.randperm(spec.vocab_size, generator=generator)[: spec.draft_vocab_size]
        elif "norm" in name:
            values = 1 + 0.2 * values
        else:
            values = values * (0.2 if name.endswith("bias") else shape[-1] ** -0.5)
        tensors[name] = values
    return Head(spec, tensors, Provenance("random"))


def tiny_eagle(name: str, seed: int = 0) -> Head:
    return random_weights(eagle_spec(**EAGLES[name]), seed)


def tiny_medusa(seed: int = 0, **changes: Any) -> Head:
    spec = MedusaSpec(hidden=40, vocab_size=VOCAB, draft_vocab_size=VOCAB, heads=3)
    return random_weights(replace(spec, **changes), seed)
