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
from paceline.kernels import REFERENCE, library
from paceline.kernels.native import NativeLinear, linear_struct
from paceline.options import Speculation
from paceline.prompts import read_prompts
from paceline.sampling import Sampling
from paceline.targets.load import physical_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.batch import Batch
    from paceline.bench.runner import Runner
    from paceline.drafters import Drafter
    from paceline.llm import LLM
    from paceline.pages import CacheGroup, Slab
    from paceline.request import Sequence as Running
    from paceline.targets import Scores, Target
    from paceline.targets.decoder import Decoder

WARM_UP = 3
SHORT = 16
"""The context whose attention counts as none: what a longer one adds to a pass is attention."""
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=0)
_VERIFIED_ROWS = 8
_PREFILL = 1000
_SAMPLING_CONTEXT = 256
_PARTS = ("step", "forward", "draft", "sample")


class TimedTarget:
    """A target that notes how long its forward passes take."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.vocab_size = target.vocab_size
        self.max_positions = target.max_positions
        self.groups: tuple[CacheGroup, ...] = target.groups
        self.seconds = 0.0

    def forward(self, batch: Batch, slabs: Sequence[Slab], features: Sequence[int] = ()) -> Scores:
        started = time.perf_counter()
        scores = self._target.forward(batch, slabs, features)
        self.seconds += time.perf_counter() - started
        return scores


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
        self._shapes = [Shape(n, context) for context in dict.fromkeys((SHORT, *contexts)) for n in rows]
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
        products = {
            n: self._runner.cell({"products": n}, partial(self._products, n)) for n in {s.rows for s in self._shapes}
        }
        fastest = max(bandwidth.values())
        return {
            "environment": self._runner.environment,
            "bandwidth": bandwidth,
            "floors": {str(context): step_bytes(self._decoder, 1, context) / fastest for context in self._contexts},
            "steps": [
                self._line(shape, timed, products[shape.rows]["seconds"], fastest)
                for shape in self._shapes
                if shape.context in self._contexts
            ],
            "prefill": self._runner.cell({"prefill": _PREFILL}, self._prefill),
            "sampling": self._runner.cell({"sampling": "temperature 0.8, top_p 0.95"}, self._sampling),
        }

    def _line(
        self, shape: Shape, timed: dict[Shape, list[dict[str, Any]]], products: float | None, bandwidth: float
    ) -> dict[str, Any]:
        """A shape's medians in seconds, as multiples of the floor of one row, and their parts."""
        parts = {part: _middle(timed[shape], part) for part in _PARTS}
        short = _middle(timed[Shape(shape.rows, SHORT)], "forward")
        floor = step_bytes(self._decoder, 1, shape.context) / bandwidth
        rounds = [median(cell["step"]) / floor for cell in timed[shape]]
        return {
            "rows": shape.rows,
            "context": shape.context,
            "seconds": parts["step"],
            "least": min(second for cell in timed[shape] for second in cell["step"]),
            "floors": parts["step"] / floor,
            "floors_by_round": [min(rounds), max(rounds)],
            "own_floor": step_bytes(self._decoder, shape.rows, shape.context) / bandwidth,
            "parts": {
                "products": products,
                "attention": parts["forward"] - short,
                "small operators": None if products is None else short - products,
                "drafter": parts["draft"],
                "sampling": parts["sample"],
                "python": parts["step"] - parts["forward"] - parts["draft"] - parts["sample"],
            },
        }

    def _shape(self, shape: Shape) -> dict[str, Any]:
        before = (WARM_UP + self._steps) // 2
        ids = self._text(max(1, shape.context - before))
        return self._time(ids, GREEDY, self._blind if shape.rows > 1 else None, shape.rows)

    def _time(self, ids: list[int], sampling: Sampling, drafter: Drafter | None, rows: int) -> dict[str, list[float]]:
        """Seconds of each timed step and of its parts, for one request after ``ids``."""
        tokens = (self._steps + WARM_UP + 1) * (rows + 1)
        wanted = sampling.replace(max_tokens=tokens, ignore_eos=True)
        seconds: dict[str, list[float]] = {part: [] for part in _PARTS}
        with _timing(self._llm) as target:
            (running,) = self._llm.submit(ids, wanted, speculation=_drafting(rows), drafter=drafter)
            while not running.output:
                self._llm.engine.step()
            for _ in range(WARM_UP):
                self._llm.engine.step()
            for _ in range(self._steps):
                self._step(running, target, seconds)
            self._llm.engine.cancel(running)
        return seconds

    def _step(self, running: Running, target: TimedTarget, seconds: dict[str, list[float]]) -> None:
        spent, forward = running.record.seconds, target.seconds
        draft, sample = spent.draft, spent.sample
        started = time.perf_counter()
        self._llm.engine.step()
        seconds["step"].append(time.perf_counter() - started)
        seconds["forward"].append(target.seconds - forward)
        seconds["draft"].append(spent.draft - draft)
        seconds["sample"].append(spent.sample - sample)

    def _products(self, rows: int) -> dict[str, Any]:
        """Seconds of all products of a pass, called one after the other, without what calling them costs."""
        built = None if self._decoder.path == REFERENCE else library()
        if built is None:
            return {"seconds": None}
        plan = self._decoder.plan
        names = [
            (f"layers.{layer}.{name}", n, k)
            for layer in range(len(plan.spec.layers))
            for name, (n, k) in plan.layer_shapes.items()
        ]
        names.append(("head", plan.vocab_size, plan.spec.hidden))
        calls = [
            partial(
                NativeLinear(
                    built, self._decoder.path, self._threads, linear_struct(plan.linear(name), n, k, plan.format)
                ),
                torch.randn(rows, k),
            )
            for name, n, k in names
        ]
        empty = NativeLinear(
            built, self._decoder.path, self._threads, linear_struct(plan.linear("layers.0.o"), 16, 64, plan.format)
        )
        nothing = [partial(empty, torch.randn(1, 64))] * len(calls)
        timed = [(_back_to_back(calls), _back_to_back(nothing)) for _ in range(WARM_UP + self._steps)][WARM_UP:]
        return {"seconds": median(whole for whole, _ in timed) - median(bare for _, bare in timed)}

    def _prefill(self) -> dict[str, Any]:
        ids = self._text(_PREFILL)
        seconds = []
        for _ in range(WARM_UP + 5):
            started = time.perf_counter()
            self._llm.generate(ids, GREEDY.replace(max_tokens=1), speculation=False)
            seconds.append(time.perf_counter() - started)
        return {"tokens": _PREFILL, "seconds": median(seconds[WARM_UP:]), "least": min(seconds[WARM_UP:])}

    def _sampling(self) -> dict[str, Any]:
        """Greedy against sampled: plain steps, and steps all of whose rows are right and therefore visited."""
        ids = self._text(_SAMPLING_CONTEXT)
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

    def _text(self, count: int) -> list[int]:
        """So many tokens of ordinary text."""
        text = "\n\n".join(turn for prompt in read_prompts() for turn in prompt.turns)
        ids = self._llm.tokenizer.encode(text)
        return [ids[place % len(ids)] for place in range(count)]


def _drafting(rows: int) -> Speculation:
    if rows == 1:
        return Speculation.off()
    return Speculation(method="ngram", adaptive=False, num_speculative_tokens=rows - 1)


@contextmanager
def _timing(llm: LLM) -> Iterator[TimedTarget]:
    """Put a timed target in the engine's place of its own, for a while."""
    own = llm.engine.target
    target = llm.engine.target = TimedTarget(own)
    try:
        yield target
    finally:
        llm.engine.target = own


def _middle(cells: Sequence[dict[str, Any]], part: str) -> float:
    seconds: list[float] = [second for cell in cells for second in cell[part]]
    return median(seconds)


def _back_to_back(calls: Sequence[partial[Any]]) -> float:
    """Seconds of making all calls, one after the other."""
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started
