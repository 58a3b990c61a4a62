"""Noise as a pure function of (seed, choice, purpose, position, token id): nothing is ever "the next" number.

Two draws that name the same five things see the same noise, whatever was drawn before, beside or instead; so
sampled text is the same with and without speculation (arXiv 2408.07978: coupled Gumbel noise).

The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) used as a tree: output n of the stream that
starts at ``key`` is ``mix(key + GOLDEN * (n + 1))`` and is itself the key of a stream. The seed picks one, the
choice one of its outputs, and so on down to the token id, whose output gives 53 bits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from paceline.elementary import log

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a number is for, so that no two uses share one."""

    TARGET = 0
    DRAFT = 1
    COIN = 2
    RESIDUAL = 3


def stream(key: int, index: int) -> int:
    """Output number ``index`` (from 0) of the stream at ``key``; both unsigned 64-bit."""
    h = (key + GOLDEN * (index + 1)) & MASK
    h = ((h ^ (h >> 30)) * MIX_1) & MASK
    h = ((h ^ (h >> 27)) * MIX_2) & MASK
    return h ^ (h >> 31)


def noise_key(seed: int, choice: int = 0, purpose: Purpose = Purpose.TARGET) -> int:
    """The key of everything that one choice of a request draws for one purpose."""
    return stream(stream(stream(0, seed), choice), purpose)


def bits(key: int, position: int, ids: Tensor) -> Tensor:
    """53 random bits, 1 to 2**53 - 1 (a zero becomes 1), for each of ``ids``.

    Args:
        key: what :func:`noise_key` gave.
        position: the absolute position of the token that is drawn, counted from the start of the prompt.
        ids: int64 [N], token ids.

    Returns:
        int64 [N].
    """
    h = (ids + 1) * _signed(GOLDEN) + _signed(stream(key, position))
    h = (h ^ _shift(h, 30)) * _signed(MIX_1)
    h = (h ^ _shift(h, 27)) * _signed(MIX_2)
    return _shift(h ^ _shift(h, 31), 11).clamp_(min=1)


def uniforms(key: int, position: int, ids: Tensor) -> Tensor:
    """Uniform float64 [N] strictly inside (0, 1), multiples of 2**-53; arguments as for :func:`bits`."""
    return bits(key, position, ids).to(torch.float64) * 2.0**-53


def gumbels(key: int, position: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u), float64 [N]; arguments as for :func:`bits`."""
    return -log(-log(uniforms(key, position, ids)))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(h: Tensor, by: int) -> Tensor:
    """Logical shift to the right; int64's own keeps the sign."""
    return (h >> by) & ((1 << (64 - by)) - 1)
