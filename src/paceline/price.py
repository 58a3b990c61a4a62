"""What drafters take, in seconds, each its own price."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.cost import TICK, Load, StepCost, towards

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.drafters import Cost, Drafter


@dataclass
class Price:
    """What one drafter takes.

    A lookup takes so many seconds for each sequence. One that drafts with a model makes a pass for each level, or a
    single one for a block, and a pass is a step of that model: its rows are the nodes that are expanded.

    Attributes:
        name: the method's.
        cost: what shape its cost has.
        number: tells it from all others.
    """

    name: str
    cost: Cost = "level"
    number: int = 0
    passes: StepCost = field(default_factory=StepCost)
    each: float = 0.0
    samples: int = 0

    def asking(self, sequences: int) -> float:
        """Estimated seconds for asking so many sequences for as little as can be."""
        return self.each * sequences if self.cost == "lookup" else self.of_pass(sequences)[-1]

    def of_pass(self, rows: int) -> list[float]:
        """Estimated seconds of a pass of no rows, which is none, and of 1 to ``rows`` rows."""
        return [0.0, *(self.passes.line(Load(1), rows - 1) if self.samples else [0.0] * rows)]

    def learn(self, passes: int, rows: int, seconds: float) -> None:
        """It took so long for so many rows in so many passes; a lookup makes none, its rows are sequences."""
        if self.cost == "lookup":
            sample = max(seconds, TICK) / rows
            cold = not self.samples or (self.samples == 1 and sample < self.each)
            self.each = sample if cold else towards(self.each, sample)
        else:
            self.passes.learn(Load(max(1, round(rows / passes))), seconds / passes)
        self.samples += 1

    def forget(self) -> None:
        """Start afresh."""
        self.passes, self.each, self.samples = StepCost(), 0.0, 0


@dataclass
class PriceList:
    """The prices of drafters that are alive, each its own: two of one method may be of very different size."""

    _believed: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    _known: dict[int, tuple[weakref.ref[Drafter], Price]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def of(self, drafter: Drafter) -> Price:
        """The price of a drafter."""
        key = id(drafter)
        known = self._known.get(key)
        if known is None or known[0]() is not drafter:
            forget: Callable[[object], object] = lambda _: self._known.pop(key, None)  # noqa: E731
            known = weakref.ref(drafter, forget), Price(drafter.name, drafter.needs.cost, next(self._numbers))
            self._known[key] = known
            self._tell(known[1])
        return known[1]

    def believe(self, measured: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """What was measured beforehand of asking drafters, by name: seconds by the number of sequences."""
        self._believed = measured
        self.forget()

    def _tell(self, price: Price) -> None:
        for sequences, seconds in self._believed.get(price.name, ()):
            price.learn(1, sequences, seconds)

    def forget(self) -> None:
        """Start afresh with what was measured."""
        for _, price in self._known.values():
            price.forget()
            self._tell(price)
