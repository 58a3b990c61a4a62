"""The C structures, filled once from packed tensors, and the call that does a whole forward pass."""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import KernelError
from paceline.kernels.plan import check_beside
from paceline.targets import Scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.kernels import Library
    from paceline.kernels.plan import Plan
    from paceline.pages import Slab

MAX_HEAD_DIM = 512

_FORMATS = {"fp32": 0, "bf16": 1, "int8": 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_QK_NORMS = {None: 0, "head": 1, "full": 2}
_FAILURES = {
    1: "no memory is left for the scratch of a pass of {rows} rows; run smaller batches.",
    2: "a token id lies outside 0 to {last_id}; encode with the model's own tokenizer.",
    3: "a row is to be written to, or looks back at, a page that the cache does not have; reserve it first.",
    4: "a position lies outside 0 to {last_position}; raise max_model_len.",
    5: "a row is to be scored that the batch, which has {rows}, does not have; score rows 0 to {rows} - 1.",
}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class CLinear(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("data", "scale", "bias")),
        *((name, _INT) for name in ("n", "k", "format", "pad")),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CLinear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")),
        *((name, _POINTER) for name in ("q_norm", "k_norm", "cos", "sin")),
        *((name, _INT) for name in ("rope_dims", "window", "group", "group_layer")),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("layer", "embedding", "embedding_scale", "norm")),
        *((name, _POINTER) for name in ("embed_norm", "hidden_norm")),
        *((name, CLinear) for name in ("head", "fc")),
        *((name, _INT) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        *((name, _INT) for name in ("positions", "ids", "activation", "qk_norm", "kv_bf16", "embedding_format")),
        *((name, _INT) for name in ("front", "normed_residual")),
        *((name, _FLOAT) for name in ("norm_eps", "attention_scale", "attention_softcap", "logit_softcap")),
        *((name, _FLOAT) for name in ("embedding_multiplier", "residual_multiplier", "logit_multiplier", "pad")),
    )


class CGroup(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "table")),
        ("layers", ctypes.c_int64),
        *((name, _INT) for name in ("pages", "slab_pages")),
    )


class CBatch(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("ids", "visible", "score", "positions", "starts", "storage", "context")),
        *((name, _POINTER) for name in ("group", "features", "seconds")),
        *((name, _INT) for name in ("rows", "segments", "scored", "groups")),
    )


class CScratch(ctypes.Structure):
    _fields_ = (("memory", _POINTER), ("bytes", ctypes.c_size_t))


class Pool:
    """Threads that the library keeps; they sleep while there is nothing to do."""

    def __init__(self, library: Library, threads: int) -> None:
        library.c.pl_pool_destroy.argtypes = [_POINTER]
        library.c.pl_pool_destroy.restype = None
        self.address: int | None = library.c.pl_pool_create(threads)
        if self.address is None:
            raise KernelError(f"{threads} threads could not be started; take fewer.")
        weakref.finalize(self, library.c.pl_pool_destroy, self.address).atexit = False


@cache
def pool(library: Library, threads: int) -> Pool:
    """The pool of that many threads, shared by all models of the process: a draft model finds them awake."""
    return Pool(library, threads)


class Scratch:
    """Memory of one model's passes, which the library lets grow."""

    def __init__(self, library: Library) -> None:
        library.c.pl_scratch_free.argtypes = [_POINTER]
        library.c.pl_scratch_free.restype = None
        self.struct = CScratch()
        weakref.finalize(self, library.c.pl_scratch_free, ctypes.byref(self.struct))


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Where a tensor lies.

    Raises:
        KernelError: it is of another type, not on the host, or not contiguous.
    """
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.is_cuda:
        raise KernelError(f"a contiguous {dtype} tensor on the CPU is needed, not {tensor.dtype}, {tensor.device}.")
    return tensor.data_ptr()


def linear_struct(tensors: dict[str, Tensor], n: int, k: int, number_format: str) -> CLinear:
    pointers = (tensors[key].data_ptr() if key in tensors else None for key in ("data", "scale", "bias"))
    return CLinear(*pointers, n, k, _FORMATS[number_format])


class NativeLinear:
    """A product of its own, outside a forward pass."""

    def __init__(self, library: Library, path: str, threads: int, struct: CLinear) -> None:
        self._call = library.c.pl_path_linear
        self._call.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER]
        self._path, self._pool = library.path(path), pool(library, threads)
        self._scratch, self._struct = Scratch(library), struct

    def __call__(self, rows: Tensor) -> Tensor:
        out = torch.empty(rows.shape[0], self._struct.n)
        status = self._call(
            *(self._path, self._pool.address, ctypes.addressof(self._scratch.struct)),
            *(ctypes.addressof(self._struct), address(rows, torch.float32), rows.shape[0], out.data_ptr()),
        )
        if status:
            raise KernelError(_FAILURES[status].format(rows=rows.shape[0]))
        return out


class NativeRuntime:
    """Runs a model's forward passes in C; all threads of the pool take part."""

    def __init__(self, library: Library, path: str, threads: int, plan: Plan) -> None:
        self._plan = plan
        self._layers, self._model = _structs(plan)
        self._model_address = ctypes.addressof(self._model)
        self._path, self._pool, self._scratch = library.path(path), pool(library, threads), Scratch(library)
        self._lock = threading.Lock()
        self._call: Any = library.c.pl_path_forward
        self._call.argtypes = [_POINTER] * 8
        self._call.restype = ctypes.c_int
        self._no_taps = (_POINTER * (len(plan.spec.layers) + 1))()
        self._groups = CGroup * len(plan.groups)

    def forward(
        self,
        batch: Batch,
        slabs: Sequence[Slab],
        features: Sequence[int],
        seconds: Tensor | None,
        beside: Tensor | None = None,
    ) -> Scores:
        check_beside(self._plan, batch, beside)
        if seconds is not None and seconds.shape != (3,):
            raise KernelError(f"the seconds of a pass have the shape (3,), not {tuple(seconds.shape)}.")
        plan, rows, scored = self._plan, batch.ids.shape[0], batch.score.shape[0]
        hidden = torch.empty(scored, plan.spec.hidden)
        logits = torch.empty(scored, plan.vocab_size)
        tapped = {layer: torch.empty(rows, plan.spec.hidden) for layer in features}
        taps = self._no_taps
        if tapped:
            taps = type(taps)(*(tapped[i].data_ptr() if i in tapped else None for i in range(len(taps))))
        groups = self._groups()
        for struct, group, slab, table in zip(groups, plan.groups, slabs, batch.tables, strict=True):
            struct.keys = address(slab.keys, group.dtype)
            struct.values = address(slab.values, group.dtype)
            struct.table = address(table, torch.int32)
            struct.layers = slab.keys.shape[1]
            struct.pages = table.shape[1]
            struct.slab_pages = slab.keys.shape[0]
        packed = CBatch(
            address(batch.ids, torch.int64),
            address(batch.visible, torch.int64),
            address(batch.score, torch.int64),
            address(batch.positions, torch.int32),
            address(batch.starts, torch.int32),
            address(batch.storage, torch.int32),
            address(batch.context, torch.int32),
            ctypes.addressof(groups),
            None if beside is None else address(beside, torch.float32),
            None if seconds is None else address(seconds, torch.float64),
            rows,
            batch.starts.shape[0] - 1,
            scored,
            len(groups),
        )
        with self._lock:
            status = self._call(
                *(self._path, self._pool.address, ctypes.addressof(self._scratch.struct), self._model_address),
                *(ctypes.addressof(packed), logits.data_ptr(), hidden.data_ptr(), ctypes.addressof(taps)),
            )
        if status:
            last_id, last_position = plan.spec.vocab_size - 1, plan.positions - 1
            raise KernelError(_FAILURES[status].format(rows=rows, last_id=last_id, last_position=last_position))
        return Scores(logits, hidden, tapped)


def _structs(plan: Plan) -> tuple[ctypes.Array[CLayer], CModel]:
    spec = plan.spec
    layers = (CLayer * len(spec.layers))()
    for index, struct in enumerate(layers):
        for name, (n, k) in plan.layer_shapes(index).items():
            setattr(struct, name, linear_struct(plan.linear(f"layers.{index}.{name}"), n, k, plan.format))
        for name in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm"):
            setattr(struct, name, _norm(plan, f"layers.{index}.{name}"))
        rope = spec.layers[index].rope
        if rope is not None:
            struct.cos, struct.sin = (address(table, torch.float32) for table in plan.ropes[rope])
            struct.rope_dims = rope.dims
        struct.window = spec.layers[index].window or 0
        struct.group, struct.group_layer = plan.places[index]
    embedding = plan.linear("embedding")
    model = CModel(
        layer=ctypes.addressof(layers),
        embedding=embedding["data"].data_ptr(),
        embedding_scale=embedding["scale"].data_ptr() if "scale" in embedding else None,
        norm=_norm(plan, "norm"),
        embed_norm=_norm(plan, "embed_norm"),
        hidden_norm=_norm(plan, "hidden_norm"),
        head=linear_struct(plan.linear("head"), plan.vocab_size, spec.hidden, plan.format),
        fc=linear_struct(plan.linear("fc"), spec.hidden, 2 * spec.hidden, plan.format),
        layers=len(layers),
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        positions=plan.positions,
        ids=spec.vocab_size,
        activation=_ACTIVATIONS[spec.activation],
        qk_norm=_QK_NORMS[spec.qk_norm],
        kv_bf16=int(plan.groups[0].dtype == torch.bfloat16),
        embedding_format=_DTYPES[embedding["data"].dtype],
        front=0 if plan.front is None else 1 if plan.front.fused else 2,
        normed_residual=int(plan.front is not None and plan.front.normed_residual),
        norm_eps=spec.norm_eps,
        attention_scale=spec.attention_scale,
        attention_softcap=spec.attention_softcap or 0.0,
        logit_softcap=spec.logit_softcap or 0.0,
        embedding_multiplier=spec.embedding_multiplier,
        residual_multiplier=spec.residual_multiplier,
        logit_multiplier=spec.logit_multiplier,
    )
    return layers, model


def _norm(plan: Plan, name: str) -> int | None:
    tensor = plan.tensors.get(name)
    return None if tensor is None else address(tensor, torch.float32)
