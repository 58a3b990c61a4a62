"""One row of logits and the noise of one position give one token.

This is the specification in plain torch. ``kernels/sample.py`` does the same in C, bit for bit, and is used
where it is available; both are made of IEEE operations in a fixed order and of integer sums, so they agree on
every machine.

The order of tokens is by logit, highest first, ties by id, lowest first. Every filter keeps a prefix of that
order, so together they keep a prefix too. With m the highest logit and T the temperature, in vLLM's order:

1. min_p keeps logits of at least m + T log(min_p), that is min_p times the highest probability;
2. top_k keeps the first k;
3. top_p keeps, of what is left, the shortest prefix with the share top_p of its mass, at least one token.

The mass of a token is exp((x - m) / T) in float32, rounded to a multiple of 2**-40: sums of whole numbers do
not depend on their order. Of the tokens kept the one with the highest (x - m) / T + Gumbel noise, in float64,
is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from paceline.elementary import exp
from paceline.errors import ModelError, RequestError
from paceline.noise import gumbels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

GRID = 2.0**40
LOG2E = float.fromhex("0x1.715476p+0")
EXP2_TERMS = tuple(
    map(
        float.fromhex,
        (
            "0x1.4309120000000p-13",
            "0x1.5d87fe0000000p-10",
            "0x1.3b2ab60000000p-7",
            "0x1.c6b08e0000000p-5",
            "0x1.ebfbe00000000p-3",
            "0x1.62e4300000000p-1",
            "0x1.0000000000000p+0",
        ),
    )
)
"""Taylor terms of 2**f, highest first, as float32."""
MAX_SCALE = 2.0**100


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The numbers that turn a row into a distribution; see the head of this file.

    Attributes:
        temperature: 0 is the most likely token, the lowest id of a tie.
        top_k: 0 is off.
        top_p: 1 is off, 0 is the most likely token alone.
        min_p: 0 is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def scale(self) -> float:
        """1 / temperature, bounded so that differences of logits stay numbers."""
        return min(1.0 / self.temperature, MAX_SCALE) if self.temperature > 1.0 / MAX_SCALE else MAX_SCALE

    @property
    def reach(self) -> float:
        """How far below the highest logit min_p keeps tokens; at most 0."""
        return self.temperature * math.log(self.min_p) if self.min_p > 0.0 else -math.inf


@dataclass(frozen=True)
class Logprob:
    """What the target gave one token.

    Attributes:
        token: its id.
        logprob: its natural log-probability; -inf where the rules forbid it.
        rank: its place in the order of the row, from 1.
        top: the ids and log-probabilities of the most likely tokens, in the order of the row.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def argmax(rows: Tensor) -> list[int]:
    """The most likely id of each row, the lowest of a tie.

    Args:
        rows: float32 [M, V].

    Raises:
        ModelError: a row holds NaN or +inf.
        RequestError: a row holds nothing but -inf.
    """
    top = rows.amax(dim=1) if rows.shape[0] else rows.new_empty(0)
    for value in top.tolist():
        check_top(value)
    return [int(i) for i in rows.argmax(dim=1).tolist()] if rows.shape[0] else []


def draw(rows: Tensor, options: Filter, key: int, positions: Sequence[int]) -> list[int]:
    """The token of each row.

    Args:
        rows: float32 [M, V], after the rules.
        options: how the rows become distributions.
        key: what :func:`paceline.noise.noise_key` gave.
        positions: for each row the absolute position of the token that is drawn.

    Raises:
        ModelError: a row holds NaN or +inf.
        RequestError: a row holds nothing but -inf.
    """
    if options.temperature == 0.0:
        return argmax(rows)
    return [_draw_row(row, options, key, position) for row, position in zip(rows, positions, strict=True)]


def kept(row: Tensor, options: Filter) -> Tensor:
    """The ids that the filters keep, in the order of the row; int64 [K]. The temperature must be above 0."""
    top = float(row.max())
    check_top(top)
    values, ids = row.sort(descending=True, stable=True)
    possible = (values > -math.inf) & (values.to(torch.float64) >= top + options.reach)
    count = int(possible.sum())
    if options.top_k > 0:
        count = min(count, options.top_k)
    if options.top_p < 1.0:
        mass = masses(values[:count], top, options.scale).cumsum(0)
        share = min(math.ceil(options.top_p * float(mass[-1])), int(mass[-1]))
        count = min(count, int((mass < share).sum()) + 1)
    return ids[:count]


def scores(row: Tensor, ids: Tensor | None, options: Filter, key: int, position: int) -> tuple[Tensor, Tensor]:
    """The columns that the filters keep, int64 [K], ascending, and the score of each, float64 [K].

    ``ids`` are the tokens of the columns, ascending; without them column i is token i. The temperature must be above 0.
    """
    columns = kept(row, options).sort().values
    z = (row[columns].to(torch.float64) - float(row.max())) * options.scale
    return columns, z + gumbels(key, position, columns if ids is None else ids[columns])


def masses(row: Tensor, top: float, scale: float) -> Tensor:
    """exp((row - top) * scale) in units of 2**-40, int64 [N]; ``top`` is at least every element."""
    exponent = ((row - top) * scale * LOG2E).clamp_(min=-60.0)
    whole = exponent.round()
    fraction = exponent - whole
    value = torch.full_like(fraction, EXP2_TERMS[0])
    for term in EXP2_TERMS[1:]:
        value = value * fraction + term
    power = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    return (value * power * GRID).round_().to(torch.int64)


def log_total(row: Tensor, top: float) -> float:
    """log(sum(exp(row - top))), a function of the row alone."""
    return math.log(int(masses(row, top, 1.0).sum()) / GRID)


def log_probability(row: Tensor, token: int) -> float:
    """The natural log-probability of ``token`` under softmax(row), to about 1e-6.

    Raises:
        ModelError: the row holds NaN or +inf.
        RequestError: the row holds nothing but -inf.
    """
    top = float(row.max())
    check_top(top)
    return float(row[token]) - top - log_total(row, top)


def logprobs(row: Tensor, token: int, k: int) -> Logprob:
    """What softmax(row) gives ``token`` and the ``k`` most likely ids.

    Args:
        row: float32 [V]: raw logits, or :func:`processed` ones.
        token: the chosen id.
        k: how many of the most likely ids to list, at most V are.

    Raises:
        ModelError: the row holds NaN or +inf.
        RequestError: the row holds nothing but -inf.
    """
    top = float(row.max())
    check_top(top)
    total = log_total(row, top)
    value = row[token]
    rank = 1 + int((row > value).sum()) + int((row[:token] == value).sum())
    values, ids = first(row, k)
    listed = tuple((i, v - top - total) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return Logprob(token, float(value) - top - total, rank, listed)


def first(row: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first ``k`` logits of the row's order and their ids, -inf left out."""
    k = min(k, int((row > -math.inf).sum()))
    if k == 0:
        return row[:0], torch.empty(0, dtype=torch.int64)
    least = row.topk(k).values[-1]
    ids = (row >= least).nonzero()[:, 0]
    values, order = row[ids].sort(descending=True, stable=True)
    return values[:k], ids[order[:k]]


def processed(row: Tensor, options: Filter) -> Tensor:
    """Logits of the distribution that a token is drawn from: over the temperature, -inf where filtered out.

    At temperature 0 the row itself: the token is its most likely.
    """
    if options.temperature == 0.0:
        return row
    ids = kept(row, options)
    result = torch.full_like(row, -math.inf)
    result[ids] = ((row[ids].to(torch.float64) - float(row.max())) * options.scale).to(torch.float32)
    return result


def shares(row: Tensor, options: Filter) -> Tensor:
    """The probabilities with which the tokens of a row are drawn: float64 [N], a single 1 at temperature 0.

    Of the tokens kept, exp((x - m) / T) over its sum, which is that of 8 sums, each of every eighth token.

    Raises:
        ModelError: the row holds NaN or +inf.
        RequestError: the row holds nothing but -inf.
    """
    result = torch.zeros(row.shape[0], dtype=torch.float64)
    if options.temperature == 0.0:
        result[argmax(row[None])[0]] = 1.0
        return result
    ids = kept(row, options).sort().values
    weights = exp((row[ids].to(torch.float64) - float(row.max())) * options.scale)
    lanes = pad(weights, (0, -ids.shape[0] % 8)).reshape(-1, 8).cumsum(0)[-1]
    result[ids] = weights / lanes.cumsum(0)[-1]
    return result


def check_top(value: float) -> None:
    """Raise unless the highest logit of a row is a finite number.

    Raises:
        ModelError: it is NaN or +inf.
        RequestError: it is -inf.
    """
    if value == -math.inf:
        raise RequestError("the request's rules leave no token to choose; allow more tokens or ban fewer.")
    if not value < math.inf:
        raise ModelError(f"the model's logits hold {value}; try another number format, or check its weights.")


def _draw_row(row: Tensor, options: Filter, key: int, position: int) -> int:
    ids, height = scores(row, None, options, key, position)
    return int(ids[height.argmax()])
