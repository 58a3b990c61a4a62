"""A head's first guesses against its target's own answer, when it is loaded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from paceline.batch import Rows
from paceline.chat import ChatTemplate
from paceline.heads.selftest import TOKENS, agreement
from paceline.kernels import PacelineWarning
from paceline.pages import PagePool, PageTable, pages_for
from paceline.text import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.pages import CacheGroup
    from paceline.targets.load import Loaded

_QUESTION = "Tell me how a bicycle works, and who invented it."


def check_agreement(
    name: str, target: Loaded, layers: Sequence[int], guess: Callable[[Sequence[int], list[Tensor]], Tensor]
) -> None:
    """Let the target answer a question greedily, and warn where the head would hardly have guessed a token of it.

    Args:
        name: what the head is called in the warning.
        layers: the target's layers whose input the head reads.
        guess: from tokens, and for each of those layers float32 [len(tokens) - 1, hidden], to the head's likeliest
            token two places after each state.
    """
    question = _question(target)
    room = min(TOKENS, target.decoder.max_positions - len(question))
    if room > 0 and len(question) > 1:
        answer, taps = _answer(target, question, layers, room)
        drafted = guess([*question, *answer], taps)[len(question) - 2 : -1]
        found = agreement(drafted.tolist(), answer, name)
        if found.warning is not None:
            warnings.warn(found.warning, PacelineWarning, stacklevel=2)


def temporary_tables(groups: Sequence[CacheGroup], rows: int) -> tuple[PageTable, ...]:
    """Room for one sequence of so many rows in pools of its own."""
    tables = tuple(PageTable(PagePool(group, pages_for(rows)), rows) for group in groups)
    for table in tables:
        table.reserve(rows)
    return tables


def _question(target: Loaded) -> list[int]:
    parts = target.tokenizer
    tokenizer = Tokenizer.from_parts(parts)
    if parts.chat_template is None:
        return tokenizer.encode(_QUESTION)
    text = ChatTemplate.from_parts(parts).render([{"role": "user", "content": _QUESTION}])
    return tokenizer.encode(text, add_special_tokens=False)


def _answer(
    target: Loaded, question: Sequence[int], layers: Sequence[int], room: int
) -> tuple[list[int], list[Tensor]]:
    """The greedy answer of at most ``room`` tokens, and the states before ``layers`` at every token but its last."""
    decoder = target.decoder
    tables = temporary_tables(decoder.groups, len(question) + room)
    slabs = [table.pool.slab for table in tables]
    answer: list[int] = []
    seen: list[list[Tensor]] = []
    new, start = list(question), 0
    while len(answer) < room and not (answer and answer[-1] in target.tokenizer.eos_ids):
        rows = Rows()
        rows.piece(new, start, tables, 1)
        scores = decoder.forward(rows.batch(), slabs, sorted(set(layers)))
        seen.append([scores.features[layer] for layer in layers])
        start += len(new)
        new = [int(scores.logits[0].argmax())]
        answer += new
    return answer, [torch.cat(tap) for tap in zip(*seen, strict=True)]
