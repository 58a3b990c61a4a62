"""Writers of heads in the layouts in which heads are published; what they write, `read_head` reads back exactly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from safetensors.torch import save_file

from paceline.errors import DrafterError
from paceline.heads.files import WEIGHT_ENDINGS
from paceline.heads.ids import mask_of, offsets_of
from paceline.heads.manifest import MANIFEST
from paceline.heads.names import tensor_name
from paceline.heads.spec import TARGET_IDS, EagleSpec, MedusaSpec
from paceline.replacing import replaced
from paceline.targets.spec import from_hf_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.targets.spec import Activation

# What a specification holds only as numbers is taken from the configuration that it was read from.
_ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
_ACTIVATIONS: dict[Activation, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def write_medusa(head: Head, folder: Path, layout: Literal["original", "vllm"] = "original") -> None:
    """Write Medusa heads into ``folder``, as their repository does or as vLLM reads them.

    Raises:
        DrafterError: they are no Medusa heads, or of a form that the layout does not have.
    """
    spec = head.spec
    if not isinstance(spec, MedusaSpec):
        raise DrafterError(f"a head of kind '{spec.kind}' cannot be written as Medusa heads.")
    if layout == "vllm":
        _save(head, folder, "model.safetensors", *_vllm(head, spec))
    elif spec.head != "each" or spec.own_ids or not spec.bias:
        raise DrafterError(
            "Medusa's own layout has a product for all ids in every head, and biases; write these heads as 'vllm'."
        )
    else:
        _save(head, folder, "medusa_lm_head.safetensors", *_original(head, spec))


def write_eagle(head: Head, folder: Path) -> None:
    """Write an EAGLE-1 or 2 head into ``folder``, as its repository does.

    Raises:
        DrafterError: it is no such head, or its configuration does not give its rotary frequencies.
    """
    spec = _eagle_spec(head, "eagle")
    config = {**_layer_config(head, spec), "architectures": ["LlamaForCausalLM"], "bias": spec.fc_bias}
    _save(head, folder, "model.safetensors", config, _eagle_tensors(head, spec, "layers.0"))


def write_eagle3(head: Head, folder: Path, layout: Literal["safeailab", "speculators"] = "safeailab") -> None:
    """Write an EAGLE-3 head into ``folder``, as its repository (and SGLang) or as speculators (and vLLM) does.

    Raises:
        DrafterError: it is no such head, its configuration does not give its rotary frequencies, or it has more
            layers than the layout.
    """
    spec = _eagle_spec(head, "eagle3")
    if layout == "speculators":
        _save(head, folder, "model.safetensors", _speculators(head, spec), _eagle_tensors(head, spec, "layers.0"))
        return
    if spec.layers > 1:
        raise DrafterError(f"EAGLE's own layout has one layer, the head has {spec.layers}; write it as 'speculators'.")
    flags = {name: value for name, value in _flags(spec).items() if value}
    config = {**_layer_config(head, spec), "architectures": ["LlamaForCausalLMEagle3"], **flags, **_sizes(spec)}
    config["target_hidden_size"] = spec.target_hidden
    _save(head, folder, "model.safetensors", config, _eagle_tensors(head, spec, "midlayer"))


def _original(head: Head, spec: MedusaSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"medusa_num_heads": spec.heads, "medusa_num_layers": spec.layers, "version": "2"}
    tensors = {}
    for number in range(spec.heads):
        for layer in range(spec.layers):
            tensors[f"{number}.{layer}.linear.weight"] = head.tensors[f"heads.{number}.layers.{layer}"]
            tensors[f"{number}.{layer}.linear.bias"] = head.tensors[f"heads.{number}.layers.{layer}.bias"]
        tensors[f"{number}.{spec.layers}.weight"] = head.tensors[f"heads.{number}.head"]
    return {**config, **_base(head)}, tensors


def _vllm(head: Head, spec: MedusaSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": spec.hidden,
        "num_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "vocab_size": spec.vocab_size,
        "truncated_vocab_size": spec.draft_vocab_size,
        "medusa_fc_bias": spec.bias,
        "original_lm_head": spec.head != "each",
        **_base(head),
    }
    tensors = {}
    for number in range(spec.heads):
        for layer in range(spec.layers):
            stem = f"heads.{number}.layers.{layer}"
            tensors[f"blocks.{number}.layers.{layer}.weight"] = head.tensors[stem]
            if spec.bias:
                tensors[f"blocks.{number}.layers.{layer}.bias"] = head.tensors[f"{stem}.bias"]
        if spec.head == "each":
            tensors[f"lm_heads.{number}.weight"] = head.tensors[f"heads.{number}.head"]
    if spec.head == "shared":
        tensors["lm_head.weight"] = head.tensors["head"]
    if spec.own_ids:
        tensors["token_map"] = head.tensors[TARGET_IDS]
    return config, tensors


def _base(head: Head) -> dict[str, str]:
    return {} if head.provenance.target is None else {"base_model_name_or_path": head.provenance.target}


def _eagle_spec(head: Head, kind: str) -> EagleSpec:
    if not isinstance(head.spec, EagleSpec) or head.spec.kind != kind:
        raise DrafterError(f"a head of kind '{head.spec.kind}' cannot be written as one of kind '{kind}'.")
    return head.spec


def _eagle_tensors(head: Head, spec: EagleSpec, first: str) -> dict[str, Tensor]:
    tensors = {tensor_name(name, first): value for name, value in head.tensors.items() if name != TARGET_IDS}
    if spec.own_ids:
        tensors["d2t"] = offsets_of(head.target_ids)
        tensors["t2d"] = mask_of(head.target_ids, spec.vocab_size)
    return tensors


def _layer_config(head: Head, spec: EagleSpec) -> dict[str, Any]:
    """The configuration of the layers, checked to give the frequencies that the head has."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": spec.layers,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": _ACTIVATIONS[spec.activation],
        "attention_bias": {"q", "k", "v"} <= set(spec.biases),
        "mlp_bias": {"gate", "up", "down"} <= set(spec.biases),
        **{key: head.config[key] for key in _ROPE_KEYS if key in head.config},
    }
    if from_hf_config(config).layers[0].rope != spec.rope:
        raise DrafterError("the head's configuration does not give its rotary frequencies; it cannot be written.")
    return {**config, "tie_word_embeddings": False}


def _flags(spec: EagleSpec) -> dict[str, bool]:
    names = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    return {name: getattr(spec, name) for name in names}


def _sizes(spec: EagleSpec) -> dict[str, Any]:
    sizes: dict[str, Any] = {"draft_vocab_size": spec.draft_vocab_size}
    if spec.features is not None:
        sizes["eagle_aux_hidden_state_layer_ids"] = list(spec.features)
    return sizes


def _speculators(head: Head, spec: EagleSpec) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": head.provenance.target, "architectures": []},
        },
        "transformer_layer_config": _layer_config(head, spec),
        "target_hidden_size": spec.target_hidden,
        "embed_requires_grad": False,
        **_flags(spec),
        **_sizes(spec),
    }


def _save(head: Head, folder: Path, name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write configuration, manifest and weights, in place of those that were there.

    Raises:
        DrafterError: other weights lie in the folder.
        ResourceError: they cannot be written; what was there stays.
    """
    there = folder.iterdir() if folder.exists() else ()
    others = [path.name for path in there if path.suffix in WEIGHT_ENDINGS and path.name != name]
    if others:
        raise DrafterError(f"{folder} holds other weights ({min(others)}); write the head into a folder of its own.")
    texts = {"config.json": json.dumps(config, indent=2) + "\n"}
    if head.manifest is not None:
        texts[MANIFEST] = head.manifest.text()
    # copies, because a file holds no two tensors that share memory
    stored = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
    with replaced(*(folder / part for part in (*texts, name))) as (*parts, weights):
        for part, text in zip(parts, texts.values(), strict=True):
            part.write_text(text, encoding="utf-8")
        save_file(stored, weights, metadata={"format": "pt"})
        if head.manifest is None:
            (folder / MANIFEST).unlink(missing_ok=True)
