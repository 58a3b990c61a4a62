"""``paceline inspect`` on published heads, alone and beside a target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from paceline.cli import main
from paceline.heads.make import random_head
from paceline.heads.write import write_eagle3, write_medusa
from paceline.targets.spec import from_hf_config
from tests.heads_files import eagle1, eagle3, medusa, speculators, write
from tests.test_cli_models import folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def test_a_head_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "head", *speculators(fc_norm=True, norm_output=True))
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {name.strip(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    assert shown["method"] == "eagle3"
    assert shown["layout"] == "eagle3 (speculators)"
    assert shown["trained for"] == "someone/target-8b"
    assert shown["flags"] == "fc_norm, norm_output"
    assert shown["features"] == "2, n // 2, n - 3 of n"
    assert shown["vocabulary"] == "10 of 40 ids"
    assert main(["inspect", str(path / "model.safetensors"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["hidden"], facts["vocabulary"]) == (16, {"ids": 40, "drafted": 10})


def test_medusa_says_what_its_configuration_has_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(write(tmp_path, *medusa(), "medusa_lm_head.pt"))]) == 0
    out = capsys.readouterr().out
    assert "medusa_num_heads is 2 in its configuration; the file has 3, which counts" in out
    assert "one in each head" in out


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_pair_that_fits(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder(tmp_path / "target", "llama")
    spec = from_hf_config(json.loads((target / "config.json").read_text()))
    if kind == "medusa":
        write_medusa(random_head("medusa", spec, head="each"), tmp_path / "head")
    else:
        write_eagle3(random_head("eagle3", spec, draft_vocab_size=50), tmp_path / "head")
    assert main(["inspect", str(target), str(tmp_path / "head")]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert "as its draft head:" in out
    assert "pass  hidden size: it reads states of" in out
    assert main(["inspect", str(target), str(tmp_path / "head"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["head"]["method"] == kind
    assert all(check["passed"] for check in shown["checks"])


def test_a_pair_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder(tmp_path / "target", "llama")
    assert main(["inspect", str(target), str(write(tmp_path / "other", *eagle3()))]) == 1
    out = capsys.readouterr().out
    assert "FAIL  hidden size: it reads states of 16 values" in out
    assert "take a head that was trained for this target, or train one" in out
    config, tensors = eagle1()
    del tensors["layers.0.mlp.up_proj.weight"]
    assert main(["inspect", str(target), str(write(tmp_path / "broken", config, tensors))]) == 1
    assert "FAIL  it loads: " in capsys.readouterr().out
    (tmp_path / "hostile.pt").write_bytes(b"not tensors")
    assert main(["inspect", str(target), str(tmp_path / "hostile.pt")]) == 1
    assert "cannot be read as plain tensors" in capsys.readouterr().out


def test_a_head_is_no_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = str(write(tmp_path / "head", *eagle3()))
    assert main(["inspect", head, head]) == 2
    assert "name the target first, then the head" in capsys.readouterr().err
