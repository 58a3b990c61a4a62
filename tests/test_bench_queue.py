"""What a queue costs is measured as it is: the time of steps by a clock of our own, memory by what is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline import LLM, OptionError, ResourceError
from paceline.bench import queue as module
from paceline.bench.queue import queue
from paceline.engine import Engine
from paceline.waiting import Waiting
from tests.bench_models import model_folder, tiny_llm
from tests.toys import Clock

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.request import Sequence

__all__ = ["model_folder", "tiny_llm"]


def test_a_queue_costs_nothing_and_is_left_behind(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step, lengths = Clock(), Engine.step, set()

    def stepped(self: Engine) -> list[Sequence]:
        lengths.add((len(self.scheduler.running), len(self.scheduler.waiting)))
        clock.now += 0.25
        return step(self)

    monkeypatch.setattr(Engine, "step", stepped)
    found = queue(tiny_llm, waiting=40, steps=3, rounds=2, clock=clock)
    assert (8, 0) in lengths
    assert (8, 40) in lengths
    assert (found["running"], found["waiting"]) == (8, 40)
    assert found["alone"] == found["queued"] == {"median": 0.25, "low": 0.25, "high": 0.25}
    assert found["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert [len(bytes_) for bytes_ in found["bytes"].values()] == [2] * 4
    assert tiny_llm.engine.idle
    assert all(pool.free == pool.pages for pool in tiny_llm.engine.pools)


def test_what_a_step_takes_for_each_that_waits_is_found(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step = Clock(), Engine.step

    def stepped(self: Engine) -> list[Sequence]:
        clock.now += 1 + len(self.scheduler.waiting) / 100
        return step(self)

    monkeypatch.setattr(Engine, "step", stepped)
    found = queue(tiny_llm, waiting=20, steps=2, rounds=2, clock=clock)
    assert found["ratio"]["value"] == pytest.approx(1.2)
    assert found["ratio"]["low"] > 1.05


def test_what_is_kept_of_those_that_waited_is_found(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Sequence] = []
    remove = Waiting.remove

    def removed(self: Waiting, sequence: Sequence) -> None:
        kept.append(sequence)
        remove(self, sequence)

    monkeypatch.setattr(Waiting, "remove", removed)
    monkeypatch.setattr(module, "_resident", lambda: 100 * len(kept))
    found = queue(tiny_llm, waiting=10, steps=1, rounds=3)
    assert found["bytes_grown"] == 100 * (10 + 8)


def test_what_would_not_be_a_queue_is_refused(model_folder: Path, tiny_llm: LLM) -> None:
    with pytest.raises(OptionError, match="max_model_len is 1024: take fewer"):
        queue(tiny_llm, waiting=1, steps=300)
    small = LLM(str(model_folder), speculation=False, threads=2, max_num_seqs=8, cache_memory=50_000)
    with pytest.raises(ResourceError, match="too small for 8 sequences"):
        queue(small, waiting=1, steps=10, rounds=2)
    assert small.engine.idle
