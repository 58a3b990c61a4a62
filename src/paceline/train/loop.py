"""The loop: one for every kind of drafter, of which it knows its parameters and its loss."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import DrafterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from paceline.train.objective import Measured, Objective
    from paceline.train.pack import Reader
    from paceline.train.recipe import Recipe

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW remembers of a parameter


class Training:
    """A training that can be stopped after any step and gone on with: what it does next is a function of the seed, of
    how many steps were taken, and of `state`.

    Attributes:
        taken: how many steps.
        tokens: how many tokens that count those had.
        steps: how many there will be.
    """

    def __init__(self, objective: Objective, reader: Reader, recipe: Recipe) -> None:
        self.objective, self._reader, self._recipe = objective, reader, recipe
        epochs = [reader.epoch(number) for number in range(math.ceil(recipe.epochs))]
        ends = [len(epoch) for epoch in epochs]
        if epochs:
            ends[-1] = max(1, round(ends[-1] * (recipe.epochs - len(epochs) + 1)))
        self._packs = [pack for epoch, end in zip(epochs, ends, strict=True) for pack in epoch[:end]]
        self.taken = self.tokens = 0
        parameters = dict(objective.network.named_parameters())
        self._parameters = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        self._averaged = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            recipe.rate,
            (recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    @property
    def steps(self) -> int:
        return len(self._packs)

    def step(self) -> Measured:
        """Take one step.

        Raises:
            DrafterError: the loss or its gradients are no numbers any more; the weights are as before.
        """
        pack = self._reader.pack(self._packs[self.taken], self.taken)
        measured = self.objective(pack)
        self._optimizer.zero_grad()
        torch.autograd.backward(measured.loss)
        size = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._recipe.clip)
        if not torch.isfinite(size):
            raise DrafterError(
                f"the training has diverged at step {self.taken + 1} of {self.steps}, its loss is "
                f"{measured.loss.item():.4g}: lower the rate or the clip."
            )
        for group in self._optimizer.param_groups:
            # as in the middle of the step, so that neither the first nor the last has a rate of 0
            group["lr"] = self._recipe.rate_at((self.taken + 0.5) / self.steps)
        self._optimizer.step()
        self._average()
        self.taken += 1
        self.tokens += int(pack.counts.sum())
        return replace(measured, loss=measured.loss.detach())

    def _average(self) -> None:
        # while few steps were taken they all count alike
        kept = min(self._recipe.average, self.taken / (self.taken + 10))
        for name, tensor in self._parameters.items():
            self._averaged[name].lerp_(tensor.detach(), 1 - kept)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the objective's network hold the averaged weights, as long as the block runs."""
        last = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
        with torch.no_grad():
            for name, tensor in self._parameters.items():
                tensor.copy_(self._averaged[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._parameters.items():
                    tensor.copy_(last[name])

    def state(self) -> dict[str, Tensor]:
        """All that the next steps depend on beside the seed, by name."""
        found = {"progress": torch.tensor([self.taken, self.tokens])}
        for name, tensor in self._parameters.items():
            found[f"weight.{name}"], found[f"averaged.{name}"] = tensor.detach(), self._averaged[name]
            for moment in _MOMENTS:
                if self.taken:
                    found[f"{moment}.{name}"] = self._optimizer.state[tensor][moment]
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        self.taken, self.tokens = state["progress"].tolist()
        with torch.no_grad():
            for name, tensor in self._parameters.items():
                tensor.copy_(state[f"weight.{name}"])
                self._averaged[name].copy_(state[f"averaged.{name}"])
                if self.taken:
                    moments = {moment: state[f"{moment}.{name}"].clone() for moment in _MOMENTS}
                    self._optimizer.state[tensor] = moments


@dataclass(frozen=True)
class Progress:
    """Some steps together.

    Attributes:
        step: how many were taken by their end.
        loss: their mean.
        accuracy: for each depth of a draft how often the first guess was the target's own token, measured on the way.
    """

    step: int
    loss: float
    accuracy: tuple[float, ...]

    @classmethod
    def of(cls, step: int, seen: list[Measured]) -> Progress:
        right = [sum(depth) for depth in zip(*(each.right for each in seen), strict=True)]
        total = [sum(depth) for depth in zip(*(each.total for each in seen), strict=True)]
        accuracy = tuple(r / t for r, t in zip(right, total, strict=True) if t)
        return cls(step, sum(each.loss.item() for each in seen) / len(seen), accuracy)
