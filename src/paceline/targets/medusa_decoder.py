"""Medusa heads on the target's own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

from paceline.errors import DrafterError
from paceline.heads.check import require_fit
from paceline.heads.network import rms_norm
from paceline.heads.spec import MedusaSpec
from paceline.targets.head_decoder import product_beside, usable_columns
from paceline.targets.linear import Linear, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.targets.decoder import Decoder


class MedusaDecoder:
    """Medusa heads beside their target, in its number format; where they take the target's head, it is not copied.

    Attributes:
        tap: the target's layer whose input `states` reads.
        target_ids: int64 [columns], the target's id of each column of the logits; None where column i is id i.
        weight_bytes: size of the weights that are not the target's.
    """

    def __init__(self, head: Head, target: Decoder) -> None:
        """Pack ``head`` for ``target``.

        Raises:
            DrafterError: it does not fit the target, or holds no Medusa heads.
        """
        spec = head.spec
        if not isinstance(spec, MedusaSpec):
            raise DrafterError(f"this is an EAGLE head; draft with the method '{spec.kind}'.")
        require_fit(head, target.spec, target.vocab_size)
        columns, self.target_ids = usable_columns(head, target)
        if spec.head == "target" and self.target_ids is not None:
            raise DrafterError("the heads name ids for their columns but have none, and the target's head has all ids.")
        self.weight_bytes = sum(
            packed_bytes(weight.shape[0], weight.shape[1], target.plan.format)
            for weight in head.tensors.values()
            if weight.dim() == 2
        )
        self.spec, self.columns, self.tap = spec, columns.shape[0], len(target.spec.layers)
        self._norm, self._eps = target.plan.tensors["norm"], target.spec.norm_eps
        self._blocks = [[_block(head, name, target) for name in names] for names in _block_names(spec)]
        self._heads = [_logits(head, name, columns, target) for name in _head_names(spec)]

    def states(self, tap: Tensor) -> Tensor:
        """What the heads read: float32 [R, H] from the input of the target's final norm, [R, H]."""
        return rms_norm(tap, self._norm, self._eps)

    def forward(self, states: Tensor, heads: int) -> Tensor:
        """The logits of the first ``heads`` heads, float32 [heads, R, columns], from states float32 [R, H]; those of
        head h are of the token h + 2 places after the state's own."""
        outputs = []
        for blocks in self._blocks[:heads]:
            x = states
            for block in blocks:
                x = x + silu(block(x))
            outputs.append(x)
        if len(self._heads) == 1:
            return self._heads[0](torch.cat(outputs)).reshape(heads, -1, self.columns)
        return torch.stack([head(x) for head, x in zip(self._heads, outputs, strict=False)])


def _block_names(spec: MedusaSpec) -> list[list[str]]:
    return [[f"heads.{head}.layers.{layer}" for layer in range(spec.layers)] for head in range(spec.heads)]


def _head_names(spec: MedusaSpec) -> list[str | None]:
    """The products that give logits: one for each head, or one for all; None is the target's."""
    if spec.head == "each":
        return [f"heads.{head}.head" for head in range(spec.heads)]
    return ["head" if spec.head == "shared" else None]


def _block(head: Head, name: str, target: Decoder) -> Linear:
    return product_beside(target, head.tensors[name], head.tensors.get(f"{name}.bias"))


def _logits(head: Head, name: str | None, columns: Tensor, target: Decoder) -> Linear:
    if name is not None:
        return product_beside(target, head.tensors[name][columns])
    plan = target.plan
    n, k = columns.shape[0], plan.spec.hidden
    return Linear(n, k, plan.format, plan.linear("head"), target.threads, target.path)
