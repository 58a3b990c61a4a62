"""The dense families: what each reads from its configuration, and what it assumes where a key is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import UnsupportedModelError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Keys that every family reads.
_READ = frozenset(
    {
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "layer_types",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "quantization_config",
    },
)
# Keys that say nothing about the logits: training, storage, other software.
HARMLESS = frozenset(
    {
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    },
)


@dataclass(frozen=True)
class Family:
    """What one family computes, beyond what its configuration says.

    Attributes:
        name: the family's own name, as configurations spell it.
        architectures: names of the classes that compute it; any other is refused.
        keys: configuration keys that it reads, or may ignore, beyond the common ones.
        neutral: keys that are ignored at exactly this value.
        defaults: values of keys that are left out.
        windows: which layers have a sliding window: none, all, or those that layer types name.
    """

    name: str
    architectures: frozenset[str]
    keys: frozenset[str] = frozenset()
    neutral: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: Literal["head", "full"] | None = None
    biases: tuple[str, ...] = ()
    activation_key: str = "hidden_act"
    windows: Literal["none", "all", "typed"] = "none"
    scaled_embedding: bool = False


_SLIDING_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
_GEMMA_KEYS = frozenset(
    {
        "hidden_act",
        "hidden_activation",
        "attention_bias",
        "query_pre_attn_scalar",
        "sliding_window",
        "sliding_window_size",  # written beside it by the first files
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "use_bidirectional_attention",
    },
)
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}

_FAMILIES = (
    Family(
        "llama",
        frozenset({"LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"}),
        keys=frozenset({"hidden_act", "attention_bias", "mlp_bias"}),
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        "smollm3",
        frozenset({"SmolLM3ForCausalLM"}),
        keys=_SLIDING_KEYS | {"hidden_act", "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        defaults={
            "max_position_embeddings": 32768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
        },
        windows="typed",
    ),
    Family(
        "mistral",
        frozenset({"MistralForCausalLM"}),
        keys=frozenset({"hidden_act", "sliding_window"}),
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    Family(
        "qwen2",
        frozenset({"Qwen2ForCausalLM"}),
        keys=_SLIDING_KEYS | {"hidden_act"},
        neutral={"use_mrope": False},
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        biases=("q", "k", "v"),
        windows="typed",
    ),
    Family(
        "qwen3",
        frozenset({"Qwen3ForCausalLM"}),
        keys=_SLIDING_KEYS | {"hidden_act", "attention_bias"},
        defaults={
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
        qk_norm="head",
        windows="typed",
    ),
    Family(
        "gemma2",
        frozenset({"Gemma2ForCausalLM"}),
        keys=_GEMMA_KEYS,
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        post_norms=True,
        activation_key="hidden_activation",
        windows="typed",
        scaled_embedding=True,
    ),
    Family(
        "gemma3",
        frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"}),
        keys=_GEMMA_KEYS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "max_position_embeddings": 131072,
        },
        post_norms=True,
        qk_norm="head",
        activation_key="hidden_activation",
        windows="typed",
        scaled_embedding=True,
    ),
    Family(
        "phi3",
        frozenset({"Phi3ForCausalLM"}),
        keys=frozenset({"hidden_act", "sliding_window"}),
        neutral={"full_attn_mod": 1, "interpolate_factor": 1},
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        windows="all",
    ),
    Family(
        "olmo2",
        frozenset({"Olmo2ForCausalLM"}),
        keys=frozenset({"hidden_act", "attention_bias"}),
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        pre_norms=False,
        post_norms=True,
        qk_norm="full",
    ),
    Family(
        "granite",
        frozenset({"GraniteForCausalLM"}),
        keys=frozenset(
            {
                "hidden_act",
                "attention_bias",
                "mlp_bias",
                "embedding_multiplier",
                "logits_scaling",
                "residual_multiplier",
                "attention_multiplier",
            },
        ),
        defaults={"max_position_embeddings": 2048, "attention_multiplier": 1.0},
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}


def family_of(config: dict[str, Any]) -> Family:
    """The family that computes `config`, once every key that it has is known to be read or to change nothing.

    Raises:
        UnsupportedModelError: another architecture, a quantized checkpoint, or a key that nothing reads.
    """
    kind = str(config.get("model_type") or "")
    family = FAMILIES.get("gemma3" if kind == "gemma3_text" else kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"the architecture '{kind or 'none named'}' is not supported (only {known}).")
    for name in config.get("architectures") or ():
        if name not in family.architectures:
            raise UnsupportedModelError(
                f"the model class '{name}' is not supported (of {family.name} only "
                f"{', '.join(sorted(family.architectures))})."
            )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"the checkpoint is quantized ('{method}'), which is not supported; take the original or a GGUF file."
        )
    _refuse_unknown(config, family)
    return family


def _refuse_unknown(config: dict[str, Any], family: Family) -> None:
    for key, value in config.items():
        if key in _READ or key in HARMLESS or key in family.keys:
            continue
        if value in (None, False, [], {}, "") or (key in family.neutral and value == family.neutral[key]):
            continue
        if key.startswith("_"):
            continue  # private to the software that wrote the file
        raise UnsupportedModelError(f"{family.name} with the configuration key {key} = {value!r} is not supported.")
