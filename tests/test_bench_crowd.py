"""Requests of every kind at once: nothing differs, whatever differs is found, and what is too seldom is said."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from paceline import AsyncLLM, RequestError
from paceline.bench import crowd
from paceline.bench.crowd import Crowd
from paceline.bench.runner import Runner
from paceline.bench.visitors import CROWD, visitors
from paceline.bench.ways import chosen_ways
from paceline.cli import main
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.verify import Verifier
from tests.bench_models import model_folder, prompts

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paceline.request import Sequence
    from paceline.tree import TokenTree
    from paceline.verify import Verdict

__all__ = ["model_folder"]

WAYS = tuple(way for way in CROWD if way.judge != "rejected")
COUNT = 40
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
    everyone = visitors(llm, prompts(8), COUNT, WAYS)
    path = tmp_path / "cells.jsonl"
    report = Crowd(llm, everyone, runner(path), orders=2).report()
    assert (report["differing"], report["lost"], report["held"]) == (0, 0, 0)
    assert report["errors"] == {}
    seen = report["seen"]
    assert seen["finished"] + seen["left before their end"] == 2 * COUNT
    assert seen["over 1,000 tokens"] == 0  # there is no room for any
    assert all(number for name, number in seen.items() if name != "over 1,000 tokens"), seen  # seldom as it may be
    assert report["compared"] >= 2 * COUNT
    ways = report["by_way"]
    assert sum(found["requests"] for found in ways.values()) == 2 * COUNT
    assert set(ways) == {way.name for way in WAYS}
    assert sum(found["rejected"] for found in ways.values()) == seen["drafts rejected"]
    assert {"target", "grammar", "draft_model", "prediction"} <= set(report["by_drafter"])
    assert sum(report["by_drafter"].values()) == report["tokens"]
    again = runner(path)
    assert Crowd(llm, everyone, again, orders=2).report() == report
    assert again.taken == 0


def test_a_token_that_another_row_should_have_had_is_found(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = visitors(llm, prompts(8), COUNT, WAYS)
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


def test_a_request_that_breaks_off_is_lost(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = visitors(llm, prompts(8), 8, WAYS)
    expected = Crowd(llm, everyone, runner(), orders=1)
    honest = Verifier.accept

    def accept(self: Verifier, sequence: Sequence, tree: TokenTree, logits: Tensor) -> Verdict:
        if sequence.drafter is not None and len(sequence.tokens) > sequence.prompt_length + 2:
            raise RequestError("no more of it.")
        return honest(self, sequence, tree, logits)

    monkeypatch.setattr(Verifier, "accept", accept)
    report = expected.report()
    assert report["lost"] == len(report["errors"]) > 0
    assert "no more of it" in next(iter(report["errors"].values()))
    assert (report["differing"], report["held"]) == (0, 0)


def test_what_a_drafter_keeps_of_those_who_are_gone_is_found(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = visitors(llm, prompts(8), 4, chosen_ways(["draft_layers"], CROWD))
    assert Crowd(llm, everyone, runner(), orders=1).report()["held"] == 0
    monkeypatch.setattr(DraftModelDrafter, "release", lambda self, sequence: None)
    assert Crowd(llm, everyone, runner(), orders=1).report()["held"] > 0


def test_each_way_must_have_been_right_and_wrong(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = visitors(llm, prompts(8), 3, chosen_ways(["medusa", "grammar", "ngram"], CROWD))
    crowd_of = Crowd(llm, everyone, runner(), orders=1)
    for least, wanted in (
        (0, set()),
        (10**6, {"medusa: rejected", "grammar: accepted", "ngram: accepted", "ngram: rejected"}),
    ):
        monkeypatch.setattr(crowd, "LEAST", least)
        assert {what for what in crowd_of.report()["short"] if ":" in what} == wanted


def test_requests_are_left_after_chunks_and_after_seconds_and_each_way_has_its_turn(llm: AsyncLLM) -> None:
    everyone = visitors(llm, prompts(8), 40, WAYS)
    leave = [(visitor.chunks is not None, visitor.seconds is not None) for visitor in everyone]
    assert set(leave) == {(False, False), (True, False), (False, True)}
    turns = Counter(visitor.way.name for visitor in everyone)
    assert set(turns) == {way.name for way in WAYS}
    assert max(turns.values()) - min(turns.values()) <= 1


def test_requests_are_drawn_by_the_seed_alone(llm: AsyncLLM) -> None:
    ways = [way for way in WAYS if way.request != "constrained"]  # two equal constraints are two objects
    assert visitors(llm, prompts(8), 10, ways) == visitors(llm, prompts(8), 10, ways)
    assert visitors(llm, prompts(8), 10, ways) != visitors(llm, prompts(8), 10, ways, seed=1)


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
