"""Prompts to measure and verify on: those that are shipped here, or a file of the user's own."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import OptionError

SHIPPED = Path(__file__).with_name("prompts.jsonl")
"""Eighty prompts of all kinds, written for paceline; four of them have more than 1,000 tokens."""

CHAT_CATEGORIES = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""The small categories that are reported together as ``mt_bench``."""


@dataclass(frozen=True)
class Prompt:
    """One question, of one turn or several.

    Attributes:
        id: what it is called in its file, or the number of its line.
        category: as its file says, or the kind of the file.
        turns: what the user says, in order.
    """

    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """The category under which it is reported."""
        return "mt_bench" if self.category in CHAT_CATEGORIES else self.category


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Read a JSONL file of prompts, or the shipped one.

    Every line is an object with Spec-Bench's fields (``question_id``, ``category``, ``turns``), HumanEval's
    (``task_id``, ``prompt``), or just ``prompt`` (a text) or ``turns`` (a list of texts); other fields are left alone.

    Raises:
        OptionError: the file cannot be read, holds no prompt, or a line (named by its number) is not one.
    """
    path = SHIPPED if path is None else Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the prompts in {path} cannot be read: {error}.") from error
    # Not splitlines(): a line separator inside a text is no end of a line.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    prompts = [_prompt(f"{path}, line {number}", number, line) for number, line in lines]
    if not prompts:
        raise OptionError(f"{path} holds no prompt: give a file with one JSON object a line.")
    twice = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise OptionError(f"{path} has more than one prompt with the id {twice[0]!r}: give each its own.")
    return prompts


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """``count`` of the prompts, taken from all categories in turn, each category in its own order."""
    if count < 1:
        raise OptionError(f"the number of prompts is {count}; it must be at least 1.")
    queues: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.group, []).append(prompt)
    rounds = range(max(map(len, queues.values()), default=0))
    turns = [queue[place] for place in rounds for queue in queues.values() if place < len(queue)]
    return turns[:count]


def _prompt(where: str, number: int, line: str) -> Prompt:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where}: this is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise OptionError(f"{where}: a prompt is a JSON object, not {line.strip()[:40]!r}.")
    if "turns" in fields:
        turns, kind = fields["turns"], "prompts"
    elif "prompt" in fields:
        turns, kind = [fields["prompt"]], "code" if "task_id" in fields else "prompts"
    else:
        raise OptionError(f"{where}: neither 'turns' nor 'prompt' is given.")
    if not isinstance(turns, list) or not turns:
        raise OptionError(f"{where}: 'turns' is a list of at least one text.")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise OptionError(f"{where}: every turn is a text that is not empty.")
    name = fields.get("question_id", fields.get("task_id", number))
    return Prompt(str(name), str(fields.get("category", kind)), tuple(turns))
