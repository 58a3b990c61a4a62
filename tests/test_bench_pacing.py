"""The grid of never being slower: bounds against values worked out by hand, and real cells of a tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline import AsyncLLM
from paceline.bench.pacing import AUTO, Grid, Pacing, Place, failures, totals
from paceline.bench.run import PLAIN, parse_method
from paceline.bench.runner import Runner
from paceline.cli import main
from paceline.errors import OptionError
from tests.bench_models import model_folder, prompts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["model_folder"]

ENVIRONMENT = {"code": "c", "machine": "m"}
GRID = Grid(users=(1, 2), temperatures=(0.0, 0.8), lengths=(2, 4), prompts=3, max_tokens=6, rounds=2)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> AsyncLLM:
    return AsyncLLM(str(model_folder), speculation=False, threads=2, max_num_seqs=2, cache_memory=1 << 24)


@pytest.fixture(autouse=True)
def costs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be kept in the cache folder that other modules of tests share."""
    monkeypatch.setattr(AsyncLLM, "calibrate", lambda self: None)


def runner(path: Path | None = None) -> Runner:
    return Runner(path, ENVIRONMENT, {}, lambda line: None)


def cell(*decode: float, digest: str = "same") -> dict[str, Any]:
    return {"seconds": sum(decode), "decode": list(decode), "steps": 10, "accepted": 5, "digest": digest}


def turn(**methods: Sequence[float]) -> dict[str, Any]:
    names = {"two": "length 2", "four": "length 4"}
    return {names.get(name, name): cell(*decode) for name, decode in methods.items()}


def test_a_place_fails_where_its_whole_interval_lies_below_a_bound() -> None:
    def row(auto: tuple[float, float], of_best: tuple[float, float]) -> dict[str, Any]:
        return {"methods": {AUTO: {"interval": auto}}, "of_best": {"interval": of_best}}

    assert failures(row((0.5, 0.97), (0.5, 0.95))) == []
    assert failures(row((0.5, 0.969), (1.0, 1.1))) == ["slower than plain"]
    assert failures(row((0.98, 1.0), (0.5, 0.949))) == ["behind the best length"]


def test_the_best_length_is_chosen_on_one_half_and_compared_on_the_other(llm: AsyncLLM) -> None:
    bench = Pacing(llm, prompts(8), runner(), GRID)
    # On the requests of even places length 2 is best, on the others plain decoding would be.
    plain, two = [4.0, 1.0, 4.0, 1.0], [2.0, 3.0, 2.0, 3.0]
    turns = [turn(plain=plain, auto=[2.0, 2.0, 2.0, 2.0], two=two, four=[9.0] * 4)]
    row = bench._row(Place("qa", 1, 0.0), turns)
    assert row["best_fixed"] == "length 2"
    assert row["of_best"]["ratio"] == pytest.approx(6 / 4)
    assert row["methods"][AUTO]["ratio"] == pytest.approx(10 / 8)
    assert row["methods"][AUTO]["tau"] == 1.5
    assert row["failed"] == []
    slow = [turn(plain=plain, auto=[5.0] * 4, two=two, four=[9.0] * 4)]
    assert bench._row(Place("qa", 1, 0.0), slow)["failed"] == ["slower than plain", "behind the best length"]


def test_of_several_rounds_the_median_of_each_request_counts(llm: AsyncLLM) -> None:
    bench = Pacing(llm, prompts(8), runner(), GRID)
    slow = {"two": [9.0, 9.0], "four": [9.0, 9.0]}
    turns = [turn(plain=[2.0, 2.0], auto=auto, **slow) for auto in ([1.0, 9.0], [9.0, 1.0], [1.0, 1.0])]
    assert bench._row(Place("qa", 1, 0.0), turns)["methods"][AUTO]["ratio"] == pytest.approx(2.0)


def test_other_tokens_than_plain_decoding_are_counted(llm: AsyncLLM) -> None:
    bench = Pacing(llm, prompts(8), runner(), GRID)
    turns = [turn(plain=[2.0], auto=[2.0], two=[2.0], four=[2.0]) for _ in range(2)]
    turns = [{name: cell(2.0, 2.0, digest="other" if name == AUTO else "same") for name in t} for t in turns]
    assert bench._row(Place("qa", 1, 0.0), turns)["differing"] == 2


def test_totals_are_means_over_places_and_ratios_over_near_requests() -> None:
    reference = parse_method("suffix", {})

    def at(category: str, users: int, plain: float, auto: float) -> tuple[Place, list[dict[str, Any]]]:
        found = {PLAIN: cell(plain, plain), AUTO: cell(auto, auto), "suffix": cell(2 * auto, 2 * auto)}
        return Place(category, users, 0.0), [found]

    found = dict([at("qa", 1, 4.0, 2.0), at("far", 1, 1.0, 2.0), at("qa", 2, 3.0, 2.0), at("rag", 2, 1.0, 2.0)])
    total = totals(found, reference, {"qa", "rag"})
    assert total["geometric_mean"] == pytest.approx((2 * 0.5 * 1.5 * 0.5) ** 0.25)
    assert total["of_reference"] == {"0": {"ratio": pytest.approx(2.0), "interval": pytest.approx((2.0, 2.0))}}
    assert total["two_users"]["0"]["ratio"] == pytest.approx(8 / 8)
    assert totals(found, None, {"qa"})["of_reference"] == {}


def test_the_grid_is_taken_and_taken_up_again(llm: AsyncLLM, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    first = Pacing(llm, prompts(8), runner(path), GRID)
    report = first.report()
    assert len(report["cells"]) == 8
    assert report["missing"] == 0
    assert all(row["differing"] == 0 for row in report["cells"])
    assert all(list(row["methods"]) == [PLAIN, AUTO, "length 2", "length 4"] for row in report["cells"])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {len(line["result"]["decode"]) for line in lines if line["cell"]["times"] == 1} == {3}
    assert {len(line["result"]["decode"]) for line in lines if line["cell"]["times"] == 4} <= {4}
    drafted = sum(line["result"]["drafted"] for line in lines if line["cell"]["method"] == "length 4")
    assert drafted > 0
    assert all(line["result"]["drafted"] == 0 for line in lines if line["cell"]["method"] == PLAIN)
    again = runner(path)
    repeated = Pacing(llm, prompts(8), again, GRID).report()
    assert again.taken == 0
    assert repeated["cells"] == report["cells"]


def test_what_there_is_no_time_for_is_missing(llm: AsyncLLM) -> None:
    at = iter(range(100))
    grid = Grid(users=(1,), temperatures=(0.0,), lengths=(2,), prompts=2, max_tokens=3, rounds=5, minutes=3 / 60)
    report = Pacing(llm, prompts(8), runner(), grid, clock=lambda: next(at)).report()
    assert [row["rounds"] for row in report["cells"]] == [1, 1]  # asked before each: 1 and 2 seconds of 3
    assert report["missing"] == 8


def test_too_few_prompts_for_the_users(llm: AsyncLLM) -> None:
    with pytest.raises(OptionError, match="qa has 4 prompts for 5 users"):
        Pacing(llm, prompts(8), runner(), Grid(users=(5,)))
    with pytest.raises(OptionError, match="at least one"):
        Grid(lengths=())


def test_the_command_line(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for number in range(2):
        files.append(tmp_path / f"{number}.jsonl")
        lines = [{"question_id": f"{number}-{n}", "category": f"kind{number}", "prompt": f"go {n}"} for n in range(3)]
        files[-1].write_text("\n".join(map(json.dumps, lines)))
    small = [
        "--users",
        "1",
        "--temperature",
        "0",
        "--lengths",
        "2",
        "--count",
        "2",
        "--max-tokens",
        "4",
        "--rounds",
        "1",
    ]
    given = ["--prompts", str(files[0]), "--prompts", str(files[1]), "--cache-memory", "16M", *small]
    code = main(["bench", "pacing", "-m", str(model_folder), "--json", *given])
    report = json.loads(capsys.readouterr().out)
    assert [row["category"] for row in report["cells"]] == ["kind0", "kind1"]
    assert code == int(any(row["failed"] for row in report["cells"]))
    main(["bench", "pacing", "-m", str(model_folder), *given, "--reference", "ngram", "--categories", "kind1"])
    shown = capsys.readouterr().out
    assert "temperature 0, 1 user\n" in shown
    assert "kind1" in shown
    assert "kind0" not in shown
    assert "ngram" in shown
    assert max(map(len, shown.splitlines())) <= 80
