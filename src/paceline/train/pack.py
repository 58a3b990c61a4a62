"""Examples of one training step, one after another in one run of rows, so that no row is padding."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from paceline.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.train.examples import Example
    from paceline.train.features import Features


@dataclass(frozen=True)
class Pack:
    """R rows, one for each token of some examples.

    Attributes:
        tokens: int64 [R].
        counts: bool [R], whether the token's prediction counts.
        places: int64 [R], the token's place in its example.
        starts: int64 [R], the first row of its example.
        states: bfloat16 [R, layers, hidden], the target's, of the layers that were tapped.
        seed: of whatever is drawn for this step.
    """

    tokens: Tensor
    counts: Tensor
    places: Tensor
    starts: Tensor
    states: Tensor
    seed: int = 0

    @classmethod
    def of(cls, examples: Sequence[Example], features: Features, seed: int = 0) -> Pack:
        """Lay ``examples`` out and take the target's states."""
        lengths = [len(example.tokens) for example in examples]
        starts = torch.tensor([0, *accumulate(lengths[:-1])])
        return cls(
            tokens=torch.tensor([token for example in examples for token in example.tokens]),
            counts=torch.tensor([counts for example in examples for counts in example.counts]),
            places=torch.cat([torch.arange(length) for length in lengths]),
            starts=starts.repeat_interleave(torch.tensor(lengths)),
            states=torch.cat(features(examples)),
            seed=seed,
        )

    def ahead(self, rows: Tensor, distance: int) -> tuple[Tensor, Tensor]:
        """The rows ``distance`` behind ``rows``, and whether those are of the same example; else they are any row."""
        beyond = rows + distance
        there = beyond.clamp(max=len(self.tokens) - 1)
        return there, (there == beyond) & (self.starts[there] == self.starts[rows])

    def roots(self) -> Tensor:
        """The rows from which a draft can begin, int64 [M]: the token two places on is a head's first guess and
        counts."""
        rows = torch.arange(len(self.tokens))
        there, same = self.ahead(rows, 2)
        return rows[same & self.counts[there]]

    def saying(self) -> Tensor:
        """The rows by which the target says a token that counts: each is before one, int64 [C]."""
        rows = torch.arange(len(self.tokens))
        there, same = self.ahead(rows, 1)
        return rows[same & self.counts[there]]

    def inside(self, roots: Tensor, depth: int) -> Tensor:
        """Whether the tokens that drafts from ``roots`` guess up to ``depth`` (0 is the first guess) are all of their
        answer, bool [M]."""
        found = torch.ones_like(roots, dtype=torch.bool)
        for place in range(depth + 1):
            there, same = self.ahead(roots, place + 2)
            found &= same & self.counts[there]
        return found


class Reader:
    """Packs of examples, in another order in every epoch: a function of the seed."""

    def __init__(self, examples: Sequence[Example], features: Features, rows: int, seed: int = 0) -> None:
        """Read ``examples``, at most ``rows`` tokens of them in a pack, unless one alone has more.

        Those from which nothing can be learned, as no token beyond their second counts, are left out.

        Raises:
            OptionError: none is left.
        """
        self.examples = [example for example in examples if any(example.counts[2:])]
        self._features, self._rows, self._seed = features, rows, seed
        if not self.examples:
            raise OptionError("there is nothing to train on: no text has a token that counts.")

    def epoch(self, number: int) -> list[list[int]]:
        """Which examples each pack of an epoch has, all of them once."""
        order = list(range(len(self.examples)))
        random.Random(f"{self._seed} {number}").shuffle(order)
        packs, room = [[order[0]]], self._rows - len(self.examples[order[0]].tokens)
        for example in order[1:]:
            length = len(self.examples[example].tokens)
            if length > room:
                packs.append([])
                room = self._rows
            packs[-1].append(example)
            room -= length
        return packs

    def pack(self, examples: Sequence[int], step: int) -> Pack:
        """The pack of these examples, for this step."""
        return Pack.of([self.examples[number] for number in examples], self._features, self._seed * 1_000_003 + step)
