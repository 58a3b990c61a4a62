"""The kernels in plain torch: their specification, and what runs where no compiler works.

Rows are independent here too: each goes through operators of a shape that its own path decides, alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import KernelError
from paceline.kernels.plan import check_beside
from paceline.pages import PAGE
from paceline.targets import Scores
from paceline.targets.linear import BLOCK, unpack_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.kernels.plan import Plan
    from paceline.pages import Slab
    from paceline.targets.linear import Format

CHUNK = 128
_EXACT = 1024  # 127 x 127 x 1024 < 2^24: sums of so many 8-bit products are exact in float32


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated float32 [R, K] as whole numbers -127 to 127 (in float32), and a scale for each row [R, 1]."""
    top = rows.abs().amax(1, keepdim=True)
    # A true division: a number divided by a tensor multiplies by its rounded reciprocal, which moves ties.
    inverse = torch.where(top > 0, torch.full_like(top, 127) / top, torch.zeros_like(top))
    return (rows * inverse).round(), top / 127


def int8_sums(inputs: Tensor, weights: Tensor) -> Tensor:
    """Exact sums [R, N] of whole numbers: inputs [R, K] and weights [N, K], all at most 128 in size."""
    blocks = range(0, inputs.shape[1], _EXACT)
    parts = [inputs[:, i : i + _EXACT] @ weights[:, i : i + _EXACT].T for i in blocks]
    return torch.stack([part.to(torch.int32) for part in parts]).sum(0, dtype=torch.int32)


class ReferenceLinear:
    """A product [R, K] -> [R, N] with packed weights."""

    def __init__(self, tensors: dict[str, Tensor], n: int, k: int, number_format: Format) -> None:
        self._weight = unpack_linear(tensors, n, k, number_format)
        self._scale = tensors["scale"][:n] if number_format == "int8" else None
        self._bias = tensors["bias"][:n] if "bias" in tensors else None

    def __call__(self, rows: Tensor) -> Tensor:
        if self._scale is not None:
            inputs, scale = quantize(rotate_rows(rows))
            out = int8_sums(inputs, self._weight).float() * self._scale * scale
        else:
            out = _each(lambda row: self._weight @ row, rows, self._weight.shape[0])
        return out if self._bias is None else out + self._bias


def rotate_rows(rows: Tensor) -> Tensor:
    """:func:`paceline.targets.linear.rotate` as additions in a fixed order: a sum that is rounded otherwise can move
    an input by a whole step."""
    blocks: Tensor = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).reshape(-1, BLOCK)
    for apart in (16, 32, 8, 4, 2, 1):
        first, second = blocks.reshape(-1, 2, apart).unbind(1)
        blocks = torch.stack((first + second, first - second), 1)
    return blocks.reshape(rows.shape[0], -1) / 8


def norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * weight


def activate(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    if kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + dims / 2) of every head [heads, head_dim] by the angles of one position [dims / 2]."""
    half = cos.shape[0]
    a, b, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], 1)


def cap(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else torch.tanh(x / limit) * limit


def path_storage(context: int, visible: int) -> list[int]:
    """Storage indices of a row's path, in order."""
    return [*range(context), *(context + bit for bit in range(64) if visible >> bit & 1)]


def attend(query: Tensor, keys: Tensor, values: Tensor, first: int, limit: float | None) -> Tensor:
    """Attention of one row's scaled queries [heads, dim] over its path [kv_heads, length, dim], from ``first`` on.

    Chunks of 128 path indices, counted from the start of the path, are merged in order with a running maximum.
    """
    kv_heads, length, dim = keys.shape
    query = query.reshape(kv_heads, -1, dim)
    top = torch.full((*query.shape[:2], 1), -torch.inf)
    weight, out = torch.zeros_like(top), torch.zeros_like(query)
    for base in range(first // CHUNK * CHUNK, length, CHUNK):
        part = slice(max(base, first), min(base + CHUNK, length))
        scores = cap(query @ keys[:, part].transpose(1, 2), limit)
        above = torch.maximum(top, scores.amax(2, keepdim=True))
        weights, shrink = torch.exp(scores - above), torch.exp(top - above)
        weight = weight * shrink + weights.sum(2, keepdim=True)
        out = out * shrink + weights @ values[:, part]
        top = above
    return (out / weight).reshape(-1, dim)


class ReferenceRuntime:
    """A model's forward passes, a row at a time where sums of floats are concerned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._layers = [
            {
                name: ReferenceLinear(plan.linear(f"layers.{index}.{name}"), n, k, plan.format)
                for name, (n, k) in plan.layer_shapes(index).items()
            }
            for index in range(len(plan.spec.layers))
        ]
        hidden = plan.spec.hidden
        self._head = ReferenceLinear(plan.linear("head"), plan.vocab_size, hidden, plan.format)
        fused = plan.front is not None and plan.front.fused
        self._fc = ReferenceLinear(plan.linear("fc"), hidden, 2 * hidden, plan.format) if fused else None

    def forward(
        self,
        batch: Batch,
        slabs: Sequence[Slab],
        features: Sequence[int],
        seconds: Tensor | None,
        beside: Tensor | None = None,
    ) -> Scores:
        check_beside(self._plan, batch, beside)
        if seconds is not None:
            raise KernelError("the torch reference does not time the parts of a pass; leave seconds out.")
        spec = self._plan.spec
        x, pair = self._front(batch.ids, beside)
        tapped = {}
        for index in range(len(spec.layers)):
            if index in features:
                tapped[index] = x.clone()
            x = self._layer(index, x, pair if index == 0 else None, batch, slabs)
        if len(spec.layers) in features:
            tapped[len(spec.layers)] = x.clone()
        hidden = self._norm("norm", x[batch.score])
        logits = cap(self._head(hidden) * spec.logit_multiplier, spec.logit_softcap)
        return Scores(logits, hidden, tapped)

    def _front(self, ids: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what layer 0 of a draft head reads in its place, if anything."""
        front, embedded = self._plan.front, self._embed(ids)
        if front is None or beside is None:
            return embedded, None
        normed = self._norm("hidden_norm", beside)
        pair = torch.cat([self._norm("embed_norm", embedded), normed], 1)
        if self._fc is not None:
            return self._fc(pair), None
        return normed if front.normed_residual else beside, pair

    def _embed(self, ids: Tensor) -> Tensor:
        parts = self._plan.linear("embedding")
        rows = parts["data"][ids].float()
        if "scale" in parts:
            rows = rows * parts["scale"][ids][:, None]
        return rows * self._plan.spec.embedding_multiplier

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._plan.tensors.get(name)
        if weight is None:
            return x
        return _each(lambda row: norm(row, weight, self._plan.spec.norm_eps), x, x.shape[1])

    def _layer(self, index: int, x: Tensor, pair: Tensor | None, batch: Batch, slabs: Sequence[Slab]) -> Tensor:
        spec, layer, name = self._plan.spec, self._layers[index], f"layers.{index}"
        entered = self._norm(f"{name}.attn_norm", x) if pair is None else pair
        rows = self._attention(index, layer["qkv"](entered), batch, slabs)
        x = x + self._norm(f"{name}.attn_post_norm", layer["o"](rows)) * spec.residual_multiplier
        gates = layer["gate_up"](self._norm(f"{name}.mlp_norm", x))

        def gated(row: Tensor) -> Tensor:
            return activate(spec.activation, row[: spec.intermediate], row[spec.intermediate :])

        out = layer["down"](_each(gated, gates, spec.intermediate))
        return x + self._norm(f"{name}.mlp_post_norm", out) * spec.residual_multiplier

    def _attention(self, index: int, qkv: Tensor, batch: Batch, slabs: Sequence[Slab]) -> Tensor:
        spec = self._plan.spec
        group, place = self._plan.places[index]
        slab, table = slabs[group], batch.tables[group].long()
        segments = torch.repeat_interleave(torch.arange(batch.segments), batch.starts.diff().long())
        queries = []
        for row in range(batch.rows):
            query, key, value = self._heads(index, qkv[row], int(batch.positions[row]))
            at = int(batch.storage[row])
            page, lane = int(table[segments[row], at // PAGE]), at % PAGE
            slab.keys[page, place, :, :, lane] = key.to(slab.keys.dtype)
            slab.values[page, place, :, lane] = value.to(slab.values.dtype)
            queries.append(query)
        rows = []
        window = spec.layers[index].window
        for row in range(batch.rows):
            storage = torch.tensor(path_storage(int(batch.context[row]), int(batch.visible[row])))
            first = max(0, storage.shape[0] - window) if window else 0
            # keys before the window may have lost their pages: any page will do, they are not read on
            pages, lanes = table[segments[row], storage // PAGE].clamp_min(0), storage % PAGE
            keys = slab.keys[pages, place, :, :, lanes].float().transpose(0, 1)
            values = slab.values[pages, place, :, lanes].float().transpose(0, 1)
            rows.append(attend(queries[row], keys, values, first, spec.attention_softcap).flatten())
        return torch.stack(rows)

    def _heads(self, index: int, row: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (scaled), keys and values of one row, normed and turned."""
        spec, name = self._plan.spec, f"layers.{index}"
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        parts = list(torch.split(row, sizes))
        for i, which in enumerate(("q_norm", "k_norm")):
            weight = self._plan.tensors.get(f"{name}.{which}")
            if weight is not None:
                shape = (-1, spec.head_dim) if spec.qk_norm == "head" else (1, -1)
                parts[i] = norm(parts[i].reshape(shape), weight, spec.norm_eps).flatten()
        query, key, value = (part.reshape(-1, spec.head_dim) for part in parts)
        angles = spec.layers[index].rope
        if angles is not None:
            cos, sin = (table[position] for table in self._plan.ropes[angles])
            query, key = rope(query, cos, sin), rope(key, cos, sin)
        return query * spec.attention_scale, key, value


def _each(function: Callable[[Tensor], Tensor], rows: Tensor, width: int) -> Tensor:
    """Apply a function to every row alone; [R, width]. A row is copied, as the order of a sum may depend on where its
    terms lie in memory."""
    return torch.stack([function(row.clone()) for row in rows]) if rows.shape[0] else rows.new_empty(0, width)
