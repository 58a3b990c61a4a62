"""Rule ``block``: the chain is judged as a whole, never accepting less than rule ``ratio`` on average (Sun et al. 2024,
arXiv 2403.10444)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.acceptance.rows import chance, excess, normalised, resumption
from paceline.acceptance.rule import Outcome, drafted

if TYPE_CHECKING:
    from paceline.acceptance.coins import Coins
    from paceline.acceptance.rows import Number, Rows
    from paceline.tree import TokenTree


def accept(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
    """Verify a chain that was drawn from ``q``.

    Every place i has its coin of chance h_i, and the last that succeeds is tau. They are independent, so they are
    thrown from the last, which has h_K = a_K, until one succeeds; place 0 always does.

    Raises:
        DrafterError: the tree is no chain, or a token has probability 0 in ``q``.
    """
    a: list[Number] = [1]
    for i, x in enumerate(drafted(tree), 1):
        a.append(chance(a[i - 1] * p[i - 1][x], q[i - 1][x]))

    last = len(a) - 1
    if coins.accept(last, a[last]):
        return Outcome(list(range(last + 1)), coins.pick(p[last]))
    for i in range(last - 1, -1, -1):
        rest = excess(a[i] * p[i], q[i])
        if i == 0 or coins.accept(i, resumption(rest.sum(), a[i])):
            break
    return Outcome(list(range(i + 1)), coins.pick(normalised(rest, p[i])))
