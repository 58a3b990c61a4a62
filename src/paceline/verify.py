"""From trees and logits to an accepted path and one more token.

The rule ``coupled``: the target's token after a node is drawn with noise that is a function of the seed and the
position alone; the child with that token is accepted, and where there is none that token is the correction
(Daliri et al. 2024, arXiv 2408.07978). So the output is the one that plain decoding draws, whatever was drafted.
The other rules are in ``acceptance/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.acceptance import Outcome
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.acceptance import Row, Rows, Rule
    from paceline.choose import Chooser
    from paceline.draw import Logprob
    from paceline.request import Sequence as Running
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
        error: why nothing can be said after the root, where that is so.
    """

    path: list[int]
    tokens: list[int]
    missed: bool
    logprobs: list[Logprob]
    probabilities: list[float]
    error: PacelineError | None = None

    @classmethod
    def nothing(cls, error: PacelineError | None = None) -> Verdict:
        """No node accepted and no token added: a request that fails with ``error``, or one that wants none."""
        return cls([], [], False, [], [], error)


class Verifier:
    """Accepts under the request's rule. It knows neither the model nor the cache.

    A request may end behind a draft that was right: the rules leave no token there, or the target's row is no row of
    numbers. Without drafts its tokens up to there would have been emitted first. So that draft is the last token of
    its step, and the request fails at the next one, whose root it is.
    """

    def accept(self, sequence: Running, tree: TokenTree, logits: Tensor) -> Verdict:
        """Judge a tree; ``logits`` is float32 [len(tree), vocab], one row a node. Rules and noise are worked out for
        visited rows only.

        Raises:
            RequestError: the rules leave no token after the root.
            ModelError: its row holds NaN or +inf.
        """
        choose = sequence.choose
        outcome = _coupled(choose, tree, logits) if choose.rule is None else _drawn(choose, choose.rule, tree, logits)
        path = outcome.path
        tokens = [*(tree.tokens[node] for node in path[1:]), outcome.token]
        offered = [tree.tokens[child] for child in tree.children(path[-1])]
        wanted = sequence.request.sampling.logprobs
        places = [(logits[node], tokens[:depth], tokens[depth]) for depth, node in enumerate(path)]
        return Verdict(
            path,
            tokens,
            tokens[-1] not in offered and bool(offered),
            [] if wanted is None else [choose.logprobs(*place, wanted) for place in places],
            [choose.probability(*place) for place in places] if sequence.request.origins else [],
        )


def _coupled(choose: Chooser, tree: TokenTree, logits: Tensor) -> Outcome:
    """Walk down from the root while the target's own token is among the children."""
    nodes = [0]
    path: list[int] = []
    places = {(tree.parents[node], tree.tokens[node]): node for node in range(1, len(tree))}
    while True:
        try:
            token = choose(logits[nodes[-1]], path)
        except PacelineError:
            if not path:
                raise
            return Outcome(nodes[:-1], path[-1])
        following = places.get((nodes[-1], token))
        if following is None:
            return Outcome(nodes, token)
        nodes.append(following)
        path.append(token)


def _drawn(choose: Chooser, rule: Rule, tree: TokenTree, logits: Tensor) -> Outcome:
    """Accept by a rule of probabilities; it is asked again where a row that it read has none.

    Then the target has one more id, the end of the request, which such a row is certain of and the drafter never
    draws. So a rule that keeps the target's distribution keeps that of where the request ends, too. The coins of a
    round are the same when it is judged again.
    """
    rows = _TargetRows(choose, tree, logits)
    try:
        return rule.accept(tree, rows, tree.q, choose.round)
    except PacelineError:
        end = len(rows[0])
        outcome = rule.accept(tree, _EndingRows(rows, end), _WiderRows(tree.q), choose.round)
    path, token = outcome.path, outcome.token
    return outcome if token != end else Outcome(path[:-1], tree.tokens[path[-1]])


class _TargetRows:
    """The target's probabilities after each node, worked out when they are read."""

    def __init__(self, choose: Chooser, tree: TokenTree, logits: Tensor) -> None:
        self._choose, self._tree, self._logits = choose, tree, logits
        self._known: dict[int, Row] = {}

    def __getitem__(self, node: int) -> Row:
        if node not in self._known:
            path = [self._tree.tokens[above] for above in self._tree.path(node)[1:]]
            self._known[node] = self._choose.probabilities(self._logits[node], path)
        return self._known[node]


class _WiderRows:
    """Rows with one more id, which has no chance."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, node: int) -> Row:
        return np.append(self._rows[node], 0.0)


class _EndingRows(_WiderRows):
    """The target's rows with one more id, the end, which those are certain of that cannot be worked out."""

    def __init__(self, rows: Rows, end: int) -> None:
        super().__init__(rows)
        self._end = end

    def __getitem__(self, node: int) -> Row:
        try:
            return super().__getitem__(node)
        except PacelineError:
            row = np.zeros(self._end + 1)
            row[self._end] = 1.0
            return row
