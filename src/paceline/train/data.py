"""Files of texts to train on: prompts or chats, with the target's answers or without."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Messages = tuple["Mapping[str, Any]", ...]


@dataclass(frozen=True)
class Text:
    """A conversation up to the answer, and perhaps the answer.

    Attributes:
        line: the number of its line.
        messages: as a chat template takes them; the last is the user's.
        answer: the target's; None where it has yet to be given.
        answer_ids: the answer as it was emitted, where the file has it: text need not be encoded as it was emitted.
        finished: whether the answer ended by itself.
        temperature: at which it was given, or is to be.
        category: of what kind it is, where the file says so.
        template: the digest of the template under which the answer was given, where the file says so.
    """

    line: int
    messages: Messages
    answer: str | None = None
    answer_ids: tuple[int, ...] | None = None
    finished: bool = True
    temperature: float | None = None
    category: str = "all"
    template: str | None = None

    @property
    def key(self) -> str:
        """A digest of the conversation."""
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Texts:
    """What a file holds.

    Attributes:
        texts: the lines that can be used.
        skipped: for each line that cannot its number and what is wrong with it.
        digest: of the file's bytes.
    """

    texts: list[Text]
    skipped: list[str] = field(default_factory=list)
    digest: str = ""


def read_texts(path: Path, most_skipped: int = 100) -> Texts:
    """Read a JSONL file.

    Every line is an object with ``prompt`` (a text) or ``messages`` (a chat, the last message the user's, or the
    assistant's, which is then the answer), and perhaps ``answer``, ``answer_ids``, ``finish_reason`` ("length" where
    the answer was cut), ``temperature``, ``source`` or ``category``, ``template``; other fields are left alone.

    Args:
        most_skipped: how many lines that are empty or malformed are left out before the file is refused.

    Raises:
        OptionError: the file cannot be read, has too many bad lines, or no good one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"the data in {path} cannot be read: {error}.") from error
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts, skipped = [], []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(_text(number, line))
        except ValueError as error:
            skipped.append(f"line {number}: {error}")
    if len(skipped) > most_skipped:
        raise OptionError(
            f"{path} has {len(skipped)} bad lines, and at most {most_skipped} may be skipped; the first are "
            f"{'; '.join(skipped[:3])}."
        )
    if not texts:
        raise OptionError(f"{path} holds no text to train on: give a file with one JSON object a line.")
    return Texts(texts, skipped, hashlib.sha256(content).hexdigest())


def _text(number: int, line: bytes) -> Text:
    """
    Raises:
        ValueError: saying what is wrong with the line.
    """
    if not line.strip():
        raise ValueError("it is empty")
    try:
        fields = json.loads(line)
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("it is no object")
    messages, answer = _conversation(fields)
    ids = fields.get("answer_ids")
    if answer is not None and not answer.strip() and not ids:
        raise ValueError("its answer is empty")
    if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise ValueError("'answer_ids' is no list of ids")
    temperature = fields.get("temperature")
    if temperature is not None and (type(temperature) not in (int, float) or not temperature >= 0):
        raise ValueError("'temperature' is no number of at least 0")
    return Text(
        number,
        messages,
        answer,
        None if ids is None else tuple(ids),
        fields.get("finish_reason", "stop") == "stop",
        temperature,
        str(fields.get("category", fields.get("source", "all"))),
        fields.get("template"),
    )


def _conversation(fields: dict[str, Any]) -> tuple[Messages, str | None]:
    """The messages up to the answer, and the answer."""
    answer = fields.get("answer")
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ValueError("'messages' is no list of objects with role and content")
        if messages[-1]["role"] == "assistant":
            answer, messages = messages[-1]["content"], messages[:-1]
    elif isinstance(fields.get("prompt"), str) and fields["prompt"].strip():
        messages = [{"role": "user", "content": fields["prompt"]}]
    else:
        raise ValueError("it has neither a 'prompt' that is a text nor 'messages'")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("no message of a user comes before the answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError("its answer is no text")
    return tuple(messages), answer


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
