"""Specifications: what each family's configuration says, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from paceline.errors import UnsupportedModelError
from paceline.targets.spec import ModelSpec, from_hf_config, uses_longrope
from paceline.targets.weights import FolderWeights
from tests.models import FAMILIES, VOCABULARY, expected_logits, plain_logits, tiny

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def read(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_pass_equals_transformers(family: str, tmp_path: Path) -> None:
    model, write = tiny(family)
    spec = from_hf_config(read(write(tmp_path)))
    ids = torch.randint(0, VOCABULARY, (60,), generator=torch.Generator().manual_seed(1))
    found = plain_logits(spec, FolderWeights(spec, tmp_path), ids)
    expected = expected_logits(model, ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_json_keeps_every_bit(family: str, tmp_path: Path) -> None:
    _, write = tiny(family)
    spec = from_hf_config(read(write(tmp_path)))
    assert ModelSpec.from_json(spec.to_json()) == spec


def test_longrope_factors_follow_the_context_limit(tmp_path: Path) -> None:
    model, write = tiny("phi4")
    config = read(write(tmp_path))
    assert uses_longrope(config) == 32
    short, long = from_hf_config(config, max_model_len=32), from_hf_config(config, max_model_len=33)
    assert short.max_positions == 32
    assert long.max_positions == 256
    assert from_hf_config(config) == long
    ids = torch.randint(0, VOCABULARY, (32,), generator=torch.Generator().manual_seed(1))
    found = plain_logits(short, FolderWeights(short, tmp_path), ids)
    torch.testing.assert_close(found, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 20},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.9, "truncate": False},
    ],
)
def test_frequencies_equal_those_of_transformers_bit_for_bit(scaling: dict[str, Any]) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 131072}
    old = {**LLAMA, **sizes, "rope_theta": 500000.0, "rope_scaling": scaling}
    new = {**LLAMA, **sizes, "rope_parameters": {"rope_theta": 500000.0, **scaling}}
    changes: dict[str, Any] = {**sizes, "rope_parameters": {"rope_theta": 500000.0, **scaling}}
    config = transformers.LlamaConfig(**changes)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    for spelling in (old, new):
        rope = from_hf_config(spelling).layers[0].rope
        assert rope is not None
        assert rope.inv_freq == tuple(rotary.inv_freq.tolist())
        assert rope.scale == rotary.attention_scaling


def test_gemma3_old_spelling_inside_a_multimodal_configuration() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
    }
    spec = from_hf_config(outer)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert [layer.window for layer in spec.layers[:6]] == [1024] * 5 + [None]
    local, everywhere = spec.layers[0].rope, spec.layers[5].rope
    assert local is not None
    assert everywhere is not None
    assert local.inv_freq[1] == pytest.approx(10_000.0 ** (-2 / 256))
    assert everywhere.inv_freq[1] == pytest.approx(1_000_000.0 ** (-2 / 256) / 8)
    assert spec.tied
    assert spec.attention_scale == 1 / 16


def test_windows_that_hide_nothing_are_none() -> None:
    config = {
        **LLAMA,
        "model_type": "mistral",
        "architectures": [],
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    assert {layer.window for layer in from_hf_config({**config, "sliding_window": 4096}).layers} == {None}
    assert {layer.window for layer in from_hf_config({**config, "sliding_window": None}).layers} == {None}
    assert {layer.window for layer in from_hf_config({**config, "sliding_window": 100}).layers} == {100}
    assert {layer.window for layer in from_hf_config(config).layers} == {None}


def test_yarn_lengthens_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**LLAMA, "max_position_embeddings": 32768, "rope_scaling": scaling}
    assert from_hf_config(config).max_positions == 131072


def test_smollm3_lists_its_layers_without_positions() -> None:
    config = {**LLAMA, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
    spec = from_hf_config({**config, "no_rope_layers": [1, 0, 1, 1]})
    assert [layer.rope is None for layer in spec.layers] == [False, True, False, False]
    spec = from_hf_config(config)
    assert [layer.rope is None for layer in spec.layers] == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported"),
        ({"model_type": None}, "none named"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized \\('gptq'\\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks the parameter factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "ramp": 3}}, "ramp = 3"),
        ({"sliding_window": 512}, "sliding_window = 512"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"hidden_size": None}, "positive hidden_size"),
        ({"hidden_size": "64"}, "positive hidden_size"),
        ({"vocab_size": -1}, "positive vocab_size"),
        ({"partial_rotary_factor": 0.07}, "rotary dimensions"),
        (
            {"model_type": "qwen2", "architectures": [], "layer_types": ["full_attention", "linear"] * 2},
            "type 'linear'",
        ),
        ({"model_type": "qwen3", "architectures": [], "layer_types": ["full_attention"]}, "names 1 layers"),
        ({"model_type": "gemma2", "architectures": [], "use_bidirectional_attention": True}, "later tokens"),
        ({"model_type": "gemma3_text", "architectures": [], "attn_logit_softcapping": 5.0}, "softcapping"),
    ],
)
def test_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        from_hf_config({**LLAMA, **change})


# Keys and values as published models have them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "is_llama_config": True,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "use_cache": True,
    },
    "Mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 128,
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 21,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "Gemma 2": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    "Gemma 3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
        "use_bidirectional_attention": False,
        "_sliding_window_pattern": 6,
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rope_scaling": {"long_factor": [1.0] * 6, "short_factor": [1.0] * 6, "type": "longrope"},
        "sliding_window": 262144,
    },
    "Granite": {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_keys_are_known(name: str) -> None:
    spec = from_hf_config({**LLAMA, **PUBLISHED[name]})
    assert len(spec.layers) == 4


def test_types_of_layers_that_the_family_does_not_have() -> None:
    assert from_hf_config({**LLAMA, "layer_types": ["full_attention"] * 4}) == from_hf_config(LLAMA)
    with pytest.raises(UnsupportedModelError, match="mixed types"):
        from_hf_config({**LLAMA, "layer_types": ["full_attention", "sliding_attention"] * 2})


def test_harmless_keys_are_let_through() -> None:
    extra = {
        "torch_dtype": "bfloat16",
        "is_llama_config": True,
        "rope_interleaved": False,
        "_name_or_path": "x",
    }
    assert from_hf_config({**LLAMA, **extra}) == from_hf_config(LLAMA)
