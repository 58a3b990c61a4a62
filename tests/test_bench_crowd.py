"""Requests of every kind at once: nothing differs, whatever differs is found, and what is too seldom is said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from paceline import AsyncLLM
from paceline.bench import crowd
from paceline.bench.crowd import Crowd, visitors
from paceline.bench.runner import Runner
from paceline.cli import main
from paceline.verify import Verifier
from tests.bench_models import model_folder, prompts

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paceline.request import Sequence
    from paceline.tree import TokenTree
    from paceline.verify import Verdict

__all__ = ["model_folder"]

METHODS = ("auto", "ngram", "suffix", "recycling", "lookahead", "prediction", "draft_model:draft_layers=1,tree=2")
COUNT = 32
BYTES = 150_000


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> AsyncLLM:
    room = {"method": "draft_model", "draft_layers": 1}
    return AsyncLLM(
        str(model_folder), speculation=room, threads=2, max_num_seqs=12, max_model_len=512, cache_memory=BYTES
    )


def runner(path: Path | None = None) -> Runner:
    return Runner(path, {"code": "c", "machine": "m"}, {}, lambda line: None)


def test_every_answer_is_the_one_that_is_given_alone(llm: AsyncLLM, tmp_path: Path) -> None:
    everyone = visitors(llm, prompts(8), COUNT, METHODS)
    path = tmp_path / "cells.jsonl"
    report = Crowd(llm, everyone, runner(path), orders=2).report()
    assert report["differing"] == report["lost"] == 0
    assert report["compared"] >= 2 * COUNT - report["seen"]["left"]
    assert report["seen"]["finished"] + report["seen"]["left"] == 2 * COUNT
    assert all(report["seen"].values()), report["seen"]  # all of it happens, seldom as it may be
    assert sum(found["requests"] for found in report["methods"].values()) == 2 * COUNT
    again = runner(path)
    assert Crowd(llm, everyone, again, orders=2).report() == report
    assert again.taken == 0


def test_a_token_that_another_row_should_have_had_is_found(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = visitors(llm, prompts(8), COUNT, METHODS)
    crowd_of = Crowd(llm, everyone, runner(), orders=1)
    honest = Verifier.accept

    def accept(self: Verifier, sequence: Sequence, tree: TokenTree, logits: Tensor) -> Verdict:
        """Once in a while the token of a request that drafts is another one."""
        verdict = honest(self, sequence, tree, logits)
        if sequence.drafter is not None and len(sequence.tokens) % 20 == 0 and verdict.tokens:
            verdict.tokens[-1] = (verdict.tokens[-1] + 1) % 250
        return verdict

    monkeypatch.setattr(Verifier, "accept", accept)
    report = crowd_of.report()
    assert report["differing"] > 0
    assert report["differences"][0]["expected"] != report["differences"][0]["found"]


def test_requests_are_drawn_by_the_seed_alone(llm: AsyncLLM) -> None:
    assert visitors(llm, prompts(8), 10, METHODS) == visitors(llm, prompts(8), 10, METHODS)
    assert visitors(llm, prompts(8), 10, METHODS) != visitors(llm, prompts(8), 10, METHODS, seed=1)


def test_the_command_line(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["verify", str(model_folder), "--crowd", "6", "--orders", "1", "--method", "ngram", "--method", "suffix"]
    given += ["--max-model-len", "512", "--cache-memory", "4M", "--prompts", "8"]
    assert main([*given, "--json", "-o", str(tmp_path / "cells.jsonl")]) == 1
    caught = capsys.readouterr()
    report = json.loads(caught.out)
    assert (report["differing"], report["lost"]) == (0, 0)
    assert "gave way" in report["short"]
    assert "too seldom for the run to count" in caught.err
    monkeypatch.setattr(crowd, "LEAST", 0)
    assert main([*given, "-o", str(tmp_path / "cells.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "differing: 0" in shown
    assert "shared a beginning" in shown
    assert main([*given, "--full"]) == 2
