"""Engines whose seconds are charged to a clock: recorded costs of steps, and drafters that follow a script."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.drafters import Needs
from paceline.pacer import Pacer
from paceline.targets.toy import ToyTarget
from paceline.tree import TokenTree
from tests.toys import Clock, ScriptedDrafter, Timed, ToyRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.cost import Prices
    from paceline.drafters import Cost, Drafter, View
    from paceline.request import Sequence

VOCAB = 32
ONE_ROW = 0.0033
RECORDED = {1: 1.0, 2: 1.09, 4: 1.2, 8: 1.33, 16: 1.9, 32: 3.0, 64: 5.3}
"""Steps of the default model in int8 at 256 tokens, as multiples of one row's."""


def recorded(rows: int) -> float:
    """Seconds of a step: between recorded numbers of rows on a line, beyond them as steep as before."""
    known = sorted(RECORDED)
    high = next((count for count in known if count >= rows), known[-1])
    low = max((count for count in known if count < high), default=0)
    first, last = RECORDED.get(low, RECORDED[high]), RECORDED[high]
    return ONE_ROW * (last + (last - first) * (rows - high) / (high - low))


_ROWS = torch.eye(VOCAB) * 32.0


def answers(path: list[int]) -> Tensor:
    """The token after a path: here any function of its length and first token does."""
    return _ROWS[(len(path) * 5 + path[0]) % VOCAB]


def token(first: int, length: int) -> int:
    return (length * 5 + first) % VOCAB


def _chance(user: int, place: int) -> float:
    """The same for every way to draft."""
    return random.Random(user * 1000 + place).random()


@dataclass
class Talker(ScriptedDrafter):
    """Right with a chance that depends on how many tokens the output has; each node, or each asking, has its time."""

    right: Callable[[int], float] = lambda done: 1.0
    clock: Clock = field(default_factory=Clock)
    each: float = 0.0
    call: float = 0.0
    prompt: int = 4
    claim: float = 0.8
    calls: list[tuple[int, int]] = field(default_factory=list)

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        self.clock.now += self.call * len(views) + self.each * max(budgets)
        return [self._tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _tree(self, view: View, budget: int) -> TokenTree:
        first, length = view.tokens[0], len(view.tokens)
        self.calls.append((length - self.prompt, budget))
        drafts = []
        for depth in range(budget):
            place = length + depth - self.prompt
            good = _chance(first, place) < self.right(place)
            drafts.append((token(first, length + depth) + (not good)) % VOCAB)
        survival = [self.claim ** (depth + 1) for depth in range(budget)]
        return TokenTree.chain(view.tokens[-1], drafts, survival, self.name)


@dataclass
class Ride:
    """So many users at once, each with one request, on a clock of their own."""

    drafter: Callable[[Clock], Drafter | None]
    users: int = 1
    tokens: int = 96
    fixed: int | None = None
    cost: Callable[[int], float] = recorded
    prices: Prices | None = None
    rounds: int = 1
    clock: Clock = field(default_factory=Clock)

    def go(self) -> Ride:
        target = Timed(ToyTarget(answers, VOCAB), self.clock, self.cost)
        self.pacer = Pacer(self.prices)
        self.run = ToyRun(
            answers,
            target=target,
            clock=self.clock,
            pacer=self.pacer,
            pages=self.users * 12,
            max_num_seqs=self.users,
            max_batch_tokens=512,
        )
        self.talker = drafter = self.drafter(self.clock)
        speculation = {"adaptive": True, "num_speculative_tokens": 63}
        if self.fixed is not None:
            speculation = {"adaptive": False, "num_speculative_tokens": self.fixed or 1}
            drafter = drafter if self.fixed else None
        self.seconds: list[float] = []
        for _ in range(self.rounds):
            running = [
                self.run.add([n, 1, 2, 3], drafter, max_tokens=self.tokens, speculation=speculation, eos=())
                for n in range(self.users)
            ]
            self._finish(running)
        self.running = running
        return self

    def _finish(self, running: Seq[Sequence]) -> None:
        """The prompt's pass is no step."""
        while not all(sequence.output for sequence in running):
            self.run.engine.step()
        started = self.clock.now
        while any(sequence.finish_reason is None for sequence in running):
            self.run.engine.step()
        self.seconds.append(self.clock.now - started)
        for sequence in running:
            first = sequence.tokens[0]
            assert sequence.output == [token(first, 4 + place) for place in range(self.tokens)]

    @property
    def total(self) -> float:
        return sum(self.seconds)


def talker(
    right: Callable[[int], float], kind: Cost = "lookup", each: float = 0.0, call: float = 0.0
) -> Callable[[Clock], Talker]:
    """A drafter of the kind, made for a clock."""

    def make(clock: Clock) -> Talker:
        needs = Needs(cost=kind)
        return Talker(lambda tokens, budget: [], "talker", needs, right=right, clock=clock, each=each, call=call)

    return make
