"""Products with packed weights: the layout that the kernels read, in int8, bf16 and fp32."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from paceline.errors import KernelError
from paceline.kernels import REFERENCE, library

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Format = Literal["int8", "bf16", "fp32"]

LANES = 16
"""Outputs that lie side by side: the lanes of a 512-bit vector of fp32."""

BLOCK = 64
"""Inputs that one rotation mixes."""

MAX_INT8_INPUTS = (2**31 - 1) // (255 * 127) // BLOCK * BLOCK
"""With more, a sum of 8-bit products could leave 32 bits."""


@cache
def hadamard() -> Tensor:
    """The orthonormal Hadamard matrix of order 64 (Sylvester's), float32, symmetric, entries +-1/8."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(BLOCK)


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def rotate(rows: Tensor) -> Tensor:
    """Rotate float32 [R, K] in blocks of 64 columns; K is padded with zeros to a multiple of 64.

    The rotation is its own inverse and leaves products of two rotated rows as they were, while it spreads the
    few large inputs that would cost 8-bit rounding its precision (QuaRot, arXiv 2404.00456).
    """
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
    return (rows.reshape(-1, BLOCK) @ hadamard()).reshape(rows.shape)


def pack_linear(weight: Tensor, bias: Tensor | None, number_format: Format) -> dict[str, Tensor]:
    """Bring a matrix [N, K] and its bias [N] into kernel layout, N padded with zeros to a multiple of 16.

    Returns:
        ``data``: fp32 and bf16 [N / 16, K, 16]; int8 uint8 [N / 16, K / 4, 16, 4], which is 128 + the weight, rows
        rotated and K padded to a multiple of 64. ``scale`` (int8 only): float32 [N], largest absolute weight of
        the row / 127. ``bias``: float32 [N], where there is one.

    Raises:
        KernelError: int8 with so many inputs that sums could leave 32 bits.
    """
    n, k = weight.shape
    weight = torch.nn.functional.pad(weight.float(), (0, 0, 0, -n % LANES))
    packed: dict[str, Tensor] = {}
    if number_format == "int8":
        if round_up(k, BLOCK) > MAX_INT8_INPUTS:
            raise KernelError(f"int8 products take at most {MAX_INT8_INPUTS} inputs, not {k}; use bf16.")
        rotated = rotate(weight)
        scale = rotated.abs().amax(1) / 127
        whole = (rotated / scale.clamp_min(1e-30)[:, None]).round() + 128
        packed["data"] = whole.to(torch.uint8).reshape(-1, LANES, rotated.shape[1] // 4, 4).transpose(1, 2).contiguous()
        packed["scale"] = scale
    else:
        dtype = torch.bfloat16 if number_format == "bf16" else torch.float32
        packed["data"] = weight.reshape(-1, LANES, k).transpose(1, 2).to(dtype).contiguous()
    if bias is not None:
        packed["bias"] = torch.nn.functional.pad(bias.float(), (0, -n % LANES))
    return packed


def unpack_linear(tensors: dict[str, Tensor], n: int, k: int, number_format: Format) -> Tensor:
    """The matrix in float32 [N, K]; under int8 the whole numbers, rotated, K as padded, without their scale."""
    data = tensors["data"]
    if number_format == "int8":
        rows = data.transpose(1, 2).reshape(data.shape[0] * LANES, -1)
        return rows[:n].float() - 128
    return data.float().transpose(1, 2).reshape(-1, k)[:n].contiguous()


def packed_bytes(n: int, k: int, number_format: Format) -> int:
    """Bytes of a packed matrix, the scales counted, a bias not."""
    rows = round_up(n, LANES)
    if number_format == "int8":
        return rows * (round_up(k, BLOCK) + 4)
    return rows * k * (2 if number_format == "bf16" else 4)


def pack_embedding(weight: Tensor, number_format: Format) -> dict[str, Tensor]:
    """Bring an embedding [V, H] into the form that rows are gathered from.

    Returns:
        ``data`` [V, H]: fp32, bf16, or int8 with ``scale`` float32 [V], the largest absolute value of a row / 127.
    """
    if number_format == "int8":
        weight = weight.float()
        scale = weight.abs().amax(1) / 127
        return {"data": (weight / scale.clamp_min(1e-30)[:, None]).round().to(torch.int8), "scale": scale}
    return {"data": weight.to(torch.bfloat16 if number_format == "bf16" else torch.float32).contiguous()}


class Linear:
    """A product [R, K] -> [R, N] in float32 with packed weights, outside a forward pass.

    Args:
        n: outputs.
        k: inputs.
        number_format: of the weights.
        tensors: what `pack_linear` made.
        threads: threads that take part; they do not change a bit.
        path: the instruction set; "" is the best that the processor has, "torch reference" the plain form.
    """

    def __init__(
        self,
        n: int,
        k: int,
        number_format: Format,
        tensors: dict[str, Tensor],
        threads: int = 1,
        path: str = "",
    ) -> None:
        from paceline.kernels.native import NativeLinear, linear_struct
        from paceline.kernels.reference import ReferenceLinear

        self.n, self.k = n, k
        self._tensors = tensors  # the library reads them where they lie
        found = None if path == REFERENCE else library()
        self._run: Callable[[Tensor], Tensor]
        if found is None:
            self._run = ReferenceLinear(tensors, n, k, number_format)
        else:
            self._run = NativeLinear(found, path, threads, linear_struct(tensors, n, k, number_format))

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply float32 rows [R, K].

        Raises:
            KernelError: rows of another width, type or place.
        """
        if rows.dim() != 2 or rows.shape[1] != self.k:
            raise KernelError(f"rows of {self.k} inputs are needed, not of shape {tuple(rows.shape)}.")
        return self._run(rows)
