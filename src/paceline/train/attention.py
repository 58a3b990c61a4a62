"""Attention of drafts that are unrolled in training, in memory linear in the length.

A row of a draft sees the rows of the committed tokens up to its root, and of the draft itself those of its own column:
the row of each depth above it, and its own (the training-time test of EAGLE-3, arXiv 2503.01840, section 3). So beside
one triangle of scores there is a diagonal for each depth. Scores are worked out in blocks of queries, forwards and once
more backwards, and never kept (as in FlashAttention, arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_QUERIES = 128  # of one block


@dataclass(frozen=True)
class Block:
    """Queries ``first`` to ``last`` - 1 look at the rows from ``start`` on; each sees ``seen`` of them, int64 [m]."""

    first: int
    last: int
    start: int
    seen: Tensor

    @property
    def end(self) -> int:
        return self.start + int(self.seen.max())


def blocks(starts: Tensor, places: Tensor) -> list[Block]:
    """The blocks of queries that each see the rows of their own text up to their place in it.

    Args:
        starts: int64 [M], the first row of each query's text, ascending.
        places: int64 [M], the place of each query in its text.
    """
    found = []
    edges = [0, *((starts[1:] != starts[:-1]).nonzero()[:, 0] + 1).tolist(), len(starts)]
    for begin, end in pairwise(edges):
        for first in range(begin, end, _QUERIES):
            last = min(first + _QUERIES, end)
            found.append(Block(first, last, int(starts[first]), places[first:last] + 1))
    return found


def unrolled_attention(
    query: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], layout: Sequence[Block]
) -> Tensor:
    """Attend to the rows of the committed tokens and to the queries' own columns, scaled by head_dim ** -0.5.

    Args:
        query: float32 [heads, M, head_dim].
        keys, values: float32 [kv_heads, R, head_dim], of the committed tokens.
        own: for each depth keys and values [kv_heads, M, head_dim], of which a query sees its own row.
        layout: the blocks, which have every query once.

    Returns:
        float32 [heads, M, head_dim].
    """
    heads, rows, size = query.shape
    grouped = query.reshape(keys.shape[0], heads // keys.shape[0], rows, size)
    found: Tensor = _Unrolled.apply(layout, grouped, keys, values, *(part for pair in own for part in pair))  # type: ignore[no-untyped-call]
    return found.reshape(heads, rows, size)


class _Unrolled(torch.autograd.Function):
    """Queries are [kv_heads, group, M, head_dim]."""

    @staticmethod
    def forward(ctx: Any, layout: Sequence[Block], query: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        scale = query.shape[-1] ** -0.5
        out, weight = torch.empty_like(query), query.new_empty(query.shape[:-1])
        for block, scores, mine in _scores(layout, query, keys, own[::2], scale):
            every = torch.cat([scores, mine], -1)
            total = weight[:, :, block.first : block.last] = every.logsumexp(-1)
            chances = every.sub_(total[..., None]).exp_()
            count = scores.shape[-1]
            found = _rows_by(chances[..., :count], values[:, block.start : block.end])
            for depth, value in enumerate(own[1::2]):
                found += chances[..., count + depth, None] * value[:, None, block.first : block.last]
            out[:, :, block.first : block.last] = found
        ctx.layout = layout
        ctx.save_for_backward(query, keys, values, out, weight, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, out, weight, *own = ctx.saved_tensors
        (asked,) = given
        scale = query.shape[-1] ** -0.5
        to_query, to_keys, to_values = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        to_own = [torch.empty_like(part) for part in own]
        for block, scores, mine in _scores(ctx.layout, query, keys, own[::2], scale):
            rows, seen = slice(block.first, block.last), slice(block.start, block.end)
            total, wanted = weight[:, :, rows, None], asked[:, :, rows]
            shared = (wanted * out[:, :, rows]).sum(-1, keepdim=True)
            chances, own_chances = scores.sub_(total).exp_(), mine.sub_(total).exp_()
            to_values[:, seen] += _columns_by(chances, wanted)
            change = _rows_by(wanted, values[:, seen].transpose(1, 2)).sub_(shared).mul_(chances).mul_(scale)
            to_keys[:, seen] += _columns_by(change, query[:, :, rows])
            to_rows = _rows_by(change, keys[:, seen])
            for depth, (key, value) in enumerate(zip(own[::2], own[1::2], strict=True)):
                chance = own_chances[..., depth, None]
                moved = ((wanted * value[:, None, rows]).sum(-1, keepdim=True) - shared) * chance * scale
                to_rows += moved * key[:, None, rows]
                to_own[2 * depth][:, rows] = (moved * query[:, :, rows]).sum(1)
                to_own[2 * depth + 1][:, rows] = (chance * wanted).sum(1)
            to_query[:, :, rows] = to_rows
        return None, to_query, to_keys, to_values, *to_own


def _scores(
    layout: Sequence[Block], query: Tensor, keys: Tensor, own: Sequence[Tensor], scale: float
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """For each block the scores of the committed rows [kv_heads, group, m, n] and of the own column [..., depths]."""
    for block in layout:
        asks = query[:, :, block.first : block.last]
        scores = _rows_by(asks, keys[:, block.start : block.end].transpose(1, 2)).mul_(scale)
        scores.masked_fill_(torch.arange(scores.shape[-1]) >= block.seen[:, None], -torch.inf)
        mine = [(asks * key[:, None, block.first : block.last]).sum(-1) * scale for key in own]
        yield block, scores, torch.stack(mine, -1) if mine else scores[..., :0]


def _rows_by(left: Tensor, right: Tensor) -> Tensor:
    """[kv_heads, group, m, a] times [kv_heads, a, b], as [kv_heads, group, m, b]."""
    heads, group, rows, inner = left.shape
    return torch.bmm(left.reshape(heads, group * rows, inner), right).reshape(heads, group, rows, -1)


def _columns_by(left: Tensor, right: Tensor) -> Tensor:
    """[kv_heads, group, m, a], transposed, times [kv_heads, group, m, b], summed over the group: [kv_heads, a, b]."""
    heads, group, rows, inner = left.shape
    flat = left.reshape(heads, group * rows, inner).transpose(1, 2)
    return torch.bmm(flat, right.reshape(heads, group * rows, -1))
