"""What both forms of the forward pass, C and torch, are made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.pages import CacheGroup
    from paceline.targets.linear import Format
    from paceline.targets.spec import ModelSpec, RopeSpec


@dataclass(frozen=True)
class Plan:
    """A model with its packed tensors, its cache groups and its limits.

    Attributes:
        tensors: packed by ``targets/linear.py``, named as ``targets/packed.py`` names them.
        vocab_size: ids that may be emitted, the columns of the logits.
        positions: the longest path.
        places: for each layer its cache group and its place there.
        ropes: cosine and sine, each float32 [positions, dims / 2].
    """

    spec: ModelSpec
    tensors: dict[str, Tensor]
    format: Format
    vocab_size: int
    positions: int
    groups: tuple[CacheGroup, ...]
    places: tuple[tuple[int, int], ...]
    ropes: dict[RopeSpec, tuple[Tensor, Tensor]]

    @cached_property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the products of a layer."""
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return {
            "qkv": (queries + 2 * keys, spec.hidden),
            "o": (spec.hidden, queries),
            "gate_up": (2 * spec.intermediate, spec.hidden),
            "down": (spec.hidden, spec.intermediate),
        }

    def linear(self, name: str) -> dict[str, Tensor]:
        """The tensors of one product or of the embedding."""
        found = {key: self.tensors.get(f"{name}.{key}") for key in ("data", "scale", "bias")}
        return {key: tensor for key, tensor in found.items() if tensor is not None}


def rope_tables(rope: RopeSpec, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, in float32 throughout, times the rope's scale."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * torch.tensor(rope.inv_freq)[None]
    return (angles.cos() * rope.scale).contiguous(), (angles.sin() * rope.scale).contiguous()
