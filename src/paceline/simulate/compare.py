"""The pacer against the best fixed length that knows the future, in every cell that fits."""

from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.simulate.acceptance import FAMILIES, FAR, Kind, draw
from paceline.simulate.device import DEVICES, MODELS, Server
from paceline.simulate.fixed import LENGTHS, speed, trace
from paceline.simulate.serve import serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.bench.runner import Runner

USERS = tuple(1 << power for power in range(10))
CONTEXTS = (1024, 4096, 16_384, 32_768, 131_072)
SEEDS = 20

BOUND, PLAIN, WORTH = 0.95, 0.97, 1.06
"""At least so much of the best fixed length and of plain decoding; above plain where that length brings so much."""

_SLACK = 4  # places of a stream for each token that is decoded on the average


@dataclass(frozen=True)
class Drafts:
    """What drafts, and for which requests."""

    name: str
    kind: Kind
    far: bool = False


DRAFTS = (Drafts("head", "head"), Drafts("lookup", "lookup"), Drafts("head, far", "head", far=True))


@dataclass(frozen=True, order=True)
class Cell:
    """One row of the table."""

    drafts: str
    device: str
    model: str
    context: int
    users: int


@dataclass(frozen=True)
class Task:
    """All machines and contexts for one number of users, one drafter and one seed: their requests are the same."""

    drafts: Drafts
    users: int
    seed: int
    contexts: tuple[int, ...]
    tokens: int

    @property
    def name(self) -> dict[str, Any]:
        """What it is called in the file."""
        return {
            "drafts": self.drafts.name,
            "users": self.users,
            "seed": self.seed,
            "contexts": [*self.contexts],
            "tokens": self.tokens,
        }


@dataclass(frozen=True)
class Taken:
    """What one seed gave in one cell: tokens a second."""

    fixed: dict[int, float]
    auto: float

    @property
    def best(self) -> int:
        """The length that turns out to be the best."""
        return max(self.fixed, key=lambda length: self.fixed[length])


def _tokens(users: int) -> int:
    return 768 if users <= 8 else 384 if users <= 64 else 192


def run(
    cells: Runner,
    seeds: int,
    users: Sequence[int],
    contexts: Sequence[int],
    processes: int = 2,
    tokens: int | None = None,
) -> dict[str, Any]:
    """The report: a row for each cell, with the bounds that do not hold, and what does not fit.

    Args:
        cells: keeps what each number of users, drafter and seed gave.
        seeds: how many.
        users, contexts: the cells.
        processes: that simulate at a time.
        tokens: of each user on the average; None takes more where users are few.
    """
    tasks = [
        Task(drafts, count, seed, tuple(contexts), tokens or _tokens(count))
        for count in sorted(users, reverse=True)
        for drafts in DRAFTS
        for seed in range(seeds)
    ]
    found: dict[Cell, list[Taken]] = {}
    for task, result in _results(cells, tasks, processes):
        for one in result["cells"]:
            fixed = {int(length): rate for length, rate in one["fixed"].items()}
            cell = Cell(task.drafts.name, one["device"], one["model"], one["context"], task.users)
            found.setdefault(cell, []).append(Taken(fixed, one["auto"]))
    return {
        "environment": cells.environment,
        "seeds": seeds,
        "cells": [row(cell, found[cell]) for cell in sorted(found)],
        "left_out": _left_out(users, contexts),
    }


def take(task: Task) -> dict[str, Any]:
    """One task on every machine that has room: tokens a second of each fixed length, and under the pacer."""
    families = FAR if task.drafts.far else FAMILIES
    kind, tokens = task.drafts.kind, task.tokens * task.users
    stream = draw(kind, task.users, _SLACK * task.tokens, task.seed, families)
    traces = {length: trace(stream, length, tokens) for length in LENGTHS}
    cells = []
    for number, server in enumerate(_servers(task.seed)):
        for context in task.contexts:
            if server.fits(task.users, context):
                fixed = {length: speed(t, kind, server, task.users, context) for length, t in traces.items()}
                auto = serve(stream, kind, server, context, tokens, task.seed * len(MODELS) * len(DEVICES) + number)
                cells.append(
                    {
                        "device": server.device.name,
                        "model": server.model.name,
                        "context": context,
                        "fixed": {str(length): _short(rate) for length, rate in fixed.items()},
                        "auto": _short(auto.speed),
                    }
                )
    return {"cells": cells}


def _results(cells: Runner, tasks: Sequence[Task], processes: int) -> Iterator[tuple[Task, dict[str, Any]]]:
    """What each task gave, now or earlier; new ones are taken several at a time."""
    missing = [task for task in tasks if not cells.has(task.name)]
    with ExitStack() as stack:
        if processes == 1 or len(missing) < 2:
            taken: Iterator[dict[str, Any]] = map(take, missing)
        else:
            pool = stack.enter_context(ProcessPoolExecutor(processes, get_context("spawn")))
            taken = pool.map(take, missing)
        for task in tasks:
            yield task, cells.cell(task.name, partial(next, taken))


def _short(rate: float) -> float:
    return float(f"{rate:.6g}")


def _servers(seed: int) -> Iterator[Server]:
    """All machines, their kernels drawn."""
    rng = np.random.default_rng([seed, 2])
    for device in DEVICES:
        for model, head in MODELS:
            yield Server.draw(device, model, head, rng)


def row(cell: Cell, taken: Sequence[Taken]) -> dict[str, Any]:
    """A cell's ratios: means over the seeds with their intervals, and the worst seed."""
    to_best = [one.auto / one.fixed[one.best] for one in taken]
    to_plain = [one.auto / one.fixed[0] for one in taken]
    best = geometric_mean([one.fixed[one.best] / one.fixed[0] for one in taken])
    found = {
        **asdict(cell),
        "plain": geometric_mean([one.fixed[0] for one in taken]),
        "length": sorted(one.best for one in taken)[len(taken) // 2],
        "best": best,
        "auto": geometric_mean(to_plain),
        "auto_interval": _interval(to_plain),
        "auto_worst": min(to_plain),
        "of_best": geometric_mean(to_best),
        "of_best_interval": _interval(to_best),
        "of_best_worst": min(to_best),
    }
    found["failed"] = _failed(found)
    return found


def _failed(row: dict[str, Any]) -> list[str]:
    """The bounds that do not hold."""
    bounds = {
        f"{BOUND:g} of best": row["of_best"] >= BOUND,
        f"{PLAIN:g} of plain": row["auto"] >= PLAIN,
        "above plain": row["auto"] > 1 or row["best"] < WORTH,
    }
    return [name for name, holds in bounds.items() if not holds]


def _interval(ratios: Sequence[float]) -> list[float]:
    """95 % of the geometric mean, normally distributed."""
    logs = np.log(ratios)
    half = 1.96 * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return [math.exp(float(logs.mean()) - half), math.exp(float(logs.mean()) + half)]


def _left_out(users: Sequence[int], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """For each machine and context the numbers of users for whom there is no room."""
    left = []
    for server in _servers(0):
        for context in contexts:
            without = [count for count in users if not server.fits(count, context)]
            if without:
                names = {"device": server.device.name, "model": server.model.name}
                left.append({**names, "context": context, "users": without})
    return left
