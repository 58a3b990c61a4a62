"""A head in a few lines: what `paceline inspect` shows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.heads.make import FLAGS
from paceline.heads.spec import EagleSpec

if TYPE_CHECKING:
    from paceline.heads.head import Head
    from paceline.heads.manifest import Manifest
    from paceline.heads.spec import MedusaSpec


def facts(head: Head) -> dict[str, Any]:
    """What a head is, as plain data; sizes in bytes."""
    spec, provenance = head.spec, head.provenance
    return {
        "method": spec.kind,
        "layout": provenance.dialect,
        "path": provenance.path,
        "trained_for": provenance.target,
        **(_eagle(spec) if isinstance(spec, EagleSpec) else _medusa(spec)),
        "vocabulary": {"ids": spec.vocab_size, "drafted": spec.draft_vocab_size},
        "weight_bytes": sum(tensor.nbytes for tensor in head.tensors.values()),
        **_training(head.manifest),
        "notes": list(head.notes),
    }


def _training(manifest: Manifest | None) -> dict[str, Any]:
    return {} if manifest is None else {"trained_for": manifest.target, "trained_length": manifest.trained_length}


def _eagle(spec: EagleSpec) -> dict[str, Any]:
    features: Any = "the state after the final norm"
    if spec.kind == "eagle3":
        features = "2, n // 2, n - 3 of n" if spec.features is None else list(spec.features)
    return {
        "layers": spec.layers,
        "hidden": spec.hidden,
        "target_hidden": spec.target_hidden,
        "intermediate": spec.intermediate,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "features": features,
        "flags": [flag for flag in FLAGS if getattr(spec, flag)],
        "shares": [name for name, own in (("embedding", spec.own_embedding), ("head", spec.own_head)) if not own],
        "context_in_file": spec.max_positions,
    }


def _medusa(spec: MedusaSpec) -> dict[str, Any]:
    products = {"each": "one in each head", "shared": "one for all heads", "target": "the target's"}
    return {"heads": spec.heads, "layers": spec.layers, "hidden": spec.hidden, "logits": products[spec.head]}
