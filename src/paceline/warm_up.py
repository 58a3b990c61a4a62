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

    from paceline.llm import LLM

_TEXT = "one two three four five six seven eight nine ten, " * 4
_SEQUENCES = (1, 4)
_TOKENS = 24
_SALT = "paceline.warm_up"


def recall(llm: LLM) -> bool:
    """Begin with what was measured at an earlier start, if anything was; returns whether."""
    table = CostTable.load(_path(llm))
    if table is None:
        return False
    llm.engine.pacer.believe(table.prices, table.drafters)
    return True


def warm_up(llm: LLM) -> None:
    """Measure steps and drafting, and keep it for later starts. The engine is idle."""
    steps = tuple(measure(llm.engine))
    if not steps:  # the cache has no room for it
        return
    pacer = llm.engine.pacer
    table = CostTable(steps)
    pacer.believe(table.prices, {})
    if llm.speculation.enabled:
        _draft(llm)
        drafter = llm.roster.drafter(llm.speculation)
        prices = [pacer.prices.of(member) for member in drafter.needs.members or (drafter,)]
        table = CostTable(steps, {p.name: tuple((n, p.asking(n)) for n in _SEQUENCES) for p in prices if p.samples})
    table.save(_path(llm))
    pacer.believe(table.prices, table.drafters)


def _draft(llm: LLM) -> None:
    """Have every drafter asked; what is learned of text by that stays under a key that nobody else has."""
    ids = llm.tokenizer.encode(_TEXT)
    sampling = Sampling(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    for sequences in _SEQUENCES:
        llm.generate([ids] * min(sequences, llm.options.max_num_seqs), sampling, cache_salt=_SALT)


def _path(llm: LLM) -> Path:
    return table_path(
        machine=machine(),
        version=paceline.__version__,
        kernels=describe()["path"],
        model=llm.loaded.fingerprint,
        dtype=llm.loaded.dtype,
        cache=str(llm.loaded.decoder.groups[0].dtype),
        threads=llm.loaded.decoder.threads,
        context=llm.max_model_len,
        drafting=methods.recipe(llm.speculation) if llm.speculation.enabled else None,
    )
