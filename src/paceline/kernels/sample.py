"""The draw of a token in C, where the library is there; else the torch form, which is its specification."""

from __future__ import annotations

import ctypes
import math
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from paceline import draw as plain
from paceline import race as plain_race
from paceline.draw import Filter, Logprob
from paceline.errors import KernelError
from paceline.kernels import PATHS, library
from paceline.noise import stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_NOT_FINITE = -2


class _Filter(ctypes.Structure):
    _fields_ = (
        ("scale", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("reach", ctypes.c_double),
        ("top_k", ctypes.c_int64),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("listed", ctypes.c_int64),
        ("top", ctypes.c_float),
        ("pad", ctypes.c_float),
    )


class SampleKernels:
    """The functions of sample.c on one of its paths, with the arguments and errors of ``paceline.draw``.

    Args:
        library: the loaded C library.
        path: one of ``PATHS`` (of the last it needs AVX-512 alone); the best that the processor has where left out.
    """

    def __init__(self, library: ctypes.CDLL, path: str | None = None) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._argmax, self._draw = library.pl_argmax, library.pl_draw
        self._logprobs, self._uniforms = library.pl_logprobs, library.pl_uniforms
        rows: list[Any] = [ctypes.c_int32, pointer, integer, integer, integer]
        self._argmax.argtypes = [*rows, pointer]
        self._draw.argtypes = [*rows, pointer, pointer, pointer, pointer]
        self._logprobs.argtypes = [*rows, pointer, pointer, pointer]
        self._logprobs.restype = integer
        self._uniforms.argtypes = [ctypes.c_uint64, pointer, integer, pointer]
        self._children, self._shares, self._race = library.pl_children, library.pl_shares, library.pl_race
        row: list[Any] = [ctypes.c_int32, pointer, integer]
        self._children.argtypes = [*rows, pointer, pointer, pointer, integer, pointer, pointer, pointer, pointer]
        self._processed = library.pl_processed
        self._shares.argtypes = self._processed.argtypes = [*row, pointer, pointer, pointer]
        self._race.argtypes = [*row, ctypes.c_uint64, integer, pointer, pointer, pointer]
        for function in (self._shares, self._processed, self._race):
            function.restype = integer
        for function in (self._argmax, self._draw, self._children, self._uniforms):
            function.restype = None
        self._top = library.pl_top
        self._top.argtypes = [*rows, integer, pointer, pointer, pointer]
        self._top.restype = integer
        self._local = threading.local()
        self.best: int = library.pl_sample_path()
        self.path = self.best if path is None else PATHS.index(path)

    def argmax(self, rows: Tensor) -> list[int]:
        rows = _packed(rows)
        found = (ctypes.c_int64 * rows.shape[0])()
        self._argmax(self.path, rows.data_ptr(), rows.shape[0], rows.stride(0), rows.shape[1], found)
        return _checked(list(found))

    def draw(self, rows: Tensor, options: Filter, key: int, positions: Sequence[int]) -> list[int]:
        if options.temperature == 0.0:
            return self.argmax(rows)
        rows = _packed(rows)
        count = rows.shape[0]
        found = (ctypes.c_int64 * count)()
        self._draw(
            *(self.path, rows.data_ptr(), count, rows.stride(0), rows.shape[1]),
            *(_filter(options), _keys(key, positions, count), self._room(rows.shape[1]), found),
        )
        return _checked(list(found))

    def children(
        self, rows: Tensor, ids: Tensor | None, options: Filter, key: int, positions: Sequence[int], count: int
    ) -> list[tuple[list[int], list[float]]]:
        rows = _packed(rows)
        number, size = rows.shape
        count = min(count, size)
        if ids is not None:
            ids = ids.to("cpu", torch.int64).contiguous()
            if ids.shape != (size,):
                raise KernelError(f"ids are {list(ids.shape)} for rows of {size} columns; give one for each.")
        tokens, chances = (ctypes.c_int64 * (number * count))(), (ctypes.c_double * (number * count))()
        found = (ctypes.c_int64 * number)()
        self._children(
            *(self.path, rows.data_ptr(), number, rows.stride(0), size, None if ids is None else ids.data_ptr()),
            *(None if options.temperature == 0.0 else _filter(options), _keys(key, positions, number)),
            *(count, self._room(size), tokens, chances, found),
        )
        if _NOT_FINITE in found:
            plain.check_top(math.nan)
        each = [(place * count, place * count + max(0, there)) for place, there in enumerate(found)]
        return [(tokens[first:end], chances[first:end]) for first, end in each]

    def top(self, rows: Tensor, count: int) -> Tensor:
        rows = _packed(rows)
        size = rows.shape[1]
        found = torch.empty(rows.shape[0], count, dtype=torch.int64)
        place = self.path, rows.data_ptr(), rows.shape[0], rows.stride(0), size
        scores = (ctypes.c_double * count)()
        full = self._top(*place, count, self._room(size), scores, found.data_ptr())
        if full < rows.shape[0]:
            found[full:] = plain_race.top(rows[full:], count)
        return found

    def shares(self, row: Tensor, options: Filter) -> Tensor:
        result = torch.zeros(row.shape[0], dtype=torch.float64)
        if options.temperature == 0.0:
            result[self.argmax(row[None])[0]] = 1.0
            return result
        return self._filled(self._shares, row, options, result)

    def processed(self, row: Tensor, options: Filter) -> Tensor:
        if options.temperature == 0.0:
            return row
        return self._filled(self._processed, row, options, torch.full(row.shape, -math.inf))

    def draws(self, q: Tensor, key: int, position: int, count: int) -> list[int]:
        q = q.to("cpu", torch.float64).contiguous()
        size = q.shape[0]
        count = min(count, size)
        tokens, scores = (ctypes.c_int64 * count)(), (ctypes.c_double * count)()
        key = stream(key, position)
        place = self.path, q.data_ptr(), size, key, count, self._room(size)
        return tokens[: self._race(*place, tokens, scores)]

    def logprobs(self, row: Tensor, token: int, k: int) -> Logprob:
        row = _packed(row[None])[0]
        size = row.shape[0]
        k = min(k, size)
        report, ids = _Report(), (ctypes.c_int64 * max(k, 1))()
        place = row.data_ptr(), size, token, k, self._room(size)
        _checked([self._logprobs(self.path, *place, ctypes.byref(report), ids)])
        total = math.log(report.total / plain.GRID)
        listed = ids[: report.listed]
        values = row[torch.tensor(listed, dtype=torch.int64)].tolist()
        top = tuple((i, value - report.top - total) for i, value in zip(listed, values, strict=True))
        return Logprob(token, float(row[token]) - report.top - total, report.rank, top)

    def _filled(self, function: Any, row: Tensor, options: Filter, result: Tensor) -> Tensor:
        """The result, once a function of one row has written what it gives each token that is kept."""
        row = _packed(row[None])[0]
        place = self.path, row.data_ptr(), row.shape[0]
        _checked([function(*place, _filter(options), self._room(row.shape[0]), result.data_ptr())])
        return result

    def _room(self, size: int) -> int:
        """Where this thread may put the candidates of a row; kept, since fresh memory costs more than a draw."""
        room: Tensor | None = getattr(self._local, "room", None)
        if room is None or room.shape[0] <= size:
            room = self._local.room = torch.empty(size + 1, 2, dtype=torch.int64)
        return room.data_ptr()

    def uniforms(self, key: int, position: int, ids: Tensor) -> Tensor:
        result = torch.empty(ids.shape[0], dtype=torch.float64)
        self._uniforms(stream(key, position), ids.contiguous().data_ptr(), ids.shape[0], result.data_ptr())
        return result


def _keys(key: int, positions: Sequence[int], count: int) -> Any:
    """A key for the noise of each of ``count`` rows."""
    return (ctypes.c_uint64 * count)(*(stream(key, place) for _, place in zip(range(count), positions, strict=True)))


def _filter(options: Filter) -> Any:
    """A pointer to the filter as C knows it."""
    return ctypes.byref(_Filter(options.scale, options.top_p, options.reach, options.top_k))


def _packed(rows: Tensor) -> Tensor:
    """The rows on the host, the elements of each side by side."""
    rows = rows.detach().to("cpu", torch.float32)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _checked(tokens: list[int]) -> list[int]:
    if tokens and min(tokens) < 0:
        plain.check_top(math.nan if min(tokens) == _NOT_FINITE else -math.inf)
    return tokens


@cache
def _kernels() -> SampleKernels | None:
    found = library()
    return None if found is None else SampleKernels(found.c)


def argmax(rows: Tensor) -> list[int]:
    """``paceline.draw.argmax``, in C where the library is there."""
    kernels = _kernels()
    return (plain if kernels is None else kernels).argmax(rows)


def draw(rows: Tensor, options: Filter, key: int, positions: Sequence[int]) -> list[int]:
    """``paceline.draw.draw``, in C where the library is there: the same tokens."""
    kernels = _kernels()
    return (plain if kernels is None else kernels).draw(rows, options, key, positions)


def children(
    rows: Tensor, ids: Tensor | None, options: Filter, key: int, positions: Sequence[int], count: int
) -> list[tuple[list[int], list[float]]]:
    """``paceline.race.children``, in C where the library is there: the same tokens and chances."""
    kernels = _kernels()
    return (plain_race if kernels is None else kernels).children(rows, ids, options, key, positions, count)


def top(rows: Tensor, count: int) -> Tensor:
    """``paceline.race.top``, in C where the library is there: the same ids."""
    kernels = _kernels()
    return (plain_race if kernels is None else kernels).top(rows, count)


def shares(row: Tensor, options: Filter) -> Tensor:
    """``paceline.draw.shares``, in C where the library is there: the same bits."""
    kernels = _kernels()
    return (plain if kernels is None else kernels).shares(row, options)


def processed(row: Tensor, options: Filter) -> Tensor:
    """``paceline.draw.processed``, in C where the library is there: the same bits."""
    kernels = _kernels()
    return (plain if kernels is None else kernels).processed(row, options)


def draws(q: Tensor, key: int, position: int, count: int) -> list[int]:
    """``paceline.race.draws``, in C where the library is there: the same tokens."""
    kernels = _kernels()
    return (plain_race if kernels is None else kernels).draws(q, key, position, count)


def logprobs(row: Tensor, token: int, k: int) -> Logprob:
    """``paceline.draw.logprobs``, in C where the library is there: the same numbers."""
    kernels = _kernels()
    return (plain if kernels is None else kernels).logprobs(row, token, k)
