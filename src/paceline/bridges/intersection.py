"""Tokens that are the same string in both vocabularies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.bridges.reading import TextReading
from paceline.errors import DrafterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from paceline.bridges.spelling import Spelling
    from paceline.drafters import View
    from paceline.drafters._candidates import Candidates
    from paceline.tree import Drawn, TokenTree


class Intersection:
    """The draft model's distribution, restricted to the tokens that the target has too, and renormalised.

    Exact under every rule: outside the common tokens q is 0, and a draft is drawn from q as it is.

    Tokens are the same if they stand for the same bytes; special ones if they have the same text and the same role
    (to begin texts, to end answers, neither). One id on each side stands for the same bytes, so the map is one to one.

    Source: Timor et al. 2025 (arXiv 2502.05202), algorithm 4, token-level intersection.

    Attributes:
        pairs: the target's id of every common token to the draft model's.
    """

    kind = "intersection"
    sampled = True

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        """
        Raises:
            DrafterError: the two have no token in common.
        """
        self._target, self._draft = target, draft
        pairs = [(token, draft.plain[text]) for text, token in target.plain.items() if text in draft.plain]
        for name, token in target.special.items():
            own = draft.special.get(name)
            if own is not None and target.role(token) == draft.role(own):
                pairs.append((token, own))
        if not pairs:
            raise DrafterError("the draft model has no token in common with the target: choose another.")
        self.pairs = dict(sorted(pairs))  # by the target's ids, so that a tie goes to the lowest as it does there
        self._targets = torch.tensor(list(self.pairs))
        self._columns = torch.tensor(list(self.pairs.values()))

    def coverage(self, texts: Iterable[str]) -> float:
        """The share of common tokens among those in which the draft model would write ``texts``."""
        common = frozenset(self.pairs.values())
        written = [token in common for text in texts for token in self._draft.encode(text, begins=True)]
        return sum(written) / max(1, len(written))

    def reading(self, tokens: Sequence[int]) -> TextReading:
        return TextReading(self._target, self._draft, tokens)

    def draw(self, view: View, logits: Tensor, path: Sequence[int], count: int, node: int) -> Drawn:
        return view.draw(logits[None, self._columns], [path], count, nodes=[node], ids=self._targets)[0]

    def own(self, tokens: Sequence[int]) -> Sequence[int]:
        return [self.pairs[token] for token in tokens]

    def tree(self, found: Candidates, view: View, reading: object, origin: str) -> TokenTree:
        return found.tree(origin)
