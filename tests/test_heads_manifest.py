"""What a head was trained for is written beside it, and a target that is another is told apart."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.cli import main
from paceline.errors import DrafterError, ResourceError, WeightsError
from paceline.heads.formats import read_head
from paceline.heads.make import random_head
from paceline.heads.manifest import MANIFEST, Manifest
from paceline.heads.write import write_eagle3, write_medusa
from paceline.kernels import PacelineWarning
from paceline.replacing import replaced
from paceline.sampling import Sampling
from paceline.targets.hub import _wanted
from paceline.targets.spec import from_hf_config
from tests.bench_models import model_folder, tiny_llm
from tests.heads_files import LLAMA

if TYPE_CHECKING:
    from paceline.heads.head import Head
    from paceline.llm import LLM

__all__ = ["model_folder", "tiny_llm"]  # fixtures

TARGET = from_hf_config({**LLAMA, "num_hidden_layers": 9})
MADE = Manifest("someone/target", "0123", "4567", (2, 4, 6), 300, {"seed": 5, "command": ["train", "eagle3"]})


def eagle(seed: int = 0, manifest: Manifest | None = MADE) -> Head:
    return replace(random_head("eagle3", TARGET, seed), manifest=manifest)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_manifest_is_read_back(layout: Any, tmp_path: Path) -> None:
    write_eagle3(eagle(), tmp_path, layout)
    assert read_head(str(tmp_path)).manifest == MADE
    assert read_head(str(tmp_path / "model.safetensors")).manifest == MADE
    write_eagle3(eagle(manifest=None), tmp_path, layout)
    assert read_head(str(tmp_path)).manifest is None, "that of another head is gone"


def test_medusa_heads_have_one_too(tmp_path: Path) -> None:
    made = replace(MADE, layers=(9,), template=None)
    write_medusa(replace(random_head("medusa", TARGET), manifest=made), tmp_path, "vllm")
    assert read_head(str(tmp_path)).manifest == made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": None}, "'target'"),
        ({"tokenizer": 5}, "'tokenizer'"),
        ({"layers": "2"}, "'layers'"),
        ({"layers": [2, 4, True]}, "whole numbers"),
        ({"layers": [2, 4, 7]}, r"\[2, 4, 6\].*\[2, 4, 7\]"),
        ({"trained_length": 0}, "at least 1"),
        ({"trained_length": True}, "'trained_length'"),
        ({"training": []}, "'training'"),
        ({"more": 1}, "'more'"),
    ],
)
def test_a_manifest_that_is_none_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_eagle3(eagle(), tmp_path)
    fields = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(fields | changes))
    with pytest.raises(WeightsError, match=said):
        read_head(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_broken_manifest_is_refused(text: str, tmp_path: Path) -> None:
    write_eagle3(eagle(), tmp_path)
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(WeightsError, match=MANIFEST):
        read_head(str(tmp_path))


def test_a_manifest_is_fetched_with_its_head() -> None:
    files = {"config.json": 1, "model.safetensors": 2, MANIFEST: 3, "README.md": 4}
    assert _wanted("a/b", files).keys() == files.keys() - {"README.md"}


def written(llm: LLM, folder: Path, **changes: Any) -> str:
    """A random head for the model, with a manifest that says so but for ``changes``."""
    parts = llm.loaded.tokenizer
    assert parts.template_digest is not None
    fits = Manifest(llm.loaded.name, parts.digest, parts.template_digest, (0, 1, 2), 64)
    head = random_head("eagle3", llm.loaded.spec, seed=7, features=(0, 1, 2))
    write_eagle3(replace(head, manifest=replace(fits, **changes)), folder)
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "warned"), [({}, False), ({"template": "another"}, True), ({"template": None}, True)]
)
def test_another_template_is_warned_of(tiny_llm: LLM, changes: dict[str, Any], warned: bool, tmp_path: Path) -> None:
    speculation = {"method": "eagle3", "model": written(tiny_llm, tmp_path, **changes)}
    with pytest.warns(PacelineWarning) as caught:  # a random head is warned of in any case
        tiny_llm.generate("wheel", Sampling(max_tokens=2), speculation=speculation)
    texts = [str(warning.message) for warning in caught]
    assert any("of 32 tokens" in text for text in texts)
    assert any("chat template is not that of" in text for text in texts) == warned


def test_another_tokenizer_is_refused(tiny_llm: LLM, tmp_path: Path) -> None:
    speculation = {"method": "eagle3", "model": written(tiny_llm, tmp_path, tokenizer="another")}
    with pytest.raises(DrafterError, match=r"tokenizer is not that of .*, for which it was trained; .* train one"):
        tiny_llm.generate("wheel", Sampling(max_tokens=2), speculation=speculation)


def test_inspect_shows_what_a_head_was_trained_for(
    tiny_llm: LLM, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = written(tiny_llm, tmp_path, tokenizer="another", template="another")
    assert main(["inspect", name]) == 0
    assert "trained length:     64" in capsys.readouterr().out
    assert main(["inspect", str(model_folder), name]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  tokenizer: not that of" in shown
    assert "pass  chat template: not that of" in shown


def test_digests_tell_tokenizers_and_templates_apart(tiny_llm: LLM) -> None:
    parts = tiny_llm.loaded.tokenizer
    assert replace(parts, chat_template=None).digest == parts.digest
    assert replace(parts, chat_template=None).template_digest is None
    assert replace(parts, chat_template="{{ messages }}").template_digest != parts.template_digest
    assert replace(parts, special_tokens={"eos_token": "x"}).template_digest != parts.template_digest
    other = type(parts.tokenizer).from_str(parts.tokenizer.to_str())
    assert replace(parts, tokenizer=other).digest == parts.digest
    other.add_tokens(["<more>"])
    assert replace(parts, tokenizer=other).digest != parts.digest


def test_a_head_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_eagle3(eagle(1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.heads.write.save_file", full)
    with pytest.raises(ResourceError, match=r"No space left on device.*what was there before stays"):
        write_eagle3(eagle(2), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        write_eagle3(eagle(), tmp_path / "file" / "head")


class _Killed(BaseException):
    pass


def test_whenever_the_writer_is_killed_what_is_there_is_of_one_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From some operation on none is done, not even those that tidy up."""
    steps = 0
    limit = 0

    def mortal(own: Any) -> Any:
        def run(*given: Any, **more: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > limit:
                raise _Killed
            return own(*given, **more)

        return run

    seen = set()
    while "new" not in seen:
        for name in ("config", "weights"):
            (tmp_path / name).write_text("old")
        steps = 0
        with monkeypatch.context() as patch:
            for kind, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "write_text")):
                patch.setattr(kind, name, mortal(getattr(kind, name)))
            with suppress(_Killed), replaced(tmp_path / "config", tmp_path / "weights") as parts:
                for part in parts:
                    part.write_text("new")
        texts = [path.read_text() if (path := tmp_path / name).exists() else None for name in ("config", "weights")]
        assert texts[1] in (None, texts[0])
        seen.add(texts[1])
        limit += 1
    assert seen == {"old", None, "new"}
    assert limit > 6


def test_one_file_is_replaced_in_one_stroke(tmp_path: Path) -> None:
    path = tmp_path / "made" / "state"
    for text in ("one", "two"):
        with replaced(path) as (part,):
            part.write_text(text)
            assert not path.exists() or path.read_text() == "one"
        assert path.read_text() == text
    with suppress(KeyboardInterrupt), replaced(path) as (part,):
        part.write_text("three")
        raise KeyboardInterrupt
    assert [(found.name, found.read_text()) for found in path.parent.iterdir()] == [("state", "two")]


def test_heads_are_trained_for_one_length_and_kept_exactly(tmp_path: Path) -> None:
    head = eagle(3)
    rounded = replace(head, tensors={k: t.bfloat16() if t.is_floating_point() else t for k, t in head.tensors.items()})
    write_eagle3(rounded, tmp_path)
    found = read_head(str(tmp_path))
    assert found.manifest is not None
    assert found.manifest.trained_length == 300
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in rounded.tensors.items())
