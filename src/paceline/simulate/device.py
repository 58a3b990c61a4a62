"""The time of a step on a modelled GPU.

A step reads all weights once and computes with them for every row, whichever takes longer; it reads the keys and values
of its sequences; and it starts kernels. Rows are computed in tiles, so their cost rises in steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Amount = NDArray[np.float64] | NDArray[np.int64] | float | int

_TILES = ((64, 16), (256, 64), (1 << 30, 128))
"""Up to so many rows a tile has so many; the larger ones are faster and are chosen for the larger products."""

EDGES = (16, 32, 64, 128, 256)
"""Numbers of rows beyond which libraries choose other kernels."""

_SHARP = 4.0  # reading and computing overlap, but not wholly where both take equally long
_QUERY_TILE = 16  # query heads of a key head times rows of a sequence, of one tile of attention


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        name: its name.
        bandwidth: bytes a second of its memory.
        flops: operations a second of dense products in bf16; fp8 brings twice as many.
        memory: bytes.
        reading, computing, attending: the shares of those rates that kernels reach: reading weights, products, and
            reading keys and values.
        usable: the share of the memory for weights and cache.
        a_kernel: seconds between two kernels of a captured graph.
        a_step: seconds of the host for each step.
        a_sequence: seconds of the host for each sequence of a step.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    reading: float = 0.85
    computing: float = 0.65
    attending: float = 0.75
    usable: float = 0.9
    a_kernel: float = 1.5e-6
    a_step: float = 2e-4
    a_sequence: float = 2e-6


@dataclass(frozen=True)
class Model:
    """A decoder's shape, as far as it takes time.

    Attributes:
        name: its name.
        weights: parameters, the embedding not counted and the head counted.
        stored: parameters that are stored.
        layers, heads, kv_heads, head_dim, vocabulary: as usual.
        width: bytes of a weight: 2 for bf16, 1 for fp8.
        cached: bytes of a number in the cache.
        kernels: of each layer.
    """

    name: str
    weights: float
    stored: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 128_256
    width: int = 2
    cached: int = 2
    kernels: int = 6

    @property
    def token_bytes(self) -> int:
        """Of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.cached


H100 = Device("H100", 3.35e12, 990e12, 80e9)
H200 = Device("H200", 4.8e12, 990e12, 141e9)

LLAMA_8B = Model("8B bf16", 7.50e9, 8.03e9, 32, 32, 8)
LLAMA_70B = Model("70B fp8", 69.5e9, 70.6e9, 80, 64, 8, width=1, cached=1)

EAGLE_8B = Model("EAGLE-3 head", 0.43e9, 0.43e9, 1, 32, 8, vocabulary=32_000, kernels=12)
EAGLE_70B = Model("EAGLE-3 head", 1.40e9, 1.40e9, 1, 64, 8, vocabulary=32_000, kernels=12)
"""Heads as published: one layer that reads twice its width, and 32,000 ids."""

DEVICES = (H100, H200)
MODELS = ((LLAMA_8B, EAGLE_8B), (LLAMA_70B, EAGLE_70B))


@dataclass(frozen=True)
class Server:
    """A model and its head on a device.

    Attributes:
        device, model, head: which.
        edges: by how much longer the products of a step take beyond each of :data:`EDGES`, drawn from a seed.
    """

    device: Device
    model: Model
    head: Model
    edges: tuple[float, ...] = field(default=(0.0,) * len(EDGES))

    @classmethod
    def draw(cls, device: Device, model: Model, head: Model, rng: np.random.Generator) -> Server:
        """A server whose kernels step up by at most 5 % at each edge."""
        return cls(device, model, head, tuple(rng.uniform(0.0, 0.05, len(EDGES))))

    def fits(self, sequences: int, context: int) -> bool:
        """Whether weights and cache, the head's too, have room for so many sequences of so many tokens."""
        each = self.model.token_bytes + self.head.token_bytes
        return self.weight_bytes + sequences * context * each <= self.device.usable * self.device.memory

    @property
    def weight_bytes(self) -> float:
        return self.model.stored * self.model.width + self.head.stored * self.head.width

    def step(self, rows: Amount, sequences: Amount, context: Amount) -> NDArray[np.float64]:
        """Seconds of a step, the sampling of its tokens included.

        Args:
            rows: of all token trees, roots included.
            sequences: how many trees.
            context: tokens of context, of all sequences together.
        """
        return self._pass(self.model, rows, sequences, context) + self.device.a_step + self._host(sequences)

    def draft(self, counts: NDArray[np.int64], context: Amount) -> NDArray[np.float64]:
        """Seconds of drafting with the head.

        Args:
            counts: [..., levels], how many sequences are drafted for at each level.
            context: tokens of context of each of them.
        """
        rows = np.maximum(counts, 1)
        levels = self._pass(self.head, rows, rows, rows * np.expand_dims(np.asarray(context), -1))
        seconds: NDArray[np.float64] = np.where(counts > 0, levels, 0.0).sum(axis=-1)
        return seconds

    def look_up(self, sequences: Amount) -> NDArray[np.float64]:
        """Seconds of drafting by lookups for so many sequences."""
        return np.asarray(self._host(sequences), dtype=np.float64)

    def _host(self, sequences: Amount) -> NDArray[np.float64]:
        return np.asarray(self.device.a_sequence * np.asarray(sequences, dtype=np.float64))

    def _pass(self, model: Model, rows: Amount, sequences: Amount, context: Amount) -> NDArray[np.float64]:
        device = self.device
        rows, sequences, context = (np.asarray(amount, dtype=np.float64) for amount in (rows, sequences, context))
        read = model.weights * model.width / (device.bandwidth * device.reading)
        rate = device.flops * (2 / model.width) * device.computing
        products = _either(read, 2 * model.weights * _tiled(rows) / rate) * self._edge(rows)
        cache = context * model.token_bytes / (device.bandwidth * device.attending)
        group = model.heads // model.kv_heads
        queries = np.ceil(rows / sequences * group / _QUERY_TILE) * _QUERY_TILE * model.kv_heads
        scores = 4 * context * queries * model.head_dim * model.layers / (device.flops * device.computing)
        logits = 3 * rows * model.vocabulary * 4 / device.bandwidth
        return products + _either(cache, scores) + logits + model.layers * model.kernels * device.a_kernel

    def _edge(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        steps = np.cumprod([1.0, *(1 + edge for edge in self.edges)], dtype=np.float64)
        return steps[np.searchsorted(EDGES, rows, side="left")]


def _tiled(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows rounded up to whole tiles."""
    tiled = np.zeros_like(rows)
    for most, tile in reversed(_TILES):
        tiled = np.where(rows <= most, np.ceil(rows / tile) * tile, tiled)
    return tiled


def _either(first: Amount, second: Amount) -> NDArray[np.float64]:
    """The longer of two times that overlap, and a little more where they are equally long."""
    longer, shorter = np.maximum(first, second), np.minimum(first, second)
    share = np.divide(shorter, longer, out=np.zeros_like(np.asarray(longer, np.float64)), where=np.asarray(longer) > 0)
    return np.asarray(longer * (1 + share**_SHARP) ** (1 / _SHARP))
