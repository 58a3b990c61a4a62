"""Steps, their floors and perplexity: what is counted, on a tiny model; nothing is timed against a bound."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch

from paceline.bench.bandwidth import read_bandwidth, step_bytes
from paceline.bench.drafters import BlindDrafter
from paceline.bench.perplexity import perplexity, score
from paceline.bench.runner import Runner
from paceline.bench.step import StepBench
from paceline.cli import main
from paceline.drafters import View
from paceline.sampling import Sampling
from tests.bench_models import model_folder, tiny_llm
from tests.toys import no_draw

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.llm import LLM

__all__ = ["model_folder", "tiny_llm"]


def runner(path: Path | None = None) -> Runner:
    return Runner(path, {"code": "c", "machine": "m"}, {}, lambda line: None)


def test_the_floor_counts_what_a_step_reads(tiny_llm: LLM) -> None:
    decoder = tiny_llm.loaded.decoder
    spec = decoder.spec
    hidden, inner, head = spec.hidden, spec.intermediate, spec.head_dim
    queries, keys = spec.heads * head, spec.kv_heads * head

    def product(n: int, k: int) -> int:  # int8: columns padded to 64, rows to 16, and a scale a row
        rows = -(-n // 16) * 16
        return rows * (-(-k // 64) * 64) + 4 * rows

    layer = product(queries + 2 * keys, hidden) + product(hidden, queries)
    layer += product(2 * inner, hidden) + product(hidden, inner) + 2 * 4 * hidden
    weights = len(spec.layers) * layer + product(spec.vocab_size, hidden) + 4 * hidden
    cache = len(spec.layers) * 2 * keys * 2  # bf16
    embedding = hidden + 4
    assert step_bytes(decoder, 1, 0) == weights + embedding
    assert step_bytes(decoder, 8, 160) == weights + 8 * embedding + 160 * cache


def test_every_reader_is_timed() -> None:
    threads = torch.get_num_threads()
    found = read_bandwidth(2, "", size=1 << 20, repeats=2)
    assert set(found) == {"sum", "product"}
    assert all(speed > 0 for speed in found.values())
    assert set(read_bandwidth(1, "torch reference", size=1 << 20, repeats=1)) == {"sum"}
    assert torch.get_num_threads() == threads


def test_the_blind_drafter_fills_its_budget() -> None:
    drafter = BlindDrafter(50)
    trees = drafter.propose([View(0, [1] * 9, no_draw)] * 2, [63, 0])
    assert [len(tree) for tree in trees] == [64, 1]
    trees[0].check(50)


def test_a_step_is_timed_with_the_rows_asked_for(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("paceline.bench.step._PREFILL", 40)
    monkeypatch.setattr("paceline.bench.step.read_bandwidth", lambda threads, path: {"sum": 1e9, "product": 2e9})
    seen: list[tuple[int, int]] = []
    target = tiny_llm.loaded.decoder
    forward = target.forward

    def note(batch, slabs, features=(), *, seconds=None):  # type: ignore[no-untyped-def]
        seen.append((batch.rows, int(batch.context[0])))
        return forward(batch, slabs, features, seconds=seconds)

    monkeypatch.setattr(target, "forward", note)
    bench = StepBench(tiny_llm, runner(tmp_path / "cells.jsonl"), [1, 8], [100], steps=4, rounds=2)
    report = bench.report()
    assert tiny_llm.engine.target is target
    steps = [line for line in report["steps"] if line["context"] == 100]
    assert [line["rows"] for line in steps] == [1, 8]
    timed = [at for at in seen if at[0] == 8 and 90 <= at[1] <= 120]
    assert len(timed) == 2 * (3 + 4)
    # warm-up counted, the contexts lie around the one asked for
    assert 97 <= timed[0][1] <= 98
    for line in steps:
        assert line["seconds"] >= line["least"] > 0
        assert line["floors"] == pytest.approx(line["seconds"] / report["floors"]["100"])
        parts = line["parts"]
        assert list(parts) == ["products", "attention", "small operators", "drafter", "sampling", "python"]
        assert all(seconds > 0 for seconds in parts.values())
    for text in (tmp_path / "cells.jsonl").read_text().splitlines():
        cell = json.loads(text)
        if "context" in cell["cell"]:
            whole = cell["result"].pop("step")
            assert [sum(parts) for parts in zip(*cell["result"].values(), strict=True)] == pytest.approx(whole)
    assert report["floors"]["100"] == step_bytes(tiny_llm.loaded.decoder, 1, 100) / 2e9
    assert report["prefill"]["tokens"] == 40
    assert set(report["sampling"]) >= {"rate", "seconds a verified row"}
    json.dumps(report)


def test_perplexity_is_weighted_by_token() -> None:
    found = perplexity([{"sum": 3 * math.log(2), "tokens": 3}, {"sum": math.log(16), "tokens": 1}])
    assert found["tokens"] == 4
    assert found["perplexity"] == pytest.approx(2 ** (7 / 4))


def test_scores_are_the_models_own(tiny_llm: LLM) -> None:
    text = "a row of riders"
    ids = tiny_llm.tokenizer.encode(text)
    found = score(tiny_llm, {"prompts": [text, "", "x"], "answers": [text]}, runner())
    # the chance of each token, worked out one prefix at a time
    total, wanted = 0.0, Sampling(temperature=0.0, max_tokens=1, logprobs=300)
    for place in range(1, len(ids)):
        (completion,) = tiny_llm.generate([ids[:place]], wanted, speculation=False)
        total -= next(logprob for token, logprob in completion.logprobs[0].top if token == ids[place])
    assert found["prompts"]["tokens"] == len(ids) - 1
    assert found["prompts"]["perplexity"] == pytest.approx(math.exp(total / (len(ids) - 1)))
    assert found["all"]["tokens"] == 2 * (len(ids) - 1)


def test_the_perplexity_verb(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-m", str(model_folder), "--prompts", "3", "--max-tokens", "4", "--threads", "2", "--json"]
    assert main(["bench", "perplexity", *options, "--dtype", "int8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["perplexity"]) == ["fp32", "int8"]
    exact, rounded = (report["perplexity"][dtype] for dtype in ("fp32", "int8"))
    assert {kind: found["tokens"] for kind, found in exact.items()} == {
        kind: found["tokens"] for kind, found in rounded.items()
    }
    assert 0.9 < report["ratios"]["int8"]["all"] < 1.1
    assert main(["bench", "perplexity", *options, "--least", "1000000"]) == 1
    assert "--least wants 1000000" in capsys.readouterr().err


def test_the_step_verb(model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.step._PREFILL", 40)
    monkeypatch.setattr("paceline.bench.step.read_bandwidth", lambda threads, path: {"sum": 1e9})
    options = ["-m", str(model_folder), "--rows", "1,4", "--context", "64", "--steps", "3", "--rounds", "1"]
    assert main(["bench", "step", *options, "--dtype", "int8", "--dtype", "bf16", "--threads", "2"]) == 0
    out = capsys.readouterr().out
    assert "int8" in out
    assert "bf16" in out
    assert "small operators" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert main(["bench", "step", "--rows", "0"]) == 2
    assert "each must be 1 to 64" in capsys.readouterr().err
    assert main(["bench", "step", "--context", "a"]) == 2
    assert "takes numbers" in capsys.readouterr().err
