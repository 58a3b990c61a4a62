"""Weights of folders: shards, fused tensors, what is not for text, and every broken kind of file."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.errors import ModelError, WeightsError
from paceline.targets.spec import ModelSpec, from_hf_config
from paceline.targets.weights import FolderWeights, folder_fingerprint
from tests.models import VOCABULARY, expected_logits, plain_logits, tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def spec_of(folder: Path) -> ModelSpec:
    return from_hf_config(json.loads((folder / "config.json").read_text()))


def opened(folder: Path, **options: Any) -> FolderWeights:
    return FolderWeights(spec_of(folder), folder, **options)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Rewrite the folder's one file of weights."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def equal_logits(model: Any, folder: Path) -> None:
    ids = torch.arange(40) % VOCABULARY
    found = plain_logits(spec_of(folder), opened(folder), ids)
    torch.testing.assert_close(found, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_shards(family: str, tmp_path: Path) -> None:
    model, _ = tiny(family)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    equal_logits(model, tmp_path)
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(WeightsError, match=f"the shard {missing.name} is missing"):
        opened(tmp_path)


def test_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["model.norm.weight"] = "../other/model.safetensors"
    index.write_text(json.dumps(names))
    with pytest.raises(WeightsError, match="outside its folder"):
        opened(tmp_path)
    index.write_text("{")
    with pytest.raises(WeightsError, match="not a readable index"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(name: str, zipped: bool, tmp_path: Path) -> None:
    model, write = tiny("qwen3")
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / name, _use_new_zipfile_serialization=zipped)
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    equal_logits(model, tmp_path)


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_torch_file_is_executed(zipped: bool, tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    target = tmp_path / "executed"
    path = tmp_path / "pytorch_model.bin"
    if zipped:
        torch.save({"a": Hostile(target)}, path)
    else:
        path.write_bytes(pickle.dumps({"a": Hostile(target)}))
    with pytest.raises(WeightsError, match="cannot be read as plain tensors"):
        opened(tmp_path)
    assert not target.exists()


def test_tables_of_something_else_are_refused(tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"state_dict": {}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="does not hold a table of tensors"):
        opened(tmp_path)


def test_multimodal_checkpoint(tmp_path: Path) -> None:
    text, _ = tiny("gemma3")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        architectures=["Gemma3ForConditionalGeneration"],
    )
    whole = transformers.Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any("vision_tower" in name for name in stored)
    assert any(name.startswith(("language_model.", "model.language_model.")) for name in stored)
    equal_logits(text, tmp_path)

    def newer(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("language_model.model."):
                tensors[name.replace("language_model.model.", "model.language_model.")] = tensors.pop(name)

    equal_logits(text, changed(tmp_path, newer))


def test_tied_head_stored_twice(tmp_path: Path) -> None:
    model, write = tiny("llama")
    write(tmp_path)

    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    equal_logits(model, changed(tmp_path, twice))

    def differs(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][3, 3] += 1

    with pytest.raises(WeightsError, match=r"lm_head\.weight is stored and differs"):
        opened(changed(tmp_path, differs))


def test_tensors_of_a_drafter_are_accounted_for(tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)
    changed(tmp_path, lambda tensors: tensors.update({"medusa_head.0.weight": torch.ones(2)}))
    with pytest.raises(WeightsError, match=r"nothing accounts for the tensor medusa_head\.0\.weight"):
        opened(tmp_path)
    assert "norm" in opened(tmp_path, owned=("medusa_head.",)).names()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "up_proj.weight is missing; fetch"),
        ("model.norm.weight", torch.ones(47), r"shape \[47\], but the configuration asks for \[48\]"),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(48, 48), r"asks for \[16, 48\]"),
        ("model.layers.3.mlp.up_proj.weight", torch.ones(80, 48), "nothing accounts for the tensor"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(48), "nothing accounts for the tensor"),
        ("model.embed_tokens.weight", None, "found 0 tensors named embed_tokens"),
        ("model.norm.weight", torch.ones(48, dtype=torch.int8), "stored as I8"),
        ("model.norm.weight", torch.ones(48, dtype=torch.float8_e4m3fn), "stored as F8_E4M3"),
    ],
)
def test_wrong_tensors(name: str, tensor: Tensor | None, words: str, tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor

    def add(tensors: dict[str, Tensor]) -> None:
        assert tensor is not None
        tensors[name] = tensor

    known = name in load_file(tmp_path / "model.safetensors")
    changed(tmp_path, change if known else add)
    with pytest.raises(WeightsError, match=words):
        opened(tmp_path)


def test_half_a_fused_tensor(tmp_path: Path) -> None:
    _, write = tiny("phi3")
    write(tmp_path)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    changed(tmp_path, lambda tensors: tensors.update({name: tensors[name][:48]}))
    with pytest.raises(WeightsError, match=r"qkv_proj.* has the shape \[48, 48\]"):
        opened(tmp_path)


def test_cut_and_foreign_safetensors(tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    contents = [whole[:length] for length in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1)]
    contents += [b"\xff" * 4000, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"is broken or cut .*fetch it again"):
            opened(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="has no weights"):
        opened(tmp_path)


def test_several_files_without_index(tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    assert opened(tmp_path).names()
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(WeightsError, match="no index"):
        opened(tmp_path)


def test_half_precision_is_read_as_stored(tmp_path: Path) -> None:
    model, _ = tiny("gemma2")
    model.bfloat16().save_pretrained(tmp_path)
    weights = opened(tmp_path)
    assert weights.get("layers.0.q").dtype == torch.bfloat16
    stored = model.state_dict()["model.layers.0.input_layernorm.weight"]
    assert torch.equal(weights.get("layers.0.attn_norm"), stored.float() + 1)


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    _, write = tiny("llama")
    write(tmp_path)
    before = folder_fingerprint(tmp_path)
    assert folder_fingerprint(tmp_path) == before
    changed(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48)}))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert folder_fingerprint(tmp_path) != before


def test_all_are_model_errors() -> None:
    assert issubclass(WeightsError, ModelError)
