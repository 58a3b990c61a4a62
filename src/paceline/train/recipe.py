"""How to train: AdamW (arXiv 1711.05101), a rate that rises in a straight line and falls as a cosine, clipped
gradients, averaged weights."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The numbers of a training.

    Attributes:
        epochs: how often every example is seen; a part of an epoch counts too.
        rate: the highest learning rate.
        warmup: the share of the training in which the rate rises.
        floor: the rate at the end, as a share of the highest.
        beta1, beta2: of AdamW.
        weight_decay: of AdamW.
        clip: the largest norm of all gradients together.
        average: how much of the averaged weights a step keeps (an exponential moving average); 0 takes the weights of
            the last step.
        seed: of the order of examples and what is drawn; with the drafter's own seed and one number of torch threads it
            gives one result.
        enough: end after an epoch in which the drafter was right so often at every depth; None trains to the end.
    """

    epochs: float = 2.0
    rate: float = 1e-3
    warmup: float = 0.05
    floor: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 0.5
    average: float = 0.0
    seed: int = 0
    enough: float | None = None

    def rate_at(self, done: float) -> float:
        """The learning rate when the share ``done`` of the training is over."""
        if done < self.warmup:
            return self.rate * done / self.warmup
        over = (done - self.warmup) / (1 - self.warmup) if self.warmup < 1 else 0.0
        return self.rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * over)) / 2)
