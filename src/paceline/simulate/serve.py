"""Serving simulated users, with a pacer that decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.simulate.acceptance import DEPTHS
from paceline.simulate.paced import Paced
from paceline.simulate.startup import ERROR, table
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.simulate.acceptance import Kind, Stream
    from paceline.simulate.device import Server

_NOISE = 0.02  # standard deviation of a time that is measured
_HICCUPS, _WORST = 0.01, 2.0  # how often something else comes between, and how many times as long it then takes at most


@dataclass(frozen=True)
class Served:
    """What came of it.

    Attributes:
        tokens: emitted.
        seconds: that it took, noise not counted.
        steps: how many, of all users together.
        drafted: nodes that were verified.
    """

    tokens: int
    seconds: float
    steps: int
    drafted: int

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def serve(
    stream: Stream, kind: Kind, server: Server, context: int, tokens: int, seed: int, error: float = ERROR
) -> Served:
    """Decode until there are ``tokens`` tokens, as the pacer says.

    The pacer sees times with noise and a start-up table of which the worst entry is off by ``error``; what is counted
    are the times without noise.

    Args:
        context: tokens that each request begins with.
    """
    rng = np.random.default_rng([seed, context, 1])
    return _Serving(stream, kind, server, context, rng, error).run(tokens)


class _Serving:
    def __init__(
        self, stream: Stream, kind: Kind, server: Server, context: int, rng: np.random.Generator, error: float
    ) -> None:
        self._stream, self._kind, self._server, self._context, self._rng = stream, kind, server, context, rng
        self._users = np.arange(len(stream.runs))
        self._place = np.zeros(len(self._users), np.int64)
        self._pacer = Paced(kind, "level" if kind == "head" else "lookup", table(server, rng, error))
        self._ids: list[int] = self._users.tolist()
        self._next = len(self._ids)
        for sequence in self._ids:
            self._pacer.start(sequence)

    def run(self, tokens: int) -> Served:
        done, seconds, steps, drafted = 0, 0.0, 0, 0
        while done < tokens:
            more, took, nodes = self._step()
            done, seconds, steps, drafted = done + more, seconds + took, steps + len(self._ids), drafted + nodes
        return Served(done, seconds, steps, drafted)

    def _step(self) -> tuple[int, float, int]:
        """Tokens, seconds and nodes of one step."""
        here = self._users, self._place
        left, contexts = self._stream.left[here], self._context + self._stream.done[here]
        ceilings = np.minimum(DEPTHS, left - 1)
        budgets = self._pacer.budgets(self._ids, ceilings.tolist(), contexts.tolist())
        drafting = self._drafting(np.array(budgets), contexts)
        kept = self._pacer.select(self._propose(budgets), budgets, drafting * self._noise())
        nodes = np.array([len(kept[s]) - 1 if s in kept else 0 for s in self._ids])
        rows = len(self._ids) + int(nodes.sum())
        seconds = float(self._server.step(rows, len(self._ids), int(contexts.sum())))
        runs = self._stream.runs[here]
        accepted = np.minimum(nodes, runs)
        self._pacer.learn(seconds * self._noise(), self._truth(accepted.tolist(), (runs > accepted).tolist()))
        taken = np.minimum(accepted + 1, left)
        self._advance(taken, (taken == left).nonzero()[0].tolist())
        return int(taken.sum()), seconds + drafting, int(nodes.sum())

    def _propose(self, budgets: list[int]) -> dict[int, TokenTree]:
        """Chains: draft d of any is token d + 1, and what is not drafted is token 0."""
        here = self._users, self._place
        given, claims = self._stream.given[here].tolist(), self._stream.claims[here]
        return {
            sequence: TokenTree.chain(0, list(range(1, size + 1)), claims[user, :size].tolist(), self._kind)
            for user, (sequence, budget) in enumerate(zip(self._ids, budgets, strict=True))
            if budget
            for size in [min(budget, given[user])]
        }

    def _drafting(self, budgets: NDArray[np.int64], contexts: NDArray[np.int64]) -> float:
        """Seconds of drafting so much."""
        if self._kind == "lookup":
            return float(self._server.look_up(int((budgets > 0).sum())))
        counts = (budgets[:, None] >= np.arange(1, DEPTHS + 1)).sum(axis=0)
        return float(self._server.draft(counts, contexts.mean()))

    def _truth(self, accepted: list[int], on: list[bool]) -> dict[int, list[int]]:
        """The tokens that follow: drafts, and one more: the next draft where that was right, but not verified."""
        return {
            sequence: [*range(1, right + 1), right + 1 if more else 0]
            for sequence, right, more in zip(self._ids, accepted, on, strict=True)
        }

    def _advance(self, taken: NDArray[np.int64], ended: list[int]) -> None:
        """Go on behind what was taken; the next request of a user takes the place of one that has ended."""
        self._place = (self._place + taken) % self._stream.places
        for user in ended:
            self._pacer.release(self._ids[user])
            self._ids[user] = self._next
            self._pacer.start(self._next)
            self._next += 1

    def _noise(self) -> float:
        noise = float(np.exp(self._rng.normal(0.0, _NOISE)))
        return noise * (float(self._rng.uniform(1.0, _WORST)) if self._rng.random() < _HICCUPS else 1.0)
