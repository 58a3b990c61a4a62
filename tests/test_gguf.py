"""GGUF files: weights, specification, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch

from paceline.errors import UnsupportedModelError, WeightsError
from paceline.targets.gguf import GgufFile
from tests.gguf_files import write_gguf
from tests.models import GGUF_FAMILIES, VOCABULARY, expected_logits, plain_logits, tiny

if TYPE_CHECKING:
    from pathlib import Path

Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_plain_pass_equals_transformers(family: str, tmp_path: Path) -> None:
    # the format has no key for Gemma's query scale: it is that of the head size
    changes = {"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
    model, _ = tiny(family, **changes)
    file = GgufFile(write_gguf(model, family, tmp_path / "model.gguf"))
    ids = torch.randint(0, VOCABULARY, (60,), generator=torch.Generator().manual_seed(1))
    found = plain_logits(file.spec, file, ids)
    torch.testing.assert_close(found, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_short_longrope_factors(tmp_path: Path) -> None:
    model, _ = tiny("phi4")
    file = GgufFile(write_gguf(model, "phi4", tmp_path / "model.gguf"))
    assert file.longrope_original == 32
    ids = torch.arange(32)
    found = plain_logits(file.spec_for(32), file, ids)
    torch.testing.assert_close(found, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_every_type_is_dequantized(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    model, _ = tiny("qwen3", hidden_size=64, intermediate_size=96)
    file = GgufFile(write_gguf(model, "qwen3", tmp_path / "model.gguf", kind))
    stored = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    found = file.get("layers.1.down")
    assert found.shape == stored.shape
    error = (found - stored).norm() / stored.norm()
    assert error < {Kind.F16: 1e-3, Kind.BF16: 1e-2, Kind.Q8_0: 1e-2}.get(kind, 0.12)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.TQ2_0])
def test_types_that_the_package_only_reads(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    model, _ = tiny("qwen3", num_hidden_layers=1, intermediate_size=256)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (48, size), dtype=np.uint8)  # small enough for finite scales
    path = write_gguf(model, "qwen3", tmp_path / "model.gguf", raw={"blk.0.ffn_down.weight": (raw, kind)})
    found = GgufFile(path).get("layers.0.down")
    assert found.shape == (48, 256)
    assert found.isfinite().all()
    np.testing.assert_array_equal(found.numpy(), gguf.dequantize(raw, kind))


def test_shared_or_separate_heads(tmp_path: Path) -> None:
    for tied in (True, False):
        model, _ = tiny("qwen2", tie_word_embeddings=tied)
        file = GgufFile(write_gguf(model, "qwen2", tmp_path / f"{tied}.gguf"))
        assert file.spec.tied is tied
        assert ("head" in file.names()) is not tied


def test_every_cut_is_one_clear_error(tmp_path: Path) -> None:
    model, _ = tiny("llama", num_hidden_layers=1)
    path = write_gguf(model, "llama", tmp_path / "model.gguf")
    whole = path.read_bytes()
    for length in [0, 3, 4, 9, 30, 200, 700, 1000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"not a whole GGUF file .*fetch it again"):
            GgufFile(path)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    noise = np.random.default_rng(0).bytes(5000)
    for content in (noise, b"GGUF" + noise, b"GGUF\x03\0\0\0" + noise, b"PK\3\4" + noise):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="not a whole GGUF file"):
            GgufFile(path)


def test_missing_tensor(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    path = write_gguf(model, "llama", tmp_path / "model.gguf", drop="blk.1.ffn_up.weight")
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight is missing"):
        GgufFile(path)


def test_surplus_tensor(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    model.model.layers[0].mlp.gate_proj.bias = torch.nn.Parameter(torch.zeros(80))
    with pytest.raises(WeightsError, match=r"nothing accounts for the tensor blk\.0\.ffn_gate\.bias"):
        GgufFile(write_gguf(model, "llama", tmp_path / "model.gguf"))


def test_experts_and_other_architectures_are_refused(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="expert_count = 8"):
        GgufFile(write_gguf(model, "llama", tmp_path / "experts.gguf", extra={"expert_count": 8}))
    writer = gguf.GGUFWriter(str(tmp_path / "mamba.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported"):
        GgufFile(tmp_path / "mamba.gguf")
