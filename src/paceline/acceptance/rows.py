"""Rows of probabilities and what the rules do with them.

A row is a numpy array [V]: float64 when text is made, objects (fractions) when a rule is proved. Nothing here knows
which, so what is proved is the code that runs.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DrafterError
from paceline.kernels.sample import shares

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.draw import Filter

Row: TypeAlias = NDArray[Any]
Number: TypeAlias = float | Fraction


class Rows(Protocol):
    """One row a node; may be a list, a matrix, or something that works rows out when they are asked for."""

    def __getitem__(self, node: int, /) -> Row: ...


def probabilities(row: Tensor, options: Filter) -> Row:
    """What a token is drawn from: float64 [V], with a single 1 at temperature 0.

    Args:
        row: float32 [V], logits after the request's rules.
        options: the temperature and the filters.

    Raises:
        ModelError: the row holds NaN or +inf.
        RequestError: the row holds nothing but -inf.
    """
    result: Row = shares(row, options).numpy()
    return result


def chance(p: Number, q: Number) -> Number:
    """min(1, p / q), for a token that was drawn with probability ``q``.

    Raises:
        DrafterError: ``q`` is not above 0, so the token cannot have been drawn.
    """
    if not q > 0:
        raise DrafterError(f"a drafted token has probability {q} in its own row; give the row that it was drawn from.")
    return 1 if p >= q else p / q


def excess(p: Row, q: Row) -> Row:
    """max(p - q, 0), what the target wants beyond what the drafter gave."""
    rest: Row = np.maximum(p, q)
    rest -= q  # in place: fresh memory costs more than the subtraction
    return rest


def normalised(row: Row, otherwise: Row) -> Row:
    """``row`` over its sum, or ``otherwise`` where the sum is 0.

    A residual is reached with the probability that is its sum, so its sum is 0 only where rounding led there.
    """
    total = row.sum()
    return row / total if total > 0 else otherwise


def without(q: Row, token: int) -> Row:
    """``q`` once ``token`` is drawn: it cannot be drawn again, the others share its part. All 0 if there are none."""
    rest = q.copy()
    rest[token] = 0
    return normalised(rest, rest)


def resumption(rest: Number, a: Number) -> Number:
    """S / (S + 1 - a): the chance to stop at a node after what follows it has failed.

    Args:
        rest: S, the sum of the node's residual max(a p - q, 0).
        a: the chance with which the node was reached, at most 1.

    With a = 1 and p = q, where it would be 0 / 0, what follows never fails but by rounding; then it is 1.
    """
    below = rest + (1 - a)
    return rest / below if below > 0 else 1
