"""From trees and logits to an accepted path and one more token.

The rule ``coupled``: the target's token after a node is drawn with noise that is a function of the seed and the
position alone; the child with that token is accepted, and where there is none that token is the correction
(Daliri et al. 2024, arXiv 2408.07978). So the output is the one that plain decoding draws, whatever was drafted.
The other rules are in ``acceptance/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.acceptance import Outcome
from paceline.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.acceptance import Row
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


class Verifier:
    """Accepts under the request's rule. It knows neither the model nor the cache."""

    def accept(self, sequence: Running, tree: TokenTree, logits: Tensor) -> Verdict:
        """Judge a tree; ``logits`` is float32 [len(tree), vocab], one row a node. Rules and noise are worked out for
        visited rows only."""
        choose = sequence.choose
        if choose.rule is None:
            outcome = _coupled(choose, tree, logits)
        else:
            rows = _TargetRows(choose, tree, logits)
            outcome = choose.rule.accept(tree, rows, tree.q, choose.round)
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
    """Walk down from the root while the target's own token is among the children.

    Where the rules leave no token behind a draft that was right, that draft is the last token of this step: without
    drafts it would have been emitted before the request fails.
    """
    nodes = [0]
    path: list[int] = []
    places = {(tree.parents[node], tree.tokens[node]): node for node in range(1, len(tree))}
    while True:
        try:
            token = choose(logits[nodes[-1]], path)
        except RequestError:
            if not path:
                raise
            return Outcome(nodes[:-1], path[-1])
        following = places.get((nodes[-1], token))
        if following is None:
            return Outcome(nodes, token)
        nodes.append(following)
        path.append(token)


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
