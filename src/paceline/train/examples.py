"""Texts to train on: prompts, and what the target itself answers to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from paceline.errors import OptionError
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.llm import LLM
    from paceline.text import Tokenizer


@dataclass(frozen=True)
class Example:
    """One text, and which of its tokens a head learns to foretell.

    Attributes:
        tokens: ids, prompt and answer.
        counts: for each token whether its prediction counts: those of answers do, those of prompts do not.
    """

    tokens: tuple[int, ...]
    counts: tuple[bool, ...]

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


def preview(example: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """An example as text with its special tokens, cut where it begins or ceases to count: each part, and whether its
    tokens count."""
    runs = groupby(zip(example.tokens, example.counts, strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in run], skip_special_tokens=False), counts) for counts, run in runs]


def frequent_ids(examples: Iterable[Example], size: int, vocab_size: int) -> list[int]:
    """The ids of a draft vocabulary, ascending: the most frequent of the tokens that count, ties to the lower id.

    Where fewer than ``size`` occur the lowest others fill it up: those that a tokenizer merged first are frequent.

    Raises:
        OptionError: ``size`` is not 1 to ``vocab_size``.
    """
    if not 1 <= size <= vocab_size:
        raise OptionError(f"a draft vocabulary has 1 to {vocab_size} ids for this target, not {size}.")
    counted = Counter(
        token for example in examples for token, counts in zip(example.tokens, example.counts, strict=True) if counts
    )
    ranked = sorted(range(vocab_size), key=lambda token: (-counted[token], token))
    return sorted(ranked[:size])
