"""Published Medusa heads of both layouts: what is read, and that it computes what the paper says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F

from paceline.errors import DrafterError
from paceline.heads.formats import read_head
from paceline.heads.medusa import MedusaNetwork
from paceline.heads.spec import MedusaSpec
from tests.heads_files import HIDDEN, IDS, Weights, medusa, medusa_vllm, write

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paceline.heads.head import Head

STATES = Weights(50)(5, HIDDEN) * 2
HEAD = Weights(51)(IDS, HIDDEN)


def spec_of(head: Head) -> MedusaSpec:
    assert isinstance(head.spec, MedusaSpec)
    return head.spec


def logits(head: Head) -> Tensor:
    found: Tensor = MedusaNetwork(spec_of(head), head.tensors, head=HEAD)(STATES).detach()
    return found


def block(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    inner = x @ weight.T + (0 if bias is None else bias)
    return x + inner * inner.sigmoid()


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_repository_layout(name: str, layers: int, tmp_path: Path) -> None:
    config, tensors = medusa(layers=layers)
    head = read_head(str(write(tmp_path, config, tensors, name)))
    assert head.spec == MedusaSpec(HIDDEN, IDS, IDS, 3, layers)
    assert head.notes == ("medusa_num_heads is 2 in its configuration; the file has 3, which counts",)
    assert (head.provenance.dialect, head.provenance.target) == ("medusa", "someone/target-7b")
    expected = []
    for number in range(3):
        x = STATES
        for layer in range(layers):
            x = block(x, tensors[f"{number}.{layer}.linear.weight"], tensors[f"{number}.{layer}.linear.bias"])
        expected.append(x @ tensors[f"{number}.{layers}.weight"].T)
    torch.testing.assert_close(logits(head), torch.stack(expected))
    assert torch.equal(logits(read_head(str(tmp_path / name))), logits(head))  # the file alone


def test_without_a_configuration_and_with_a_prefix(tmp_path: Path) -> None:
    _, tensors = medusa()
    expected = logits(read_head(str(write(tmp_path / "plain", None, tensors, "medusa_lm_head.pt"))))
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    found = logits(read_head(str(write(tmp_path / "prefixed", None, prefixed))))
    assert torch.equal(found, expected)


def test_blocks_that_share_their_weights_may_be_stored_once(tmp_path: Path) -> None:
    config, tensors = medusa(layers=2)
    for number in range(3):
        for part in ("weight", "bias"):
            tensors[f"{number}.1.linear.{part}"] = tensors[f"{number}.0.linear.{part}"]
    expected = logits(read_head(str(write(tmp_path / "twice", config, tensors, "medusa_lm_head.pt"))))
    once = {name: tensor for name, tensor in tensors.items() if ".1.linear" not in name}
    head = read_head(str(write(tmp_path / "once", config, once, "medusa_lm_head.pt")))
    assert torch.equal(logits(head), expected)
    assert "its residual blocks share their weights" in head.notes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm(prefix: str, bias: bool, tmp_path: Path) -> None:
    config, tensors = medusa_vllm(prefix=prefix, bias=bias)
    head = read_head(str(write(tmp_path, config, tensors)))
    assert head.spec == MedusaSpec(HIDDEN, IDS, IDS, 2, 2, bias)
    expected = []
    for number in range(2):
        x = STATES
        for layer in range(2):
            stem = f"{prefix}blocks.{number}.layers.{layer}"
            x = block(x, tensors[f"{stem}.weight"], tensors.get(f"{stem}.bias"))
        expected.append(x @ tensors[f"{prefix}lm_heads.{number}.weight"].T)
    torch.testing.assert_close(logits(head), torch.stack(expected))


def test_vllm_with_one_product_for_all(tmp_path: Path) -> None:
    config, tensors = medusa_vllm(shared=True)
    head = read_head(str(write(tmp_path / "own", config, tensors)))
    assert spec_of(head).head == "shared"
    last = block(block(STATES, tensors["blocks.1.layers.0.weight"]), tensors["blocks.1.layers.1.weight"])
    torch.testing.assert_close(logits(head)[1], last @ tensors["lm_head.weight"].T)
    product = tensors.pop("lm_head.weight")
    target = read_head(str(write(tmp_path / "target", config, tensors)))
    assert spec_of(target).head == "target"
    torch.testing.assert_close(logits(target)[1], last @ HEAD.T)
    copies = {f"lm_heads.{number}.weight": product.clone() for number in range(2)}
    copied = read_head(str(write(tmp_path / "copied", config, tensors | copies)))
    assert torch.equal(logits(copied), logits(head))
    with pytest.raises(DrafterError, match="need the target's"):
        MedusaNetwork(spec_of(target), target.tensors)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_vllm_with_fewer_ids(whole: bool, shared: bool, tmp_path: Path) -> None:
    config, tensors = medusa_vllm(columns=12, shared=shared)
    names = ["lm_head.weight"] if shared else ["lm_heads.0.weight", "lm_heads.1.weight"]
    rows = [tensors[name] for name in names]
    if whole:  # products of all ids, of which the map takes some
        for name in names:
            table = torch.zeros(IDS, HIDDEN)
            table[tensors["token_map"]] = tensors[name]
            tensors[name] = table
    head = read_head(str(write(tmp_path, config, tensors)))
    assert (spec_of(head).draft_vocab_size, spec_of(head).own_ids) == (12, True)
    assert head.target_ids.tolist() == [2 * column + 1 for column in range(12)]
    x = block(block(STATES, tensors["blocks.0.layers.0.weight"]), tensors["blocks.0.layers.1.weight"])
    torch.testing.assert_close(logits(head)[0], F.linear(x, rows[0]))
