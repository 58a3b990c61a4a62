"""How far a drafter would get on texts that it was not trained on: drafts along the target's own answers, simulated.

Drafts are chains. One token is accepted after another as long as each is the target's own, so with those before it
given a guess is judged exactly as in decoding. Answers that were drawn are judged under rule `coupled`: of the noise
that drew a token it is known that this token won, and the rest of it is drawn from what that leaves open (which of
shifted Gumbel variables is the largest says nothing of how large it is: arXiv 1411.0030, section 3).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.train.pack import Pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.train.examples import Example
    from paceline.train.features import Features
    from paceline.train.objective import Objective
    from paceline.train.shared import Shared


@dataclass(frozen=True)
class Held:
    """A text to evaluate on.

    Attributes:
        example: the text.
        category: under which it is reported.
        temperature, top_p: at which it was answered.
    """

    example: Example
    category: str
    temperature: float
    top_p: float

    @property
    def drawn(self) -> str:
        """How it was answered, in a word."""
        return f"at {self.temperature:g}" if self.temperature else "greedy"


@dataclass(frozen=True)
class Evaluation:
    """How far drafts got.

    Attributes:
        tau: tokens of a pass of the target, 1 + accepted / steps, over all texts of one kind together: by how they were
            answered, and then by category, "all" among them.
        accepted: by how they were answered, for each depth how often a guess was right where those before it were.
    """

    tau: dict[str, dict[str, float]]
    accepted: dict[str, list[float]]

    @property
    def score(self) -> float:
        """What training is to raise: the mean of tau over the ways to answer."""
        return sum(groups["all"] for groups in self.tau.values()) / len(self.tau)


class Evaluator:
    """Simulates drafts on the same texts, with the same noise, again and again."""

    def __init__(self, held: Sequence[Held], features: Features, shared: Shared, depth: int, seed: int = 0) -> None:
        """Evaluate chains of ``depth`` tokens on ``held``."""
        self._held, self._features, self._shared = held, features, shared
        self._depth, self._seed = depth, seed

    @torch.no_grad()
    def __call__(self, objective: Objective) -> Evaluation:
        steps: Counter[tuple[str, str]] = Counter()
        accepted: Counter[tuple[str, str]] = Counter()
        reached = {held.drawn: [0] * self._depth for held in self._held}
        right = {held.drawn: [0] * self._depth for held in self._held}
        for number, held in enumerate(self._held):
            taken = self._accepted(held, objective, number)
            for group in {held.category, "all"}:
                steps[held.drawn, group] += len(taken)
                accepted[held.drawn, group] += sum(taken)
            for depth in range(self._depth):
                reached[held.drawn][depth] += sum(count >= depth for count in taken)
                right[held.drawn][depth] += sum(count > depth for count in taken)
        tau: dict[str, dict[str, float]] = {}
        for drawn, group in sorted(key for key in steps if steps[key]):
            tau.setdefault(drawn, {})[group] = 1 + accepted[drawn, group] / steps[drawn, group]
        rates = {
            drawn: [r / n for r, n in zip(right[drawn], reached[drawn], strict=True) if n] for drawn in sorted(reached)
        }
        return Evaluation(tau, rates)

    def _accepted(self, held: Held, objective: Objective, number: int) -> list[int]:
        """How many drafted tokens each step of decoding the answer accepts."""
        pack = Pack.of([held.example], self._features)
        dice = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        noise = _Noise(held, pack, self._shared, objective.target_ids, dice) if held.temperature else None
        right = torch.zeros(len(pack.tokens), self._depth, dtype=torch.bool)
        for depth, (roots, logits) in enumerate(objective.guess(pack, self._depth)):
            rows = roots + depth + 1
            best = logits.argmax(-1) if noise is None else noise.draw(rows, logits)
            right[roots, depth] = objective.target_ids[best] == pack.tokens[rows + 1]
        reach = right.long().cumprod(1).sum(1).tolist()
        taken, place = [], int(pack.counts.nonzero()[0]) + 1  # the prompt's pass gives the first token
        while place < len(pack.tokens):
            # what would go beyond the answer's end was never drafted, and does not count as reached either
            taken.append(min(reach[place - 2], len(pack.tokens) - place))
            place += taken[-1] + 1
        return taken


class _Noise:
    """Noise under which the target would have drawn the tokens of a text, for the columns of a drafter."""

    def __init__(self, held: Held, pack: Pack, shared: Shared, ids: Tensor, dice: torch.Generator) -> None:
        self._held = held
        first = int(pack.counts.nonzero()[0])
        rows = torch.arange(first - 1, len(pack.tokens) - 1)
        chances = processed(shared.logits(pack.states[rows, -1].float()), held).log_softmax(-1)
        drawn = pack.tokens[rows + 1, None]
        # another number format than that of the answer may have put its token just beyond top_p
        chances.scatter_(1, drawn, chances.gather(1, drawn).clamp_min(-20.0))
        highest = _gumbel((len(rows), 1), dice)
        others = _gumbel(chances.shape, dice)
        noise = -torch.logaddexp(-highest, -(chances + others)) - chances
        # where a chance is 0 nothing is known of the noise
        noise = torch.where(chances.isinf(), others, noise)
        self._noise = noise.scatter(1, drawn, highest - chances.gather(1, drawn))[:, ids]
        self._first = first - 1

    def draw(self, rows: Tensor, logits: Tensor) -> Tensor:
        """The columns [M] that a drafter with these ``logits`` [M, N] draws for the token after each of ``rows``."""
        return (processed(logits, self._held).log_softmax(-1) + self._noise[rows - self._first]).argmax(-1)


def processed(logits: Tensor, held: Held) -> Tensor:
    """Logits [M, N] at the text's temperature, those beyond its top_p -inf."""
    logits = logits / held.temperature
    if held.top_p >= 1:
        return logits
    ordered, order = logits.sort(-1, descending=True)
    chances = ordered.softmax(-1)
    beyond = chances.cumsum(-1) - chances >= held.top_p
    return logits.masked_fill(beyond.gather(1, order.argsort(-1)), -torch.inf)


def _gumbel(shape: tuple[int, ...] | torch.Size, dice: torch.Generator) -> Tensor:
    return -torch.log(-torch.log(torch.rand(shape, generator=dice).clamp(1e-20, 1 - 1e-7)))
