"""The reader of EAGLE heads: 1, 2 and 3 as their repository, SGLang, vLLM, NVIDIA and speculators lay them out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.errors import DrafterError, UnsupportedModelError, WeightsError
from paceline.heads.files import take
from paceline.heads.head import Head, Provenance
from paceline.heads.ids import read_ids
from paceline.heads.names import tensor_name
from paceline.heads.spec import TARGET_IDS, EagleKind, EagleSpec
from paceline.targets.families import FAMILIES
from paceline.targets.spec import ROLES, from_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from paceline.heads.files import Files

# What configurations of heads say beside what any model's says.
_OWN_KEYS = frozenset(
    {
        "architectures",
        "bias",
        "draft_vocab_size",
        "eagle3_layers_to_capture",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "eagle_fc_bias",
        "fc_norm",
        "max_window_layers",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "num_aux_hidden_states",
        "sliding_window",
        "target_hidden_size",
        "tie_word_embeddings",
        "use_sliding_window",
    }
)
_SPECULATORS_KEYS = _OWN_KEYS | {
    "auto_map",
    "dtype",
    "embed_requires_grad",
    "has_no_defaults_at_init",
    "model_type",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "torch_dtype",
    "transformer_layer_config",
    "transformers_version",
}
_EAGLE_CONFIG_KEYS = frozenset(
    {"eagle_aux_hidden_state_layer_ids", "norm_before_fc", "parallel_draft_heads_num_layers", "use_aux_hidden_state"}
)
# What NVIDIA's say of every head that is like the others, at the only value that is supported.
_EAGLE_CONFIG_VALUES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "next_layer_regular": True,
}
_LAYER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def eagle_kind(names: Iterable[str]) -> EagleKind:
    """EAGLE-3 heads norm the state that they read; the earlier ones do not."""
    plain = {name.removeprefix("model.") for name in names}
    return "eagle3" if plain & {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} else "eagle"


def read_eagle(files: Files) -> Head:
    """The EAGLE head in ``files``.

    Raises:
        WeightsError: a tensor is missing, surplus, misshapen or not finite, or contradicts the configuration.
        DrafterError: the head is of a kind, or has an option, that is not supported.
    """
    if not files.config:
        raise WeightsError(f"{files.path}: an EAGLE head needs its config.json, which is not beside it.")
    files = files.renamed(lambda name: name.removeprefix("model."))
    tensors = files.tensors
    first = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    kind = eagle_kind(tensors)
    reader = _Reader(files, kind, first)
    spec = reader.spec()
    shapes = {name: shape for name, shape in spec.shapes().items() if name != TARGET_IDS}
    found = take(files, shapes, {name: tensor_name(name, first) for name in shapes}, ("d2t", "t2d"))
    ids = read_ids(files.path, tensors.get("d2t"), tensors.get("t2d"), spec.draft_vocab_size, spec.vocab_size)
    if ids is not None:
        if kind == "eagle" and not spec.own_head:
            raise WeightsError(f"{files.path}: d2t maps the columns of a head that the file does not have.")
        spec = replace(spec, own_ids=True)
        found[TARGET_IDS] = ids
    provenance = Provenance(reader.dialect, str(files.path), reader.target())
    return Head(spec, found, provenance, reader.layer_config)


class _Reader:
    """One configuration, checked key by key, and what only the tensors say."""

    def __init__(self, files: Files, kind: EagleKind, first: str) -> None:
        self.path: Path = files.path
        self.tensors = files.tensors
        self.config = files.config
        self.kind = kind
        self.first = first
        self.is_speculators = "speculators_model_type" in self.config
        self.dialect = f"{kind} (speculators)" if self.is_speculators else kind
        self.own, outer = self._split()
        self.layer_config = self._layers(outer)

    def _split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What concerns the head, and what concerns its layers."""
        config = dict(self.config)
        if self.is_speculators:
            model, layers = config["speculators_model_type"], config.get("transformer_layer_config")
            if model != "eagle3":
                raise DrafterError(f"{self.path}: speculators heads of type '{model}' are not supported (only eagle3).")
            if not isinstance(layers, dict):
                raise WeightsError(f"{self.path}: the configuration has no transformer_layer_config.")
            self._known(config, _SPECULATORS_KEYS)
            inner = {key: value for key, value in layers.items() if key in _OWN_KEYS and key not in config}
            own = {**inner, **config}
        else:
            own = {key: value for key, value in config.items() if key in _OWN_KEYS}
            layers = config
        nested = own.get("eagle_config") or {}
        self._known(nested, _EAGLE_CONFIG_KEYS | _EAGLE_CONFIG_VALUES.keys())
        for key, value in _EAGLE_CONFIG_VALUES.items():
            if nested.get(key) not in (None, value):
                raise DrafterError(f"{self.path}: eagle_config with {key} = {nested[key]!r} is not supported.")
        return own, {key: value for key, value in layers.items() if key not in _OWN_KEYS}

    def _known(self, config: dict[str, Any], known: frozenset[str] | set[str]) -> None:
        for key, value in config.items():
            if key not in known and not key.startswith("_") and value not in (None, False, [], {}, ""):
                raise DrafterError(
                    f"{self.path}: a head with the configuration key {key} = {value!r} is not supported."
                )

    def _layers(self, outer: dict[str, Any]) -> dict[str, Any]:
        """The configuration of the layers, as a model's would be."""
        kind = outer.get("model_type") or "llama"
        if self.own.get("use_sliding_window") or (kind == "mistral" and self.own.get("sliding_window")):
            raise DrafterError(f"{self.path}: heads with a sliding window are not supported.")
        known = kind in _LAYER_FAMILIES
        if not known and kind in FAMILIES:
            raise DrafterError(f"{self.path}: heads whose layers are of the family '{kind}' are not supported.")
        config = {**outer, "model_type": kind if known else "llama", "num_hidden_layers": self._count(outer)}
        if config["model_type"] == "mistral":
            config["sliding_window"] = None
        return config

    def _count(self, outer: dict[str, Any]) -> int:
        found = {int(match[1]) for name in self.tensors if (match := re.match(r"layers\.(\d+)\.", name))}
        found |= {0} if self.first == "midlayer" else set()
        said = outer.get("num_hidden_layers", 1)
        if found != set(range(said if isinstance(said, int) else 0)):
            raise WeightsError(
                f"{self.path}: the configuration says {said} layers, but the file has tensors of the layers "
                f"{', '.join(map(str, sorted(found))) or 'none'}."
            )
        return len(found)

    def spec(self) -> EagleSpec:
        try:
            model = from_hf_config(self.layer_config)
        except UnsupportedModelError as error:
            raise DrafterError(f"{self.path}: {error}") from error
        rope = model.layers[0].rope
        if rope is None or any(layer != model.layers[0] or layer.window for layer in model.layers):
            raise DrafterError(f"{self.path}: heads with windows or without positions are not supported.")
        if not all(map(math.isfinite, (*rope.inv_freq, rope.scale))) or not 0 < model.norm_eps < 1:
            raise WeightsError(f"{self.path}: rope or rms_norm_eps in the configuration give no usable numbers.")
        fused, target_hidden, features = self._features(model.hidden)
        biases = {role for role in ROLES if self._has(f"layers.0.{role}.bias")}
        if self.layer_config.get("attention_bias"):
            biases |= {"q", "k", "v"}
        if self.layer_config.get("mlp_bias"):
            biases |= {"gate", "up", "down"}
        spec = replace(
            EagleSpec.like(self.kind, model, rope),
            target_hidden=target_hidden,
            draft_vocab_size=self._columns(model.vocab_size),
            features=features,
            fused=fused,
            biases=tuple(role for role in ROLES if role in biases),
            fc_bias=self._fc_bias(),
            qk_norm=self._has("layers.0.q_norm"),
            own_embedding=self._has("embedding"),
            own_head=self._has("head"),
        )
        return replace(spec, **self._flags())

    def _has(self, name: str) -> bool:
        return tensor_name(name, self.first) in self.tensors

    def _said(self, key: str) -> Any:
        """A key of the head, or of NVIDIA's `eagle_config`; None where neither has it."""
        outer, inner = self.own.get(key), (self.own.get("eagle_config") or {}).get(key)
        if outer not in (None, [], inner) and inner not in (None, []):
            raise WeightsError(f"{self.path}: the configuration says {key} twice, {outer!r} and {inner!r}.")
        return inner if outer in (None, []) else outer

    def _flags(self) -> dict[str, Any]:
        present = {"fc_norm": self._has("fc_norm.0"), "norm_before_fc": self._has("input_norm")}
        for flag, there in present.items():
            self._agrees(flag, there, tensor_name("fc_norm.0" if flag == "fc_norm" else "input_norm"))
        if all(present.values()):
            raise DrafterError(f"{self.path}: fc_norm and norm_before_fc exclude each other, but the head has both.")
        said = {flag: self._flag(flag) or False for flag in ("norm_before_residual", "norm_output")}
        if self.kind == "eagle" and any({**present, **said}.values()):
            raise DrafterError(f"{self.path}: the norms of EAGLE-3 in a head of EAGLE-1 are not supported.")
        return {**present, **said}

    def _fc_bias(self) -> bool:
        there = self._has("fc.bias")
        if self.kind == "eagle":
            self._agrees("bias", there, "fc.bias")
            self._agrees("eagle_fc_bias", there, "fc.bias")
        return there

    def _flag(self, key: str) -> bool | None:
        said = self._said(key)
        if said is None or isinstance(said, bool):
            return said
        raise WeightsError(f"{self.path}: {key} in the configuration must be true or false, but it is {said!r}.")

    def _agrees(self, key: str, there: bool, tensor: str) -> None:
        """Check what a key says of a tensor; it may be left out."""
        said = self._flag(key)
        if said is not None and said != there:
            raise WeightsError(
                f"{self.path}: the configuration says {key} {str(said).lower()}, "
                f"but the tensor {tensor} is {'there' if there else 'missing'}."
            )

    def _columns(self, vocab_size: int) -> int:
        said = self.own.get("draft_vocab_size")
        if not self._has("head"):
            if said not in (None, vocab_size):
                raise WeightsError(
                    f"{self.path}: the configuration says draft_vocab_size {said}, but lm_head is missing."
                )
            return vocab_size
        columns = int(self.tensors["lm_head.weight"].shape[0])
        if said is not None and said != columns:
            raise WeightsError(f"{self.path}: lm_head has {columns} columns, but the configuration says {said}.")
        if columns > vocab_size:
            raise WeightsError(f"{self.path}: lm_head has {columns} columns for only {vocab_size} ids.")
        return columns

    def _features(self, hidden: int) -> tuple[int, int, tuple[int, ...] | None]:
        """How many states are fused, their width, and which they are."""
        weight = self.tensors.get("fc.weight")
        if weight is None or weight.dim() != 2:
            raise WeightsError(f"{self.path}: the tensor fc.weight is missing or no matrix; fetch the head again.")
        width = int(weight.shape[1])
        said = self._said("target_hidden_size")
        if self.kind == "eagle":
            return 1, said or hidden, ()
        features = self._layer_ids()
        count = self._said("num_aux_hidden_states")
        fused = len(features) if features else 3
        if count not in (None, fused):
            raise WeightsError(f"{self.path}: {count} states are fused, but which is said of {fused} only.")
        # a head that shares its target's embedding is as wide as its target
        target_hidden = said or (width // fused if self._has("embedding") else hidden)
        if target_hidden * fused != width:
            raise WeightsError(
                f"{self.path}: fc reads {width} values, which are not {fused} states of {target_hidden}."
            )
        return fused, target_hidden, features

    def _layer_ids(self) -> tuple[int, ...] | None:
        """The fused states by layers executed before them; files that count a layer's output count one less."""
        inputs, outputs = self._said("eagle_aux_hidden_state_layer_ids"), self.own.get("eagle3_layers_to_capture")
        if inputs and outputs:
            raise WeightsError(f"{self.path}: the configuration names the fused layers twice, by input and by output.")
        found = inputs or outputs
        if not found:
            return None
        if not isinstance(found, list) or not all(type(layer) is int and layer >= 0 for layer in found):
            raise WeightsError(f"{self.path}: the fused layers must be a list of layers, but they are {found!r}.")
        if sorted(set(found)) != found:
            raise WeightsError(f"{self.path}: the fused layers must ascend, but they are {found}.")
        return tuple(layer + 1 for layer in found) if outputs else tuple(found)

    def target(self) -> str | None:
        """The model that it was trained for, if its configuration says so."""
        verifier = (self.own.get("speculators_config") or {}).get("verifier") or {}
        found = verifier.get("name_or_path")
        return found if isinstance(found, str) and found else None
