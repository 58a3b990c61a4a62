"""Logarithm and exponential, made of IEEE operations in a fixed order: the same bits here, in C and on every machine.

A library's own have not: they differ between machines, and between an element in a vector and one in its tail.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LOG2E = float.fromhex("0x1.71547652b82fep+0")
SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")
LOG_TERMS = tuple(1.0 / (2 * k + 1) for k in range(11))
EXP_TERMS = tuple(1.0 / math.factorial(k) for k in range(14))
ROUND = 1.5 * 2.0**52
"""Added to a number and taken off again it rounds to the nearest whole one, a tie to the even."""
LOWEST = -700.0


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 numbers, to within 2 units in the last place.

    With x = 2**e * m, m from sqrt(1/2) to sqrt(2), and s = (m - 1)/(m + 1), log m = 2 atanh s.
    """
    raw = x.view(torch.int64)
    m = ((raw & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    large = m > SQRT2
    e = (raw >> 52) - 1023 + large
    m = torch.where(large, m * 0.5, m)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    p = torch.full_like(t, LOG_TERMS[-1])
    for term in LOG_TERMS[-2::-1]:
        p = p * t + term
    scale = e.to(torch.float64)
    return scale * LN2_HIGH + (scale * LN2_LOW + (s + s) * p)


def exp(x: Tensor) -> Tensor:
    """e**x of float64 numbers of at most 0, to within 2 units in the last place; below -700 it is e**-700.

    With x = k log 2 + r, k whole, e**x = 2**k e**r.
    """
    x = x.clamp(min=LOWEST)
    whole = (x * LOG2E + ROUND) - ROUND
    r = (x - whole * LN2_HIGH) - whole * LN2_LOW
    p = torch.full_like(r, EXP_TERMS[-1])
    for term in EXP_TERMS[-2::-1]:
        p = p * r + term
    return p * ((whole.to(torch.int64) + 1023) << 52).view(torch.float64)
