"""A draft head on the target's own kernels: one call is one level of a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import DrafterError
from paceline.heads.spec import TARGET_IDS
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
    from paceline.heads.spec import EagleSpec
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
    """

    def __init__(self, head: Head, target: Decoder) -> None:
        """Pack ``head`` for ``target``.

        Raises:
            DrafterError: it does not fit the target, or is no EAGLE head.
        """
        spec, plan = head.spec, target.plan
        if spec.kind == "medusa":
            raise DrafterError("these are Medusa heads; take the method 'medusa'.")
        check_fit(spec, target)
        columns, self.target_ids = _columns(head, spec, target)
        own = huge_copy(_packed(head, spec, columns, plan.format))
        shared = {name: tensor for name, tensor in plan.tensors.items() if name.split(".")[0] in _shared(spec)}
        tensors = own | shared
        dtype = plan.groups[0].dtype
        self.spec, self.max_positions = spec, target.max_positions
        self.taps = spec.taps(len(target.spec.layers))
        self.groups = (CacheGroup(spec.kind, spec.layers, spec.kv_heads, spec.head_dim, dtype),)
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


def check_fit(spec: EagleSpec, target: Decoder) -> None:
    """Raise unless a head of that kind can draft for the target.

    Raises:
        DrafterError: width, vocabulary or number of layers are another's.
    """
    found = target.spec
    if spec.target_hidden != found.hidden:
        raise DrafterError(
            f"the head reads states of {spec.target_hidden} numbers, but the target's have {found.hidden}; it was made "
            "for another model."
        )
    if spec.vocab_size < target.vocab_size:
        raise DrafterError(
            f"the head knows {spec.vocab_size} token ids, but the target has {target.vocab_size}; it was made for "
            "another model."
        )
    needed = [name for name in _shared(spec) if spec.hidden != found.hidden]
    if needed or (spec.kind == "eagle" and spec.hidden != spec.target_hidden):
        raise DrafterError(
            f"the head is {spec.hidden} wide and takes its {' and '.join(needed) or 'states'} from the target, which "
            f"is {found.hidden} wide; take a head that brings its own."
        )
    beyond = [layer for layer in spec.taps(len(found.layers)) if not 0 <= layer <= len(found.layers)]
    if beyond:
        raise DrafterError(
            f"the head reads the input of layer {beyond[0]}, but the target has {len(found.layers)} layers; it was "
            "made for another model."
        )


def _shared(spec: EagleSpec) -> tuple[str, ...]:
    """What is the target's."""
    return (*(() if spec.own_embedding else ("embedding",)), *(() if spec.own_head else ("head",)))


def _columns(head: Head, spec: EagleSpec, target: Decoder) -> tuple[Tensor, Tensor | None]:
    """The columns of the head whose ids may be emitted, and those ids, None where column i is id i."""
    if not spec.own_head:
        return torch.arange(min(spec.draft_vocab_size, target.vocab_size)), None
    columns = (head.target_ids < target.vocab_size).nonzero()[:, 0]
    ids = head.target_ids[columns]
    return columns, None if torch.equal(ids, torch.arange(ids.shape[0])) else ids


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
    """The head's layers as a model; with the target's head go its multiplier and its cap."""
    theirs = None if spec.own_head else target.spec
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
        logit_softcap=theirs.logit_softcap if theirs else None,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logit_multiplier=theirs.logit_multiplier if theirs else 1.0,
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
        weight, bias = _joined(given, ["fc"])
        form = target.plan.format
        packed = huge_copy(pack_linear(weight, bias, form))
        self._fc = Linear(spec.hidden, weight.shape[1], form, packed, target.threads, target.path)

    def __call__(self, taps: Sequence[Tensor]) -> Tensor:
        if self._each:
            taps = [self._norm(tap, weight) for tap, weight in zip(taps, self._each, strict=True)]
        joined = torch.cat(list(taps), 1)
        if self._joined is not None:
            joined = self._norm(joined, self._joined)
        return joined if self._fc is None else self._fc(joined)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + self._eps) * weight
