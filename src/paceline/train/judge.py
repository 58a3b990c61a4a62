"""What the target says of the tokens of a pack, next to what a drafter guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from paceline.train.losses import NOTHING, compare
from paceline.train.objective import FADING, Measured

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.train.pack import Pack
    from paceline.train.shared import Shared

Against = Literal["tokens", "distribution"]


@dataclass(frozen=True)
class Columns:
    """Which columns a step looks at.

    Attributes:
        those: int64 [n]; None is all of them.
        added: float32 [n], to the logits of each: the logarithm of how many columns it stands for.
    """

    those: Tensor | None = None
    added: Tensor | None = None


class Judge:
    """Compares guesses with what the target says, by its tokens or its whole distribution over the drafter's ids.

    Where only ``sampled`` columns are looked at in a step, these are the most frequent ones, those of the step's own
    tokens, and others drawn, each of which stands for as many as were not drawn: sums over all columns are then right
    on average (sampled softmax, arXiv 1412.2007, section 3).

    Args:
        ids: int64 [N], the target's id of each column of the guesses.
        ranked: int64 [N], the columns by how frequent they are; needed where they are sampled.
        sampled: how many columns a step looks at beside those of its own tokens, half of them the most frequent; 0 is
            all.
    """

    def __init__(
        self, shared: Shared, ids: Tensor, against: Against, *, ranked: Tensor | None = None, sampled: int = 0
    ) -> None:
        self._shared = shared
        self._columns = torch.full((shared.spec.vocab_size,), NOTHING)
        self._columns[ids] = torch.arange(len(ids))
        self._product = shared.product(ids) if against == "distribution" else None
        self._ranked, self._sampled = ranked, sampled if sampled < len(ids) else 0

    def begin(self, pack: Pack) -> Guesses:
        """Begin with a pack."""
        columns = self._columns[pack.tokens]
        looked = self._look(columns[pack.counts], pack.seed) if self._sampled else Columns()
        if looked.those is not None:
            places = torch.full((len(self._columns),), NOTHING)
            places[looked.those] = torch.arange(len(looked.those))
            columns = torch.where(columns == NOTHING, NOTHING, places[columns])
        return Guesses(pack, columns, looked, self._wanted(pack, looked))

    def _look(self, tokens: Tensor, seed: int) -> Columns:
        assert self._ranked is not None
        always = self._sampled // 2
        chosen = torch.zeros(len(self._ranked), dtype=torch.bool)
        chosen[self._ranked[:always]] = True
        chosen[tokens[tokens != NOTHING]] = True
        others = (~chosen).nonzero()[:, 0]
        count = min(self._sampled - always, len(others))
        drawn = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:count]]
        those = torch.cat([chosen.nonzero()[:, 0], drawn])
        added = torch.zeros(len(those))
        if count:
            added[-count:] = torch.tensor(len(others) / count).log()
        return Columns(those, added)

    def _wanted(self, pack: Pack, looked: Columns) -> Tensor | None:
        """For each row of the pack that says a token that counts, the logarithms of what the target holds likely."""
        if self._product is None:
            return None
        product = self._product if looked.those is None else self._product[looked.those]
        says = pack.saying()
        logits = self._shared.states(pack.states[says, -1].float()) @ product.T
        softcap = self._shared.spec.logit_softcap
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return (logits if looked.added is None else logits.add_(looked.added)).log_softmax(-1)


class Guesses:
    """Adds up what a pack says of guesses, depth by depth.

    Args:
        columns: int64 [R], the place of each token among the columns looked at, `NOTHING` where it has none.
        wanted: see `Judge`; None is sure of the tokens.
    """

    def __init__(self, pack: Pack, columns: Tensor, looked: Columns, wanted: Tensor | None) -> None:
        self._pack, self._columns, self._looked, self._wanted = pack, columns, looked, wanted
        self._says = torch.zeros(len(pack.tokens), dtype=torch.int64)
        self._says[pack.saying()] = torch.arange(len(pack.saying()))
        self.loss = torch.zeros(())
        self._right: list[int] = []
        self._total: list[int] = []

    def take(self, roots: Tensor, outputs: Tensor, product: Tensor) -> None:
        """Take in what drafts from ``roots`` [M] say at the next depth: the softmax of ``outputs`` [M, hidden] times
        ``product`` [N, hidden]. Those whose token has no column are wrong, and teach nothing."""
        depth = len(self._right)
        says = roots + depth + 1
        columns = self._columns[says + 1]
        known = columns != NOTHING
        if self._looked.those is not None:
            product = product[self._looked.those]
        wanted = None if self._wanted is None else self._wanted[self._says[says[known]]]
        loss, right = compare(outputs[known], product, columns[known], wanted, self._looked.added)
        self.loss = self.loss + FADING**depth * loss / max(1, int(known.sum()))
        self._right.append(int(right.sum()))
        self._total.append(len(roots))

    def measured(self) -> Measured:
        return Measured(self.loss, tuple(self._right), tuple(self._total))
