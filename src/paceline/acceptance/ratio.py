"""Rule ``ratio``: accept left to right, each with min(1, p / q) (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1;
Chen et al. 2023, arXiv 2302.01318)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.acceptance.rows import chance, excess, normalised
from paceline.acceptance.rule import Outcome, drafted

if TYPE_CHECKING:
    from paceline.acceptance.coins import Coins
    from paceline.acceptance.rows import Rows
    from paceline.tree import TokenTree


def accept(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
    """Verify a chain that was drawn from ``q``.

    Raises:
        DrafterError: the tree is no chain, or a token has probability 0 in ``q``.
    """
    path = [0]
    for i, x in enumerate(drafted(tree), 1):
        if not coins.accept(i, chance(p[i - 1][x], q[i - 1][x])):
            return Outcome(path, coins.pick(normalised(excess(p[i - 1], q[i - 1]), p[i - 1])))
        path.append(i)
    return Outcome(path, coins.pick(p[path[-1]]))
