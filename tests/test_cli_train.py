"""``paceline train``: from prompts to a head that drafts, by flags or a file of options."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import torch

from paceline.cli import main
from tests.bench_models import model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["model_folder"]  # a fixture

pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    dice = random.Random(1)
    lines = [{"prompt": "".join(dice.choices("abcdef ", k=12)) + "?", "source": "xy"[n % 2]} for n in range(24)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\nnothing\n")
    return path


SMALL = "--held-out 4 --epochs 1 --rows 200 --answer-tokens 12 --evaluations 1 --columns 200 -t 1".split()  # noqa: SIM905


def test_a_head_is_trained_and_drafts(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    command = ["train", "eagle3", "-m", str(model_folder), "--prompts", str(prompts), "-o", str(folder), *SMALL]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["folder"] == str(folder)
    assert report["steps"] > 1
    assert report["score"] >= 1
    for line in (
        "line 25: it is empty: skipped",
        "line 26: it is not JSON: skipped",
        "24 prompts have no answer",
        "200 ids cover",
        "4 held out",
        "tau",
    ):
        assert line in err
    assert main([*command, "-q"]) == 0  # nothing is left to do, and the answers are there
    assert capsys.readouterr().out.startswith(f"{folder}: the best of")
    generate = ["generate", "abc", "-m", str(model_folder), "--method", "eagle3", "--draft-model", str(folder)]
    assert main([*generate, "--json", "--max-tokens", "8", "--temperature", "0", "--no-adaptive", "--compare"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["speculation"]["drafted"] > 0
    assert answer["speculation"]["method"] == "eagle3"


def test_the_preview_shows_what_counts_and_trains_nothing(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{**json.loads(line), "answer": "yes"} for line in prompts.read_text().splitlines()[:24]]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train", "eagle3", "-m", str(model_folder), "--answers", str(answers), "-o", str(tmp_path / "head")]
    assert main([*command, *SMALL, "--preview", "1"]) == 0
    assert capsys.readouterr().out.endswith("?\na:[yes<eos>]\n")
    assert not (tmp_path / "head").exists()


def test_prompts_are_answered_for_later(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    command = ["train", "answers", "-m", str(model_folder), "--prompts", str(prompts), "-o", str(path)]
    assert main([*command, "--max-tokens", "5", "--count", "3"]) == 0
    assert main([*command, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("24 answers of 1")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == 24
    assert {line["temperature"] for line in lines} == {0.0, 0.8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = 'many'", "epochs"),
        ("colums = 5", "columns"),
        ("depth = 9", "depth is 1 to 7"),
        ("depth = ", "cannot be read"),
        ("", "nothing to train on"),
    ],
)
def test_a_file_of_options_is_checked(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text)
    assert main(["train", "eagle3", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_flags_come_before_the_file_of_options(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.toml"
    path.write_text(
        f"prompts = '{prompts}'\nepochs = 1\nanswer_tokens = 4\nheld_out = 4\ncolumns = 60\nfc_norm = true\n"
    )
    folder = tmp_path / "head"
    flags = ["--columns", "70", "--evaluations", "0", "-t", "1"]
    assert main(["train", "eagle3", "-m", str(model_folder), "--config", str(path), "-o", str(folder), *flags]) == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == 70
    assert config["fc_norm"] is True
    assert "answers" in (folder / "training" / "answers.jsonl").name
