"""Tiny EAGLE and Medusa heads with random weights for the tiny decoders of `tests/decoders.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.heads.head import Head, Provenance
from paceline.heads.spec import TARGET_IDS, EagleSpec, MedusaSpec
from paceline.targets.decoder import Decoder
from paceline.targets.linear import unpack_linear
from tests.decoders import VOCAB, random_tensors, rope_spec, tiny_spec

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


def tiny_eagle(name: str, seed: int = 0, vocab: int = VOCAB) -> Head:
    spec = eagle_spec(**EAGLES[name])
    columns = min(spec.draft_vocab_size, vocab if not spec.own_ids else vocab - 3)
    return random_weights(replace(spec, vocab_size=vocab, draft_vocab_size=columns), seed)


def tiny_medusa(seed: int = 0, vocab: int = VOCAB, **changes: Any) -> Head:
    spec = MedusaSpec(hidden=40, vocab_size=vocab, draft_vocab_size=vocab, heads=3)
    return random_weights(replace(spec, **changes), seed)


def bigram_decoder(seed: int = 0) -> Decoder:
    """A target whose next token depends on the last one alone: nothing of its layers reaches the residual stream."""
    spec = tiny_spec()
    tensors = random_tensors(spec, "fp32", seed)
    rows = tensors["embedding.data"]
    tensors["embedding.data"] = rows / rows.square().mean(1, keepdim=True).sqrt()
    tensors["head.data"] *= 3.0
    for name in tensors:
        if name.endswith((".o.data", ".down.data")):
            tensors[name].zero_()
    return Decoder(spec, tensors, "fp32")


def knowing_eagle(name: str, target: Decoder) -> Head:
    """A head that foretells `bigram_decoder`.

    EAGLE: the state after the final norm is the embedding times the norm's weight. EAGLE-3: a row attends to itself
    alone, as no other key is near enough, and what it reads there puts its embedding in the place of its state.
    """
    spec = eagle_spec(**EAGLES[name])
    if spec.kind == "eagle3":
        spec = replace(spec, kv_heads=spec.heads, biases=("q", "k"))
    tensors = {key: torch.zeros_like(tensor) for key, tensor in random_weights(spec).tensors.items()}
    tensors |= {key: torch.ones_like(tensor) for key, tensor in tensors.items() if "norm" in key}
    one, norm = torch.eye(40), target.plan.tensors["norm"]
    if spec.kind == "eagle":
        tensors["fc"][:, :40] = one * norm
        return Head(spec, tensors, Provenance("random"))
    ids = torch.arange(0, VOCAB, 3)[: spec.draft_vocab_size] if spec.own_ids else torch.arange(VOCAB)
    spec = replace(spec, draft_vocab_size=len(ids))
    rows = unpack_linear(target.plan.linear("head"), VOCAB, 40, "fp32")
    tensors["head"] = (rows * norm)[ids]
    if spec.own_ids:
        tensors[TARGET_IDS] = ids
    for role in "qk":
        tensors[f"layers.0.{role}.bias"].view(spec.heads, 16)[:, :8] = 30.0
        if spec.qk_norm:
            tensors[f"layers.0.{role}_norm"] *= 20.0
    tensors["layers.0.v"][:40] = torch.cat([one, -one], 1)
    tensors["layers.0.o"][:, :40] = one
    return Head(spec, tensors, Provenance("random"))
