"""Every family, from folders and from GGUF files, through the packed form and the decoder, against transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from paceline.batch import Batch
from paceline.pages import Slab, pages_for
from paceline.targets.decoder import Decoder
from paceline.targets.gguf import GgufFile
from paceline.targets.packed import convert, open_packed
from paceline.targets.spec import from_hf_config
from paceline.targets.weights import FolderWeights
from tests.gguf_files import write_gguf
from tests.models import FAMILIES, GGUF_FAMILIES, VOCABULARY, expected_logits, tiny

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from paceline.targets.linear import Format
    from paceline.targets.spec import ModelSpec
    from paceline.targets.weights import WeightSource

LENGTH = 60
PIECES = (1, 17, 5, 1, 30, 6)


def text() -> Tensor:
    return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))


def packed_decoder(
    spec: ModelSpec, source: WeightSource, folder: Path, dtype: Format = "fp32", limit: int | None = None
) -> Decoder:
    convert(spec, source, dtype, folder / "packed.safetensors")
    read, tensors = open_packed(folder / "packed.safetensors", limit)
    assert read == spec
    return Decoder(read, tensors, dtype, threads=2)


def logits_in_pieces(decoder: Decoder, ids: Tensor, pieces: Sequence[int]) -> Tensor:
    """Logits float32 [tokens, vocabulary] of one text whose pieces are passes of their own."""
    count = pages_for(len(ids))
    slabs = [Slab.allocate(group, count) for group in decoder.groups]
    table = torch.arange(count - 1, -1, -1, dtype=torch.int32)[None]  # the order of pages must not matter
    found, first = [], 0
    for rows in pieces:
        places = torch.arange(first, first + rows, dtype=torch.int32)
        batch = Batch(
            ids=ids[first : first + rows],
            positions=places,
            starts=torch.tensor([0, rows], dtype=torch.int32),
            storage=places,
            context=places + 1,
            visible=torch.zeros(rows, dtype=torch.int64),
            tables=tuple(table for _ in slabs),
            score=torch.arange(rows),
        )
        found.append(decoder.forward(batch, slabs).logits.clone())
        first += rows
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_equals_transformers(family: str, tmp_path: Path) -> None:
    model, write = tiny(family)
    spec = from_hf_config(json.loads((write(tmp_path) / "config.json").read_text()))
    decoder = packed_decoder(spec, FolderWeights(spec, tmp_path), tmp_path)
    found = logits_in_pieces(decoder, text(), PIECES)
    torch.testing.assert_close(found, expected_logits(model, text()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_equals_transformers(family: str, tmp_path: Path) -> None:
    # the format has no key for Gemma's query scale: it is that of the head size
    changes = {"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
    model, _ = tiny(family, **changes)
    file = GgufFile(write_gguf(model, family, tmp_path / "model.gguf"))
    decoder = packed_decoder(file.spec, file, tmp_path)
    found = logits_in_pieces(decoder, text(), PIECES)
    torch.testing.assert_close(found, expected_logits(model, text()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_do_not_change_a_bit(family: str, tmp_path: Path) -> None:
    _, write = tiny(family)
    spec = from_hf_config(json.loads((write(tmp_path) / "config.json").read_text()))
    for dtype in ("int8", "bf16"):
        decoder = packed_decoder(spec, FolderWeights(spec, tmp_path), tmp_path, dtype)
        whole = logits_in_pieces(decoder, text(), [LENGTH])
        assert torch.equal(logits_in_pieces(decoder, text(), PIECES), whole)


def test_int8_and_bf16_stay_close(tmp_path: Path) -> None:
    model, write = tiny("qwen3")
    spec = from_hf_config(json.loads((write(tmp_path) / "config.json").read_text()))
    expected = expected_logits(model, text())
    for dtype in ("int8", "bf16"):
        decoder = packed_decoder(spec, FolderWeights(spec, tmp_path), tmp_path, dtype)
        found = logits_in_pieces(decoder, text(), PIECES)
        assert (found - expected).norm() / expected.norm() < 0.05
