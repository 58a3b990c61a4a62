"""The simulation of the pacer on modelled GPUs: its parts, and a sample of its cells."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.bench.runner import Runner
from paceline.cli import main
from paceline.errors import OptionError
from paceline.simulate import compare
from paceline.simulate.acceptance import DEPTHS, FAMILIES, draw
from paceline.simulate.device import EAGLE_8B, EAGLE_70B, H100, H200, LLAMA_8B, LLAMA_70B, Server
from paceline.simulate.fixed import speed, trace
from paceline.simulate.plot import plot
from paceline.simulate.serve import serve
from paceline.simulate.startup import ERROR, ROWS, table

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.simulate.acceptance import Kind

SMALL = Server(H100, LLAMA_8B, EAGLE_8B)
LARGE = Server(H200, LLAMA_70B, EAGLE_70B)
MEASURED = {
    "chat": (2.85, 1.35),
    "code": (3.55, 1.9),
    "math": (3.3, 1.55),
    "summarization": (2.6, 2.1),
    "editing": (3.3, 3.4),
    "translation": (2.1, 1.12),
    "far": (1.4, 1.06),
}
"""Tokens a step with a head and 7 drafts, and with a lookup and 8."""


def cells() -> Runner:
    return Runner(None, {}, {}, lambda line: None)


def test_few_rows_cost_the_reading_of_the_weights_and_many_their_products() -> None:
    one, eight = float(SMALL.step(1, 1, 1000)), float(SMALL.step(8, 1, 1000))
    read = LLAMA_8B.weights * 2 / H100.bandwidth
    assert read < one < 1.5 * read
    assert eight < 1.02 * one
    many, twice = float(SMALL.step(1024, 128, 0)), float(SMALL.step(2048, 128, 0))
    assert 1.8 < twice / many < 2.1


def test_rows_cost_by_the_tile_and_a_long_context_by_its_length() -> None:
    kinked = replace(SMALL, edges=(0.05,) * 5)
    assert float(kinked.step(16, 1, 0)) > 0.999 * float(kinked.step(10, 1, 0))
    assert float(kinked.step(17, 1, 0)) > 1.03 * float(kinked.step(16, 1, 0))
    slope = float(SMALL.step(8, 8, 800_000) - SMALL.step(8, 8, 400_000)) / 400_000
    assert slope == pytest.approx(LLAMA_8B.token_bytes / (H100.bandwidth * H100.attending), rel=0.02)


def test_steps_of_arrays_are_steps_of_their_entries() -> None:
    rows, context = np.array([1, 17, 300]), np.array([100.0, 2000.0, 300_000.0])
    together = SMALL.step(rows, 4, context)
    assert together.tolist() == [float(SMALL.step(r, 4, c)) for r, c in zip(rows, context, strict=True)]


def test_a_level_of_a_head_costs_a_small_part_of_a_step() -> None:
    for server in (SMALL, LARGE):
        levels = [float(server.draft(np.array([8] * depth), 1000)) for depth in (1, 2, 4)]
        assert 0.02 < levels[0] / float(server.step(8, 8, 8000)) < 0.1
        assert levels[1:] == pytest.approx([2 * levels[0], 4 * levels[0]])
    assert float(SMALL.draft(np.array([0, 0]), 1000)) == 0.0


def test_what_does_not_fit_is_left_out() -> None:
    assert SMALL.fits(1, 131_072)
    assert not SMALL.fits(512, 1024)
    assert not Server(H100, LLAMA_70B, EAGLE_70B).fits(1, 1024)
    assert LARGE.fits(256, 1024)


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_families_are_accepted_as_was_measured(family: Any) -> None:
    assert (_tau("head", family, 7), _tau("lookup", family, 8)) == pytest.approx(MEASURED[family.name], rel=0.06)


def _tau(kind: Kind, family: Any, drafts: int) -> float:
    found = trace(draw(kind, 64, 800, 3, (family,)), drafts, 64 * 500)
    return found.tokens / (64 * len(found.rows))


@pytest.mark.parametrize("kind", ["head", "lookup"])
def test_streams_hold_what_they_promise(kind: Kind) -> None:
    stream = draw(kind, 8, 600, 1)
    again = draw(kind, 8, 600, 1)
    assert (stream.runs == again.runs).all()
    assert (stream.claims == again.claims).all()
    assert (stream.runs != draw(kind, 8, 600, 2).runs).any()
    assert stream.runs.min() == 0
    assert stream.runs.max() == DEPTHS
    assert (np.diff(stream.claims, axis=-1) <= 0).all()
    assert (stream.left[:, -1] == 1).all()
    starts = stream.done == 0
    assert (stream.left[:, :-1][starts[:, 1:]] == 1).all()


def test_places_are_like_the_ones_before_them_and_requests_unlike_each_other() -> None:
    stream = draw("head", 64, 800, 4)
    first, second = stream.runs[:, :-1].ravel(), stream.runs[:, 1:].ravel()
    assert np.corrcoef(first, second)[0, 1] > 0.2
    numbers = np.cumsum(stream.done == 0, axis=1) + 1000 * np.arange(64)[:, None]
    means = [stream.runs[numbers == number].mean() for number in np.unique(numbers)]
    assert np.std(means) > 0.5


def test_plain_decoding_takes_a_step_a_token_and_a_length_no_more_rows_than_it_says() -> None:
    stream = draw("head", 4, 400, 0)
    plain, two = (trace(stream, length, 400) for length in (0, 2))
    assert plain.tokens == 4 * len(plain.rows)
    assert (plain.rows == 4).all()
    assert not plain.levels.any()
    assert two.rows.max() == 12
    assert two.tokens > 1.3 * 4 * len(two.rows)
    assert (two.levels[:, 2:] == 0).all()
    assert speed(two, "head", SMALL, 4, 1024) > speed(plain, "head", SMALL, 4, 1024)


def test_the_table_at_start_up_is_as_wrong_as_is_said() -> None:
    right = SMALL.step(np.array(ROWS), 1, 256)
    for seed in range(5):
        cells = table(SMALL, np.random.default_rng(seed))
        wrong = np.array([seconds for _, seconds in cells[: len(ROWS)]]) / right - 1
        assert np.abs(wrong).max() == pytest.approx(ERROR)
        assert wrong.std() > 0.01


def test_the_same_seed_gives_the_same_figures() -> None:
    stream = draw("head", 2, 400, 7)
    first, again, other = (serve(stream, "head", SMALL, 1024, 200, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.seconds != other.seconds
    assert first.tokens >= 200
    assert first.drafted > 0


def test_one_process_or_two_give_one_report() -> None:
    one, two = (compare.run(cells(), 2, [1], [131_072], processes, tokens=40) for processes in (1, 2))
    assert one == two


def test_a_sample_of_cells_and_what_has_no_room() -> None:
    report = compare.run(cells(), 2, [1, 16], [1024, 131_072], 1, tokens=40)
    rows = {(r["drafts"], r["device"], r["model"], r["context"], r["users"]): r for r in report["cells"]}
    assert {key[0] for key in rows} == {drafts.name for drafts in compare.DRAFTS}
    assert ("head", "H200", "8B bf16", 1024, 16) in rows
    assert ("head", "H200", "8B bf16", 131_072, 16) not in rows
    assert {"device": "H200", "model": "8B bf16", "context": 131_072, "users": [16]} in report["left_out"]
    assert {"device": "H100", "model": "70B fp8", "context": 1024, "users": [1, 16]} in report["left_out"]
    assert all(row["best"] >= 1 for row in rows.values())
    assert all(row["auto_worst"] <= row["auto"] for row in rows.values())


def test_a_bound_that_does_not_hold_is_named() -> None:
    taken = compare.Taken({0: 100.0, 1: 110.0}, 96.0)
    assert taken.best == 1
    row = compare.row(compare.Cell("head", "H100", "8B bf16", 1024, 1), [taken, taken])
    assert row["failed"] == ["0.95 of best", "0.97 of plain", "above plain"]
    fine = compare.Taken({0: 100.0, 1: 105.0}, 99.9)
    assert compare.row(compare.Cell("head", "H100", "8B bf16", 1024, 1), [fine])["failed"] == []


def test_the_command_prints_tables_and_fails_where_a_bound_does(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "simulate", "--users", "1", "--context", "131072", "--seeds", "1", "--max-tokens", "10"]
    code = main([*arguments, "--processes", "1", "--quiet", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == int(any(row["failed"] for row in report["cells"]))
    assert len(report["cells"]) == 3 * len(compare.DRAFTS)


def test_the_plot_is_the_same_twice(tmp_path: Path) -> None:
    report = compare.run(cells(), 1, [1], [131_072], 1, tokens=20)
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    plot(report, first)
    plot(report, second)
    assert first.read_bytes() == second.read_bytes()
    assert b"best fixed length" in first.read_bytes()
    with pytest.raises(OptionError, match="no plot"):
        plot(report, tmp_path / "a.unknown")
