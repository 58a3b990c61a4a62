"""The picture of a training, and the curve that tells what more of it would bring."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline.errors import OptionError
from paceline.train.curves import draw
from paceline.train.scaling import Scaling, fit

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("power", [0.1, 0.35, 1.0])
def test_a_power_law_is_found_again(power: float) -> None:
    law = Scaling(2.4, 0.9, power, 5e4)
    found = fit([(tokens, law.at(tokens)) for tokens in (5e4, 1e5, 3e5, 7e5, 1.5e6)])
    assert found is not None
    assert found.power == pytest.approx(power, rel=0.02)
    assert found.at(1.5e7) == pytest.approx(law.at(1.5e7), abs=0.005)
    assert found.at(5e4) == pytest.approx(1.5, abs=1e-3)


def test_noise_moves_the_curve_no_further_than_itself() -> None:
    law = Scaling(2.2, 0.8, 0.5, 1e5)
    wrong = (0.01, -0.01, 0.01, -0.01, 0.01, -0.01)
    tokens = [1e5 * 2**place for place in range(6)]
    found = fit([(at, law.at(at) + error) for at, error in zip(tokens, wrong, strict=True)])
    assert found is not None
    assert all(abs(found.at(at) - law.at(at)) < 0.012 for at in tokens)
    assert abs(found.at(3.2e7) - law.at(3.2e7)) < 0.05


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1.0, 1.0), (2.0, 1.2), (3.0, 1.3)],
        [(1.0, 1.0), (1.0, 1.1), (2.0, 1.2), (3.0, 1.3)],
        [(1.0, 1.4), (2.0, 1.3), (3.0, 1.2), (4.0, 1.1)],
    ],
)
def test_there_is_no_curve_through_too_little_or_what_falls(points: list[tuple[float, float]]) -> None:
    assert fit(points) is None


def lines(evaluations: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"kind": "split", "step": 3, "tokens": 900, "target": 0.4}]
    for step in range(1, 9):
        accuracy = [0.1 * step, 0.05 * step, 0.02 * step][: 1 + min(step, 2)]
        steps = {"loss": 4 / step, "accuracy": accuracy, "tokens_per_second": 200.0}
        found.append({"kind": "steps", "step": 10 * step, "tokens": 5000 * step, **steps})
        if step <= evaluations:
            tau = {"greedy": {"all": 2 - 0.9 / step, "qa": 1.5, "math": 1.7}, "at 0.8": {"all": 1.7 - 0.6 / step}}
            if step == 1:
                del tau["greedy"]["qa"], tau["at 0.8"]
            found.append({"kind": "evaluation", "step": 10 * step, "tokens": 5000 * step, "tau": tau, "accepted": {}})
    return found


def written(path: Path, evaluations: int) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines(evaluations)))
    return path


def test_a_log_becomes_a_picture_that_is_the_same_twice(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", 8)
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(log, first)
    draw(log, second)
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    for label in ("tau on held-out texts", "(solid: greedy)", "at 0.8", "qa", "math", "ten times the tokens: 1.9"):
        assert label in text


@pytest.mark.parametrize("evaluations", [0, 1, 3])
def test_a_training_that_has_just_begun_is_drawn_too(evaluations: int, tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    draw(written(tmp_path / "log.jsonl", evaluations), picture)
    assert "ten times" not in picture.read_text()
    assert (">greedy<" in picture.read_text()) == (evaluations > 0)


@pytest.mark.parametrize("text", ["", "[]\n", "{}\n", "nothing\n", '{"kind": "split", "step": 1}\n'])
def test_what_cannot_be_drawn(text: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(text)
    with pytest.raises(OptionError, match=r"log\.jsonl"):
        draw(log, tmp_path / "curves.svg")
    with pytest.raises(OptionError, match="no log"):
        draw(tmp_path / "none.jsonl", tmp_path / "curves.svg")
