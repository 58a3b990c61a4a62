"""A chain from a drafter that has no chances of its own to give."""

from __future__ import annotations

from paceline.tree import TokenTree

_SURVIVAL = 0.8


def fading_chain(root: int, drafts: list[int], origin: str) -> TokenTree:
    """The drafts one after another below the root, each somewhat less likely to survive than the one before.

    Only that order matters: the pacer knows how often drafts of each depth are right.
    """
    return TokenTree.chain(root, drafts, [_SURVIVAL**depth for depth in range(1, len(drafts) + 1)], origin)
