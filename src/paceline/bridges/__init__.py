"""Bridges between a draft model's vocabulary and the target's.

One interface, :class:`Bridge`: what the draft model reads of a sequence (:class:`Reading`), and how what it drafts
becomes tokens of the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.bridges.agreeing import Agreeing, difference
from paceline.bridges.intersection import Intersection
from paceline.bridges.retokenized import Retokenized
from paceline.bridges.spelling import Spelling
from paceline.errors import DrafterError
from paceline.prompts import read_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.drafters import View
    from paceline.drafters._candidates import Candidates
    from paceline.text import Tokenizer
    from paceline.tree import Drawn, TokenTree

Kind = Literal["auto", "same", "intersection", "retokenized"]

ENOUGH = 0.8
"""The share of the draft model's writing that must be common tokens for ``auto`` to draft with them alone.

Where a token that it would write is not common, a draft breaks off early at best; retokenized text has no such gaps,
but leaves out its unstable end, about one token of five drafted, and is drawn without the noise that lets sampled
drafts agree. So the common tokens are better while fewer than one of five is missing.
"""


class Reading(Protocol):
    """The committed tokens of one sequence as the draft model reads them."""

    @property
    def ids(self) -> Sequence[int]:
        """The draft model's ids."""

    @property
    def settled(self) -> int:
        """How many leading ids never change again."""

    @property
    def ready(self) -> bool:
        """Whether the draft model can read all of the text."""

    def update(self) -> int:
        """Take in what was committed since; returns how many leading ids are what they were before."""

    def covers(self, filled: int) -> int:
        """How many leading tokens ``filled`` leading ids are of."""

    def fork(self, tokens: Sequence[int]) -> Reading:
        """The same for another sequence that has begun alike."""


class Bridge(Protocol):
    """Between two vocabularies. What it drafts is first a tree of *drafted* tokens, in the target's ids or, where it
    drafts text, in the draft model's.

    Attributes:
        kind: its name among the values of the option ``vocabulary``.
        sampled: whether drafts are drawn from a distribution over the target's ids, as rules that need ``q`` demand.
    """

    kind: str
    sampled: bool

    def reading(self, tokens: Sequence[int]) -> Any:
        """A :class:`Reading` of a sequence's ``tokens``, a list that grows."""

    def draw(self, view: View, logits: Tensor, path: Sequence[int], count: int, node: int) -> Drawn:
        """Children of one node, from the draft model's float32 [rows] logits behind the drafted tokens ``path``."""

    def own(self, tokens: Sequence[int]) -> Sequence[int]:
        """The draft model's ids of drafted tokens."""

    def tree(self, found: Candidates, view: View, reading: Any, origin: str) -> TokenTree:
        """What is proposed of the drafted tokens ``found``, behind what ``reading``, one of this bridge's, read."""


def bridge(
    target: Tokenizer,
    draft: Tokenizer,
    kind: Kind = "auto",
    *,
    target_rows: int | None = None,
    draft_rows: int | None = None,
    sampled: bool = False,
) -> Bridge:
    """The bridge between two tokenizers.

    Args:
        target: the target's tokenizer.
        draft: the draft model's.
        kind: ``same`` demands that the ids agree; ``intersection`` and ``retokenized`` are taken whether they do or
            not; ``auto`` takes the ids as they are where they agree, else the intersection where it is enough of what
            the draft model writes (measured on the prompts that come with paceline; see :data:`ENOUGH`), else
            retokenized text.
        target_rows: how many ids the target emits; None is all of its tokenizer's.
        draft_rows: how many rows the draft model's head has.
        sampled: whether the verification rule needs the probabilities that drafts were drawn with.

    Raises:
        DrafterError: the ids do not agree and must, nothing is common, or the rule does not fit the bridge.
    """
    if kind == "retokenized" and sampled:
        raise DrafterError(
            "a draft model of another tokenizer, with vocabulary 'retokenized', knows no probabilities of the target's "
            "tokens, which this rule needs: use vocabulary 'intersection', or the rule 'coupled'."
        )
    differing = difference(target, draft) if kind in ("auto", "same") else None
    if kind == "same" and differing:
        raise DrafterError(f"{differing}: leave vocabulary at 'auto' to translate, or use another draft model.")
    ours, theirs = Spelling(target, target_rows), Spelling(draft, draft_rows)
    if kind == "same" or (kind == "auto" and not differing):
        return Agreeing(target_rows or target.vocab_size, draft_rows or draft.vocab_size)
    if kind == "retokenized":
        return Retokenized(ours, theirs)
    common = Intersection(ours, theirs)
    texts = (text for prompt in read_prompts(None) for text in prompt.turns)
    if kind == "intersection" or sampled or common.coverage(texts) >= ENOUGH:
        return common
    return Retokenized(ours, theirs)
