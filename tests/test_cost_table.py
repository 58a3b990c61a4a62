"""Costs measured at the start: what they come to, how they are kept, and that nothing damaged is believed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from paceline.cost import Load, Prices, StepCost
from paceline.cost_table import CostTable, table_path
from paceline.drafters.cascade import LOOKUPS
from paceline.options import Speculation
from paceline.startup import ROWS, measure
from paceline.targets.toy import ToyTarget
from tests.bench_models import model_folder, tiny_llm
from tests.toys import VOCAB, Clock, Timed, ToyRun, path_rule

if TYPE_CHECKING:
    from pathlib import Path

    from paceline import LLM

__all__ = ["model_folder", "tiny_llm"]


def seconds(load: Load) -> float:
    """A machine: rows, sequences, and context that is read and seen."""
    rows = load.all_rows
    return (
        3e-3 * (1 + 0.05 * rows + 0.1 * (rows > 16))
        + 1e-4 * max(0, load.decodes - 1)
        + 6e-7 * load.read
        + 2e-7 * load.seen
    )


def cells() -> list[tuple[Load, float]]:
    loads = [Load(n, 1, 0, context, n * context) for n in (*range(1, 33), 64, 128) for context in (100, 2000)]
    loads += [Load(n, n, 0, n * 100, n * 100) for n in (2, 8, 32)]
    return [(load, seconds(load)) for load in loads]


def test_measured_steps_give_back_what_made_them() -> None:
    prices = Prices.fit(cells())
    assert (prices.decode, prices.read, prices.seen) == pytest.approx((1e-4, 6e-7, 2e-7), rel=0.01)
    cost = StepCost(prices)
    for load in (Load(3, 1, 0, 500, 1500), Load(40, 8, 0, 8000, 40_000), Load(5, 5, 100, 3000, 90_000)):
        assert cost(load) == pytest.approx(seconds(load), rel=0.05)
    assert cost.of_context(3, 1000) == pytest.approx(2e-4, rel=0.01)


def test_few_measurements_say_less_and_none_is_below_zero() -> None:
    alone = Prices.fit([(Load(1), 1.0), (Load(8), 2.0)])
    assert (alone.decode, alone.read, alone.seen) == (0.0, 0.0, 0.0)
    assert StepCost(alone)(Load(4)) == pytest.approx(1 + 3 / 7)
    odd = Prices.fit([(Load(n, 1, 0, c, n * c), 1.0 + n - c / 1000) for n in (1, 2, 4) for c in (10, 900)])
    assert min(odd.decode, odd.read, odd.seen, *odd.rows) >= 0.0


@pytest.mark.parametrize("wrong", [0.85, 1.15, "some"])
def test_a_table_that_is_wrong_is_corrected_by_what_is_seen(wrong: Any) -> None:
    """All of it at once by the first step, and single entries by steps of their own."""
    factor = (lambda n: 0.85 if n % 2 else 1.15) if wrong == "some" else (lambda n: wrong)
    cost = StepCost(Prices.fit([(load, s * factor(load.rows)) for load, s in cells()]))
    for _ in range(12):
        for rows in (1, 2, 5) if wrong == "some" else (1,):
            cost.learn(Load(rows, 1, 0, 300, 300 * rows), seconds(Load(rows, 1, 0, 300, 300 * rows)))
    for rows in (1, 2, 5) if wrong == "some" else (1, 2, 5, 9, 30):
        load = Load(rows, 1, 0, 800, 800 * rows)
        assert cost(load) == pytest.approx(seconds(load), rel=0.03)


def test_a_table_is_kept_whole_and_read_again(tmp_path: Path) -> None:
    table = CostTable(tuple(cells()), {"suffix": ((1, 1e-5), (4, 3e-5))})
    path = tmp_path / "new" / "table.json"
    assert CostTable.load(path) is None
    table.save(path)
    assert CostTable.load(path) == table
    table.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


GOOD = {"steps": [{**asdict(Load(1)), "seconds": 1.0}], "drafters": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '{"steps": []}',
        json.dumps({**GOOD, "drafters": None}),
        json.dumps({**GOOD, "drafters": {"x": [[1]]}}),
        json.dumps({**GOOD, "drafters": {"x": [[1, -1.0]]}}),
        json.dumps({**GOOD, "steps": [{**asdict(Load(1)), "seconds": 0.0}]}),
        json.dumps({**GOOD, "steps": [{**asdict(Load(1)), "seconds": "1e999"}]}),
        json.dumps({**GOOD, "steps": [{**asdict(Load(1)), "seconds": None}]}),
        json.dumps({**GOOD, "steps": [{**asdict(Load(0)), "seconds": 1.0}]}),
        json.dumps({**GOOD, "steps": [{**asdict(Load(-1)), "seconds": 1.0}]}),
        json.dumps({**GOOD, "steps": [{**asdict(Load(2, 2)), "seconds": 1.0}]}),
        json.dumps({**GOOD, "steps": [{"lines": 1, "seconds": 1.0}]}),
        json.dumps({**GOOD, "steps": [3]}),
    ],
)
def test_what_is_damaged_is_not_believed(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(GOOD))
    assert CostTable.load(path) is not None
    path.write_text(text)
    assert CostTable.load(path) is None
    path.write_bytes(b"\xff\xfe\x00")
    assert CostTable.load(path) is None


def test_every_difference_has_a_file_of_its_own() -> None:
    paths = {table_path(model="a", threads=2), table_path(model="b", threads=2), table_path(model="a", threads=1)}
    assert len(paths) == 3
    assert table_path(threads=2, model="a") in paths


@pytest.mark.parametrize("window", [None, 40])
def test_it_measures_what_has_room_and_leaves_nothing_behind(window: int | None) -> None:
    clock, rule = Clock(), path_rule(VOCAB, seed=3)
    target = Timed(ToyTarget(rule, VOCAB, 4096, window), clock, lambda rows: 1 + 0.1 * rows)
    run = ToyRun(rule, target=target, clock=clock, pages=40, max_batch_tokens=256, max_num_seqs=4)
    found = measure(run.engine)
    assert {load.rows for load, _ in found if load.decodes == 1} == set(ROWS)
    assert {load.pieces for load, _ in found if not load.decodes} == {128, 256}
    assert {load.decodes for load, _ in found if load.decodes > 1} == {2, 4}
    for load, took in found:
        assert took == pytest.approx(1 + 0.1 * load.all_rows)
    run.check_empty()
    sequence = run.add("abc", max_tokens=5)
    run.finish(sequence)


def test_a_model_is_measured_once_and_then_remembered(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny_llm, "speculation", Speculation())
    before = tiny_llm.engine.pacer.cost
    assert not before.prices.known
    tiny_llm.calibrate()
    measured = tiny_llm.engine.pacer.cost
    assert measured.prices.known
    (file,) = (tmp_path / "costs").iterdir()
    drafters = json.loads(file.read_text())["drafters"]
    assert set(LOOKUPS) == set(drafters)
    file.write_text(file.read_text().replace("seconds", "secs"))
    tiny_llm.calibrate()  # what is damaged is measured anew
    stamp = file.stat().st_mtime_ns
    tiny_llm.calibrate()
    assert file.stat().st_mtime_ns == stamp
    tiny_llm.forget()
    assert tiny_llm.engine.pacer.cost.prices.known
    tiny_llm.engine.pacer.believe(Prices(), {})


def test_generating_measures_nothing(tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    tiny_llm.generate("row of riders")
    assert not list(tmp_path.iterdir())
