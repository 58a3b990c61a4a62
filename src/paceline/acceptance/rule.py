"""What every rule of acceptance takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import DrafterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.acceptance.coins import Coins
    from paceline.acceptance.rows import Rows
    from paceline.record import Lossless
    from paceline.tree import TokenTree


@dataclass(frozen=True)
class Outcome:
    """What was accepted of one tree.

    Attributes:
        path: the accepted nodes, the root first.
        token: the one more token that follows them.
    """

    path: list[int]
    token: int


@dataclass(frozen=True)
class Rule:
    """A rule and what it asks for.

    Attributes:
        accept: the rule itself: ``accept(tree, p, q, coins)``. ``p[node]`` is the target's row after ``node`` and its
            ancestors, after the request's rules; ``q[node]`` is the row that the children of ``node`` were drawn from,
            without replacement and in the order of their indices, and is read only where there are children.
        trees: whether it verifies trees, or chains alone.
        sampled: whether drafts must be drawn from ``q``; if not, ``q`` is never read.
        lossless: what it guarantees.
    """

    accept: Callable[[TokenTree, Rows, Rows, Coins], Outcome]
    trees: bool
    sampled: bool
    lossless: Lossless


def drafted(tree: TokenTree) -> list[int]:
    """The tokens of a chain, the root's left out: x_1 ... x_K.

    Raises:
        DrafterError: the tree has a node with two children.
    """
    if tree.parents != list(range(-1, len(tree) - 1)):
        raise DrafterError("this rule verifies chains, not trees; draft a chain, or take rule recursive or traversal.")
    return tree.tokens[1:]
