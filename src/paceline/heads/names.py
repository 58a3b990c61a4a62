"""What the files of EAGLE heads call their tensors; two names differ between layouts, the rest is the same in all."""

from __future__ import annotations

from paceline.targets.weights import LAYER_NAMES


def tensor_name(name: str, first: str = "layers.0") -> str:
    """What files call the canonical tensor ``name``; ``first`` is their prefix of the first layer."""
    if name in ("embed_norm", "hidden_norm"):
        return f"{first}.{'input_layernorm' if name == 'embed_norm' else 'hidden_norm'}.weight"
    if name.startswith("layers."):
        _, layer, role, *bias = name.split(".")
        prefix = first if layer == "0" else f"layers.{layer}"
        return f"{prefix}.{LAYER_NAMES[role]}.{'bias' if bias else 'weight'}"
    if name == "fc.bias":
        return name
    return f"{ {'head': 'lm_head', 'embedding': 'embed_tokens'}.get(name, name) }.weight"
