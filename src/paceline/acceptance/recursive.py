"""Rule ``recursive``: at each node its children are tried one after another, each against what the target still wants
(Miao et al. 2023, SpecInfer, arXiv 2305.09781; without replacement: Jeon et al. 2024, RSD, arXiv 2402.14160, and Chen
et al. 2024, Sequoia, arXiv 2402.12374)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.acceptance.rows import chance, excess, normalised, without
from paceline.acceptance.rule import Outcome

if TYPE_CHECKING:
    from paceline.acceptance.coins import Coins
    from paceline.acceptance.rows import Row, Rows
    from paceline.tree import TokenTree


def accept(tree: TokenTree, p: Rows, q: Rows, coins: Coins) -> Outcome:
    """Verify a tree whose siblings were drawn from ``q`` without replacement, in the order of their indices.

    Raises:
        DrafterError: a token has probability 0 in ``q``, or in what its earlier siblings leave of it.
    """
    path = [0]
    while True:
        child, rest = _step(tree, path[-1], p, q, coins)
        if child is None:
            return Outcome(path, coins.pick(rest))
        path.append(child)


def _step(tree: TokenTree, node: int, p: Rows, q: Rows, coins: Coins) -> tuple[int | None, Row]:
    """The child that is accepted, or none and what the target still wants."""
    children = tree.children(node)
    target = p[node]
    if not children:
        return None, target
    draft = q[node]
    for child in children:
        x = tree.tokens[child]
        if coins.accept(child, chance(target[x], draft[x])):
            return child, target
        target = normalised(excess(target, draft), target)
        if child != children[-1]:
            draft = without(draft, x)
    return None, target
