"""Heads to begin a training with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.heads.make import random_head
from paceline.heads.spec import MedusaSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.train.shared import Shared


def new_head(kind: HeadKind, shared: Shared, seed: int, *, ids: Sequence[int] | None = None, heads: int = 4) -> Head:
    """A head for the target that ``shared`` comes from: random layers, and what is known beforehand.

    Products that give logits begin as the target's. Medusa's residual blocks begin with zeros, so that every head
    first says what the target says of the next token (arXiv 2401.10774, section 2.1).

    Args:
        ids: the draft vocabulary of EAGLE-3 and Medusa heads, which then have a product of their own; None is all
            ids.
        heads: how many Medusa heads.

    Raises:
        DrafterError: the ids do not fit the target, or the kind.
    """
    size = shared.spec.vocab_size if ids is None else len(ids)
    head = random_head(kind, shared.spec, seed, draft_vocab_size=size, target_ids=ids, heads=heads)
    changes: dict[str, Tensor] = {}
    for name, tensor in head.tensors.items():
        if name == "head" or name.endswith(".head"):
            changes[name] = shared.head[head.target_ids].clone()
        elif isinstance(head.spec, MedusaSpec):
            changes[name] = torch.zeros_like(tensor) if ".layers." in name else tensor
        elif name == "norm":
            changes[name] = shared.norm.clone()
    return replace(head, tensors={**head.tensors, **changes})
