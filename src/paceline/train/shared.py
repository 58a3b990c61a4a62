"""What a head takes from its target as it is: embedding, final norm and head, out of their packed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from paceline.heads.network import rms_norm
from paceline.targets.linear import rotate, unpack_linear

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.targets.decoder import Decoder
    from paceline.targets.linear import Format
    from paceline.targets.spec import ModelSpec


@dataclass(frozen=True)
class Shared:
    """Weights of a target in float32, as exact as its number format has them; they are never trained.

    Attributes:
        spec: the target.
        usable: how many ids, from 0 on, it may emit.
        embedding: [vocab_size, hidden], without the target's multiplier.
        head: [vocab_size, hidden].
        norm: [hidden], of the final norm.
    """

    spec: ModelSpec
    usable: int
    embedding: Tensor
    head: Tensor
    norm: Tensor

    @classmethod
    def of(cls, target: Decoder) -> Shared:
        """Unpack them."""
        plan, spec = target.plan, target.spec
        head = _matrix(plan.linear("head"), spec.vocab_size, spec.hidden, plan.format)
        return cls(spec, target.vocab_size, _rows(plan.linear("embedding")), head, plan.tensors["norm"].float())

    def states(self, tap: Tensor) -> Tensor:
        """The states after the final norm, from its inputs [..., hidden]."""
        return rms_norm(tap, self.norm, self.spec.norm_eps)

    def product(self, ids: Tensor) -> Tensor:
        """What gives the target's logits of some ids from its states after the final norm, [len(ids), hidden], before
        a softcap."""
        return self.head[ids] * self.spec.logit_multiplier

    def logits(self, tap: Tensor) -> Tensor:
        """The target's own logits [..., vocab_size] of the next token, from the inputs of the final norm; -inf for
        ids that it may not emit."""
        logits = F.linear(self.states(tap), self.head) * self.spec.logit_multiplier
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        logits[..., self.usable :] = -torch.inf
        return logits


def _matrix(tensors: dict[str, Tensor], n: int, k: int, number_format: Format) -> Tensor:
    """A packed product as [n, k]; the rotation of int8 is its own inverse."""
    matrix = unpack_linear(tensors, n, k, number_format)
    if number_format != "int8":
        return matrix
    return rotate(matrix * tensors["scale"][:n, None])[:, :k].contiguous()


def _rows(tensors: dict[str, Tensor]) -> Tensor:
    rows = tensors["data"].float()
    return rows * tensors["scale"][:, None] if "scale" in tensors else rows
