"""Small published heads, laid out by hand as their formats are described, not by paceline's own writers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, DIM, IDS, COLUMNS = 16, 24, 4, 2, 4, 40, 10

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "vocab_size": IDS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.46.2",
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Weights:
    """Random matrices that differ, and norms that are not 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return drawn / shape[1] ** 0.5 if len(shape) > 1 else drawn * 0.2


def layer(make: Weights, prefix: str, width: int = HIDDEN) -> dict[str, Tensor]:
    """A llama layer without the norm before its attention, which reads ``width`` values."""
    rows, kv_rows = HEADS * DIM, KV_HEADS * DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": make(rows, width),
        f"{prefix}.self_attn.k_proj.weight": make(kv_rows, width),
        f"{prefix}.self_attn.v_proj.weight": make(kv_rows, width),
        f"{prefix}.self_attn.o_proj.weight": make(HIDDEN, rows),
        f"{prefix}.mlp.gate_proj.weight": make(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": make(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": make(HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": 1 + make(HIDDEN),
    }


def eagle1(seed: int = 0, bias: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-1 and 2: `fc` and one layer, the rest is the target's."""
    make = Weights(seed)
    tensors = {"fc.weight": make(HIDDEN, 2 * HIDDEN), **layer(make, "layers.0")}
    if bias:
        tensors["fc.bias"] = make(HIDDEN)
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    return (config if bias else {**config, "bias": False}), tensors


def eagle3(
    seed: int = 0, prefix: str = "midlayer", target_hidden: int = HIDDEN, columns: int = COLUMNS
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-3 as its own repository and SGLang lay it out; with the prefix `layers.0` as vLLM and NVIDIA do."""
    make = Weights(seed)
    tensors = {
        "fc.weight": make(HIDDEN, 3 * target_hidden),
        **layer(make, prefix, 2 * HIDDEN),
        f"{prefix}.input_layernorm.weight": 1 + make(HIDDEN),
        f"{prefix}.hidden_norm.weight": 1 + make(HIDDEN),
        "norm.weight": 1 + make(HIDDEN),
        "lm_head.weight": make(columns, HIDDEN),
    }
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}
    if columns != IDS:
        ids = torch.arange(columns) * 3 + 2
        config["draft_vocab_size"] = columns
        tensors["d2t"] = ids - torch.arange(columns)
        tensors["t2d"] = torch.isin(torch.arange(IDS), ids)
    if target_hidden != HIDDEN:
        config["target_hidden_size"] = target_hidden
        tensors["embed_tokens.weight"] = make(IDS, HIDDEN)
    return config, tensors


def nvidia(seed: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-3 with its layer ids in `eagle_config`."""
    config, tensors = eagle3(seed, "layers.0")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 5, 9], "use_aux_hidden_state": True}
    return config, tensors


def speculators(seed: int = 0, **flags: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-3 as speculators writes it, with its flags and what they bring."""
    _, tensors = eagle3(seed, "layers.0")
    make = Weights(seed + 1)
    tensors["embed_tokens.weight"] = make(IDS, HIDDEN)
    if flags.get("fc_norm"):
        tensors.update({f"fc_norm.{place}.weight": 1 + make(HIDDEN) for place in range(3)})
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + make(3 * HIDDEN)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "someone/target-8b", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": COLUMNS,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0",
        "torch_dtype": "bfloat16",
        **flags,
    }
    return config, tensors


def medusa(seed: int = 0, heads: int = 3, layers: int = 1) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Medusa heads as their own repository lays them out; their configuration counts them wrongly, as it does."""
    make = Weights(seed)
    tensors = {}
    for head in range(heads):
        for block in range(layers):
            tensors[f"{head}.{block}.linear.weight"] = make(HIDDEN, HIDDEN)
            tensors[f"{head}.{block}.linear.bias"] = make(HIDDEN)
        tensors[f"{head}.{layers}.weight"] = make(IDS, HIDDEN)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "someone/target-7b"}
    return config, tensors


def medusa_vllm(
    seed: int = 0, prefix: str = "", columns: int = IDS, shared: bool = False, bias: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Two Medusa heads of two blocks as vLLM reads them."""
    make = Weights(seed)
    tensors = {}
    for head in range(2):
        for block in range(2):
            tensors[f"{prefix}blocks.{head}.layers.{block}.weight"] = make(HIDDEN, HIDDEN)
            if bias:
                tensors[f"{prefix}blocks.{head}.layers.{block}.bias"] = make(HIDDEN)
        if not shared:
            tensors[f"{prefix}lm_heads.{head}.weight"] = make(columns, HIDDEN)
    if shared:
        tensors[f"{prefix}lm_head.weight"] = make(columns, HIDDEN)
    if columns != IDS:
        tensors[f"{prefix}token_map"] = torch.arange(columns) * 2 + 1
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": IDS,
        "truncated_vocab_size": columns,
        "medusa_fc_bias": bias,
        "original_lm_head": shared,
    }
    return config, tensors


def write(
    folder: Path, config: dict[str, Any] | None, tensors: dict[str, Tensor], name: str = "model.safetensors"
) -> Path:
    """Write a folder; the ending of ``name`` says in which format."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder
