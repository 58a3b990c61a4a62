"""Writes GGUF files of tiny models and tokenizers, with the format's own names, order of rows, and folded norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from tests.models import GGUF_FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    model: Any,
    family: str,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: dict[str, Any] | None = None,
    drop: str | None = None,
    extra: dict[str, Any] | None = None,
    raw: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write `model` of a family of `tests.models` into a GGUF file.

    Args:
        kind: the type of the products' tensors; norms and biases are always F32.
        tokenizer: metadata to add, as `add_tokenizer` takes them.
        drop: a tensor to leave out, by its name in the file.
        extra: further keys of the architecture.
        raw: bytes to store in place of a tensor, with their type.
    """
    architecture = GGUF_FAMILIES[family]
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    _add_sizes(writer, config, architecture)
    _add_rope(writer, config, architecture)
    for key, value in (extra or {}).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    head_dim = _head_dim(config)
    for name, tensor in model.state_dict().items():
        target = _gguf_name(name, gemma=architecture.startswith("gemma"))
        if target == "output.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and (".attn_q." in target or ".attn_k." in target):
            tensor = _interleaved(tensor, head_dim)
        if architecture.startswith("gemma") and "norm" in target:
            tensor = tensor + 1
        if raw is not None and target in raw:
            writer.add_tensor(target, raw[target][0], raw_dtype=raw[target][1])
        elif target != drop:
            _add_tensor(writer, target, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _gguf_name(name: str, gemma: bool) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *middle, ending = name.split(".")
    part = ".".join(middle)
    if part == "post_attention_layernorm":
        return f"blk.{layer}.{'post_attention_norm' if gemma else 'ffn_norm'}.{ending}"
    return f"blk.{layer}.{_NAMES[part]}.{ending}"


def _interleaved(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows (half, pair) of each head become (pair, half)."""
    heads = tensor.shape[0] // head_dim
    return tensor.reshape(heads, 2, head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    values = tensor.float().numpy()
    if values.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _add_sizes(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture != "phi3":
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))
    if architecture in {"gemma2", "gemma3", "phi3"}:
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_rope(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    fraction = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(_head_dim(config) * fraction))
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    if kind == "longrope":
        original = config.original_max_position_embeddings
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
        for name in ("short", "long"):
            table = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", table)


def _llama3_divisors(config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    dims = _head_dim(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dims, 2).float() / dims)
    divisors: np.ndarray[Any, np.dtype[np.float32]] = (plain / scaled).numpy()
    return divisors


def add_tokenizer(writer: gguf.GGUFWriter, parts: dict[str, Any]) -> None:
    """Add `tokenizer.ggml.*`: model, pre, tokens, types, and what else `parts` has of scores, merges, ids."""
    writer.add_tokenizer_model(parts["model"])
    if "pre" in parts:
        writer.add_tokenizer_pre(parts["pre"])
    writer.add_token_list(parts["tokens"])
    writer.add_token_types(parts["types"])
    if "scores" in parts:
        writer.add_token_scores(parts["scores"])
    if "merges" in parts:
        writer.add_token_merges(parts["merges"])
    for name, value in parts.get("ids", {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    for name, value in parts.get("flags", {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    if "template" in parts:
        writer.add_chat_template(parts["template"])
