"""Rule ``traversal``: from the leaves up, so that a path is judged as a whole; rule ``block`` for trees (Weng et al.
2025, arXiv 2505.12398)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.acceptance.rows import chance, excess, normalised, resumption, without
from paceline.acceptance.rule import Outcome

if TYPE_CHECKING:
    from paceline.acceptance.coins import Coins
    from paceline.acceptance.rows import Number, Row, Rows
    from paceline.tree import TokenTree


def accept(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
    """Verify a tree whose siblings were drawn from ``q`` without replacement, in the order of their indices.

    Go down to the first leaf. A node whose children have all failed, or that has none, is tried itself; when it fails
    its parent takes on what the target still wants there, and goes on with the next child.

    Raises:
        DrafterError: a token has probability 0 in ``q``, or in what its earlier siblings leave of it.
    """
    waiting = [tree.children(node) for node in range(len(tree))]
    a: dict[int, Number] = {0: 1}
    target: dict[int, Row] = {0: p[0]}
    draft: dict[int, Row] = {}
    node = 0
    while True:
        if waiting[node]:
            if node not in draft:
                draft[node] = q[node]
            child = waiting[node].pop(0)
            x = tree.tokens[child]
            a[child] = chance(a[node] * target[node][x], draft[node][x])
            target[child] = p[child]
            node = child
        elif node == 0 or coins.accept(node, a[node]):
            return Outcome(tree.path(node), coins.pick(target[node]))
        else:
            del target[node]  # its memory is at once wanted again
            draft.pop(node, None)
            x, node = tree.tokens[node], tree.parents[node]
            rest = excess(a[node] * target[node], draft[node])
            a[node] = resumption(rest.sum(), a[node])
            target[node] = normalised(rest, target[node])
            if waiting[node]:
                draft[node] = without(draft[node], x)
