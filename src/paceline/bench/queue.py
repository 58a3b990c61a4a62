"""What a long queue costs those that run: the time of their steps, and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from paceline.bench.stats import Spread, ratio_interval
from paceline.bench.step import WARM_UP, ordinary_ids
from paceline.errors import OptionError, ResourceError
from paceline.prompts import read_prompts
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from paceline.bench.arrivals import Clock
    from paceline.engine import Engine
    from paceline.front import Front
    from paceline.request import Sequence as Running

WAITING = 2000
_CONTEXT = 64  # tokens that those who run begin with
_ANSWER = 64  # tokens that those who wait ask for


@dataclass(frozen=True)
class _Round:
    """Seconds of steps with nobody waiting and with the queue, and bytes of the process at four moments."""

    alone: list[float]
    queued: list[float]
    bytes: dict[str, int]


def queue(
    llm: Front, *, waiting: int = WAITING, steps: int = 20, rounds: int = 5, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Time plain steps of as many sequences as may run at once, with nobody waiting and with a queue.

    In every round come ``steps`` steps with an empty queue, twice as many with the full one, and ``steps`` with an
    empty one again: contexts grow by a token each step, and so are the same on the average. Those that wait have
    ordinary prompts, and speculate as the model was set up to; their turn does not come.

    Args:
        llm: the model; no request is running.
        waiting: how long the queue is.
        rounds: how often all of it is done, twice at least.

    Returns:
        ``alone`` and ``queued``, seconds of a step: the median of the rounds' medians, with the least and the greatest.
        ``ratio``: the one by the other, with its 95 % interval (bootstrap over rounds). ``bytes``: the resident memory
        of the process by round, ``before`` the queue, when it was ``filled``, after the steps that it ``waited``, and
        when it was ``emptied``. ``bytes_grown``: by how much more it has with each full queue than with the one before,
        the least of all rounds: what is kept of each that waits shows in all of them.

    Raises:
        OptionError: the context is too short for so many steps.
        ResourceError: the cache is too small for those that run.
    """
    longest = _CONTEXT + llm.options.max_num_seqs + WARM_UP + 4 * steps + 1  # they begin one after another
    if longest > llm.max_model_len:
        raise OptionError(
            f"{4 * steps} steps take a context of {longest} tokens, and max_model_len is {llm.max_model_len}: take "
            "fewer."
        )
    taken = [_round(llm, longest, waiting, steps, clock) for _ in range(rounds)]
    alone = [median(one.alone) for one in taken]
    queued = [median(one.queued) for one in taken]
    low, high = ratio_interval(queued, alone)
    return {
        "running": llm.options.max_num_seqs,
        "waiting": waiting,
        "steps": steps,
        "rounds": rounds,
        "alone": Spread.of(alone).as_dict(),
        "queued": Spread.of(queued).as_dict(),
        "ratio": {"value": sum(queued) / sum(alone), "low": low, "high": high},
        "bytes": {moment: [one.bytes[moment] for one in taken] for moment in taken[0].bytes},
        "bytes_grown": min(after.bytes["waited"] - before.bytes["waited"] for before, after in pairwise(taken)),
    }


def _round(llm: Front, longest: int, waiting: int, steps: int, clock: Clock) -> _Round:
    with llm.paused() as engine:
        runners = _begin(llm, engine, longest)
        alone = _time(engine, steps, clock)
        held = {"before": _resident()}
        queue = _line_up(llm, waiting)
        held["filled"] = _resident()
        queued = _time(engine, 2 * steps, clock)
        held["waited"] = _resident()
        for sequence in queue:
            engine.cancel(sequence)
        held["emptied"] = _resident()
        alone += _time(engine, steps, clock)
        if any(sequence.record.preemptions or sequence.finish_reason for sequence in runners):
            raise ResourceError(
                f"the cache is too small for {len(runners)} sequences of {longest} tokens; raise cache_memory, or "
                "lower max_num_seqs."
            )
    return _Round(alone, queued, held)


def _begin(llm: Front, engine: Engine, longest: int) -> list[Running]:
    """As many sequences as may run at once, each with its first tokens."""
    settings = Sampling(temperature=0.0, max_tokens=longest - _CONTEXT, ignore_eos=True)
    every = ordinary_ids(llm, _CONTEXT + llm.options.max_num_seqs)
    begun = [
        sequence
        for place in range(llm.options.max_num_seqs)
        for sequence in llm.submit(every[place : place + _CONTEXT], settings, speculation=False)
    ]
    while not all(sequence.output for sequence in begun):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    return begun


def _line_up(llm: Front, waiting: int) -> list[Running]:
    most = llm.max_model_len - _ANSWER
    asked = [llm.tokenizer.encode(prompt.turns[0])[:most] for prompt in read_prompts()]
    settings = Sampling(temperature=0.8, max_tokens=_ANSWER, seed=0)
    return [sequence for place in range(waiting) for sequence in llm.submit(asked[place % len(asked)], settings)]


def _time(engine: Engine, steps: int, clock: Clock) -> list[float]:
    seconds = []
    for _ in range(steps):
        started = clock()
        engine.step()
        seconds.append(clock() - started)
    return seconds


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
