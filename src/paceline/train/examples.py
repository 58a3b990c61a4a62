"""Texts to train on: prompts, and what the target itself answers to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline.errors import OptionError
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.llm import LLM
    from paceline.text import Tokenizer
    from paceline.train.data import Text


@dataclass(frozen=True)
class Example:
    """One text, and which of its tokens a head learns to foretell.

    Attributes:
        tokens: ids, prompt and answer.
        counts: for each token whether its prediction counts: those of answers do, those of prompts do not.
    """

    tokens: tuple[int, ...]
    counts: tuple[bool, ...]

    @property
    def counted(self) -> int:
        """How many of its tokens count."""
        return sum(self.counts)

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Example:
        """A prompt and one answer to it."""
        return cls((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))


def answered(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = 256) -> list[Example]:
    """The target's own greedy answers to ``prompts``, given as ids; those that were answered at all.

    A head learns to foretell this target with its template, so it learns from what this target says.
    """
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    completions = llm.generate([list(prompt) for prompt in prompts], sampling, speculation=False)
    return [Example.of(c.prompt_token_ids, c.token_ids) for c in completions if c.token_ids]


def encoded(texts: Iterable[Text], chat_ids: Callable[[Any], list[int]], tokenizer: Tokenizer) -> list[Example]:
    """Texts with answers as examples: the template of inference, and only the answer counts.

    Args:
        chat_ids: the ids of messages up to the beginning of the answer, as for inference.
    """
    return [Example.of(chat_ids(list(text.messages)), _answer(text, tokenizer)) for text in texts]


def _answer(text: Text, tokenizer: Tokenizer) -> list[int]:
    """The ids of an answer; one that ended by itself ends with the token that said so."""
    if text.answer_ids is not None:
        return list(text.answer_ids)
    assert text.answer is not None
    end = tokenizer.eos_ids[:1] if text.finished else ()
    return [*tokenizer.encode(text.answer, add_special_tokens=False), *end]


def preview(example: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """An example as text with its special tokens, cut where it begins or ceases to count: each part, and whether its
    tokens count."""
    runs = groupby(zip(example.tokens, example.counts, strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in run], skip_special_tokens=False), counts) for counts, run in runs]


def ranked_ids(examples: Iterable[Example], vocab_size: int) -> list[int]:
    """All ids, those first that occur most often among the tokens that count.

    Ties go to the lower id: those that a tokenizer merged first are frequent.
    """
    counted = Counter(
        token for example in examples for token, counts in zip(example.tokens, example.counts, strict=True) if counts
    )
    return sorted(range(vocab_size), key=lambda token: (-counted[token], token))


def frequent_ids(examples: Iterable[Example], size: int, vocab_size: int) -> list[int]:
    """The ids of a draft vocabulary, ascending: the first ``size`` of `ranked_ids`.

    Raises:
        OptionError: ``size`` is not 1 to ``vocab_size``.
    """
    if not 1 <= size <= vocab_size:
        raise OptionError(f"a draft vocabulary has 1 to {vocab_size} ids for this target, not {size}.")
    return sorted(ranked_ids(examples, vocab_size)[:size])


def coverage(examples: Iterable[Example], ids: Iterable[int]) -> float:
    """The share of the tokens that count for which there is an id."""
    known = set(ids)
    found = Counter(
        token in known
        for example in examples
        for token, counts in zip(example.tokens, example.counts, strict=True)
        if counts
    )
    return found[True] / max(1, found.total())
