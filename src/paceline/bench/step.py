"""What one step of the engine costs, from plan to commit, by rows and context, and where the time goes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from paceline.bench.bandwidth import read_bandwidth, step_bytes
from paceline.bench.drafters import BlindDrafter, OracleDrafter
from paceline.kernels import REFERENCE
from paceline.options import Speculation
from paceline.prompts import read_prompts
from paceline.sampling import Sampling
from paceline.targets.resources import physical_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.batch import Batch
    from paceline.bench.runner import Runner
    from paceline.drafters import Drafter
    from paceline.engine import Engine
    from paceline.front import Front
    from paceline.llm import LLM
    from paceline.pages import CacheGroup, Slab
    from paceline.request import Sequence as Running
    from paceline.targets import Scores
    from paceline.targets.decoder import Decoder

WARM_UP = 3
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=0)
_VERIFIED_ROWS = 8
_PREFILL = 1000
_SAMPLING_CONTEXT = 256
_KERNELS = ("products", "attention", "small operators")
_PARTS = (*_KERNELS, "drafter", "sampling", "python")


class TimedTarget:
    """A decoder that keeps the sum of what the parts of its passes take; the torch reference has no such parts."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.vocab_size = decoder.vocab_size
        self.max_positions = decoder.max_positions
        self.groups: tuple[CacheGroup, ...] = decoder.groups
        self.seconds = None if decoder.path == REFERENCE else torch.zeros(len(_KERNELS), dtype=torch.float64)

    def forward(self, batch: Batch, slabs: Sequence[Slab], features: Sequence[int] = ()) -> Scores:
        return self._decoder.forward(batch, slabs, features, seconds=self.seconds)

    def spent(self) -> dict[str, float]:
        """Seconds of each part so far."""
        return {} if self.seconds is None else dict(zip(_KERNELS, self.seconds.tolist(), strict=True))


@dataclass(frozen=True)
class Shape:
    """A step of so many rows, all of one sequence's tree, after so many tokens of context."""

    rows: int
    context: int


class StepBench:
    """Times real engine steps: a drafter that is never right keeps the rows of every step the same.

    Args:
        llm: the model; it runs one request, of the longest context and some tokens more.
        runner: keeps the cells.
        rows: the row counts, each 1 to 64, the root counted.
        contexts: the contexts in tokens; while a shape is timed, they grow from a little below to a little above.
        steps: timed steps of each shape and round, after three that do not count.
        rounds: how often all shapes are gone through.
    """

    def __init__(
        self,
        llm: LLM,
        runner: Runner,
        rows: Sequence[int],
        contexts: Sequence[int],
        *,
        steps: int = 20,
        rounds: int = 3,
    ) -> None:
        self._llm = llm
        self._runner = runner
        self._decoder: Decoder = llm.loaded.decoder
        self._threads = llm.options.threads or physical_cores()
        self._shapes = [Shape(n, context) for context in dict.fromkeys(contexts) for n in rows]
        self._contexts = contexts
        self._steps = steps
        self._rounds = rounds
        self._blind = BlindDrafter(self._decoder.vocab_size)

    @staticmethod
    def room(contexts: Sequence[int], steps: int) -> int:
        """The longest sequence that is needed, in tokens."""
        return max(_PREFILL, _SAMPLING_CONTEXT, *contexts) + (steps + WARM_UP) * _VERIFIED_ROWS + 64

    def report(self) -> dict[str, Any]:
        """Take what is missing; the result as JSON has it."""
        bandwidth = self._runner.cell(
            {"bandwidth": "best of 7"}, lambda: read_bandwidth(self._threads, self._decoder.path)
        )
        timed: dict[Shape, list[dict[str, Any]]] = {shape: [] for shape in self._shapes}
        for turn in range(self._rounds):
            for shape in self._shapes:
                name = {"rows": shape.rows, "context": shape.context, "round": turn}
                timed[shape].append(self._runner.cell(name, partial(self._shape, shape)))
        fastest = max(bandwidth.values())
        return {
            "environment": self._runner.environment,
            "bandwidth": bandwidth,
            "floors": {str(context): step_bytes(self._decoder, 1, context) / fastest for context in self._contexts},
            "steps": [self._line(shape, cells, fastest) for shape, cells in timed.items()],
            "prefill": self._runner.cell({"prefill": _PREFILL}, self._prefill),
            "sampling": self._runner.cell({"sampling": "temperature 0.8, top_p 0.95"}, self._sampling),
        }

    def _line(self, shape: Shape, cells: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
        """A shape's medians in seconds, as multiples of the floor of one row, and those of its parts."""
        seconds = median(second for cell in cells for second in cell["step"])
        floor = step_bytes(self._decoder, 1, shape.context) / bandwidth
        rounds = [median(cell["step"]) / floor for cell in cells]
        return {
            "rows": shape.rows,
            "context": shape.context,
            "seconds": seconds,
            "least": min(second for cell in cells for second in cell["step"]),
            "floors": seconds / floor,
            "floors_by_round": [min(rounds), max(rounds)],
            "own_floor": step_bytes(self._decoder, shape.rows, shape.context) / bandwidth,
            "parts": {part: _middle(cells, part) for part in _PARTS},
        }

    def _shape(self, shape: Shape) -> dict[str, Any]:
        before = (WARM_UP + self._steps) // 2
        ids = ordinary_ids(self._llm, max(1, shape.context - before))
        return self._time(ids, GREEDY, self._blind if shape.rows > 1 else None, shape.rows)

    def _time(self, ids: list[int], sampling: Sampling, drafter: Drafter | None, rows: int) -> dict[str, list[float]]:
        """Seconds of each timed step and of its parts, for one request after ``ids``."""
        tokens = (self._steps + WARM_UP + 1) * (rows + 1)
        wanted = sampling.replace(max_tokens=tokens, ignore_eos=True)
        seconds: dict[str, list[float]] = {part: [] for part in ("step", *_PARTS)}
        with self._llm.paused() as engine, _timing(engine, self._decoder) as target:
            (running,) = self._llm.submit(ids, wanted, speculation=_drafting(rows), drafter=drafter)
            while not running.output:
                engine.step()
            for _ in range(WARM_UP):
                engine.step()
            for _ in range(self._steps):
                _step(engine, running, target, seconds)
            engine.cancel(running)
        return seconds

    def _prefill(self) -> dict[str, Any]:
        ids = ordinary_ids(self._llm, _PREFILL)
        seconds = []
        for _ in range(WARM_UP + 5):
            self._llm.forget()
            started = time.perf_counter()
            self._llm.generate(ids, GREEDY.replace(max_tokens=1), speculation=False)
            seconds.append(time.perf_counter() - started)
        return {"tokens": _PREFILL, "seconds": median(seconds[WARM_UP:]), "least": min(seconds[WARM_UP:])}

    def _sampling(self) -> dict[str, Any]:
        """Greedy against sampled: plain steps, and steps all of whose rows are right and therefore visited."""
        ids = ordinary_ids(self._llm, _SAMPLING_CONTEXT)
        found: dict[str, Any] = {}
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            found[f"{name} step"] = median(self._time(ids, sampling, None, 1)["step"])
            count = (self._steps + WARM_UP + 2) * (_VERIFIED_ROWS + 1)
            wanted = sampling.replace(max_tokens=count, ignore_eos=True)
            answer = self._llm.generate(ids, wanted, speculation=False).token_ids
            oracle = OracleDrafter({tuple(ids): answer}, self._decoder.vocab_size, wrong=0.0)
            found[f"{name} step of {_VERIFIED_ROWS}"] = median(
                self._time(ids, sampling, oracle, _VERIFIED_ROWS)["step"]
            )
        wide = f"step of {_VERIFIED_ROWS}"
        found["rate"] = found["greedy step"] / found["sampled step"]
        found["seconds a verified row"] = (found[f"sampled {wide}"] - found[f"greedy {wide}"]) / _VERIFIED_ROWS
        return found


def ordinary_ids(llm: Front, count: int) -> list[int]:
    """So many tokens of ordinary text."""
    text = "\n\n".join(turn for prompt in read_prompts() for turn in prompt.turns)
    ids = llm.tokenizer.encode(text)
    return [ids[place % len(ids)] for place in range(count)]


def _drafting(rows: int) -> Speculation:
    if rows == 1:
        return Speculation.off()
    return Speculation(method="ngram", adaptive=False, num_speculative_tokens=rows - 1)


@contextmanager
def _timing(engine: Engine, decoder: Decoder) -> Iterator[TimedTarget]:
    """Put a timed target in the engine's place of its own, for a while."""
    own = engine.target
    target = engine.target = TimedTarget(decoder)
    try:
        yield target
    finally:
        engine.target = own


def _step(engine: Engine, running: Running, target: TimedTarget, seconds: dict[str, list[float]]) -> None:
    """Time one step and its parts."""
    before = _spent(running, target)
    started = time.perf_counter()
    engine.step()
    step = time.perf_counter() - started
    parts = {part: second - before[part] for part, second in _spent(running, target).items()}
    for part, second in {"step": step, **parts, "python": step - sum(parts.values())}.items():
        seconds[part].append(second)


def _spent(running: Running, target: TimedTarget) -> dict[str, float]:
    """Seconds of all parts so far; the rest of a step is Python."""
    spent = running.record.seconds
    return {**target.spent(), "drafter": spent.draft, "sampling": spent.sample}


def _middle(cells: Sequence[dict[str, Any]], part: str) -> float | None:
    """The median of all repeats; None where this part is not timed."""
    seconds: list[float] = [second for cell in cells for second in cell[part]]
    return median(seconds) if seconds else None
