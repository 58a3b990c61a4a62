"""Tiny random models of every family, and a plain forward pass that reads nothing but a specification."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from paceline.targets.spec import ModelSpec, RopeSpec
    from paceline.targets.weights import WeightSource

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHORT, _LONG = [1.0 + 0.1 * i for i in range(3)], [2.0 + 0.5 * i for i in range(3)]
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "pad_token_id": 0,
}

# Variant to configuration class, model class, and what it has besides the common sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama3": ("Llama", {"rope_parameters": {**_LLAMA3, "rope_theta": 5000.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2-yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3Text",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 30, "original_max_position_embeddings": 256}),
    "phi4": (
        "Phi3",
        {
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": _SHORT,
                "long_factor": _LONG,
            },
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 3}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
}
# Those of which GGUF files exist, under the name that the format has for the architecture.
GGUF_FAMILIES = {
    "llama": "llama",
    "llama-biases": "llama",
    "llama3": "llama",
    "llama-linear": "llama",
    "qwen2": "qwen2",
    "qwen2-yarn": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi4": "phi3",
}


def tiny(family: str, seed: int = 0, **changes: Any) -> tuple[Any, Callable[[Path], Path]]:
    """A random model of `family` in float32, and a function that writes it into a folder and returns that."""
    stem, own = FAMILIES[family]
    config = getattr(transformers, f"{stem}Config")(**{**_SIZES, **own, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    name = "Gemma3ForCausalLM" if stem == "Gemma3Text" else f"{stem}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # as large as in trained models, so that an error in any part shows in the logits
            centre = 0.0 if "norm" not in key or stem.startswith("Gemma") else 1.0
            spread = 0.2 if "norm" in key or key.endswith("bias") else 0.15
            parameter.copy_(centre + spread * torch.randn_like(parameter))

    def write(folder: Path) -> Path:
        model.save_pretrained(folder)
        return folder

    return model, write


def expected_logits(model: Any, ids: Tensor) -> Tensor:
    """The model's own logits, float32 [tokens, vocabulary]."""
    with torch.no_grad():
        logits: Tensor = model(ids.reshape(1, -1)).logits[0]
    return logits


def plain_logits(spec: ModelSpec, weights: WeightSource, ids: Tensor) -> Tensor:
    """Logits float32 [tokens, vocabulary] of one text by the definition of `ModelSpec`, nothing cached."""

    def weight(name: str) -> Tensor:
        return weights.get(name).float()

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.norm_eps) * weight(name)

    def product(x: Tensor, name: str) -> Tensor:
        role = name.rsplit(".", 1)[-1]
        return torch.nn.functional.linear(x, weight(name), weight(f"{name}.bias") if role in spec.biases else None)

    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    act = activations[spec.activation]
    x = weight("embedding")[ids] * spec.embedding_multiplier
    for index in range(len(spec.layers)):
        layer = f"layers.{index}"
        h = norm(x, f"{layer}.attn_norm") if spec.pre_norms else x
        h = product(_attention(spec, index, h, norm, product), f"{layer}.o")
        h = norm(h, f"{layer}.attn_post_norm") if spec.post_norms else h
        x = x + spec.residual_multiplier * h
        h = norm(x, f"{layer}.mlp_norm") if spec.pre_norms else x
        h = act(product(h, f"{layer}.gate")) * product(h, f"{layer}.up")
        h = product(h, f"{layer}.down")
        h = norm(h, f"{layer}.mlp_post_norm") if spec.post_norms else h
        x = x + spec.residual_multiplier * h
    logits = norm(x, "norm") @ weight("embedding" if spec.tied else "head").T * spec.logit_multiplier
    cap = spec.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _attention(
    spec: ModelSpec,
    index: int,
    x: Tensor,
    norm: Callable[[Tensor, str], Tensor],
    product: Callable[[Tensor, str], Tensor],
) -> Tensor:
    rows, layer = len(x), spec.layers[index]
    q, k, v = (product(x, f"layers.{index}.{role}") for role in "qkv")
    if spec.qk_norm == "full":
        q, k = norm(q, f"layers.{index}.q_norm"), norm(k, f"layers.{index}.k_norm")
    q, k, v = (part.reshape(rows, -1, spec.head_dim).transpose(0, 1) for part in (q, k, v))
    if spec.qk_norm == "head":
        q, k = norm(q, f"layers.{index}.q_norm"), norm(k, f"layers.{index}.k_norm")
    if layer.rope is not None:
        q, k = rotated(q, layer.rope), rotated(k, layer.rope)
    k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, 0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * spec.attention_scale
    if spec.attention_softcap is not None:
        scores = spec.attention_softcap * torch.tanh(scores / spec.attention_softcap)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    hidden = (distance < 0) | (distance >= (layer.window or math.inf))
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return out.transpose(0, 1).reshape(rows, -1)


def rotated(x: Tensor, rope: RopeSpec) -> Tensor:
    """Rotary embedding of x [heads, rows, head_dim], row r at position r."""
    angles = torch.arange(x.shape[1]).float()[:, None] * torch.tensor(rope.inv_freq)
    cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
    half = rope.dims // 2
    a, b, rest = x[..., :half], x[..., half : rope.dims], x[..., rope.dims :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
