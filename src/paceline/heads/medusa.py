"""The Medusa network in plain torch, float32: what is trained, and what the fast path must equal.

Source: Cai et al. (arXiv 2401.10774), section 2.1; what it computes is written at `MedusaSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from paceline.errors import DrafterError
from paceline.heads.network import HeadNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paceline.heads.spec import MedusaSpec


class MedusaNetwork(HeadNetwork):
    """All heads over any number of states."""

    spec: MedusaSpec

    def __init__(self, spec: MedusaSpec, tensors: Mapping[str, Tensor], *, head: Tensor | None = None) -> None:
        """Make the network from canonical ``tensors``; ``head`` is the target's, for heads that have none.

        Raises:
            DrafterError: it is needed and not given.
        """
        if spec.head == "target" and head is None:
            raise DrafterError("the heads have no product for logits of their own and need the target's.")
        super().__init__(spec, tensors, head if spec.head == "target" else None)

    def forward(self, states: Tensor) -> Tensor:
        """Logits [heads, ..., draft_vocab_size] from the target's states after its final norm [..., hidden].

        Head h says which token is h + 2 places after the state's own.
        """
        return torch.stack([F.linear(self.behind(head, states), self.product(head)) for head in range(self.spec.heads)])

    def behind(self, head: int, states: Tensor) -> Tensor:
        """What the product of one head reads [..., hidden]."""
        for layer in range(self.spec.layers):
            states = states + F.silu(self.linear(f"heads.{head}.layers.{layer}", states))
        return states

    def product(self, head: int) -> Tensor:
        """The product of one head that gives logits [draft_vocab_size, hidden]."""
        if self.spec.head == "target":
            return self.get_buffer("_target_head")
        return self.weight("head" if self.spec.head == "shared" else f"heads.{head}.head")
