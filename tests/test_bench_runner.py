"""The runner of resumable measurements, and the arithmetic of medians, intervals and environments."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

import paceline
from paceline.bench import environment as head
from paceline.bench.runner import Runner
from paceline.bench.stats import Spread, ratio_interval
from paceline.errors import OptionError, ResourceError

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = {"code": "c1", "machine": "m1", "commit": "0123", "versions": {"python": "3"}}
NAMES = [{"prompt": str(place), "repeat": repeat} for repeat in range(2) for place in range(3)]


class Work:
    """Counts what is taken; stops like an interrupt after so many cells."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.taken: list[dict[str, Any]] = []

    def run(self, path: Path | None, environment: dict[str, Any] = ENVIRONMENT, **settings: Any) -> list[Any]:
        self.runner = Runner(path, environment, settings, lambda line: None)
        return [self.runner.cell(name, lambda name=name: self._take(name)) for name in NAMES]  # type: ignore[misc]

    def _take(self, name: dict[str, Any]) -> dict[str, Any]:
        if len(self.taken) == self.stop:
            raise KeyboardInterrupt
        self.taken.append(name)
        return {"value": f"{name['prompt']}/{name['repeat']}", "pair": (1, 2)}


EXPECTED = [{"value": f"{name['prompt']}/{name['repeat']}", "pair": [1, 2]} for name in NAMES]


def test_a_cut_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    first = Work(stop=4)
    with pytest.raises(KeyboardInterrupt):
        first.run(path)
    assert len(path.read_text().splitlines()) == 4
    second = Work()
    assert second.run(path) == EXPECTED
    assert second.taken == NAMES[4:]
    assert (second.runner.found, second.runner.taken) == (4, 2)
    third = Work(stop=0)
    assert third.run(path) == EXPECTED
    line = json.loads(path.read_text().splitlines()[0])
    assert line["cell"] == NAMES[0]
    assert line["result"] == EXPECTED[0]
    assert {line[key] for key in ("commit", "code", "machine")} == {"0123", "c1", "m1"}
    assert line["versions"] == {"python": "3"}
    assert line["date"].endswith("+00:00")


def test_a_line_that_was_cut_is_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    Work().run(path)
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    again = Work()
    assert again.run(path) == EXPECTED
    assert again.taken == NAMES[-1:]
    assert len(path.read_text().splitlines()) == len(NAMES)


@pytest.mark.parametrize("change", [{"code": "c2"}, {"machine": "m2"}])
def test_cells_of_other_code_or_machine_are_taken_again(tmp_path: Path, change: dict[str, str]) -> None:
    path = tmp_path / "cells.jsonl"
    Work().run(path)
    again = Work()
    again.run(path, {**ENVIRONMENT, **change})
    assert again.taken == NAMES
    # a commit that changes none of the code leaves them alone, and so do the cells of the other machine
    assert Work(stop=0).run(path, {**ENVIRONMENT, "commit": "4567"}) == EXPECTED


def test_cells_of_other_settings_are_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    Work().run(path, tokens=64)
    again = Work()
    again.run(path, tokens=65)
    assert again.taken == NAMES
    assert Work(stop=0).run(path, tokens=64) == EXPECTED


def test_without_a_file_nothing_is_kept() -> None:
    work = Work()
    assert work.run(None) == EXPECTED
    assert work.runner.has(NAMES[0])
    assert not work.runner.has({"prompt": "9", "repeat": 0})


@pytest.mark.parametrize("line", ["not json", '{"prompt": "a"}', "[1]"])
def test_a_foreign_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(OptionError, match="line 1: no cell of a measurement"):
        Work().run(path)
    assert path.read_text() == line + "\n"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        Work().run(tmp_path / "file" / "cells.jsonl")


def test_the_interval_of_a_ratio_is_the_bootstrap_one() -> None:
    # every pair has the same ratio, so nothing varies
    assert ratio_interval([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == (2.0, 2.0)
    # ratio of means of 400 pairs, each numerator 1 or 3: mean 2, standard error 0.05
    lot = random.Random(0)
    numerators = [float(lot.choice((1, 3))) for _ in range(400)]
    low, high = ratio_interval(numerators, [1.0] * 400)
    mean = sum(numerators) / 400
    assert low == pytest.approx(mean - 1.96 * 0.05, abs=0.01)
    assert high == pytest.approx(mean + 1.96 * 0.05, abs=0.01)
    assert ratio_interval(numerators, [1.0] * 400) == (low, high)


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 10.0]).as_dict() == {"median": 3.0, "low": 1.0, "high": 10.0}


def test_the_environment_says_what_runs() -> None:
    found = head.environment()
    assert found["cores"] >= 1
    assert found["kernels"]
    assert found["versions"]["paceline"] == paceline.__version__
    assert len(found["code"]) == 16
    json.dumps(found)


def test_the_code_is_known_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("engine.py", "cli/main.py", "kernels/a.c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(head, "_PACKAGE", tmp_path)
    digest = head.code.__wrapped__
    before = digest()
    (tmp_path / "cli/main.py").write_text("shown otherwise")
    (tmp_path / "notes.txt").write_text("no source")
    assert digest() == before
    (tmp_path / "kernels/a.c").write_text("computed otherwise")
    assert digest() != before
