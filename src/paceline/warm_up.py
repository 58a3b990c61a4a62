"""Costs that are measured before the first request, once for each machine, model and way to draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paceline
from paceline import methods
from paceline.cost_table import CostTable, table_path
from paceline.kernels import describe
from paceline.machine import machine
from paceline.sampling import Sampling
from paceline.startup import measure

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.front import Front

_TEXT = "one two three four five six seven eight nine ten, " * 4
_SEQUENCES = (1, 4)
_TOKENS = 24
_SALT = "paceline.warm_up"


def recall(front: Front) -> bool:
    """Begin with what was measured at an earlier start, if anything was; returns whether."""
    table = CostTable.load(_path(front))
    if table is None:
        return False
    front.engine.pacer.believe(table.prices, table.drafters)
    return True


def warm_up(front: Front) -> None:
    """Measure steps and drafting, and keep it for later starts. The engine is idle, and this thread has it."""
    steps = tuple(measure(front.engine))
    if not steps:  # the cache has no room for it
        return
    pacer = front.engine.pacer
    table = CostTable(steps)
    pacer.believe(table.prices, {})
    if front.speculation.enabled:
        _draft(front)
        drafter = front.roster.drafter(front.speculation)
        prices = [pacer.prices.of(member) for member in drafter.needs.members or (drafter,)]
        table = CostTable(steps, {p.name: tuple((n, p.asking(n)) for n in _SEQUENCES) for p in prices if p.samples})
    table.save(_path(front))
    pacer.believe(table.prices, table.drafters)


def _draft(front: Front) -> None:
    """Have every drafter asked; what is learned of text by that stays under a key that nobody else has."""
    sampling = Sampling(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    for sequences in _SEQUENCES:
        running = [
            front.submit(_TEXT, sampling, speculation=front.speculation, cache_salt=_SALT) for _ in range(sequences)
        ]
        while any(one.finish_reason is None for each in running for one in each):
            front.engine.step()


def _path(front: Front) -> Path:
    return table_path(
        machine=machine(),
        version=paceline.__version__,
        kernels=describe()["path"],
        model=front.loaded.fingerprint,
        dtype=front.loaded.dtype,
        cache=str(front.loaded.decoder.groups[0].dtype),
        threads=front.loaded.decoder.threads,
        context=front.max_model_len,
        drafting=methods.recipe(front.speculation) if front.speculation.enabled else None,
    )
