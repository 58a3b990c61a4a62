"""Engines whose seconds are charged to a clock: recorded costs of steps, and drafters that follow a script."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

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
    from paceline.trace import Trace

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


@cache
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
    """So many users at once, each with one request after another, on a clock of their own."""

    drafter: Callable[[Clock], Drafter | None]
    users: int = 1
    tokens: int = 96
    fixed: int | None = None
    cost: Callable[[int], float] = recorded
    prices: Prices | None = None
    rounds: int = 1
    trace: Trace | None = None
    clock: Clock = field(default_factory=Clock)

    def go(self) -> Ride:
        target = Timed(ToyTarget(answers, VOCAB), self.clock, self.cost)
        self.pacer = Pacer(self.prices)
        self.run = ToyRun(
            answers,
            target=target,
            clock=self.clock,
            pacer=self.pacer,
            pages=self.users * (self.tokens + 96) // 16,
            max_num_seqs=self.users,
            max_batch_tokens=512,
        )
        self.run.engine.drafting.trace = self.trace
        drafter: Drafter | None = self.drafter(self.clock)
        self.talker: Any = drafter
        speculation = {"adaptive": True, "num_speculative_tokens": 63}
        if self.fixed is not None:
            speculation = {"adaptive": False, "num_speculative_tokens": self.fixed or 1}
            drafter = drafter if self.fixed else None
        self.seconds: list[float] = []
        for done in range(self.rounds):
            running = [
                self.run.add(
                    [done * self.users + n, 1, 2, 3], drafter, max_tokens=self.tokens, speculation=speculation, eos=()
                )
                for n in range(self.users)
            ]
            self._finish(running)
        self.running = running
        return self

    def _finish(self, running: Seq[Sequence]) -> None:
        """Add up the seconds from each request's first token, which the prompt's pass gives, to its last."""
        while not all(sequence.output for sequence in running):
            self.run.engine.step()
        started = self.clock.now
        left = list(running)
        while left:
            self.run.engine.step()
            self.seconds += [self.clock.now - started for sequence in left if sequence.finish_reason]
            left = [sequence for sequence in left if not sequence.finish_reason]
        for sequence in running:
            first = sequence.tokens[0]
            assert sequence.output == [token(first, 4 + place) for place in range(self.tokens)]

    @property
    def total(self) -> float:
        """Decode seconds of all requests together."""
        return sum(self.seconds)


def talker(
    right: Callable[[int], float], kind: Cost = "lookup", each: float = 0.0, call: float = 0.0
) -> Callable[[Clock], Talker]:
    """A drafter of the kind, made for a clock."""

    def make(clock: Clock) -> Talker:
        needs = Needs(cost=kind)
        return Talker(lambda tokens, budget: [], "talker", needs, right=right, clock=clock, each=each, call=call)

    return make


def fixed_seconds(
    right: Callable[[int], float],
    users: int,
    length: int,
    each: float,
    call: float,
    *,
    tokens: int = 96,
    rounds: int = 1,
) -> float:
    """Decode seconds of all requests together where every step drafts ``length`` tokens for each."""
    total = 0.0
    for before in range(rounds):
        done, now = {before * users + user: 1 for user in range(users)}, 0.0
        while done:
            drafts = {user: min(length, tokens - place - 1) for user, place in done.items()}
            asked = [count for count in drafts.values() if count]
            now += call * len(asked) + each * max(asked, default=0) + recorded(len(done) + sum(asked))
            for user, place in list(done.items()):
                accepted = 0
                while accepted < drafts[user] and _chance(user, place + accepted) < right(place + accepted):
                    accepted += 1
                done[user] = place + accepted + 1
                if done[user] == tokens:
                    total += now
                    del done[user]
    return total
