"""From trees and logits to an accepted path and one more token.

The rule is ``coupled``: the target's token after a node is drawn with noise that is a function of the seed and the
position alone; the child with that token is accepted, and where there is none that token is the correction
(Daliri et al. 2024, arXiv 2408.07978). So the output is the one that plain decoding draws, whatever was drafted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import pad

from paceline.draw import processed
from paceline.kernels.sample import draw, logprobs
from paceline.noise import noise_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.draw import Logprob
    from paceline.record import Lossless
    from paceline.request import Request
    from paceline.request import Sequence as Running
    from paceline.rules import LogitRules
    from paceline.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    """What was accepted of one tree.

    Attributes:
        path: the accepted nodes, the root first.
        tokens: their tokens without the root's, then the token that the target added.
        missed: whether the last accepted node had children, none of which was right.
        logprobs: one entry for each of ``tokens``, where the request asks for them.
        probabilities: what the target gave each of them after the rules, where the request asks for origins.
    """

    path: list[int]
    tokens: list[int]
    missed: bool
    logprobs: list[Logprob]
    probabilities: list[float]

    @classmethod
    def nothing(cls) -> Verdict:
        """No node accepted and no token added: a request that failed, or one that wants none."""
        return cls([], [], False, [], [])


class Chooser:
    """Chooses the token after a path: a pure function of the logits, the committed tokens, the path and the seed.

    ``tokens`` is the sequence's own list of committed tokens, prompt included; it grows while the chooser is in use.
    """

    def __init__(self, request: Request, rules: LogitRules, tokens: list[int]) -> None:
        self._sampling = request.sampling
        self._start = len(request.prompt)
        self._rules = rules
        self._tokens = tokens
        self._key = noise_key(request.seed, request.choice)
        self._counts = rules.counts()
        self._counted = self._start

    def __call__(self, row: Tensor, path: Sequence[int]) -> int:
        """The token after the committed ones and ``path``; ``row`` is float32 [vocab], raw logits.

        A drafter's row may be shorter, as its head may: it is then silent on the ids that it lacks.
        """
        row = self._ruled(row, path).unsqueeze(0)
        return draw(row, self._sampling, self._key, (len(self._tokens) + len(path),))[0]

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

    def _ruled(self, row: Tensor, path: Sequence[int]) -> Tensor:
        if row.shape[0] < self._rules.vocab_size:
            row = pad(row, (0, self._rules.vocab_size - row.shape[0]), value=-math.inf)
        if self._rules.trivial:
            return row[: self._rules.vocab_size]
        if self._counted < len(self._tokens):
            self._counts.commit(self._tokens[self._counted :])
            self._counted = len(self._tokens)
        return self._rules.apply(row, self._tokens[self._start :], path, self._counts)


class Verifier:
    """Accepts under the rule ``coupled``. It knows neither the model nor the cache."""

    lossless: Lossless = "bits"

    def accept(self, sequence: Running, tree: TokenTree, logits: Tensor) -> Verdict:
        """Walk down from the root while the target's own token is among the children.

        Rules and noise are worked out for visited rows only. ``logits`` is float32 [len(tree), vocab], one row a node.
        """
        choose = sequence.choose
        wanted = sequence.request.sampling.logprobs
        node, nodes = 0, [0]
        path: list[int] = []
        entries: list[Logprob] = []
        probabilities: list[float] = []
        while True:
            row = logits[node]
            token = choose(row, path)
            if wanted is not None:
                entries.append(choose.logprobs(row, path, token, wanted))
            if sequence.request.origins:
                probabilities.append(choose.probability(row, path, token))
            children = tree.children(node)
            path.append(token)
            following = next((child for child in children if tree.tokens[child] == token), None)
            if following is None:
                return Verdict(nodes, path, bool(children), entries, probabilities)
            node = following
            nodes.append(node)
