"""What is written is read back exactly, and has the names that the formats ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import DrafterError
from paceline.heads.formats import read_head
from paceline.heads.head import Provenance
from paceline.heads.make import random_head
from paceline.heads.write import write_eagle, write_eagle3, write_medusa
from paceline.targets.spec import from_hf_config
from tests.heads_files import LLAMA, eagle1, eagle3, medusa, medusa_vllm, nvidia, speculators, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from paceline.heads.head import Head

    Made = tuple[dict[str, Any], dict[str, Tensor]]
    Writer = Callable[[Head, Path], None]

TARGET = from_hf_config({**LLAMA, "num_hidden_layers": 9})


def speculators_layout(head: Head, folder: Path) -> None:
    write_eagle3(head, folder, "speculators")


def vllm_layout(head: Head, folder: Path) -> None:
    write_medusa(head, folder, "vllm")


def equal(found: Head, expected: Head) -> None:
    assert found.spec == expected.spec
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def scaled() -> Made:
    config, tensors = eagle3()
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    return config, {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("make", "writer"),
    [
        (eagle1, write_eagle),
        (lambda: eagle1(bias=False), write_eagle),
        (eagle3, write_eagle3),
        (eagle3, speculators_layout),
        (scaled, write_eagle3),
        (scaled, speculators_layout),
        (nvidia, write_eagle3),
        (lambda: eagle3(target_hidden=24), write_eagle3),
        (lambda: eagle3(target_hidden=24), speculators_layout),
        (lambda: eagle3(columns=40), speculators_layout),
        (lambda: speculators(fc_norm=True, norm_output=True), write_eagle3),
        (lambda: speculators(norm_before_fc=True, norm_before_residual=True), speculators_layout),
        (medusa, write_medusa),
        (medusa, vllm_layout),
        (lambda: medusa_vllm(bias=True), write_medusa),
        (lambda: medusa_vllm(columns=12), vllm_layout),
        (lambda: medusa_vllm(shared=True), vllm_layout),
    ],
)
def test_read_write_read(make: Callable[[], Made], writer: Writer, tmp_path: Path) -> None:
    head = read_head(str(write(tmp_path / "read", *make())))
    writer(head, tmp_path / "written")
    first = read_head(str(tmp_path / "written"))
    equal(first, head)
    writer(first, tmp_path / "again")
    for file in (tmp_path / "written").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize("kind", ["medusa", "medusa (vllm)", "eagle3 (speculators)"])
def test_the_target_that_it_was_trained_for_is_kept(kind: str, tmp_path: Path) -> None:
    head = random_head("eagle3" if kind.startswith("eagle3") else "medusa", TARGET, head="each")
    writer = {"medusa": write_medusa, "medusa (vllm)": vllm_layout}.get(kind, speculators_layout)
    writer(replace(head, provenance=Provenance("trained", None, "someone/target")), tmp_path)
    assert read_head(str(tmp_path)).provenance == Provenance(kind, str(tmp_path), "someone/target")


@pytest.mark.parametrize(
    ("make", "writer", "name"),
    [
        (eagle1, write_eagle, "model.safetensors"),
        (eagle3, write_eagle3, "model.safetensors"),
        (lambda: speculators(fc_norm=True, norm_output=True), speculators_layout, "model.safetensors"),
        (medusa, write_medusa, "medusa_lm_head.safetensors"),
        (lambda: medusa_vllm(columns=12), vllm_layout, "model.safetensors"),
    ],
)
def test_tensors_have_their_published_names(
    make: Callable[[], Made], writer: Writer, name: str, tmp_path: Path
) -> None:
    config, tensors = make()
    writer(read_head(str(write(tmp_path / "read", config, tensors))), tmp_path / "written")
    found = load_file(tmp_path / "written" / name)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    kept = (
        "architectures",
        "speculators_model_type",
        "draft_vocab_size",
        "truncated_vocab_size",
        "model_type",
        "fc_norm",
    )
    assert {key: written.get(key) for key in kept if key in config} == {k: config[k] for k in kept if k in config}


@pytest.mark.parametrize(
    ("kind", "options", "writer"),
    [
        ("eagle", {}, write_eagle),
        ("eagle3", {"draft_vocab_size": 12}, write_eagle3),
        ("eagle3", {"flags": ("fc_norm", "norm_output")}, speculators_layout),
        ("eagle3", {"layers": 2, "features": (1, 4)}, speculators_layout),
        ("medusa", {"head": "each", "layers": 2}, write_medusa),
        ("medusa", {"head": "target"}, vllm_layout),
        ("medusa", {"draft_vocab_size": 12}, vllm_layout),
    ],
)
def test_made_heads_are_read_back(kind: Any, options: dict[str, Any], writer: Writer, tmp_path: Path) -> None:
    head = random_head(kind, TARGET, 3, **options)
    writer(head, tmp_path)
    equal(read_head(str(tmp_path)), head)


def test_layouts_that_cannot_hold_a_head(tmp_path: Path) -> None:
    wrong: list[tuple[Writer, Head, str]] = [
        (write_medusa, random_head("medusa", TARGET), "write these heads as 'vllm'"),
        (write_eagle3, random_head("eagle3", TARGET, layers=2), "write it as 'speculators'"),
        (write_eagle3, random_head("eagle", TARGET), "kind 'eagle' cannot be written as one of kind 'eagle3'"),
        (write_eagle, random_head("medusa", TARGET), "cannot be written"),
        (write_medusa, random_head("eagle", TARGET), "cannot be written as Medusa heads"),
        (write_eagle, replace(random_head("eagle", TARGET), config={"rope_theta": 1e6}), "rotary frequencies"),
    ]
    for writer, head, message in wrong:
        with pytest.raises(DrafterError, match=message):
            writer(head, tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_a_folder_with_other_weights_is_left_alone(tmp_path: Path) -> None:
    head = random_head("medusa", TARGET, head="each")
    vllm_layout(head, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DrafterError, match=r"holds other weights \(model.safetensors\)"):
        write_medusa(head, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    vllm_layout(head, tmp_path)  # the same again is written over
