"""Ids that mean the same to both models, whose heads may be padded to different sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.drafters import View
    from paceline.drafters._candidates import Candidates
    from paceline.text import Tokenizer
    from paceline.tree import Drawn, TokenTree


class Agreeing:
    """Ids map to themselves; the draft model is silent on those that only one of the two has.

    Source: Leviathan et al. 2023 (arXiv 2211.17192).
    """

    kind = "same"
    sampled = True

    def __init__(self, target_rows: int, draft_rows: int) -> None:
        """``target_rows`` and ``draft_rows`` are how many ids each model has."""
        self._common = min(target_rows, draft_rows)
        self._known = draft_rows if draft_rows < target_rows else None

    def reading(self, tokens: Sequence[int]) -> SameReading:
        return SameReading(tokens, self._known)

    def draw(self, view: View, logits: Tensor, path: Sequence[int], count: int, node: int) -> Drawn:
        return view.draw(logits[None, : self._common], [path], count, nodes=[node])[0]

    def own(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens

    def tree(self, found: Candidates, view: View, reading: object, origin: str) -> TokenTree:
        return found.tree(origin)


class SameReading:
    """The committed tokens themselves; see :class:`paceline.bridges.Reading`."""

    def __init__(self, tokens: Sequence[int], known: int | None) -> None:
        """``known`` is how many ids the draft model can read, None where these are all."""
        self.ids = tokens
        self.ready = True
        self._known = known
        self._seen = 0

    @property
    def settled(self) -> int:
        return len(self.ids)

    def fork(self, tokens: Sequence[int]) -> SameReading:
        return SameReading(tokens, self._known)

    def update(self) -> int:
        if self._known is not None:
            self.ready = self.ready and max(self.ids[self._seen :], default=0) < self._known
            self._seen = len(self.ids)
        return len(self.ids)

    def covers(self, filled: int) -> int:
        return filled


def difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """The first id that the draft model does not know as the target does, with both texts; None where there is none.

    Ids that only the draft model has are no difference: it is silent on them.
    """
    ours, theirs = (tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (target, draft))
    if ours.items() <= theirs.items():
        return None
    token = min(token for text, token in ours.items() - theirs.items())
    texts = [tokenizer.backend.id_to_token(token) for tokenizer in (target, draft)]
    mine, other = ("nothing" if text is None else repr(text) for text in texts)
    return f"id {token} is {mine} in the target, {other} in the draft model"
