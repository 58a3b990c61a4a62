"""A draft head on the target's own kernels: one call is one level of a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import DrafterError
from paceline.heads.check import require_fit
from paceline.heads.network import rms_norm
from paceline.heads.spec import TARGET_IDS, EagleSpec
from paceline.kernels.memory import huge_copy
from paceline.kernels.plan import Front, Plan, rope_tables
from paceline.kernels.runtime import make_runtime
from paceline.pages import CacheGroup
from paceline.targets.linear import Linear, pack_embedding, pack_linear
from paceline.targets.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.heads.head import Head
    from paceline.pages import Slab
    from paceline.targets.decoder import Decoder
    from paceline.targets.linear import Format

_NORMS = ("embed_norm", "hidden_norm", "norm")


class HeadDecoder:
    """An EAGLE head beside its target: the same number format, threads and instruction set and, where the head has
    none of its own, the target's embedding and head themselves, not copies. Rows are independent as the target's are.

    Attributes:
        taps: the target's layers whose input `states` reads, in order.
        groups: the one cache group, of the head's own keys and values.
        target_ids: int64 [columns], the target's id of each column of the logits; None where column i is id i.
        weight_bytes: size of the weights that are not the target's.
    """

    def __init__(self, head: Head, target: Decoder) -> None:
        """Pack ``head`` for ``target``.

        Raises:
            DrafterError: it does not fit the target, or is no EAGLE head.
        """
        spec, plan = head.spec, target.plan
        if not isinstance(spec, EagleSpec):
            raise DrafterError("these are Medusa heads; draft with the method 'medusa'.")
        require_fit(head, target.spec, target.vocab_size)
        columns, self.target_ids = usable_columns(head, target)
        if self.target_ids is not None and not spec.own_head:
            raise DrafterError("the head names ids for its columns but has none, and the target's has all ids.")
        own = huge_copy(_packed(head, spec, columns, plan.format))
        shared = {name: tensor for name, tensor in plan.tensors.items() if name.split(".")[0] in _shared(spec)}
        tensors = own | shared
        dtype = plan.groups[0].dtype
        self.spec, self.max_positions = spec, target.max_positions
        self.taps = spec.taps(len(target.spec.layers))
        self.groups = (CacheGroup(spec.kind, spec.layers, spec.kv_heads, spec.head_dim, dtype),)
        self.weight_bytes = sum(tensor.nbytes for tensor in own.values())
        self._states = _States(head, spec, target)
        self._last = (spec.layers,) if spec.kind == "eagle3" and not spec.norm_output else ()
        self.plan = Plan(
            spec=_model_spec(spec, target, tensors["embedding.data"].shape[0]),
            tensors=tensors,
            format=plan.format,
            vocab_size=columns.shape[0],
            positions=target.max_positions,
            groups=self.groups,
            places=tuple((0, layer) for layer in range(spec.layers)),
            ropes={spec.rope: rope_tables(spec.rope, target.max_positions)},
            front=Front(fused=spec.kind == "eagle", normed_residual=spec.norm_before_residual),
        )
        _, self._runtime = make_runtime(self.plan, target.path, target.threads)

    def states(self, taps: Sequence[Tensor]) -> Tensor:
        """What rows read where the target has been: float32 [R, H] from float32 [R, F] for each of ``self.taps``."""
        return self._states(taps)

    def forward(self, batch: Batch, slabs: Sequence[Slab], states: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values into the slabs, then score the rows asked for.

        Args:
            batch: R rows, M of them scored; a row's id is the token that follows its state.
            states: float32 [R, H], from `states`, or from an earlier pass where the target has not been yet.

        Returns:
            The logits of the scored rows, float32 [M, columns], and the states that rows below them read, [M, H].

        Raises:
            KernelError: ids, positions or pages out of range, or tensors of the wrong type or shape.
        """
        scores = self._runtime.forward(batch, slabs, self._last, None, states)
        last = scores.features[self.spec.layers][batch.score] if self._last else scores.hidden
        return scores.logits, last


def _shared(spec: EagleSpec) -> tuple[str, ...]:
    """What is the target's."""
    return (*(() if spec.own_embedding else ("embedding",)), *(() if spec.own_head else ("head",)))


def usable_columns(head: Head, target: Decoder) -> tuple[Tensor, Tensor | None]:
    """The columns of a head whose ids may be emitted, and those ids, None where column i is id i."""
    columns = (head.target_ids < target.vocab_size).nonzero()[:, 0]
    ids = head.target_ids[columns]
    return columns, None if torch.equal(ids, torch.arange(ids.shape[0])) else ids


def product_beside(target: Decoder, weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A product [N, K] in the target's number format, on its threads and its instruction set."""
    n, k = weight.shape
    form = target.plan.format
    return Linear(n, k, form, huge_copy(pack_linear(weight, bias, form)), target.threads, target.path)


def _packed(head: Head, spec: EagleSpec, columns: Tensor, form: Format) -> dict[str, Tensor]:
    """The head's own tensors as the kernels read them."""
    given = {name: tensor for name, tensor in head.tensors.items() if name != TARGET_IDS}
    packed: dict[str, Tensor] = {}

    def product(name: str, *parts: str) -> None:
        weight, bias = _joined(given, parts)
        packed.update({f"{name}.{key}": value for key, value in pack_linear(weight, bias, form).items()})

    for layer in (f"layers.{index}" for index in range(spec.layers)):
        product(f"{layer}.qkv", f"{layer}.q", f"{layer}.k", f"{layer}.v")
        product(f"{layer}.o", f"{layer}.o")
        product(f"{layer}.gate_up", f"{layer}.gate", f"{layer}.up")
        product(f"{layer}.down", f"{layer}.down")
    if spec.kind == "eagle":
        product("fc", "fc")
    if spec.own_head:
        given["head"] = given["head"][columns]
        product("head", "head")
    if spec.own_embedding:
        packed |= {f"embedding.{key}": value for key, value in pack_embedding(given["embedding"], form).items()}
    norms = {name: given[name].float() for name in _NORMS if name in given}
    layer_norms = {name: given[name].float() for name in given if name.startswith("layers.") and name.endswith("norm")}
    return packed | norms | layer_norms


def _joined(given: Mapping[str, Tensor], parts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Products one below the other; a bias that only some have is 0 for the others."""
    weights = [given[part].float() for part in parts]
    if not any(f"{part}.bias" in given for part in parts):
        return torch.cat(weights), None
    biases = [
        given.get(f"{part}.bias", torch.zeros(weight.shape[0])) for part, weight in zip(parts, weights, strict=True)
    ]
    return torch.cat(weights), torch.cat([bias.float() for bias in biases])


def _model_spec(spec: EagleSpec, target: Decoder, ids: int) -> ModelSpec:
    """The head's layers as a model."""
    return ModelSpec(
        family=spec.kind,
        vocab_size=ids,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layers=(LayerSpec(spec.rope, None),) * spec.layers,
        activation=spec.activation,
        norm_eps=spec.norm_eps,
        pre_norms=True,
        post_norms=False,
        qk_norm="head" if spec.qk_norm else None,
        attention_scale=spec.head_dim**-0.5,
        attention_softcap=None,
        logit_softcap=None,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logit_multiplier=1.0,
        tied=False,
        max_positions=target.max_positions,
        biases=spec.biases,
    )


class _States:
    """What a head reads where the target has been: for "eagle" the state after the target's final norm, for "eagle3"
    several states made one by a product."""

    def __init__(self, head: Head, spec: EagleSpec, target: Decoder) -> None:
        given = head.tensors
        self._eps, self._fc = spec.norm_eps, None
        self._each: list[Tensor] = []
        self._joined = given["input_norm"].float() if spec.norm_before_fc else None
        if spec.kind == "eagle":
            self._eps, self._each = target.spec.norm_eps, [target.plan.tensors["norm"]]
            return
        if spec.fc_norm:
            self._each = [given[f"fc_norm.{place}"].float() for place in range(spec.fused)]
        self._fc = product_beside(target, given["fc"], given.get("fc.bias"))

    def __call__(self, taps: Sequence[Tensor]) -> Tensor:
        if self._each:
            taps = [rms_norm(tap, weight, self._eps) for tap, weight in zip(taps, self._each, strict=True)]
        joined = torch.cat(list(taps), 1)
        if self._joined is not None:
            joined = rms_norm(joined, self._joined, self._eps)
        return joined if self._fc is None else self._fc(joined)
