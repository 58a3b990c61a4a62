"""The token after a path, for the target and for drafters: the rules of a request, and the noise of its acceptance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.acceptance import Noise, probabilities
from paceline.errors import RequestError
from paceline.kernels.sample import children, draw, logprobs, processed
from paceline.noise import noise_key
from paceline.tree import Drawn, Dropping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.acceptance import Row, Rule
    from paceline.draw import Logprob
    from paceline.request import Request
    from paceline.rules import LogitRules


class Chooser:
    """Chooses the token after a path: a pure function of the logits, the committed tokens, the path and the seed.

    ``tokens`` is the sequence's own list of committed tokens, prompt included; it grows while the chooser is in use.
    ``rule`` is the rule of acceptance where it is another than ``coupled``.
    """

    def __init__(self, request: Request, rules: LogitRules, tokens: list[int], rule: Rule | None = None) -> None:
        self.rule = rule
        self._request = request
        self._sampling = request.sampling
        self._start = len(request.prompt)
        self._rules = rules
        self._tokens = tokens
        self._key = noise_key(request.seed, request.choice)
        self._counts = rules.counts()
        self._counted = self._start

    def __call__(self, row: Tensor, path: Sequence[int]) -> int:
        """The token after the committed ones and ``path`` under ``coupled``; ``row`` is float32 [vocab], raw logits."""
        row = self._ruled(row, path).unsqueeze(0)
        return draw(row, self._sampling, self._key, (len(self._tokens) + len(path),))[0]

    def draft(
        self,
        rows: Tensor,
        paths: Sequence[Sequence[int]],
        count: int = 1,
        *,
        nodes: Sequence[int] = (0,),
        ids: Tensor | None = None,
    ) -> list[Drawn]:
        """Children for a drafter: :class:`paceline.drafters.Draw`."""
        if (self.rule is None or not self.rule.sampled) and self._rules.trivial:
            return self._raced(rows, paths, count, ids)
        each = zip(rows, paths, nodes, strict=True)
        return [self._drawn(self._spread(row, ids), path, count, node) for row, path, node in each]

    def _raced(
        self, rows: Tensor, paths: Sequence[Sequence[int]], count: int, ids: Tensor | None = None
    ) -> list[Drawn]:
        """The likeliest of each row under the noise of its place."""
        here = len(self._tokens)
        positions = [here + len(path) for path in paths]
        rows = rows[:, : self._rules.vocab_size]
        return [Drawn(*each) for each in children(rows, ids, self._sampling, self._key, positions, count)]

    def _drawn(self, row: Tensor, path: Sequence[int], count: int, node: int) -> Drawn:
        """The same of one row under the rules of the request, or drawn from its probabilities."""
        try:
            if self.rule is None or not self.rule.sampled:
                return self._raced(self._ruled(row, path)[None], [path], count)[0]
            q = self.probabilities(row, path)
        except RequestError:  # the rules leave no token that the drafter knows
            return Drawn([], [])
        tokens = self.round.children(node, q, count)
        return Drawn(tokens, q[tokens].tolist(), q)

    @property
    def dropping(self) -> Dropping | None:
        """The liberty to drop drafts, where the rule grants it."""
        return None if self.rule is not None and self.rule.sampled else Dropping()

    @property
    def round(self) -> Noise:
        """The draws and coins of the round whose root is the last committed token."""
        return Noise(self._request.seed, self._request.choice, len(self._tokens) - 1)

    def probabilities(self, row: Tensor, path: Sequence[int]) -> Row:
        """What the token after ``path`` is drawn from: float64 [vocab], after the rules and filters."""
        return probabilities(self._ruled(row, path), self._sampling)

    def logprobs(self, row: Tensor, path: Sequence[int], token: int, count: int) -> Logprob:
        """What the target gave ``token`` and the ``count`` best: raw, or after rules and filters as asked for."""
        if self._sampling.logprobs_mode == "processed":
            row = processed(self._ruled(row, path), self._sampling)
        return self.raw_logprobs(row, token, count)

    def raw_logprobs(self, row: Tensor, token: int, count: int) -> Logprob:
        """What a row as it stands gives ``token`` and the ``count`` best."""
        return logprobs(row[: self._rules.vocab_size], token, count)

    def probability(self, row: Tensor, path: Sequence[int], token: int) -> float:
        """The target's probability of ``token`` after the rules and filters."""
        return math.exp(logprobs(processed(self._ruled(row, path), self._sampling), token, 0).logprob)

    def _spread(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """A drafter's row over the target's ids: it is silent on those that it lacks."""
        size = self._rules.vocab_size
        if ids is None and logits.shape[0] >= size:
            return logits
        row = torch.full((size,), -math.inf)
        if ids is None:
            row[: logits.shape[0]] = logits
        else:
            row[ids] = logits
        return row

    def _ruled(self, row: Tensor, path: Sequence[int]) -> Tensor:
        if self._rules.trivial:
            return row[: self._rules.vocab_size]
        if self._counted < len(self._tokens):
            self._counts.commit(self._tokens[self._counted :])
            self._counted = len(self._tokens)
        return self._rules.apply(row, self._tokens[self._start :], path, self._counts)
