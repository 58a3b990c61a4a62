"""The loop: one for every kind of head."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import DrafterError
from paceline.heads.head import Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.train.objectives import Measured, Objective
    from paceline.train.pack import Pack, Reader


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW (arXiv 1711.05101), a rate that rises and falls in straight lines, clipped gradients.

    Attributes:
        epochs: how often every example is seen.
        rate: the highest learning rate.
        warmup: the share of the training in which the rate rises.
        betas: of AdamW.
        weight_decay: of AdamW.
        clip: the largest norm of all gradients together.
        seed: of the order of examples; with the head's own seed and one number of torch threads it gives one result.
        enough: end after an epoch in which the head was right so often at every depth; None trains to the end.
    """

    epochs: int
    rate: float = 1e-3
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    seed: int = 0
    enough: float | None = None

    def rate_at(self, done: float) -> float:
        """The learning rate when the share ``done`` of the training is over."""
        rising = done / self.warmup if self.warmup else 1.0
        falling = (1 - done) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return self.rate * min(1.0, rising, falling)


@dataclass(frozen=True)
class Progress:
    """One epoch.

    Attributes:
        epoch: its number, from 1 on.
        steps: how many steps it had.
        loss: their mean.
        accuracy: for each depth of a draft how often the first guess was the target's own token, measured on the way.
    """

    epoch: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]


def train(
    objective: Objective,
    reader: Reader,
    recipe: Recipe,
    report: Callable[[Progress], None] | None = None,
    target: str | None = None,
) -> Head:
    """Train the head of ``objective`` on what ``reader`` gives.

    Args:
        report: called after each epoch.
        target: the name of the model that the head is trained for, which its files will carry.

    Raises:
        DrafterError: the loss is no number any more.
    """
    optimizer = torch.optim.AdamW(
        objective.network.parameters(), recipe.rate, recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
    dice = random.Random(recipe.seed)
    for epoch in range(recipe.epochs):
        progress = _epoch(epoch, objective, reader.epoch(dice), optimizer, recipe)
        if report is not None:
            report(progress)
        if recipe.enough is not None and min(progress.accuracy) >= recipe.enough:
            break
    return replace(objective.head, tensors=objective.network.tensors(), provenance=Provenance("trained", None, target))


def _epoch(
    epoch: int,
    objective: Objective,
    packs: Iterator[tuple[Pack, float]],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
) -> Progress:
    seen: list[Measured] = []
    before = 0.0
    for pack, share in packs:
        measured = objective(pack)
        # as in the middle of the step, so that neither the first nor the last has a rate of 0
        _step(measured.loss, optimizer, recipe.rate_at((epoch + (before + share) / 2) / recipe.epochs), recipe.clip)
        seen.append(replace(measured, loss=measured.loss.detach()))
        before = share
    right = [sum(depth) for depth in zip(*(each.right for each in seen), strict=True)]
    total = [sum(depth) for depth in zip(*(each.total for each in seen), strict=True)]
    accuracy = tuple(r / t for r, t in zip(right, total, strict=True) if t)
    return Progress(epoch + 1, len(seen), sum(each.loss.item() for each in seen) / len(seen), accuracy)


def _step(loss: Tensor, optimizer: torch.optim.Optimizer, rate: float, clip: float) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    size = torch.nn.utils.clip_grad_norm_(parameters, clip)
    if not torch.isfinite(size):
        raise DrafterError(f"the training has diverged, its loss is {loss.item():.4g}: lower the rate or the clip.")
    optimizer.step()
