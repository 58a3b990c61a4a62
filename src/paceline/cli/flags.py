"""Flags made from dataclasses, so that an option is spelled once: its field is its flag, its line of documentation
its help."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from paceline.errors import OptionError

Reader = Callable[[str, Any], Any]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback when something fails.")]

_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_DEBUG = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: the name of its value, how it is written, what typer makes of it, and how that becomes the value."""

    name: str
    declaration: str
    kind: Any
    read: Reader
    help: str

    @property
    def written(self) -> str:
        """Its first spelling."""
        return re.split(r"[ /]", self.declaration)[0]


class Group:
    """The flags of a dataclass's fields, under one heading.

    Args:
        heading: of their part of the help.
        options: a dataclass whose documentation describes its fields under "Attributes:".
        spelled: other spellings, by field; None leaves a field out.
        readers: what makes a field's value of the written text, where its type does not say.
        helps: what is said of a field in place of its documentation.
    """

    def __init__(
        self,
        heading: str,
        options: type,
        spelled: Mapping[str, str | None] | None = None,
        readers: Mapping[str, Reader] | None = None,
        helps: Mapping[str, str] | None = None,
    ) -> None:
        self.heading = heading
        hints, lines = get_type_hints(options), {**describe(options), **(helps or {})}
        self.flags = []
        for field in dataclasses.fields(options):
            kind, read = _kind(hints[field.name])
            declaration = (spelled or {}).get(field.name, _spelling(field.name, kind))
            if field.init and declaration is not None:
                if field.name in (readers or {}):
                    kind, read = str | None, (readers or {})[field.name]
                self.flags.append(Flag(field.name, declaration, kind, read, lines[field.name].replace("``", "")))
        written = {flag.name: flag.written for flag in self.flags}
        self.flags = [dataclasses.replace(flag, help=in_flags(flag.help, written)) for flag in self.flags]

    def parameters(self, prefix: str) -> list[inspect.Parameter]:
        """The flags as typer reads them from a signature; what is not given is None."""
        return [
            inspect.Parameter(
                f"{prefix}_{flag.name}",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    flag.kind, typer.Option(*flag.declaration.split(), help=flag.help, rich_help_panel=self.heading)
                ],
            )
            for flag in self.flags
        ]

    def take(self, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
        """Take the group's values out of ``values``, those that were given, by field."""
        taken = [(flag, values.pop(f"{prefix}_{flag.name}")) for flag in self.flags]
        return {flag.name: flag.read(flag.declaration, value) for flag, value in taken if value is not None}


def verb(**groups: Group) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a verb the flags of groups, and --debug, which the whole command line has too.

    The parameter named like a group gets a dict of what was given.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True).parameters.values()

        @wraps(function)
        def run(context: typer.Context, debug: bool, **values: Any) -> Any:
            context.obj["debug"] |= debug
            return function(**{name: group.take(name, values) for name, group in groups.items()}, **values)

        added = [parameter for name, group in groups.items() for parameter in group.parameters(name)]
        kept = [parameter for parameter in own if parameter.name not in groups]
        run.__signature__ = inspect.Signature([_CONTEXT, *kept, _DEBUG, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """A sentence about options with flags in place of their names in Python.

    A name without an underscore may be a word of English too: it is an option where it begins the sentence or a
    clause, stands before an equals sign, or is what another excludes.

    Args:
        flags: by name in Python.
    """
    option = re.compile(rf"(?<![\w'./-])({'|'.join(flags)})\b(?!['/])(=?)")

    def flag(match: re.Match[str]) -> str:
        before, behind = text[: match.start()], text[match.end() :]
        begins = re.fullmatch("(.*, and )?", before) and re.match(" (is|has|and|holds|names) | '", behind)
        if "_" in match[1] or match[2] or begins or behind.startswith(" exclude each other"):
            return flags[match[1]] + " " * bool(match[2])
        return match[0]

    return option.sub(flag, text)


def describe(options: type) -> dict[str, str]:
    """What a class's documentation says about each name under "Attributes:"."""
    _, _, rest = inspect.cleandoc(options.__doc__ or "").partition("Attributes:\n")
    section = re.split(r"\n(?=\S)", rest)[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section):
        names, _, text = entry.partition(":")
        text = " ".join(text.split())
        found |= dict.fromkeys((name.strip() for name in names.split(",")), text[:1].upper() + text[1:])
    return found


def _spelling(name: str, kind: Any) -> str:
    flag = name.replace("_", "-")
    return f"--{flag}/--no-{flag}" if kind == bool | None else f"--{flag}"


def _kind(hint: Any) -> tuple[Any, Reader]:
    """What typer is to read for a field of this type, and what makes the field's value of that."""
    members = [member for member in _members(hint) if member is not types.NoneType]
    if len(members) == 1 and members[0] in (bool, int, float, str, Path):
        return members[0] | None, _as_it_is
    if set(members) == {str, int}:
        return str | None, _number_or_word
    if any(get_origin(member) is Mapping for member in members):
        return list[str] | None, _numbers_by_id
    if Sequence[int] in members:
        return list[str] | None, _integers
    return list[str] | None, _as_it_is


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _as_it_is(flag: str, value: Any) -> Any:
    return value


def _number_or_word(flag: str, value: str) -> str | int:
    return int(value) if value.isdecimal() else value


def _integers(flag: str, values: list[str]) -> list[int]:
    """Given again and again, or with commas."""
    try:
        return [int(part) for value in values for part in value.split(",")]
    except ValueError:
        raise OptionError(f"{flag} takes token ids, as in {flag} 1,2, not {','.join(values)!r}.") from None


def _numbers_by_id(flag: str, values: list[str]) -> dict[int, float]:
    try:
        pairs = (part.split("=") for value in values for part in value.split(","))
        return {int(token): float(number) for token, number in pairs}
    except ValueError:
        raise OptionError(f"{flag} takes ids and numbers, as in {flag} 11=-5, not {','.join(values)!r}.") from None


def memory(flag: str, text: str) -> int:
    """Bytes, from a number with or without a unit (K, M, G, T, by 1,024; "iB" or "B" may follow)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise OptionError(f"{flag} takes an amount, as in 512M or 2G, not {text!r}.")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def speculation(given: dict[str, Any], enabled: bool, written: str | None) -> Any:
    """What LLM takes as ``speculation``, from the short flags, --no-speculation and --speculation.

    Raises:
        OptionError: two of them say different things, or --speculation is not JSON.
    """
    if not enabled:
        if given or written is not None:
            raise OptionError("--no-speculation excludes the other options of speculation.")
        return False
    if written is None:
        return given or True
    options = _object(written)
    for name, value in given.items():
        if options.setdefault(name, value) != value:
            raise OptionError(f"--speculation has {name} {options[name]!r}, but its flag says {value!r}.")
    return options


def _object(written: str) -> Any:
    """A JSON value, or the bare name of a method."""
    if re.fullmatch(r"\w+", written) and written not in ("true", "false", "null"):
        return {"method": written}
    try:
        options = json.loads(written)
    except json.JSONDecodeError as error:
        raise OptionError(f"--speculation takes a JSON object or a method's name ({error}).") from None
    if isinstance(options, bool) or options is None:
        return {"enabled": bool(options)}
    if not isinstance(options, dict):
        raise OptionError(f"--speculation takes a JSON object, not {written}.")
    return options
