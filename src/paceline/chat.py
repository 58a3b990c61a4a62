"""Chat templates: from messages to the text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import OptionError, RequestError, TokenizerError
from paceline.options import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2.parser import Parser

    from paceline.targets.vocabulary import TokenizerParts

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template, compiled once in jinja2's sandbox.

    The environment is what templates are written for (Hugging Face's ``apply_chat_template``): blocks
    trimmed, ``break`` and ``continue``, ``raise_exception``, ``strftime_now``, ``tojson`` without escapes,
    and a ``generation`` block that is only its content. Templates come with models and are not trusted: they
    see plain data, and nothing of Python.

    Args:
        source: the template, or None where the model has none.
        special_tokens: what the template may name, as in ``{"bos_token": "<s>"}``.

    Raises:
        TokenizerError: the template does not compile.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._template = None if source is None else environment.from_string(source)
            self._read = jinja2.meta.find_undeclared_variables(environment.parse(source or ""))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the model's chat template does not compile ({error.message}, line {error.lineno}): "
                "give plain prompts instead of messages."
            ) from error

    @classmethod
    def from_parts(cls, parts: TokenizerParts) -> ChatTemplate:
        """The template that a model's files bring, if any."""
        return cls(parts.chat_template, parts.special_tokens)

    def check(self, names: Iterable[str], others: Iterable[str] = ()) -> None:
        """Refuse a variable that the template does not read, for it would change nothing.

        Args:
            names: of the variables.
            others: what else the caller may have meant.

        Raises:
            OptionError: with the nearest right name, or all that the template reads.
        """
        own = sorted(self._read - {"messages"} - self._special_tokens.keys())
        for name in names:
            if self._template is not None and name not in (*self._read, "add_generation_prompt"):
                end = nearest(name, [*others, *own])
                raise OptionError(
                    f"{name!r} is no variable of the model's chat template"
                    + (end if end != "." else f", which reads {', '.join(own) or 'none'}.")
                )

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, special tokens written out; encode it without adding any.

        Args:
            messages: one mapping each with ``role`` and ``content``, a text or a list of text parts, which
                reach the template joined, as most templates know texts only.
            add_generation_prompt: end with the beginning of the model's answer.
            tools: descriptions of functions, as JSON schemas.
            variables: whatever else the template reads, as in ``enable_thinking=False``.

        Raises:
            RequestError: no conversation, no template, or the template refuses.
            OptionError: the template does not read one of ``variables``, or reads no ``tools`` that were given.
        """
        conversation = [_message(place, message) for place, message in enumerate(_checked(messages))]
        if self._template is None:
            raise RequestError("the model has no chat template: give a plain prompt instead of messages (no --chat).")
        self.check([*variables, *["tools"] * bool(tools)])
        context = {
            **self._special_tokens,
            "documents": None,
            **_plain(variables),
            "messages": conversation,
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses the messages: {str(error).rstrip('.')}.") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template fails on these messages ({type(error).__name__}: {error}): "
                "check their roles and contents."
            ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks answers for training, stands for its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError('messages are a list, as in [{"role": "user", "content": "Hello"}].')
    if not messages:
        raise RequestError("the conversation has no messages: give at least one.")
    return messages


def _message(place: int, message: Message) -> dict[str, Any]:
    """One message as plain data; keys without a value are left out, as templates expect."""
    if not isinstance(message, Mapping):
        raise RequestError(f"message {place} is not an object with role and content but {_kind(message)}.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f'message {place} has no role: give one, as "system", "user" or "assistant".')
    if message.get("content") is None and not message.get("tool_calls"):
        raise RequestError(f"message {place} has no content: give it a text.")
    given = {**message, "content": _content(place, message.get("content"))}
    return {key: _plain(value) for key, value in given.items() if value is not None}


def _content(place: int, content: object) -> str | None:
    """A message's content as one text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"the content of message {place} is {_kind(content)}: give a text or a list of text parts.")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'the content of message {place} has a part that is no text: parts are {{"type": "text", "text": ...}}.'
            )
    return "".join(part["text"] for part in content)


def _plain(value: Any) -> Any:
    """The value rebuilt of plain JSON types, so that a template has no methods of other objects to call."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise RequestError(f"a chat template takes texts, numbers, lists and objects, not {_kind(value)}.")


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
