"""Drafts that are drawn token by token in the target's ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paceline.drafters import View


class DrawnDraft:
    """A token tree whose nodes each stand for one id of the draft model.

    Attributes:
        ids: the draft model's id of each node; node 0 stands for the end of what was committed.
        parents: the parent of each node.
        survival: the estimated probability that a node and all above it are accepted.
    """

    def __init__(
        self,
        view: View,
        origin: str,
        columns: slice | Tensor,
        targets: Tensor | None = None,
        own: Mapping[int, int] | None = None,
    ) -> None:
        """Draw from the ``columns`` of the draft model's logits, which stand for the ids ``targets`` (int64 [N]; None
        is 0, 1, 2 ...); ``own`` maps these to the draft model's ids (None where they are the same)."""
        self._view = view
        self._origin = origin
        self._columns = columns
        self._targets = targets
        self._own = own
        self._tree = TokenTree.root(view.tokens[-1])
        self.ids = self._tree.tokens if own is None else [-1]
        self.parents = self._tree.parents
        self.survival = self._tree.survival

    def grow(self, node: int, logits: Tensor, count: int) -> list[int]:
        """Draw at most ``count`` children of ``node`` from its float32 [rows] logits; returns those that can grow."""
        path = [self._tree.tokens[above] for above in self._tree.path(node)[1:]]
        drawn = self._view.draw(logits[self._columns], path, count, node=node, ids=self._targets)
        if self._own is not None:
            self.ids += [self._own[token] for token in drawn.tokens]
        return self._tree.grow(node, drawn, self._origin)

    def tree(self) -> TokenTree:
        """What is proposed."""
        return self._tree
