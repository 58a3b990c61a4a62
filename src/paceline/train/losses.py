"""The loss: how far a head's guesses are from the target's next token, and for EAGLE from its next state.

Guesses are compared with the token that the target emitted, by cross-entropy, or with its whole distribution, by the
forward KL divergence, of which the former is the case of one sure token. All are means over what counts; where nothing
does, they are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

NOTHING = -1
"""The column of a label that does not count."""


def against_tokens(logits: Tensor, columns: Tensor) -> Tensor:
    """The mean of -log q(token), as Medusa's heads are trained (arXiv 2401.10774, equation 1).

    Args:
        logits: float32 [M, N].
        columns: int64 [M], the tokens' columns; `NOTHING` where a row does not count.
    """
    total = F.cross_entropy(logits, columns, ignore_index=NOTHING, reduction="sum")
    return total / (columns != NOTHING).sum().clamp_min(1)


def against_distribution(logits: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
    """The mean of sum p log(p / q). Its gradients are those of the cross-entropy -sum p log q, by which EAGLE and
    EAGLE-3 heads are trained (arXiv 2401.15077, section 4.2; 2503.01840), but a head that knows all has a loss of 0.

    Args:
        logits: float32 [M, N].
        wanted: float32 [M, N], the target's logits of the same columns: p is their softmax, so that the target's
            distribution is renormalised over a reduced vocabulary.
        counted: bool [M], which rows count.
    """
    each = F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="none").sum(-1)
    return each.where(counted, 0.0).sum() / counted.sum().clamp_min(1)


def against_states(outputs: Tensor, states: Tensor, counted: Tensor) -> Tensor:
    """Smooth L1 of the foretold states, float32 [M, hidden], against the target's: EAGLE's regression
    (arXiv 2401.15077, section 4.2), a mean over values of the rows that count, bool [M]."""
    each = F.smooth_l1_loss(outputs, states, reduction="none").mean(-1)
    return each.where(counted, 0.0).sum() / counted.sum().clamp_min(1)
