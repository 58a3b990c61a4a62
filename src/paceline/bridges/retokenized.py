"""Drafts as text: the draft model writes in its own tokens, and the target's tokenizer reads what it wrote."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from paceline.bridges.reading import INNER, TextReading
from paceline.tree import MAX_NODES, Drawn, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.bridges.spelling import Spelling
    from paceline.drafters import View
    from paceline.drafters._candidates import Candidates

_LEFT = 8  # committed tokens that are encoded once more before drafted text, for the splitter's sake


class Retokenized:
    """The draft model's likeliest text, in the target's tokens.

    No probability of a token of the target's is known, so it is exact only under rules that need none.

    Source: Timor et al. 2025 (arXiv 2502.05202), algorithm 2, string-level exact match.

    Attributes:
        target: the target's tokenizer.
        draft: the draft model's.
        ends: the draft model's special tokens that may end a text, to the target's of the same text and role.
    """

    kind = "retokenized"
    sampled = False

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        self.target, self.draft = target, draft
        pairs = [(draft.special[name], token) for name, token in target.special.items() if name in draft.special]
        self.ends = {own: token for own, token in pairs if draft.role(own) == target.role(token)}

    def reading(self, tokens: Sequence[int]) -> TextReading:
        return TextReading(self.target, self.draft, tokens)

    def draw(self, view: View, logits: Tensor, path: Sequence[int], count: int, node: int) -> Drawn:
        """The likeliest tokens of the draft model's own: the noise of the target's ids is not that of its ids."""
        chances = logits[: self.draft.rows].softmax(0)
        best = chances.topk(min(count, chances.shape[0]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        special = self.draft.tokenizer.special_ids
        good = [(token, chance) for token, chance in pairs if token not in special or token in self.ends]
        return Drawn([token for token, _ in good], [chance for _, chance in good])

    def own(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens

    def tree(self, found: Candidates, view: View, reading: TextReading, origin: str) -> TokenTree:
        """The texts of all branches in the target's tokens, joined where they begin alike."""
        written, tree = found.tree(origin), TokenTree.root(view.tokens[-1])
        inner = set(written.parents)
        for leaf in range(1, len(written)):
            if leaf not in inner:
                path = written.path(leaf)[1:]
                drafted = [written.tokens[node] for node in path]
                tokens = self.retokenize(view.tokens, drafted, reading.begins)
                _branch(tree, [(token, written.survival[path[taken - 1]]) for token, taken in tokens], origin)
        return tree

    def retokenize(self, committed: Sequence[int], drafted: Sequence[int], begins: bool) -> list[tuple[int, int]]:
        """The target's tokens for what the draft model wrote behind the target's ``committed`` tokens.

        Each comes with the number of ``drafted`` ids that it takes. What they spell is what these spell, up to the
        last place where both tokenizers cut and behind which the draft model has said how the text goes on: further
        text might change the tokens there. An end at which both have the same token is such a place too.

        ``begins`` says that the draft model's first token may start with a space that is none of the text's.
        """
        ending = next((place for place, token in enumerate(drafted) if token in self.ends), None)
        written, end = drafted[:ending], None if ending is None else self.ends[drafted[ending]]
        pieces = [self.draft.tokenizer.token_bytes(token) for token in written]
        if begins and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        tokens, places = self._read(committed, text)
        ends = list(accumulate(map(len, pieces)))
        whole = (places or [0])[-1] == len(text)
        if end is None and not (whole and places[-2:-1] == ends[-2:-1]):
            cuts = {0, *ends[:-1]}
            stable = next((n for n in range(len(places), 0, -1) if places[n - 1] in cuts), 0)
            tokens, places = tokens[:stable], places[:stable]
        found = [(token, bisect_left(ends, place) + 1) for token, place in zip(tokens, places, strict=True)]
        return [*found, (end, len(written) + 1)] if end is not None and whole else found

    def _read(self, committed: Sequence[int], text: bytes) -> tuple[list[int], list[int]]:
        """The target's tokens for ``text`` behind ``committed``, and where in it each of them ends."""
        left, begins = self._left(committed)
        for before, first in ((left, begins), (b"", begins and not left)):
            ids = self.target.encode(_decoded(before + text), first)
            pieces = [self.target.tokenizer.token_bytes(token) for token in ids]
            if first and ids:
                pieces[0] = pieces[0].removeprefix(b" ")
            ends = [0, *accumulate(map(len, pieces))]
            if len(before) in ends:
                start = ends.index(len(before))
                places = [end - len(before) for end in ends[start + 1 :]]
                spans = zip([0, *places], places, pieces[start:], strict=False)
                differing = (n for n, (a, b, piece) in enumerate(spans) if text[a:b] != piece)
                good = next(differing, len(places))
                return ids[start : start + good], places[:good]
        return [], []

    def _left(self, committed: Sequence[int]) -> tuple[bytes, bool]:
        """The text of the last committed tokens, and whether it begins where the target puts a space before text."""
        tokenizer, start = self.target.tokenizer, len(committed)
        while start > max(0, len(committed) - _LEFT) and committed[start - 1] not in tokenizer.special_ids:
            start -= 1
        left = self.target.spelled(committed[start:])
        if start > 0 and committed[start - 1] not in tokenizer.special_ids:
            return left.lstrip(INNER), False  # without the rest of a character that began before
        opening = start == 0 or (start == 1 and committed[0] == tokenizer.bos_id)
        begins = self.target.prefix == "always" or (self.target.prefix == "first" and opening)
        if begins and left == b" ":
            return b"", False  # the space is written already
        return left.removeprefix(b" ") if begins else left, begins


def _decoded(data: bytes) -> str:
    """The text of ``data`` up to the first byte that is none, or no whole character yet."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _branch(tree: TokenTree, tokens: Sequence[tuple[int, float]], origin: str) -> None:
    """Add tokens, each with its survival, below the root of ``tree``, as far as it has room."""
    node = 0
    for token, survival in tokens:
        known = next((child for child in tree.children(node) if tree.tokens[child] == token), None)
        if known is None and len(tree) == MAX_NODES:
            return
        node = tree.add(node, token, min(survival, tree.survival[node]), origin) if known is None else known
