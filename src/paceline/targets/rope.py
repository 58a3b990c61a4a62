"""Rotary position embedding: the inverse frequencies of every supported kind of scaling.

All arithmetic is float32 in the order of the reference implementation, so that the frequencies equal it bit
for bit: an error of one unit in the last place is a visible angle after some thousand positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

KNOWN_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    ),
    "yarn": frozenset(
        {
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "original_max_position_embeddings",
        },
    ),
    "longrope": frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"},
    ),
}
COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


def kind_of(parameters: Mapping[str, Any]) -> str:
    """The kind of scaling that `parameters` name, "default" where they name none.

    Raises:
        UnsupportedModelError: an unknown kind, or a key that this kind does not have.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in KNOWN_KEYS:
        known = ", ".join(sorted(KNOWN_KEYS))
        raise UnsupportedModelError(f"rope scaling of type '{kind}' is not supported (only {known}).")
    for key, value in parameters.items():
        if key not in COMMON_KEYS | KNOWN_KEYS[kind] and value not in (None, False):
            raise UnsupportedModelError(f"rope scaling '{kind}' has a key that is not supported: {key} = {value!r}.")
    return str(kind)


def frequencies(
    parameters: Mapping[str, Any], dims: int, theta: float, max_positions: int, long: bool
) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [dims / 2] and the factor on cos and sin.

    Args:
        parameters: the scaling's own parameters, `original_max_position_embeddings` filled in.
        dims: rotary dimensions of a head, even.
        theta: the base.
        max_positions: the configuration's context limit, in tokens.
        long: for longrope, whether the factors for long contexts are taken.

    Raises:
        UnsupportedModelError: the kind of scaling is unknown or lacks a parameter.
    """
    kind = kind_of(parameters)
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).to(torch.float32) / dims
    try:
        if kind == "longrope":
            return _longrope(parameters, exponents, theta, max_positions, long)
        return _SCALINGS[kind](parameters, exponents, dims, theta, max_positions)
    except KeyError as error:
        raise UnsupportedModelError(f"rope scaling '{kind}' lacks the parameter {error.args[0]}.") from error


def _default(_: Mapping[str, Any], exponents: Tensor, dims: int, theta: float, __: int) -> tuple[Tensor, float]:
    return 1.0 / (theta**exponents), 1.0


def _linear(parameters: Mapping[str, Any], exponents: Tensor, dims: int, theta: float, _: int) -> tuple[Tensor, float]:
    return 1.0 / (theta**exponents) / parameters["factor"], 1.0


def _llama3(parameters: Mapping[str, Any], exponents: Tensor, dims: int, theta: float, _: int) -> tuple[Tensor, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between mixed (Llama 3.1)."""
    inverse = 1.0 / (theta**exponents)
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, mixed, scaled), 1.0


def _yarn(
    parameters: Mapping[str, Any], exponents: Tensor, dims: int, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """NTK by parts and a factor on the attention (YaRN, arXiv 2309.00071, section 3)."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or max_positions / original

    def turns_to_dim(turns: float) -> float:
        return (dims * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low = turns_to_dim(parameters.get("beta_fast") or 32)
    high = turns_to_dim(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # a ramp of no width has no slope
    powers = theta**exponents
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return inverse, _yarn_attention(parameters, factor)


def _yarn_attention(parameters: Mapping[str, Any], factor: float) -> float:
    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def _longrope(
    parameters: Mapping[str, Any], exponents: Tensor, theta: float, max_positions: int, long: bool
) -> tuple[Tensor, float]:
    """One factor a frequency, a set for short and a set for long contexts (LongRoPE, arXiv 2402.13753)."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original
    name = "long_factor" if long else "short_factor"
    divisors = torch.tensor(parameters[name], dtype=torch.float32)
    if divisors.shape != exponents.shape:
        raise UnsupportedModelError(
            f"rope scaling 'longrope' has {divisors.numel()} values in {name}, "
            f"but the heads have {exponents.numel()} frequencies."
        )
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (divisors * theta**exponents), float(attention)


_SCALINGS: dict[str, Callable[[Mapping[str, Any], Tensor, int, float, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
