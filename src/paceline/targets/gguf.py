"""GGUF files: specification, weights under canonical names, and tokenizer, from one file."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import UnsupportedModelError, WeightsError
from paceline.targets.gguf_tokenizer import from_metadata
from paceline.targets.spec import ModelSpec, from_hf_config, uses_longrope
from paceline.targets.weights import account, places

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from paceline.targets.vocabulary import TokenizerParts

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
# Tensors that are read with the specification, or hold tables that are computed anew.
_TABLES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_OUTER_NAMES = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "qkv": "attn_qkv",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
    "attn_norm": "attn_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
# Keys that change nothing at these values; any other value of them is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "pooling_type": (0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_USED = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
    },
)


class GgufFile:
    """One GGUF file, memory-mapped: a `WeightSource` that also knows its specification and tokenizer.

    Args:
        path: the file.

    Raises:
        WeightsError: the file is broken, cut, or not what its metadata say.
        UnsupportedModelError: the model needs something that is not supported.
        TokenizerError: from `tokenizer_parts`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = _read(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.metadata: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
        }
        config = _Config(self.metadata, self._tensors, path).as_hf()
        self._config = config
        two_sets = "rope_factors_long.weight" in self._tensors
        self.longrope_original: int | None = uses_longrope(config) if two_sets else None
        self.spec: ModelSpec = from_hf_config(config)
        self._architecture = str(self.metadata["general.architecture"])
        self._places = places(self.spec, _OUTER_NAMES, "blk", _LAYER_NAMES)
        present = {name: tuple(map(int, reversed(found.shape))) for name, found in self._tensors.items()}
        account(self.spec, self._places, present, _TABLES & present.keys(), path)

    def names(self) -> set[str]:
        """Every canonical name of the specification."""
        return set(self.spec.shapes())

    def get(self, name: str) -> Tensor:
        """The tensor as float32; the order of rows that llama files give q and k is undone."""
        place = self._places[name]
        tensor = _dequantized(self._tensors[place.tensor], self._path)
        if place.rows:
            tensor = tensor[place.rows[0] : place.rows[1]]
        role = name.split(".")[2] if name.startswith("layers.") else ""
        if self._architecture == "llama" and role in {"q", "k"}:
            heads = self.spec.heads if role == "q" else self.spec.kv_heads
            tensor = _unpermuted(tensor, heads)
        return tensor

    def spec_for(self, max_model_len: int) -> ModelSpec:
        """The specification under a context limit in tokens, which decides which longrope factors are taken."""
        return from_hf_config(self._config, max_model_len)

    @cached_property
    def tokenizer_parts(self) -> TokenizerParts:
        """The tokenizer that the file's metadata describe."""
        return from_metadata(self.metadata)


def _read(path: Path) -> Any:
    from gguf import GGUFReader  # 0.1 s that a start from converted weights does not need

    class Reader(GGUFReader):
        """Refuses what lies beyond the end, where the package goes on with empty arrays."""

        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = np.asarray(mapped)  # views of a plain array are made several times as fast

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(int(offset), dtype, count, override_order)
            if len(found) < int(count):
                raise EOFError(f"it ends at byte {len(self.data)}, where more is announced")
            return found

    try:
        return Reader(path)
    except (OSError, ValueError, KeyError, IndexError, EOFError, OverflowError, TypeError) as error:
        raise WeightsError(f"{path} is not a whole GGUF file ({error}); fetch it again.") from error


def _dequantized(stored: Any, path: Path) -> Tensor:
    from gguf import dequantize

    try:
        values = dequantize(np.asarray(stored.data), stored.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{path}: the tensor {stored.name} is stored as {stored.tensor_type.name}, which is not supported."
        ) from error
    shape = tuple(map(int, reversed(stored.shape)))
    return torch.from_numpy(values.astype("float32", copy=not values.flags.writeable).reshape(shape))


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """Rows (pair, half) of each head back to (half, pair): llama files interleave what rope turns."""
    per_head = tensor.shape[0] // heads
    halves = tensor.reshape(heads, per_head // 2, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


class _Config:
    """The metadata in the words of a Hugging Face configuration."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.tensors = tensors
        architecture = metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: the GGUF architecture '{architecture}' is not supported (only {', '.join(ARCHITECTURES)})."
            )
        if int(metadata.get("split.count", 1)) > 1:
            raise UnsupportedModelError(f"{path} is one part of a split file; merge the parts first.")
        self.architecture = str(architecture)
        prefix = f"{architecture}."
        self.values = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
        for key, value in self.values.items():
            if key not in _USED and value not in _NEUTRAL.get(key, ()):
                raise UnsupportedModelError(f"{path}: {architecture} with {key} = {value!r} is not supported.")

    def number(self, key: str, default: Any = None) -> Any:
        found = self.values.get(key, default)
        if found is None:
            raise WeightsError(f"{self.path} lacks the key {self.architecture}.{key}.")
        if isinstance(found, list):
            if len(set(found)) != 1:
                raise UnsupportedModelError(f"{self.path}: {key} differs from layer to layer: {found}.")
            found = found[0]
        return found

    def as_hf(self) -> dict[str, Any]:
        if "token_embd.weight" not in self.tensors:
            raise WeightsError(f"{self.path}: the tensor token_embd.weight is missing.")
        heads, hidden = self.number("attention.head_count"), self.number("embedding_length")
        head_dim = self.number("attention.key_length", hidden // heads)
        if self.number("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(f"{self.path}: keys and values of different sizes are not supported.")
        config = {
            "model_type": self.architecture,
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.number("context_length"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            **self._rope(head_dim),
        }
        if self.architecture == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in self.tensors
            config["mlp_bias"] = "blk.0.ffn_down.bias" in self.tensors
        elif self.architecture.startswith("gemma"):
            config |= self._gemma(hidden, heads, head_dim)
        elif self.architecture == "phi3":
            config["sliding_window"] = self.values.get("attention.sliding_window") or None
        return config

    def _gemma(self, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
        # The largest of each generation scales by hidden / heads; the format has no key for it.
        largest = {"gemma2": 46, "gemma3": 62}[self.architecture]
        scalar = hidden // heads if self.number("block_count") == largest else head_dim
        found = {
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.number("attention.sliding_window"),
            "attn_logit_softcapping": self.values.get("attn_logit_softcapping"),
            "final_logit_softcapping": self.values.get("final_logit_softcapping"),
        }
        if self.architecture == "gemma3":
            found["rope_local_base_freq"] = self.values.get("rope.freq_base_swa", 10_000.0)
            pattern = self.values.get("attention.sliding_window_pattern", 6)
            if isinstance(pattern, list):
                kinds = {True: "sliding_attention", False: "full_attention"}
                found["layer_types"] = [kinds[bool(local)] for local in pattern]
            else:
                found["sliding_window_pattern"] = pattern
        return found

    def _rope(self, head_dim: int) -> dict[str, Any]:
        dims = self.number("rope.dimension_count", head_dim)
        if self.architecture == "llama" and dims != head_dim:
            raise UnsupportedModelError(f"{self.path}: {dims} rotary dimensions of {head_dim} are not supported.")
        found: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10_000.0)}
        found["partial_rotary_factor"] = dims / head_dim
        scaling = self._scaling()
        if scaling:
            found["rope_scaling"] = scaling
            if scaling["rope_type"] == "longrope":
                found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        return found

    def _scaling(self) -> dict[str, Any] | None:
        kind = self.values.get("rope.scaling.type", "none")
        factor = self.values.get("rope.scaling.factor", self.values.get("rope.scale_linear"))
        limit = self.number("context_length")
        original = self.values.get("rope.scaling.original_context_length", limit)
        if "rope_freqs.weight" in self.tensors:  # llama3: one divisor a frequency
            divisors = self._table("rope_freqs.weight")
            return _divided(divisors, divisors, limit, 1.0)
        if "rope_factors_long.weight" in self.tensors:
            short, long = self._table("rope_factors_short.weight"), self._table("rope_factors_long.weight")
            return _divided(short, long, original, self.values.get("rope.scaling.attn_factor"))
        if kind == "linear" or (kind == "none" and factor not in (None, 0.0, 1.0)):
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": self.values.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": self.values.get("rope.scaling.yarn_beta_slow"),
            }
        if kind != "none":
            raise UnsupportedModelError(f"{self.path}: rope scaling of type '{kind}' is not supported.")
        return None

    def _table(self, name: str) -> list[float]:
        if name not in self.tensors:
            raise WeightsError(f"{self.path}: the tensor {name} is missing.")
        values: list[float] = _dequantized(self.tensors[name], self.path).flatten().tolist()
        return values


def _divided(short: list[float], long: list[float], original: int, attention: float | None) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }
