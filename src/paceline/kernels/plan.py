"""What both forms of the forward pass, C and torch, are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import KernelError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.batch import Batch
    from paceline.pages import CacheGroup
    from paceline.targets.linear import Format
    from paceline.targets.spec import ModelSpec, RopeSpec


@dataclass(frozen=True)
class Front:
    """What a draft head has before its layers: every row brings a feature of ``hidden`` numbers, which stands beside
    the embedding of its id, each normed where the tensor ``embed_norm`` or ``hidden_norm`` exists.

    Attributes:
        fused: the product ``fc`` [hidden, 2 hidden] brings the two back to one residual stream (EAGLE, arXiv
            2401.15077). Otherwise q, k and v of layer 0 read both, and the feature is the residual stream (EAGLE-3,
            arXiv 2503.01840).
        normed_residual: it is the normed feature that goes on as the residual stream; not where the two are fused.
    """

    fused: bool
    normed_residual: bool = False


@dataclass(frozen=True)
class Plan:
    """A model with its packed tensors, its cache groups and its limits.

    Attributes:
        tensors: packed by ``targets/linear.py``, named as ``targets/packed.py`` names them; a draft head may lack
            ``norm``, and the input norm of a layer.
        vocab_size: ids that may be emitted, the columns of the logits.
        positions: the longest path.
        places: for each layer its cache group and its place there.
        ropes: cosine and sine, each float32 [positions, dims / 2].
        front: of a draft head, whose passes read features.
    """

    spec: ModelSpec
    tensors: dict[str, Tensor]
    format: Format
    vocab_size: int
    positions: int
    groups: tuple[CacheGroup, ...]
    places: tuple[tuple[int, int], ...]
    ropes: dict[RopeSpec, tuple[Tensor, Tensor]]
    front: Front | None = None

    def layer_shapes(self, index: int) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the products of a layer."""
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        paired = index == 0 and self.front is not None and not self.front.fused
        return {
            "qkv": (queries + 2 * keys, 2 * spec.hidden if paired else spec.hidden),
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


def check_beside(plan: Plan, batch: Batch, beside: Tensor | None) -> None:
    """Raise unless a draft head, and nothing else, gets a feature for each of its rows.

    Raises:
        KernelError: features are missing, of another shape, or given to a whole model.
    """
    if (beside is None) == (plan.front is None):
        if beside is None or beside.shape == (batch.ids.shape[0], plan.spec.hidden):
            return
        raise KernelError(
            f"features of the shape {(batch.ids.shape[0], plan.spec.hidden)} are needed, not {tuple(beside.shape)}."
        )
    raise KernelError(
        "a draft head reads a feature for each row." if beside is None else "only a draft head reads features."
    )
