"""Examples of one training step, one after another in one run of rows, so that no row is padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import OptionError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paceline.train.examples import Example
    from paceline.train.taps import Taps


@dataclass(frozen=True)
class Pack:
    """R rows, one for each token of some examples.

    Attributes:
        tokens: int64 [R].
        counts: bool [R], whether the token's prediction counts.
        places: int64 [R], the token's place in its example.
        owner: int64 [R], which example it belongs to.
        taps: for each tapped layer float32 [R, hidden].
    """

    tokens: Tensor
    counts: Tensor
    places: Tensor
    owner: Tensor
    taps: tuple[Tensor, ...]

    @classmethod
    def of(cls, examples: Sequence[Example], taps: Taps) -> Pack:
        """Lay ``examples`` out and take the target's states."""
        states = [taps(example.tokens) for example in examples]
        lengths = [len(example.tokens) for example in examples]
        return cls(
            tokens=torch.tensor([token for example in examples for token in example.tokens]),
            counts=torch.tensor([counts for example in examples for counts in example.counts]),
            places=torch.cat([torch.arange(length) for length in lengths]),
            owner=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
            taps=tuple(torch.cat(layer) for layer in zip(*states, strict=True)),
        )

    def ahead(self, rows: Tensor, distance: int) -> tuple[Tensor, Tensor]:
        """The rows ``distance`` behind ``rows``, and whether those are of the same example; else they are any row."""
        beyond = rows + distance
        there = beyond.clamp(max=len(self.tokens) - 1)
        return there, (there == beyond) & (self.owner[there] == self.owner[rows])

    def roots(self) -> Tensor:
        """The rows from which a draft can begin, int64 [M]: the token two places on is a head's first guess and
        counts."""
        rows = torch.arange(len(self.tokens))
        there, same = self.ahead(rows, 2)
        return rows[same & self.counts[there]]

    def labels(self, roots: Tensor, depth: int) -> Tensor:
        """The tokens of ``depth`` (0 is the first guess) of drafts from ``roots``, int64 [M]; -1 where a draft so
        deep would leave its answer."""
        inside = torch.ones_like(roots, dtype=torch.bool)
        there = roots
        for place in range(depth + 1):
            there, same = self.ahead(roots, place + 2)
            inside &= same & self.counts[there]
        return torch.where(inside, self.tokens[there], -1)


class Reader:
    """Packs of examples, in another order every time."""

    def __init__(self, examples: Sequence[Example], taps: Taps, rows: int) -> None:
        """Read ``examples``, at most ``rows`` tokens of them in a pack, unless one alone has more.

        Those from which nothing can be learned, as no token beyond their second counts, are left out.

        Raises:
            OptionError: none is left.
        """
        self._examples = [example for example in examples if any(example.counts[2:])]
        self._taps, self._rows = taps, rows
        if not self._examples:
            raise OptionError("there is nothing to train on: no text has a token that counts.")

    def epoch(self, dice: random.Random) -> Iterator[tuple[Pack, float]]:
        """All examples once: packs, and with each the share of the epoch that is then done."""
        order = self._examples.copy()
        dice.shuffle(order)
        done, waiting = 0, [order[0]]
        for example in order[1:]:
            if sum(len(one.tokens) for one in waiting) + len(example.tokens) > self._rows:
                done += len(waiting)
                yield Pack.of(waiting, self._taps), done / len(order)
                waiting = []
            waiting.append(example)
        yield Pack.of(waiting, self._taps), 1.0
