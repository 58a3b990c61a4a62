"""Our own decoder for the dense families, on the C kernels or, without them, on their torch reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import KernelError, OptionError
from paceline.kernels.memory import huge_copy
from paceline.kernels.native import MAX_HEAD_DIM
from paceline.kernels.plan import Plan, rope_tables
from paceline.kernels.runtime import make_runtime
from paceline.pages import CacheGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.pages import Slab
    from paceline.targets import Scores
    from paceline.targets.linear import Format
    from paceline.targets.spec import ModelSpec


class Decoder:
    """A target whose rows are independent, bit for bit, in every format.

    Layers with the same window share a cache group.

    Args:
        spec: the model.
        tensors: its packed tensors, as ``targets/packed.py`` names them; they are copied into large pages.
        number_format: of the products: int8, bf16 or fp32.
        threads: threads of a pass; they do not change a bit.
        kv_dtype: float32 or bfloat16, the type of keys and values in the cache.
        max_model_len: the longest path in tokens; the model's own limit where left out.
        vocab_size: how many ids may be emitted, where the head is padded beyond the tokenizer.
        path: the instruction set; "" is the best that the processor has, "torch reference" the plain form.

    Raises:
        OptionError: a limit or type that the model does not have.
        KernelError: the heads are too wide, the processor lacks the path, or the threads cannot be started.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        number_format: Format,
        threads: int = 1,
        kv_dtype: torch.dtype = torch.float32,
        max_model_len: int | None = None,
        *,
        vocab_size: int | None = None,
        path: str = "",
    ) -> None:
        if kv_dtype not in {torch.float32, torch.bfloat16}:
            raise OptionError(f"keys and values are kept in float32 or bfloat16, not {kv_dtype}.")
        if spec.head_dim > MAX_HEAD_DIM:
            raise KernelError(f"heads have at most {MAX_HEAD_DIM} dimensions, not {spec.head_dim}.")
        if threads < 1:
            raise OptionError(f"threads must be at least 1, not {threads}.")
        positions = min(max_model_len or spec.max_positions, spec.max_positions)
        emitted = vocab_size or spec.vocab_size
        if not 1 <= emitted <= spec.vocab_size:
            raise OptionError(f"the model has {spec.vocab_size} ids, so {emitted} cannot be emitted.")
        groups, places = _cache_groups(spec, kv_dtype, "")
        ropes = {rope: rope_tables(rope, positions) for rope in {layer.rope for layer in spec.layers} if rope}
        self.threads, self._path = threads, path
        self._start(Plan(spec, huge_copy(tensors), number_format, emitted, positions, groups, places, ropes))

    def _start(self, plan: Plan) -> None:
        self.plan = plan
        self.spec, self.vocab_size, self.max_positions = plan.spec, plan.vocab_size, plan.positions
        self.groups = plan.groups
        self.path, self._runtime = make_runtime(plan, self._path, self.threads)

    def forward(
        self,
        batch: Batch,
        slabs: Sequence[Slab],
        features: Sequence[int] = (),
        *,
        seconds: Tensor | None = None,
    ) -> Scores:
        """Write the rows' keys and values into the slabs, then score the rows asked for.

        Args:
            batch: the rows.
            slabs: the cache, one slab a group.
            features: the layers whose input is wanted; the number of layers itself for that of the final norm.
            seconds: float64 [3], to which the C kernels add what this pass spent on products, on attention and on
                small operators (all else inside the library), the waits of its threads for each other included.

        Raises:
            KernelError: ids, positions or pages out of range, tensors of the wrong type, or ``seconds`` on the
                torch reference.
        """
        return self._runtime.forward(batch, slabs, features, seconds)

    def prefix(self, layers: int) -> Decoder:
        """The first ``layers`` layers with the same embedding, norm and head: a draft model without a weight of its
        own. Its cache groups are its own too.

        Raises:
            OptionError: the model has no such number of layers.
        """
        if not 1 <= layers <= len(self.spec.layers):
            raise OptionError(f"the model has {len(self.spec.layers)} layers, so draft_layers cannot be {layers}.")
        spec = replace(self.spec, layers=self.spec.layers[:layers])
        groups, places = _cache_groups(spec, self.groups[0].dtype, f"first {layers} layers, ")
        short = object.__new__(Decoder)
        short.threads, short._path = self.threads, self._path
        short._start(replace(self.plan, spec=spec, groups=groups, places=places))
        return short


def _cache_groups(
    spec: ModelSpec, dtype: torch.dtype, prefix: str
) -> tuple[tuple[CacheGroup, ...], tuple[tuple[int, int], ...]]:
    """One group for each window, in the order of the layers, and the place of every layer in them."""
    windows = list(dict.fromkeys(layer.window for layer in spec.layers))
    counts = [0] * len(windows)
    places = []
    for layer in spec.layers:
        group = windows.index(layer.window)
        places.append((group, counts[group]))
        counts[group] += 1
    groups = tuple(
        CacheGroup(
            f"{prefix}window {window}" if window else f"{prefix}full",
            *(count, spec.kv_heads, spec.head_dim, dtype, window),
        )
        for window, count in zip(windows, counts, strict=True)
    )
    return groups, tuple(places)
