"""Tiny decoders with random weights, and batches of pieces and trees over a cache of shuffled pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.batch import Batch
from paceline.kernels import PATHS, library
from paceline.pages import PAGE, Slab
from paceline.targets.decoder import Decoder
from paceline.targets.linear import Format, pack_embedding, pack_linear
from paceline.targets.spec import LayerSpec, ModelSpec, RopeSpec
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.targets import Scores

VOCAB = 101


def paths() -> list[str]:
    """The instruction sets that this processor has."""
    found = library()
    assert found is not None
    best = found.path_name()
    return [*reversed(PATHS[: PATHS.index(best) + 1])]


def rope_spec(dims: int = 16, base: float = 10000.0, scale: float = 1.0) -> RopeSpec:
    return RopeSpec(dims, tuple(base ** (-2 * i / dims) for i in range(dims // 2)), scale)


def tiny_spec(layers: Sequence[LayerSpec] | None = None, **changes: Any) -> ModelSpec:
    plain = LayerSpec(rope_spec(), None)
    spec = ModelSpec(
        family="llama",
        vocab_size=VOCAB,
        hidden=40,
        intermediate=72,
        heads=4,
        kv_heads=2,
        head_dim=16,
        layers=tuple(layers or (plain, plain)),
        activation="silu",
        norm_eps=1e-5,
        pre_norms=True,
        post_norms=False,
        qk_norm=None,
        attention_scale=0.25,
        attention_softcap=None,
        logit_softcap=None,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logit_multiplier=1.0,
        tied=False,
        max_positions=512,
    )
    return replace(spec, **changes)


def random_tensors(spec: ModelSpec, form: Format, seed: int = 0) -> dict[str, Tensor]:
    """Packed random weights: products of variance 1 / inputs, norms around 1, biases where the spec has them."""
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, Tensor] = {}
    for name, shape in spec.shapes().items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm"):
            given[name] = 1 + 0.2 * values
        else:
            given[name] = values * (0.2 if name.endswith("bias") else shape[-1] ** -0.5)
    given["embedding"] *= spec.hidden**0.5
    packed = {f"embedding.{key}": value for key, value in pack_embedding(given["embedding"], form).items()}

    def product(name: str, parts: list[str]) -> None:
        weight = torch.cat([given[part] for part in parts])
        biases = [given[f"{part}.bias"] for part in parts if f"{part}.bias" in given]
        bias = torch.cat(biases) if biases else None
        packed.update({f"{name}.{key}": value for key, value in pack_linear(weight, bias, form).items()})

    for layer in (f"layers.{index}" for index in range(len(spec.layers))):
        product(f"{layer}.qkv", [f"{layer}.q", f"{layer}.k", f"{layer}.v"])
        product(f"{layer}.o", [f"{layer}.o"])
        product(f"{layer}.gate_up", [f"{layer}.gate", f"{layer}.up"])
        product(f"{layer}.down", [f"{layer}.down"])
    product("head", ["embedding" if spec.tied else "head"])
    return packed | {name: value for name, value in given.items() if name.endswith("norm")}


def tiny_decoder(
    spec: ModelSpec, form: Format = "fp32", threads: int = 1, kv: torch.dtype = torch.float32, path: str = ""
) -> Decoder:
    return Decoder(spec, random_tensors(spec, form), form, threads, kv, path=path)


def random_ids(count: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCAB) for _ in range(count)]


@dataclass(frozen=True)
class Rows:
    """One segment of a batch."""

    sequence: int
    ids: list[int]
    positions: list[int]
    storage: list[int]
    context: list[int]
    visible: list[int]


def piece(sequence: int, ids: Sequence[int], start: int = 0) -> Rows:
    at = list(range(start, start + len(ids)))
    return Rows(sequence, list(ids), at, at, [i + 1 for i in at], [0] * len(at))


def tree_rows(sequence: int, tree: TokenTree, context: int) -> Rows:
    nodes = range(len(tree))
    positions = [context + depth for depth in tree.depths()]
    storage = [context + node for node in nodes]
    return Rows(sequence, tree.tokens, positions, storage, [context] * len(tree), tree.masks())


def random_tree(nodes: int, seed: int, root: int = 5) -> TokenTree:
    drawn = random.Random(seed)
    tree = TokenTree.root(root)
    while len(tree) < nodes:
        tree.add(drawn.randrange(max(0, len(tree) - 4), len(tree)), drawn.randrange(VOCAB), 1.0, "test")
    return tree


class Cache:
    """Slabs for some sequences, each with its own pages in a shuffled order."""

    def __init__(self, decoder: Decoder, sequences: int = 1, length: int = 512, seed: int = 0) -> None:
        self.decoder = decoder
        per = -(-length // PAGE)
        pages = list(range(per * sequences))
        random.Random(seed).shuffle(pages)
        self.tables = torch.tensor(pages, dtype=torch.int32).reshape(sequences, per)
        self.slabs = tuple(Slab.allocate(group, len(pages)) for group in decoder.groups)

    def batch(self, segments: Sequence[Rows], score: Sequence[int] | None = None) -> Batch:
        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value for rows in segments for value in getattr(rows, name)], dtype=dtype)

        counts = torch.tensor([0, *(len(rows.ids) for rows in segments)])
        table = self.tables[[rows.sequence for rows in segments]].contiguous()
        total = int(counts.sum())
        return Batch(
            column("ids", torch.int64),
            column("positions", torch.int32),
            counts.cumsum(0).to(torch.int32),
            column("storage", torch.int32),
            column("context", torch.int32),
            column("visible", torch.int64),
            (table,) * len(self.slabs),
            torch.tensor(list(range(total)) if score is None else list(score), dtype=torch.int64),
        )

    def run(self, *segments: Rows, features: Sequence[int] = ()) -> Scores:
        return self.decoder.forward(self.batch(segments), self.slabs, features)

    def chain(self, ids: Sequence[int]) -> Tensor:
        """The logits of every token, one token a pass: plain decoding."""
        return torch.cat([self.run(piece(0, [token], at)).logits for at, token in enumerate(ids)])
