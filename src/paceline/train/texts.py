"""From files of texts to what a training reads: examples to learn from, and others to evaluate on."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path  # noqa: TC003 - a flag is made of this type
from typing import TYPE_CHECKING

from paceline.errors import OptionError
from paceline.train.answers import Asking, answer
from paceline.train.data import Texts, read_texts
from paceline.train.evaluate import Held
from paceline.train.examples import Example, encoded
from paceline.train.provenance import answers_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.llm import LLM
    from paceline.train.data import Text

_LISTED = 5  # bad lines that are named one by one


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on.

    Attributes:
        answers: a JSONL file of prompts with the target's own answers (prompt or messages, answer, temperature,
            finish_reason), which are used as they are.
        prompts: a JSONL file of prompts (prompt or messages) that the target answers first; those that have an answer
            above are left out.
        count: take so many texts, drawn from all; unless said every one.
        held_out: keep so many back, of all kinds, to evaluate on.
        max_skipped: how many lines that are empty or malformed are left out before a file is refused.
        max_length: tokens of a text, what is beyond them is cut.
        answer_tokens: the longest answer that the target gives.
        temperature: of every second of the prompts to be answered that name none; the others are answered greedily.
        top_p: of answers above temperature 0, given ones too.
    """

    answers: Path | None = None
    prompts: Path | None = None
    count: int | None = None
    held_out: int = 64
    max_skipped: int = 100
    max_length: int = 2048
    answer_tokens: int = 224
    temperature: float = 0.8
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if self.answers is None and self.prompts is None:
            raise OptionError("there is nothing to train on: give answers of the target, or prompts for it to answer.")
        for name, least in (("count", 2), ("held_out", 1), ("max_skipped", 0), ("max_length", 8), ("answer_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"{name} must be at least {least}, not {value}.")


@dataclass(frozen=True)
class Material:
    """What a training reads.

    Attributes:
        examples: to learn from.
        held: to evaluate on.
        digests: of the files that both come from, by what they are.
    """

    examples: list[Example]
    held: list[Held]
    digests: dict[str, str]


def collect(
    data: Data, llm: LLM, folder: Path, seed: int, tell: Callable[[str], None], advance: Callable[[int, int], None]
) -> Material:
    """Read the files, have the target answer what has no answer, and part what is held out from what is learned.

    Args:
        folder: where answers are written as they come, and found again.

    Raises:
        OptionError: a file cannot be used, or too little is in it; or its answers were given under another template.
    """
    files = {name: path for name, path in (("answers", data.answers), ("prompts", data.prompts)) if path is not None}
    read = {name: _read(path, data, tell) for name, path in files.items()}
    digest = answers_digest(llm.loaded)
    given = {text.key: text for found in read.values() for text in found.texts if text.answer is not None}
    for text in given.values():
        if text.template not in (None, digest):
            raise OptionError(
                f"the answer of line {text.line} was given by another model or under another chat template than "
                f"{llm.loaded.name}'s: train on this target's own answers."
            )
    asked = {text.key: text for found in read.values() for text in found.texts if text.key not in given}
    if asked:
        tell(f"{len(asked)} prompts have no answer; the target gives them, into {folder / 'answers.jsonl'}")
        asking = Asking(temperature=data.temperature, top_p=data.top_p, max_tokens=data.answer_tokens, seed=seed)
        new = answer(llm, list(asked.values()), folder / "answers.jsonl", asking, digest, advance)
        given |= {text.key: text for text in new}
    texts = list(given.values())
    random.Random(seed).shuffle(texts)
    texts = texts[: data.count]
    if len(texts) <= data.held_out:
        raise OptionError(f"of {len(texts)} texts {data.held_out} cannot be held out: give more, or hold out fewer.")
    held, learned = _parted(texts, data.held_out)
    pairs = zip(held, _examples(held, llm, data.max_length), strict=True)
    return Material(
        _examples(learned, llm, data.max_length),
        [
            Held(example, text.category, text.temperature or 0.0, data.top_p)
            for text, example in pairs
            if example.counted
        ],
        {name: found.digest for name, found in read.items()},
    )


def _read(path: Path, data: Data, tell: Callable[[str], None]) -> Texts:
    found = read_texts(path, data.max_skipped)
    for line in found.skipped[:_LISTED]:
        tell(f"{path}, {line}: skipped")
    if len(found.skipped) > _LISTED:
        tell(f"{path}: {len(found.skipped) - _LISTED} more lines skipped")
    return found


def _examples(texts: Sequence[Text], llm: LLM, length: int) -> list[Example]:
    length = min(length, llm.max_model_len)
    found = encoded(texts, llm.chat_ids, llm.tokenizer)
    return [replace(example, tokens=example.tokens[:length], counts=example.counts[:length]) for example in found]


def _parted(texts: Sequence[Text], count: int) -> tuple[list[Text], list[Text]]:
    """``count`` of the texts, of all categories and temperatures in turn, and the others."""
    queues: dict[tuple[str, bool], list[Text]] = {}
    for text in texts:
        queues.setdefault((text.category, bool(text.temperature)), []).append(text)
    turns = [text for turn in zip_longest(*(queues[kind] for kind in sorted(queues))) for text in turn if text]
    return turns[:count], turns[count:]
