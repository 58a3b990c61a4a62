"""How often something is so: a mean that forgets slowly, and suspects at every judgement that things have changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

_HAZARD = 0.02  # a turn, as from code to prose, is believed to come once in so many judgements
_DOUBT = 0.1  # of a suspicion so much is given up at every judgement
_SURE = 0.8
_LEAST, _MOST = 0.01, 0.99


@dataclass(slots=True)
class Rate:
    """Two explanations of what is seen: all is as before, or there was a turn since which only ``fresh`` counts. The
    estimate is their mean by how likely they are, so it moves at once where what is seen was hardly to be expected.

    Source: two run lengths of Bayesian online change point detection (Adams and MacKay 2007, arXiv 0710.3742).

    Attributes:
        prior: how many judgements the belief that was held beforehand counts for, as long as there was no turn.
        slow: what a judgement is worth when the next comes.
    """

    prior: float = 4.0
    slow: float = 0.95
    hazard: float = _HAZARD
    judged: float = 0.0
    right: float = 0.0
    turned: float = 0.0
    fresh_judged: float = 0.0
    fresh_right: float = 0.0
    believed: float = field(init=False)

    def __post_init__(self) -> None:
        self.believed = self.prior

    def learn(self, right: float, judged: float = 1.0, belief: float = 0.5) -> None:
        """Of so many, so many were right; ``belief`` was held beforehand."""
        before = self.turned
        turned = before + self.hazard * (1 - before)
        kept = before / turned if before else 0.0  # a turn that comes only now has seen nothing yet
        fresh_judged, fresh_right = self.fresh_judged * kept, self.fresh_right * kept
        weight = self.judged + self.believed
        old = (self.right + self.believed * belief) / weight if weight else belief
        old = _LEAST if old < _LEAST else _MOST if old > _MOST else old
        fresh = (fresh_right + 0.5) / (fresh_judged + 1)
        if judged == 1.0:
            odds = fresh / old if right else (1 - fresh) / (1 - old)
        else:
            odds = exp(min(right * log(fresh / old) + (judged - right) * log((1 - fresh) / (1 - old)), 50.0))
        weight = turned * odds
        turned = (1 - _DOUBT) * weight / (weight + 1 - turned)
        self.turned, self.fresh_judged, self.fresh_right = turned, fresh_judged + judged, fresh_right + right
        self.judged = self.judged * self.slow + judged
        self.right = self.right * self.slow + right
        self.believed += (1 - self.slow) * (self.prior - self.believed)
        if turned > _SURE:
            self.judged, self.right, self.believed, self.turned = self.fresh_judged, self.fresh_right, 0.5, 0.0

    def value(self, belief: float) -> float:
        """The estimate, where ``belief`` was held beforehand."""
        weight = self.judged + self.believed
        old = (self.right + self.believed * belief) / weight if weight else belief
        return old + self.turned * ((self.fresh_right + 0.5) / (self.fresh_judged + 1) - old)
