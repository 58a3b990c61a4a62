"""What the networks of all heads share: their tensors as parameters under canonical names, and the small operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from paceline.heads.spec import TARGET_IDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paceline.heads.spec import HeadSpec
    from paceline.targets.spec import Activation, RopeSpec


class HeadNetwork(nn.Module):
    """The tensors of a head as float32 parameters, by canonical name."""

    spec: HeadSpec
    target_ids: Tensor

    def __init__(self, spec: HeadSpec, tensors: Mapping[str, Tensor], target_head: Tensor | None) -> None:
        """Take over copies of ``tensors``; ``target_head`` [rows, hidden] serves where the head has no own product."""
        super().__init__()
        self.spec = spec
        floats = (name for name in spec.shapes() if name != TARGET_IDS)
        # a parameter's name may hold no dot
        self._weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(tensors[name].float().clone()) for name in floats}
        )
        ids = tensors.get(TARGET_IDS, torch.arange(spec.draft_vocab_size))
        self.register_buffer(TARGET_IDS, ids.clone(), persistent=False)
        rows = None if target_head is None else target_head[: spec.draft_vocab_size].detach().float()
        self.register_buffer("_target_head", rows, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as they are now, by canonical name, detached copies."""
        found = {name.replace("/", "."): weight.detach().clone() for name, weight in self._weights.items()}
        if self.spec.own_ids:
            found[TARGET_IDS] = self.target_ids.clone()
        return found

    def weight(self, name: str) -> Tensor:
        found: Tensor = self._weights[name.replace(".", "/")]
        return found

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The product with the weight ``name`` and, where there is one, its bias."""
        return F.linear(x, self.weight(name), self._weights.get(f"{name}.bias".replace(".", "/")))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def activate(kind: Activation, x: Tensor) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def rotate(x: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """Turn the first ``rope.dims`` of every head: x [..., heads, T, head_dim] by positions [T], half-split pairs."""
    angles = positions.to(torch.float32)[:, None] * torch.tensor(rope.inv_freq, device=x.device)
    cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
    half = rope.dims // 2
    a, b, rest = x[..., :half], x[..., half : rope.dims], x[..., rope.dims :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
