"""Several tokens from one row without replacement: the race that decides a draw, run to more than the first place.

Each token runs with its log-probability + Gumbel noise. The first is the draw of ``draw.py``; those after it, in
falling order, are the draws that would follow if what is drawn were taken out (Kool et al. 2019, arXiv 1903.06059).
This is the specification of what ``kernels/sample.py`` does in C, bit for bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.draw import check_top, masses, scores
from paceline.elementary import log
from paceline.noise import gumbels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.draw import Filter


def children(
    rows: Tensor, ids: Tensor | None, options: Filter, key: int, positions: Sequence[int], count: int
) -> list[tuple[list[int], list[float]]]:
    """For each row the first tokens of the race that a draw decides, in falling order; the first of them is what the
    draw gives.

    The draw is that from the whole vocabulary, with -inf for every token that has no column. At temperature 0 the
    race goes by the logits alone.

    Args:
        rows: float32 [M, N], after the rules.
        ids: int64 [N], the tokens of the columns, below 2**32, all different, in any order; without them column i is
            token i.
        options: how a row becomes a distribution.
        key: what :func:`paceline.noise.noise_key` gave.
        positions: for each row the absolute position of the token that is drawn.
        count: how many tokens are wanted; there are fewer where fewer are possible, and none in a row of -inf.

    Returns:
        For each row the tokens, and for each token an estimate of its chance to be what the target draws with the same
        noise: the softmax of all that ran, logits and noise together.

    Raises:
        ModelError: a row holds NaN or +inf.
    """
    if ids is not None:
        ids, order = ids.sort()
        rows = rows[:, order]
    return [_first(row, ids, options, key, at, count) for row, at in zip(rows, positions, strict=True)]


def _first(
    row: Tensor, ids: Tensor | None, options: Filter, key: int, position: int, count: int
) -> tuple[list[int], list[float]]:
    possible = (row != -math.inf).nonzero()[:, 0]
    if possible.shape[0] == 0:
        return [], []
    top = float(row.max())
    check_top(top)
    if options.temperature == 0.0:
        columns, height = possible, row[possible].to(torch.float64)
        mass = masses(row[possible], top, 1.0)
    else:
        columns, height = scores(row, ids, options, key, position)
        mass = masses((height - height.max()).to(torch.float32), 0.0, 1.0)
    first = height.argsort(descending=True, stable=True)[:count]
    tokens = columns[first] if ids is None else ids[columns[first]]
    return tokens.tolist(), (mass[first].to(torch.float64) / float(int(mass.sum()))).tolist()


def top(rows: Tensor, count: int) -> Tensor:
    """The ids of the highest logits of each row, in falling order, among equal ones the lowest id first.

    Args:
        rows: float32 [M, V], whatever they hold.
        count: how many are wanted, at most V.

    Returns:
        int64 [M, count], all different in a row.
    """
    return rows.argsort(dim=1, descending=True, stable=True)[:, :count]


def draws(q: Tensor, key: int, position: int, count: int) -> list[int]:
    """Up to ``count`` tokens drawn from a row of probabilities without replacement, in the order of the draws.

    Those with the highest log q + noise, where q is not 0.

    Args:
        q: float64 [V]; a positive factor to all does not matter.
        key, position: of the noise, as for :func:`children`.
        count: how many tokens are wanted.
    """
    ids = q.nonzero()[:, 0]
    height = log(q[ids]) + gumbels(key, position, ids)
    return [int(i) for i in ids[height.argsort(descending=True, stable=True)[:count]].tolist()]
