"""Attention of unrolled drafts and the loss, against plain forms of both, forwards and backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F

from paceline.train.attention import blocks, unrolled_attention
from paceline.train.losses import compare

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (7, 1, 30, 12)
STARTS = torch.tensor([0, 7, 8, 38]).repeat_interleave(torch.tensor(LENGTHS))
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])


def dense(query: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
    """One softmax over all keys, with a mask of who sees whom."""
    share = query.shape[0] // keys.shape[0]
    seen = (STARTS[rows][:, None] == STARTS) & (PLACES[rows][:, None] >= PLACES)
    eye = torch.eye(len(rows), dtype=torch.bool)
    mask = torch.cat([seen, *[eye] * len(own)], 1)
    keys = torch.cat([keys, *(key for key, _ in own)], 1).repeat_interleave(share, 0)
    values = torch.cat([values, *(value for _, value in own)], 1).repeat_interleave(share, 0)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_unrolled_attention_is_attention(depth: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.train.attention._QUERIES", 5)
    dice = torch.Generator().manual_seed(depth)
    rows = torch.randperm(50, generator=dice)[:31].sort().values

    def drawn(heads: int, count: int) -> Tensor:
        return torch.randn(heads, count, 8, generator=dice, dtype=torch.float64, requires_grad=True)

    query, keys, values = drawn(4, 31), drawn(kv_heads, 50), drawn(kv_heads, 50)
    own = [(drawn(kv_heads, 31), drawn(kv_heads, 31)) for _ in range(depth)]
    leaves = [query, keys, values, *(part for pair in own for part in pair)]
    found = unrolled_attention(query, keys, values, own, blocks(STARTS[rows], PLACES[rows]))
    wanted = dense(query, keys, values, own, rows)
    assert torch.allclose(found, wanted)
    weight = torch.randn(found.shape, generator=dice, dtype=torch.float64)
    for ours, plain in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((wanted * weight).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(ours, plain)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("sure", [False, True])
def test_the_loss_is_a_divergence(sure: bool, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.train.losses._ROWS", 4)
    dice = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 6, generator=dice, dtype=torch.float64, requires_grad=True)
    product = torch.randn(9, 6, generator=dice, dtype=torch.float64, requires_grad=True)
    columns = torch.randint(9, (11,), generator=dice)
    wanted = None if sure else torch.randn(11, 9, generator=dice, dtype=torch.float64).log_softmax(-1)
    more = torch.randn(9, generator=dice, dtype=torch.float64) if added else None
    total, right = compare(rows, product, columns, wanted, more)
    logits = rows @ product.T
    assert torch.equal(right, logits.argmax(-1) == columns)
    said = (logits if more is None else logits + more).log_softmax(-1)
    if wanted is None:
        plain = F.nll_loss(said, columns, reduction="sum")
    else:
        plain = F.kl_div(said, wanted, log_target=True, reduction="sum")
    assert torch.allclose(total, plain)
    for ours, theirs in zip(
        torch.autograd.grad(3 * total, [rows, product]), torch.autograd.grad(3 * plain, [rows, product]), strict=True
    ):
        assert torch.allclose(ours, theirs)
