"""Packed files: what is in them, and that only whole ones appear; loading: convert once, then map."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import HubError, OptionError, ResourceError, TokenizerError, WeightsError
from paceline.folders import cache_folder
from paceline.targets import load as loading
from paceline.targets import packed
from paceline.targets.linear import pack_embedding, pack_linear
from paceline.targets.load import load, open_model
from paceline.targets.packed import convert, open_packed, packed_size
from paceline.targets.resources import physical_cores
from paceline.targets.spec import ModelSpec, from_hf_config
from paceline.targets.weights import FolderWeights
from tests.gguf_files import write_gguf
from tests.models import tiny
from tests.test_gguf_tokenizer import metadata, original

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paceline.targets.linear import Format

Memory = namedtuple("Memory", "available")
Usage = namedtuple("Usage", "free")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for models; compiled kernels are shared with all other tests."""
    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    own = tmp_path / "cache"
    own.mkdir()
    (own / "kernels").symlink_to(kernels)
    monkeypatch.setenv("PACELINE_CACHE", str(own))
    return own


def folder(path: Path, family: str = "llama", **changes: Any) -> Path:
    _, write = tiny(family, vocab_size=604, **changes)
    write(path)
    original("smollm").save(str(path / "tokenizer.json"))
    return path


def source_of(path: Path) -> tuple[ModelSpec, FolderWeights]:
    spec = from_hf_config(json.loads((path / "config.json").read_text()))
    return spec, FolderWeights(spec, path)


class Interrupted(FolderWeights):
    """Fails at the second layer."""

    error: BaseException = KeyboardInterrupt()

    def get(self, name: str) -> Tensor:
        if name == "layers.1.o":
            raise self.error
        return super().get(name)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
def test_contents(dtype: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_CHUNK", 32)  # several chunks, the last one short
    spec, source = source_of(folder(tmp_path, "qwen2"))
    steps: list[tuple[int, int]] = []
    path = tmp_path / "packed.safetensors"
    convert(spec, source, dtype, path, lambda done, total: steps.append((done, total)))
    assert steps == [(done, 5) for done in range(1, 6)]
    read, tensors = open_packed(path)
    assert read == spec
    expected = {f"embedding.{k}": v for k, v in pack_embedding(source.get("embedding"), dtype).items()}
    expected |= {f"head.{k}": v for k, v in pack_linear(source.get("embedding"), None, dtype).items()}
    expected["norm"] = source.get("norm")
    for layer in (f"layers.{index}" for index in range(3)):
        for name, parts in {"qkv": "qkv", "o": ["o"], "gate_up": ["gate", "up"], "down": ["down"]}.items():
            weight = torch.cat([source.get(f"{layer}.{part}") for part in parts])
            bias = torch.cat([source.get(f"{layer}.{part}.bias") for part in parts]) if name == "qkv" else None
            expected |= {f"{layer}.{name}.{k}": v for k, v in pack_linear(weight, bias, dtype).items()}
        expected |= {f"{layer}.{name}": source.get(f"{layer}.{name}") for name in ("attn_norm", "mlp_norm")}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].data_ptr() % 64 == 0
    assert abs(packed_size(spec, dtype) / sum(t.nbytes for t in tensors.values()) - 1) < 0.05
    assert load_file(path).keys() >= expected.keys()  # any reader of the container can look inside


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug"), OSError(28, "No space left")])
def test_nothing_is_left_of_a_conversion_that_fails(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = source_of(folder(tmp_path / "model"))
    monkeypatch.setattr(Interrupted, "error", error)
    source = Interrupted(spec, tmp_path / "model")
    (tmp_path / "out").mkdir()
    with pytest.raises(ResourceError if isinstance(error, OSError) else type(error)):
        convert(spec, source, "int8", tmp_path / "out" / "packed.safetensors")
    assert list((tmp_path / "out").iterdir()) == []


def test_interrupted_load_leaves_nothing_and_starts_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "FolderWeights", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_model(str(tmp_path / "model"))
    assert list((cache / "packed").iterdir()) == []
    assert open_model(str(tmp_path / "model")).path.parent == cache / "packed"


def test_what_killed_processes_left_is_removed(tmp_path: Path, cache: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned = cache / "packed" / f".model-int8-0.{ended.pid}"
    abandoned.mkdir(parents=True)
    (abandoned / "weights.safetensors").write_bytes(b"half")
    opened = open_model(str(folder(tmp_path / "model")))
    assert list((cache / "packed").iterdir()) == [opened.path]


def test_too_little_disk_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(folder(tmp_path / "model"))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: Usage(10_000_000 - 9_999_000))
        with pytest.raises(ResourceError, match=r"has 1000 bytes free, but .* [KM]iB are needed"):
            open_model(path)
    with monkeypatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: Memory(1000))
        with pytest.raises(ResourceError, match=r"needs .* [KM]iB of memory, but only 1000 bytes are free"):
            open_model(path)
    open_model(path)


def test_second_time_nothing_is_read_or_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(folder(tmp_path / "model"))
    first = open_model(path)
    monkeypatch.setattr(loading, "_convert", lambda *_: pytest.fail("converted again"))
    second = open_model(path)
    assert second.path == first.path
    assert second.spec == first.spec
    assert second.fingerprint == first.fingerprint
    assert torch.equal(second.tensors["head.data"], first.tensors["head.data"])
    assert second.tokenizer.tokenizer.to_str() == first.tokenizer.tokenizer.to_str()


def test_each_format_and_each_state_of_the_folder_has_its_own(tmp_path: Path, cache: Path) -> None:
    path = folder(tmp_path / "model")
    for dtype in ("int8", "bf16", None):
        open_model(str(path), dtype=dtype)
    assert len(list((cache / "packed").iterdir())) == 2
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((48,), 3.0)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}, path / "model.safetensors")
    assert open_model(str(path)).tensors["norm"].tolist() == [3.0] * 48


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, None], ids=["empty", "foreign", "cut"])
def test_broken_conversions_are_made_again(content: bytes | None, tmp_path: Path) -> None:
    path = str(folder(tmp_path / "model"))
    file = open_model(path).path / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(WeightsError, match="remove it"):
        open_packed(file)
    open_model(path)
    assert file.read_bytes() == whole


def test_another_version_of_the_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, source = source_of(folder(tmp_path))
    monkeypatch.setattr(packed, "PACKING_VERSION", 0)
    convert(spec, source, "int8", tmp_path / "old.safetensors")
    monkeypatch.undo()
    with pytest.raises(WeightsError, match="another version"):
        open_packed(tmp_path / "old.safetensors")


def test_another_process_was_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(folder(tmp_path / "model"))
    first = open_model(path)
    kept = tmp_path / "kept"
    shutil.copytree(first.path, kept)
    shutil.rmtree(first.path)

    def meanwhile(*arguments: Any) -> None:
        convert(*arguments)
        shutil.copytree(kept, first.path)

    monkeypatch.setattr(loading, "convert", meanwhile)
    assert open_model(path).path == first.path
    assert [entry.name for entry in first.path.parent.iterdir()] == [first.path.name]


def test_longrope_factors_are_chosen_by_the_limit_and_told(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "phi4")
    config = json.loads((path / "config.json").read_text())
    short, long = open_model(str(path), max_model_len=32), open_model(str(path))
    assert short.path == long.path
    assert short.spec == from_hf_config(config, 32)
    assert long.spec == from_hf_config(config)
    assert any("longrope: the factors for contexts up to 32 tokens" in note for note in short.notes)
    assert any("longrope: the factors for contexts of more than 32" in note for note in long.notes)


def test_longrope_from_gguf(tmp_path: Path) -> None:
    model, _ = tiny("phi4", vocab_size=600)
    described = metadata(original("gpt-4o"), "gpt-4o")
    path = write_gguf(model, "phi4", tmp_path / "phi.gguf", tokenizer=described)
    assert open_model(str(path), max_model_len=20).spec.max_positions == 32
    assert open_model(str(path)).spec.max_positions == 256


def test_load_gives_a_decoder(tmp_path: Path) -> None:
    loaded = load(str(folder(tmp_path / "model")), threads=1, max_model_len=64)
    assert loaded.decoder.vocab_size == 600  # of 604 rows; the rest is padding
    assert loaded.decoder.max_positions == 64
    assert {group.dtype for group in loaded.decoder.groups} == {torch.bfloat16}
    assert (loaded.name, loaded.dtype) == ("model", "int8")
    exact = load(str(tmp_path / "model"), dtype="fp32", threads=1)
    assert {group.dtype for group in exact.decoder.groups} == {torch.float32}
    assert {group.dtype for group in load(str(tmp_path / "model"), kv_dtype="fp32", threads=1).decoder.groups} == {
        torch.float32
    }


def test_tokenizer_with_more_ids_than_rows_is_told(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    tokenizer = original("smollm")
    tokenizer.add_special_tokens([f"<image{number}>" for number in range(5)])
    tokenizer.save(str(path / "tokenizer.json"))
    opened = open_model(str(path))
    assert opened.vocab_size == 604
    assert any("605 ids, the model 604" in note for note in opened.notes)


def test_options_out_of_range(tmp_path: Path) -> None:
    path = str(folder(tmp_path / "model"))
    with pytest.raises(OptionError, match="dtype 'int3' is unknown"):
        load(path, dtype="int3")
    with pytest.raises(OptionError, match="kv_dtype 'int8' is unknown"):
        load(path, kv_dtype="int8")
    with pytest.raises(OptionError, match="max_model_len is 257, but model has at most 256"):
        load(path, max_model_len=257)


def test_folder_that_lacks_parts(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="tokenizer"):
        open_model(str(path))
    (path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="not readable as JSON"):
        open_model(str(path))
    (path / "config.json").unlink()
    with pytest.raises(HubError, match=r"no config\.json"):
        open_model(str(path))


def test_warm_start_imports_nothing_slow(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    open_model(str(path))
    code = (
        "import sys; from paceline.targets.load import load; "
        f"load({str(path)!r}, threads=1); "
        "slow = {'transformers', 'gguf', 'huggingface_hub', 'rich.progress'} & set(sys.modules); "
        "sys.exit(', '.join(slow) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_physical_cores() -> None:
    assert 1 <= physical_cores() <= 4096
