"""What a dense decoder computes: one specification for all families, read from their `config.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from paceline.errors import UnsupportedModelError
from paceline.targets.families import ACTIVATIONS, Family, family_of
from paceline.targets.rope import frequencies, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Activation = Literal["silu", "gelu", "gelu_tanh"]
QkNorm = Literal["head", "full"]

ROLES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `dims` of each head, half-split form: pairs are (i, i + dims / 2).

    Attributes:
        dims: rotary dimensions, even.
        inv_freq: dims / 2 inverse frequencies in radians a position, scaling applied (float32 values).
        scale: multiplies cosine and sine (the attention factor of yarn and longrope).
    """

    dims: int
    inv_freq: tuple[float, ...]
    scale: float


@dataclass(frozen=True)
class LayerSpec:
    """What differs from layer to layer: `rope` None has no positions, `window` None sees everything."""

    rope: RopeSpec | None
    window: int | None


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder.

    With r the residual multiplier, each half of a layer is x = x + r * post(f(pre(x))); pre and post are norms
    or nothing. A norm is x * rsqrt(mean(x^2) + eps) * w. The logits are
    softcap(head(norm(x)) * logit_multiplier).

    Attributes:
        vocab_size: rows of embedding and head.
        qk_norm: norm of queries and keys: none, over each head, or over the whole row.
        attention_scale: factor on the products of queries and keys.
        attention_softcap: c in c * tanh(score / c), after the scale.
        logit_softcap: the same on the logits, after their multiplier.
        max_positions: the longest path, in tokens.
        biases: which of q, k, v, o, gate, up, down have a bias.
    """

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    activation: Activation
    norm_eps: float
    pre_norms: bool
    post_norms: bool
    qk_norm: QkNorm | None
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logit_multiplier: float
    tied: bool
    max_positions: int
    biases: tuple[str, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every canonical weight that this model has, with its shape ([out, in] for products)."""
        found: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_size, self.hidden),
            "norm": (self.hidden,),
        }
        if not self.tied:
            found["head"] = (self.vocab_size, self.hidden)
        for layer in range(len(self.layers)):
            found.update({f"layers.{layer}.{name}": shape for name, shape in self._layer_shapes()})
        return found

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        outputs = (rows, kv_rows, kv_rows, self.hidden, self.intermediate, self.intermediate, self.hidden)
        inputs = (self.hidden, self.hidden, self.hidden, rows, self.hidden, self.hidden, self.intermediate)
        for role, n, k in zip(ROLES, outputs, inputs, strict=True):
            yield role, (n, k)
            if role in self.biases:
                yield f"{role}.bias", (n,)
        if self.pre_norms:
            yield from (("attn_norm", (self.hidden,)), ("mlp_norm", (self.hidden,)))
        if self.post_norms:
            yield from (("attn_post_norm", (self.hidden,)), ("mlp_post_norm", (self.hidden,)))
        if self.qk_norm == "head":
            yield from (("q_norm", (self.head_dim,)), ("k_norm", (self.head_dim,)))
        elif self.qk_norm == "full":
            yield from (("q_norm", (rows,)), ("k_norm", (kv_rows,)))

    def to_json(self) -> str:
        """This specification as JSON; floats keep every bit. Layers that are equal are written once."""
        kinds = list(dict.fromkeys(self.layers))
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "layers"}
        fields["kinds"] = [asdict(kind) for kind in kinds]
        fields["layers"] = [kinds.index(layer) for layer in self.layers]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        kinds = [_layer_from(kind) for kind in fields.pop("kinds")]
        layers = tuple(kinds[kind] for kind in fields.pop("layers"))
        return cls(layers=layers, biases=tuple(fields.pop("biases")), **fields)


def _layer_from(fields: dict[str, Any]) -> LayerSpec:
    rope = fields["rope"]
    spec = None if rope is None else RopeSpec(rope["dims"], tuple(rope["inv_freq"]), rope["scale"])
    return LayerSpec(spec, fields["window"])


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model inside a multimodal checkpoint; any other as it is."""
    if config.get("model_type") != "gemma3" or "text_config" not in config:
        return config
    outer: dict[str, Any] = {key: config[key] for key in ("architectures", "quantization_config") if key in config}
    outer["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
    return {**outer, **config["text_config"], "model_type": "gemma3_text"}


def uses_longrope(config: dict[str, Any]) -> int | None:
    """The context up to which the factors for short contexts apply; None where no longrope is used."""
    config = text_config(config)
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if parameters.get("rope_type", parameters.get("type")) not in {"longrope", "su"} and not (
        config.get("model_type") == "phi3" and parameters.get("rope_type", parameters.get("type")) == "yarn"
    ):
        return None
    return int(_Reader(config, family_of(config)).original_positions(parameters))


def from_hf_config(config: dict[str, Any], max_model_len: int | None = None) -> ModelSpec:
    """Read a `config.json`.

    Args:
        config: the parsed file.
        max_model_len: the context limit in tokens; it decides which longrope factors are taken: those for
            short contexts where it does not exceed the original context (then `max_positions`), those
            for long contexts otherwise. None is the model's own limit.

    Raises:
        UnsupportedModelError: the model needs something that is not supported, or a key is missing.
    """
    config = text_config(config)
    return _Reader(config, family_of(config)).spec(max_model_len)


class _Reader:
    def __init__(self, config: dict[str, Any], family: Family) -> None:
        self.config = config
        self.family = family

    def value(self, key: str, default: Any = None) -> Any:
        found = self.config.get(key)
        if found is None and not (key in self.config and key in _NULLABLE):
            found = self.family.defaults.get(key, default)
        return found

    def size(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UnsupportedModelError(f"the configuration must have a positive {key}, but it has {found!r}.")
        return found

    def spec(self, max_model_len: int | None) -> ModelSpec:
        family = self.family
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UnsupportedModelError(f"{heads} query heads cannot share {kv_heads} key heads evenly.")
        head_dim = self.size("head_dim", hidden // heads)
        layers, max_positions = self.layers(head_dim, max_model_len)
        is_gemma = family.scaled_embedding
        scalar = self.value("query_pre_attn_scalar", head_dim)
        return ModelSpec(
            family=family.name,
            vocab_size=self.size("vocab_size"),
            hidden=hidden,
            intermediate=self.size("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=layers,
            activation=self.activation(),
            norm_eps=float(self.value("rms_norm_eps", 1e-6)),
            pre_norms=family.pre_norms,
            post_norms=family.post_norms,
            qk_norm=family.qk_norm,
            attention_scale=float(self.value("attention_multiplier", float(scalar) ** -0.5)),
            attention_softcap=self.softcap("attn_logit_softcapping"),
            logit_softcap=self.softcap("final_logit_softcapping"),
            embedding_multiplier=float(hidden**0.5 if is_gemma else self.value("embedding_multiplier", 1.0)),
            residual_multiplier=float(self.value("residual_multiplier", 1.0)),
            logit_multiplier=1.0 / float(self.value("logits_scaling", 1.0)),
            tied=bool(self.value("tie_word_embeddings", False)),
            max_positions=max_positions,
            biases=self.biases(),
        )

    def activation(self) -> Activation:
        name = self.value(self.family.activation_key, "silu")
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"the activation '{name}' is not supported (only {', '.join(sorted(ACTIVATIONS))})."
            )
        return cast("Activation", ACTIVATIONS[name])

    def softcap(self, key: str) -> float | None:
        found = self.value(key)
        if found and key == "attn_logit_softcapping" and self.family.name == "gemma3":
            raise UnsupportedModelError(f"gemma3 with {key} = {found} is not supported.")
        return float(found) if found else None

    def biases(self) -> tuple[str, ...]:
        found = set(self.family.biases)
        if self.value("attention_bias", False):
            found |= {"q", "k", "v", "o"}
        if self.value("mlp_bias", False):
            found |= {"gate", "up", "down"}
        return tuple(role for role in ROLES if role in found)

    # Layers: which have a window, which have positions, and with which frequencies.

    def layers(self, head_dim: int, max_model_len: int | None) -> tuple[tuple[LayerSpec, ...], int]:
        if self.value("use_bidirectional_attention", False):
            raise UnsupportedModelError("attention to later tokens (use_bidirectional_attention) is not supported.")
        types = self.layer_types()
        parameters = {kind: self.rope_parameters(kind) for kind in set(types)}
        limits = [self.positions(found, max_model_len) for found in parameters.values()]
        max_positions = min(limits)
        ropes = {kind: self.rope(found, head_dim, max_model_len) for kind, found in parameters.items()}
        windows = {"full_attention": None, "sliding_attention": self.window(max_positions)}
        placed = self.placed(len(types))
        layers = tuple(
            LayerSpec(ropes[kind] if has_positions else None, windows[kind])
            for kind, has_positions in zip(types, placed, strict=True)
        )
        return layers, max_positions

    def layer_types(self) -> list[str]:
        count = self.size("num_hidden_layers")
        usual = self._default_types(count)
        types = self.value("layer_types") or usual
        if self.family.windows != "typed" and types != usual:
            raise UnsupportedModelError(f"{self.family.name} with layers of mixed types is not supported.")
        if len(types) != count:
            raise UnsupportedModelError(f"layer_types names {len(types)} layers, but the model has {count}.")
        for kind in types:
            if kind not in {"full_attention", "sliding_attention"}:
                raise UnsupportedModelError(f"layers of type '{kind}' are not supported.")
        return list(types)

    def _default_types(self, count: int) -> list[str]:
        family = self.family
        if family.windows == "all":
            return ["sliding_attention" if self.value("sliding_window") else "full_attention"] * count
        if family.name in {"gemma2", "gemma3"}:
            # one global layer after every five local ones, in Gemma 2 after every one
            pattern = 2
            if family.name == "gemma3":
                pattern = self.value("sliding_window_pattern") or self.value("_sliding_window_pattern") or 6
            local = [bool((layer + 1) % pattern) for layer in range(count)]
        elif family.windows == "typed" and self.value("use_sliding_window") and self.value("sliding_window"):
            if family.name == "smollm3":
                local = [not has_positions for has_positions in self.placed(count)]
            else:
                local = [layer >= self.value("max_window_layers") for layer in range(count)]
        else:
            local = [False] * count
        return ["sliding_attention" if flag else "full_attention" for flag in local]

    def window(self, max_positions: int) -> int | None:
        """The window in tokens; None where it never hides anything."""
        if "use_sliding_window" in self.family.keys and not self.value("use_sliding_window", False):
            return None
        window = self.value("sliding_window")
        return int(window) if window and window < max_positions else None

    def placed(self, count: int) -> list[bool]:
        """Which layers have positions (SmolLM3 leaves them out of every fourth)."""
        if "no_rope_layers" not in self.family.keys:
            return [True] * count
        given = self.value("no_rope_layers")
        if given is None:
            interval = self.value("no_rope_layer_interval")
            return [(layer + 1) % interval != 0 for layer in range(count)]
        if len(given) < count:
            raise UnsupportedModelError(f"no_rope_layers names {len(given)} layers, but the model has {count}.")
        return [bool(flag) for flag in given[:count]]

    def rope_parameters(self, layer_type: str) -> dict[str, Any]:
        """The parameters of one type of layer, in the newer spelling, from either spelling."""
        given = self.config.get("rope_parameters") or {}
        nested = any(key in given for key in ("full_attention", "sliding_attention"))
        if self.family.name == "gemma3":
            return self._gemma3_parameters(layer_type, given if nested else {})
        flat = self.config.get("rope_scaling") or given
        found = dict(given.get(layer_type) or {}) if nested else dict(flat)
        for key in ("rope_theta", "partial_rotary_factor"):
            if found.get(key) is None:
                found[key] = self.value(key)
        if self.family.name == "phi3" and found.get("rope_type", found.get("type")) == "yarn":
            found["rope_type"] = "longrope"  # so called by the first release
        return found

    def _gemma3_parameters(self, layer_type: str, nested: dict[str, Any]) -> dict[str, Any]:
        found = dict(nested.get(layer_type) or {})
        if layer_type == "full_attention":
            found.update(self.config.get("rope_scaling") or {})
            theta = self.value("rope_theta", 1_000_000.0)
        else:
            theta = self.value("rope_local_base_freq", 10_000.0)
        if found.get("rope_theta") is None:
            found["rope_theta"] = theta
        return found

    def original_positions(self, parameters: dict[str, Any]) -> int:
        outer = self.value("original_max_position_embeddings")
        inner = parameters.get("original_max_position_embeddings")
        return int(outer or inner or self.size("max_position_embeddings"))

    def positions(self, parameters: dict[str, Any], max_model_len: int | None) -> int:
        limit, kind = self.size("max_position_embeddings"), kind_of(parameters)
        if kind == "yarn" and parameters.get("factor"):
            return max(limit, int(self.original_positions(parameters) * parameters["factor"]))
        if kind == "longrope" and not self.long(parameters, max_model_len):
            return self.original_positions(parameters)
        return limit

    def long(self, parameters: dict[str, Any], max_model_len: int | None) -> bool:
        limit = max_model_len or self.size("max_position_embeddings")
        return limit > self.original_positions(parameters)

    def rope(self, parameters: dict[str, Any], head_dim: int, max_model_len: int | None) -> RopeSpec:
        fraction = parameters.get("partial_rotary_factor")
        dims = int(head_dim * (1.0 if fraction is None else fraction))
        if dims < 2 or dims % 2 or dims > head_dim:
            raise UnsupportedModelError(f"{dims} rotary dimensions of {head_dim} are not supported.")
        theta = float(parameters.get("rope_theta") or 10_000.0)
        if kind_of(parameters) in {"llama3", "yarn", "longrope"}:
            parameters = {
                **parameters,
                "original_max_position_embeddings": self.original_positions(parameters),
            }
        inverse, scale = frequencies(
            parameters,
            dims,
            theta,
            self.size("max_position_embeddings"),
            self.long(parameters, max_model_len),
        )
        return RopeSpec(dims, tuple(inverse.tolist()), scale)


# Keys whose null means "none", not "left out".
_NULLABLE = frozenset({"sliding_window", "final_logit_softcapping", "attn_logit_softcapping"})
