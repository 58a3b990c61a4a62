"""The command line with real models: the default one, and tiny ones in folders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models as tokenizer_models

import paceline.cli.model
from paceline.cli import main
from paceline.llm import LLM
from paceline.sampling import Sampling
from tests.models import VOCABULARY, tiny

if TYPE_CHECKING:
    from pathlib import Path

REPEAT = "Repeat this sentence three times: The lazy dog sleeps in the sun all day long."


@pytest.fixture
def default(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The default model, already loaded, whatever options are given."""
    monkeypatch.setattr(paceline.cli.model, "LLM", lambda model, **options: llm)
    return llm


def folder(path: Path, family: str, first: str = "a") -> Path:
    """A tiny model with a tokenizer of single letters, the first of them chosen."""
    path.mkdir()
    tiny(family)[1](path)
    letters = {first: 0} | {chr(0x4E00 + n): n for n in range(1, VOCABULARY)}
    backend = Backend(tokenizer_models.WordLevel(letters, unk_token=first))
    backend.decoder = decoders.Fuse()
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, for converted tiny models."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_rule_that_does_not_promise_the_tokens_is_not_blamed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under ratio the text is another than without drafts, of the same distribution; that is no failure."""
    arguments = [
        "generate",
        "ab",
        "--compare",
        "-m",
        str(folder(tmp_path / "model", "llama")),
        "--seed",
        "1",
        "--temperature",
        "1",
    ]
    options = [
        "--method",
        "draft_model",
        "--draft-layers",
        "1",
        "--max-tokens",
        "24",
        "--ignore-eos",
        "--compare",
        "-q",
    ]
    assert main([*arguments, *options, "--rule", "ratio"]) == 0
    assert capsys.readouterr().out.endswith("no, nor does this rule promise it\n")
    assert main([*arguments, *options]) == 0
    assert capsys.readouterr().out.endswith("yes\n")


def test_compare_on_the_default_model(default: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--chat", REPEAT, "--max-tokens", "16", "--temperature", "0.8", "-q"]
    assert main([*arguments, "--compare", "--json", "--origins"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["comparison"]["identical"] is True
    assert shown["plain"]["token_ids"] == shown["token_ids"]
    assert shown["plain"]["speculation"]["drafted"] == 0
    assert shown["speculation"]["seed"] == shown["plain"]["speculation"]["seed"]
    assert len(shown["speculation"]["origins"]) == len(shown["token_ids"])
    assert default.tokenizer.decode(shown["token_ids"]) == shown["text"]


def test_logprobs_of_the_default_model(default: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "One two", "--max-tokens", "3", "--logprobs", "2", "--json", "-q"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [entry["token_id"] for entry in shown["logprobs"]] == shown["token_ids"]
    assert [len(entry["top"]) for entry in shown["logprobs"]] == [2, 2, 2]


def test_calls_draft_as_the_engine_was_set_up_to(cache: Path, tmp_path: Path) -> None:
    plain = LLM(str(folder(tmp_path / "model", "llama")), speculation=False, cache_memory=1 << 20)
    assert plain.generate([1, 2], Sampling(max_tokens=2)).record.method == "none"
    assert plain.generate([1, 2], Sampling(max_tokens=2), speculation=True).record.method != "none"


def test_inspect_the_default_model(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "smollm2-135m", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["family"], shown["layers"], shown["hidden"], shown["eos_ids"]) == ("llama", 30, 576, [2])
    assert shown["vocabulary"] == {"rows": 49152, "tokens": 49152}
    assert shown["chat_template"] is True


def test_inspect_says_what_a_pair_is(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder(tmp_path / "target", "qwen3")
    same, other = folder(tmp_path / "same", "llama"), folder(tmp_path / "other", "llama", first="b")
    assert main(["inspect", str(target), str(same)]) == 0
    out = capsys.readouterr().out
    assert "pass  tokens: 97 ids" in out
    assert "FAIL" not in out
    assert main(["inspect", str(target), str(other)]) == 0
    out = capsys.readouterr().out
    differing = "1 of 97 ids differ, the first is 0: 'a' in the target, 'b' in the drafter"
    assert f"pass  tokens: {differing}: drafts go through the vocabulary '" in out
    assert main(["inspect", str(same), str(target), "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks if not check["passed"]] == ["smaller"]
    assert main(["inspect", str(target), str(tmp_path / "missing")]) == 1
    assert "FAIL  it loads" in capsys.readouterr().out


def test_inspect_shows_windows(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder(tmp_path / "windows", "gemma2"))]) == 0
    out = capsys.readouterr().out
    assert "2 layers see 8 tokens" in out
    assert f"converted:          {cache}" in out


def test_pull_converts_once(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "model", "llama")
    assert main(["pull", str(path), "--dtype", "fp32", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["source"] == str(path)
    assert shown["dtype"] == "fp32"
    assert shown["converted"].startswith(str(cache))
    assert main(["pull", str(path), "--dtype", "fp32"]) == 0
    assert shown["converted"] in capsys.readouterr().out


def test_what_cannot_be_pulled_is_one_sentence(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"GGUF, or so it says")
    for arguments in (["--from", str(foreign)], [str(foreign)], [str(tmp_path)], ["--dtype", "int3", str(tmp_path)]):
        assert main(["pull", *arguments]) in (1, 2)
        err = capsys.readouterr().err.splitlines()
        assert err[-1].startswith("paceline: ")
        assert "should not happen" not in err[-1]
        assert len(err) == 2


def test_a_tiny_model_generates_from_its_folder(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "model", "llama")
    arguments = ["generate", "-m", str(path), "a", "--max-tokens", "6", "--json", "--dtype", "fp32"]
    assert main([*arguments, "--cache-memory", "1M", "--draft-layers", "1", "--threads", "1"]) == 0
    captured = capsys.readouterr()
    assert "converted weights: " in captured.err
    shown = json.loads(captured.out)
    assert shown["completion_tokens"] == 6
    assert shown["speculation"]["method"] == "cascade"
    assert main([*arguments, "--no-speculation"]) == 0
    captured = capsys.readouterr()
    assert "convert" not in captured.err
    record = json.loads(captured.out)["speculation"]
    assert (record["method"], record["drafted"]) == ("none", 0)
    assert main([*arguments, "--chat"]) == 1
    assert "no chat template" in capsys.readouterr().err
    assert main([*arguments, "--max-model-len", "100000"]) == 2
    assert "--max-model-len is 100000" in capsys.readouterr().err
