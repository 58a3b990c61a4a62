"""What a step costs, and what drafters cost, in seconds: believed beforehand, and corrected by what is seen.

Times say something about the machine and nothing about what was asked, so they serve requests of all isolation keys.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.drafters import Cost, Drafter

EXACT = 64
"""Up to so many rows each number has a cell of its own; beyond there are four cells for each doubling."""

_ROW_GUESS = 0.05  # what one more row adds to a step as long as nobody knows, in parts of the one-row step
_TICK = 1e-9  # seconds; nothing takes less, whatever a coarse clock says


def towards(known: float, sample: float) -> float:
    """Move a mean of seconds: down at once by half, for nothing is faster by accident, up slowly and in bounds."""
    return known + (0.5 if sample < known else 0.2) * (min(sample, 2 * known) - known)


@dataclass(frozen=True, slots=True)
class Load:
    """What a forward pass has to do.

    Attributes:
        rows: of token trees, roots included.
        decodes: how many trees there are.
        pieces: rows of prompts.
        read: tokens of context that are read, each sequence's once.
        seen: tokens of context that the rows see, all rows together.
    """

    rows: int
    decodes: int = 1
    pieces: int = 0
    read: int = 0
    seen: int = 0

    @property
    def all_rows(self) -> int:
        return self.rows + self.pieces

    def without_pieces(self) -> Load:
        """The same trees by themselves."""
        return replace(self, pieces=0)


@dataclass(frozen=True)
class Prices:
    """What is believed of steps before any is seen.

    Attributes:
        rows: seconds of a step for each number of rows from 1 on, of one sequence with no context.
        decode: seconds for each further sequence.
        read: seconds for each token of context that is read.
        seen: seconds for each token of context that a row sees.
        known: whether all this was measured.
    """

    rows: tuple[float, ...] = tuple(1 + _ROW_GUESS * n for n in range(EXACT))
    decode: float = 0.0
    read: float = 0.0
    seen: float = 0.0
    known: bool = False

    @classmethod
    def fit(cls, measured: Sequence[tuple[Load, float]]) -> Prices:
        """What measured steps come to.

        Args:
            measured: loads and seconds: one sequence with different numbers of rows and little context, some of them
                with much context too, and some steps of several sequences.
        """
        single: dict[int, list[tuple[Load, float]]] = {}
        for load, seconds in sorted(measured, key=lambda cell: cell[0].seen):
            if load.decodes <= 1:
                single.setdefault(load.all_rows, []).append((load, seconds))
        pairs = [(cells[0], cells[-1]) for cells in single.values() if cells[-1][0].seen > cells[0][0].seen]
        more = [(b.read - a.read, b.seen - a.seen, after - before) for (a, before), (b, after) in pairs]
        read, seen = _two(more)
        rows = {count: max(_TICK, s - read * load.read - seen * load.seen) for count, ((load, s), *_) in single.items()}
        line = _between(rows)
        extra = [
            (load.decodes - 1, seconds - line[min(load.rows, len(line)) - 1] - read * load.read - seen * load.seen)
            for load, seconds in measured
            if load.decodes > 1
        ]
        decode = sum(s for _, s in extra) / sum(n for n, _ in extra) if extra else 0.0
        return cls(tuple(line), max(0.0, decode), read, seen, known=True)


def _two(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Two factors, none below 0, that make the third of each sample from the first two: by least squares, each sample
    by its own measure."""
    scaled = [(a / s, b / s) for a, b, s in samples if s > 0]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in _products(scaled))
    a, b = sum(a for a, _ in scaled), sum(b for _, b in scaled)
    rest = aa * bb - ab * ab
    if rest > 1e-9 * aa * bb:
        first, second = (a * bb - b * ab) / rest, (b * aa - a * ab) / rest
        if first >= 0 and second >= 0:
            return first, second
    return (0.0, b / bb if bb else 0.0) if b * b * aa > a * a * bb else (a / aa if aa else 0.0, 0.0)


def _products(pairs: Sequence[tuple[float, float]]) -> Sequence[Sequence[tuple[float, float]]]:
    return [(a, a) for a, _ in pairs], [(a, b) for a, b in pairs], [(b, b) for _, b in pairs]


def _between(rows: Mapping[int, float]) -> list[float]:
    """Seconds for each number of rows up to the most, on lines between those that are known."""
    known = sorted(rows)
    line = [rows[known[0]]] * known[0]
    for low, high in itertools.pairwise(known):
        steep = (rows[high] - rows[low]) / (high - low)
        line += [rows[low] + steep * n for n in range(1, high - low + 1)]
    return line


class StepCost:
    """Seconds of a step: what is believed beforehand times what was seen in its place.

    The factor of a number of rows that was not seen lies between those of its neighbours that were. So what is
    believed gives the shape, and a machine that is slower today, or a table that is wrong, is corrected as it runs.
    """

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = prices or Prices()
        self._rows = [0.0, *self.prices.rows]
        self._cells = [0]
        self._factors: list[float] = []
        self._samples: list[int] = []
        self._seen: list[int] = []  # cells with samples, in order
        self._reach(EXACT)

    def learn(self, load: Load, seconds: float) -> None:
        """A step took so long."""
        rows = load.all_rows
        self._reach(rows)
        cell = self._cells[rows]
        sample = max(seconds, _TICK) / (self._rows[rows] + self._context(load))
        known, samples = self._factors[cell], self._samples[cell]
        if samples:
            cold = samples == 1 and sample < known  # the first step of a kind is often a cold one
            self._factors[cell] = sample if cold else towards(known, sample)
        else:
            # Without a sample of its own a number is judged by its neighbours: an interrupted step says little.
            self._factors[cell] = min(sample, 2 * known) if self._seen or self.prices.known else sample
            insort(self._seen, cell)
        self._samples[cell] += 1
        self._fill(cell)

    def __call__(self, load: Load) -> float:
        """Estimated seconds."""
        return self.line(load, 0)[0]

    def line(self, load: Load, more: int) -> list[float]:
        """Estimated seconds of a load, and of it with 1, 2, to ``more`` rows added, their context not counted.

        Fewer rows never take longer than more: what seems so was interrupted, or measured in slower times.
        """
        rows = load.rows + load.pieces
        if rows + more >= len(self._cells) or rows + more >= len(self._rows):
            self._reach(rows + more)
        base, believed, cells, factors = self._context(load), self._rows, self._cells, self._factors
        seconds = [(believed[n] + base) * factors[cells[n]] for n in range(rows + more, rows - 1, -1)]
        return list(itertools.accumulate(seconds, min))[::-1]

    def samples(self, rows: int) -> int:
        """How many steps of about so many rows were seen."""
        self._reach(rows)
        return self._samples[self._cells[rows]]

    def of_context(self, rows: int, context: int) -> float:
        """Estimated seconds for what one row of a step sees of a context."""
        return self.prices.seen * context * self._factors[self._cells[min(rows, len(self._cells) - 1)]]

    def _context(self, load: Load) -> float:
        prices = self.prices
        return prices.decode * max(0, load.decodes - 1) + prices.read * load.read + prices.seen * load.seen

    def _reach(self, rows: int) -> None:
        """Have believed costs and cells for so many rows: beyond the last two costs as steep as between them."""
        believed, cells = self._rows, self._cells
        while len(believed) <= rows:
            last = len(believed) - 1
            low = min(EXACT // 2, last - 1)
            believed.append(believed[-1] + max(0.0, (believed[last] - believed[low]) / (last - low)))
        while len(cells) <= rows:
            cells.append(_cell(len(cells)))
        while len(self._factors) <= cells[-1]:
            self._factors.append(self._factors[-1] if self._factors else 1.0)
            self._samples.append(0)

    def _fill(self, cell: int) -> None:
        """Lay the cells without samples on lines between those that have some."""
        seen, factors = self._seen, self._factors
        place = bisect_left(seen, cell)
        low = seen[place - 1] if place else 0
        high = seen[place + 1] if place + 1 < len(seen) else len(factors) - 1
        for first, last in ((low, cell), (cell, high)):
            left = factors[first] if self._samples[first] else factors[cell]
            right = factors[last] if self._samples[last] else factors[cell]
            for between in range(first, last + 1):
                factors[between] = left + (right - left) * (between - first) / max(1, last - first)


def _cell(rows: int) -> int:
    if rows <= EXACT:
        return rows
    doublings = rows.bit_length() - EXACT.bit_length()
    start = EXACT << doublings
    return EXACT + 4 * doublings + 1 + min(3, (rows - start) * 4 // start)


@dataclass
class Price:
    """What one drafter takes.

    A lookup takes so many seconds for each sequence. One that drafts with a model makes a pass for each level, or a
    single one for a block, and a pass is a step of that model: its rows are the nodes that are expanded.

    Attributes:
        name: the method's.
        cost: what shape its cost has.
        number: tells it from all others.
        whole: whether its trees are verified whole or not at all.
    """

    name: str
    cost: Cost = "level"
    number: int = 0
    whole: bool = False
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
            sample = max(seconds, _TICK) / rows
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
            needs = drafter.needs
            price = Price(drafter.name, needs.cost, next(self._numbers), needs.whole)
            known = weakref.ref(drafter, forget), price
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
