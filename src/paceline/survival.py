"""How far drafts of one drafter survive in one sequence: estimates with the right denominators."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.rate import Rate

_PRIOR = 0.6
_PRIOR_WEIGHT = 12.0  # so many judgements the belief that a sequence is like the others counts for
_SHARED = 0.99
_LEAST = 0.02  # what survives less often is not worth a thought


@dataclass
class Survival:
    """For each depth, how often a draft was accepted when all before it were: the denominator is who got there.

    Attributes:
        depths: of this sequence.
        shared: of all sequences that may learn from each other: what is believed of a new one.
    """

    shared: list[Rate] = field(default_factory=list)
    depths: list[Rate] = field(default_factory=list)

    def learn(self, accepted: int, missed: bool) -> None:
        """So many drafts in a row were right, and then one was wrong, or none was left."""
        reached = accepted + missed
        while len(self.depths) < reached:
            self.depths.append(Rate(_PRIOR_WEIGHT))
        while len(self.shared) < reached:
            self.shared.append(Rate(slow=_SHARED, hazard=0.0))
        belief = _PRIOR
        for place in range(reached):
            belief = self.shared[place].value(belief)
            self.depths[place].learn(place < accepted, belief=belief)
            self.shared[place].learn(place < accepted)

    def alive(self, depths: int) -> list[float]:
        """The chance that the first d drafts are all accepted, for d from 1 to ``depths``, as long as there is one."""
        rate, product, chances = _PRIOR, 1.0, []
        for place in range(depths):
            if place < len(self.shared):
                rate = self.shared[place].value(rate)
            if place < len(self.depths):
                rate = self.depths[place].value(rate)
            product *= rate
            if product < _LEAST:
                break
            chances.append(product)
        return chances

    @property
    def first(self) -> float:
        """The chance of the first draft."""
        return next(iter(self.alive(1)), 0.0)
