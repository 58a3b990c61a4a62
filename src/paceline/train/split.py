"""Where the time of training steps goes: in the target, in the drafter's matrix products, in the rest."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.autograd.profiler import profile

if TYPE_CHECKING:
    from collections.abc import Callable

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::dot")


@dataclass(frozen=True)
class Split:
    """Shares of the time, which add up to 1.

    Attributes:
        target: the target's passes.
        products: the drafter's matrix products.
        rest: all else: small operators, the optimizer, laying out.
    """

    target: float
    products: float
    rest: float


def measured(step: Callable[[], object], target_seconds: Callable[[], float]) -> Split:
    """Take one step under torch's profiler.

    Args:
        target_seconds: how long the target has run so far, by the clock.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells standard error when it starts and stops
    before, begun = target_seconds(), time.perf_counter()
    with profile(use_kineto=False) as found:
        step()
        seconds, target = time.perf_counter() - begun, target_seconds() - before
    each = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    products = sum(each.get(name, 0.0) for name in _PRODUCTS) / max(sum(each.values()), 1e-9)
    own = max(0.0, 1 - target / seconds)
    return Split(min(1.0, target / seconds), own * products, own * (1 - products))
