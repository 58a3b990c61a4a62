"""The loss: how far a drafter's guesses are from the target's next token, and for EAGLE from its next state.

Guesses are compared with the token that the target emitted, by cross-entropy, or with its whole distribution, by the
forward KL divergence, of which the former is the case of one sure token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

NOTHING = -1
"""The column of a token that a drafter has none for."""

_ROWS = 256  # whose logits are there at once: 8,192 columns of them fit a processor's cache


def compare(
    rows: Tensor, product: Tensor, columns: Tensor, wanted: Tensor | None = None, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum over M rows of KL(p || q), where q is the softmax of a row's logits.

    Logits are made a few rows at a time, their gradients beside them, and none is kept.

    Args:
        rows: float32 [M, hidden], what the drafter's product reads.
        product: float32 [N, hidden].
        columns: int64 [M], those of the tokens that the target emitted.
        wanted: float32 [M, N], log p: KL's gradients are those of the cross-entropy by which EAGLE heads are trained
            (arXiv 2401.15077, section 4.2; 2503.01840), but a head that knows all has a loss of 0. None is sure of the
            emitted tokens, as Medusa's heads are trained (arXiv 2401.10774, equation 1).
        added: float32 [N], to the logits.

    Returns:
        The sum, and which rows' likeliest column, before anything was added, is that of the emitted token, bool [M].
    """
    total, right = _Compare.apply(rows, product, columns, wanted, added)  # type: ignore[no-untyped-call]
    return total, right


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, product: Tensor, columns: Tensor, wanted: Tensor | None, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        to_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        to_product = torch.zeros_like(product) if ctx.needs_input_grad[1] else None
        right = torch.empty(len(rows), dtype=torch.bool)
        total = rows.new_zeros(())
        for first in range(0, len(rows), _ROWS):
            some = slice(first, first + _ROWS)
            logits = rows[some] @ product.T
            right[some] = logits.argmax(-1) == columns[some]
            if added is not None:
                logits += added
            loss, change = _divergence(logits, columns[some], None if wanted is None else wanted[some])
            total += loss
            if to_rows is not None:
                torch.mm(change, product, out=to_rows[some])
            if to_product is not None:
                to_product.addmm_(change.T, rows[some])
        ctx.save_for_backward(to_rows, to_product)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if change is None else change * given[0] for change in ctx.saved_tensors), None, None, None


def _divergence(logits: Tensor, columns: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of the rows' divergences, and its gradient for the logits, which takes their place."""
    logits -= logits.logsumexp(-1, keepdim=True)
    if wanted is not None:
        chances = wanted.exp()
        loss = torch.dot(chances.view(-1), (wanted - logits).view(-1))
        return loss, logits.exp_().sub_(chances)
    there = columns[:, None]
    loss = -logits.gather(1, there).sum()
    change = logits.exp_()
    return loss, change.scatter_add_(1, there, change.new_full((1, 1), -1.0).expand(len(there), 1))


def against_states(outputs: Tensor, states: Tensor) -> Tensor:
    """Smooth L1 of the foretold states, float32 [M, hidden], against the target's: EAGLE's regression
    (arXiv 2401.15077, section 4.2), the sum over rows of the mean over values."""
    return F.smooth_l1_loss(outputs, states, reduction="none").mean(-1).sum()
