"""How fast this machine reads memory, and how much a step has to read: together the floor of a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from paceline.kernels import REFERENCE, library
from paceline.kernels.memory import huge_empty
from paceline.kernels.native import NativeLinear, linear_struct
from paceline.pages import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.targets.decoder import Decoder

SIZE = 1 << 30
REPEATS = 7
_INPUTS = 4096


def read_bandwidth(threads: int, path: str, size: int = SIZE, repeats: int = REPEATS) -> dict[str, Any]:
    """Bytes per second of each reader that there is: torch's sum, and our own int8 product at one row.

    Args:
        threads: threads of both.
        path: the instruction set of the product; it is left out on the torch reference.
        size: bytes that are read at a time, in large pages.
        repeats: the best of so many counts.
    """
    memory = huge_empty(size).fill_(129)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = memory[: size // 8 * 8]
        found = {"sum": size / min(best(whole.view(kind).sum, repeats) for kind in (torch.float32, torch.int64))}
    finally:
        torch.set_num_threads(before)
    built = None if path == REFERENCE else library()
    if built is not None:
        outputs = size // _INPUTS // 16 * 16
        tensors = {"data": memory, "scale": torch.zeros(outputs)}
        product = NativeLinear(built, path, threads, linear_struct(tensors, outputs, _INPUTS, "int8"))
        row = torch.ones(1, _INPUTS)
        found["product"] = outputs * _INPUTS / best(lambda: product(row), repeats)
    return found


def best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def step_bytes(decoder: Decoder, rows: int, context: int) -> int:
    """Bytes that a step must read: all weights, of the embedding its rows alone, and keys and values of the context."""
    plan = decoder.plan
    weights = sum(tensor.nbytes for name, tensor in plan.tensors.items() if not name.startswith("embedding."))
    embedding = sum(tensor[:1].nbytes for tensor in plan.linear("embedding").values())
    cache = sum(group.page_bytes * min(context, group.window or context) // PAGE for group in plan.groups)
    return weights + rows * embedding + cache
