"""Rule ``typical``: accept what is likely enough for how certain the target is (Cai et al. 2024, Medusa, arXiv
2401.10774, section 2.3.1). Lossy: the tokens no longer have the target's distribution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.acceptance.rule import Outcome

if TYPE_CHECKING:
    from paceline.acceptance.coins import Coins
    from paceline.acceptance.rows import Row, Rows
    from paceline.tree import TokenTree

EPSILON = 0.09
DELTA = 0.3


def accept(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
    """Verify a tree however it was drafted; ``q`` is not read.

    A node is accepted after its parent if p(x) > min(epsilon, delta exp(-H(p))). Of the accepted paths the longest
    wins, of those the likeliest, then the first. The token after it is drawn from ``p``: where nothing is accepted
    the text is the target's own.
    """
    depth, likelihood = {0: 0}, {0: 1.0}
    for node in range(len(tree)):
        children = tree.children(node) if node in depth else []
        if not children:
            continue
        row = p[node]
        least = min(EPSILON, DELTA * math.exp(-_entropy(row)))
        for child in children:
            chance = float(row[tree.tokens[child]])
            if chance > least:
                depth[child] = depth[node] + 1
                likelihood[child] = likelihood[node] * chance
    best = max(depth, key=lambda node: (depth[node], likelihood[node], -node))
    return Outcome(tree.path(best), coins.pick(p[best]))


def _entropy(p: Row) -> float:
    """In nats."""
    possible = p[p > 0]
    return -float((possible * np.log(possible)).sum())
