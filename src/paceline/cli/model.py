"""What the verbs that run a model share: its flags, and how it is loaded with them."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import typer

from paceline import methods
from paceline.cli.flags import Group, in_flags, memory, speculation
from paceline.cli.output import plain_warnings, tell
from paceline.front import Front
from paceline.llm import LLM
from paceline.options import Speculation
from paceline.sampling import Sampling
from paceline.settings import EngineOptions

F = TypeVar("F", bound=Front)

ENGINE = Group("Model", EngineOptions, {"threads": "--threads -t"}, {"cache_memory": memory})
SAMPLING = Group("Sampling", Sampling)
_METHODS = ", ".join(("auto", *methods.names()))
DRAFTING = Group(
    "Speculation",
    Speculation,
    {"enabled": None, "model": "--draft-model"},
    helps={"method": f"What drafts: {_METHODS}."},
)
METHOD_HELP = f"plain, {_METHODS}, with options as in NAME:KEY=VALUE,KEY=VALUE, or options alone; give several."
FLAGS = {flag.name: flag.written for group in (SAMPLING, ENGINE, DRAFTING) for flag in group.flags}
"""The flag of every option that has one, by its name in Python."""

MODEL_HELP = "smollm2-135m, a Hugging Face repository id, a folder, or a GGUF file."

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=MODEL_HELP,
        rich_help_panel="Model",
    ),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Plain decoding.", rich_help_panel="Speculation")]
Written = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        "--speculative-config",
        help="All options of speculation as one JSON object, or a method's name.",
        rich_help_panel="Speculation",
    ),
]
CacheSalt = Annotated[
    str | None,
    typer.Option(
        "--cache-salt",
        help="What drafters learn from this serves requests of the same key alone.",
        rich_help_panel="Speculation",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result, no remarks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def chosen_speculation(given: dict[str, Any], enabled: bool, written: str | None) -> Any:
    """What LLM takes as ``speculation``, checked before a model is loaded for it; see :func:`flags.speculation`."""
    wanted = speculation(given, enabled, written)
    methods.check(Speculation.parse(wanted))
    return wanted


def open_model(model: str, engine: dict[str, Any], drafting: Any = True, *, quiet: bool = False) -> LLM:
    """Load a model with the options that were given; what was chosen goes to standard error."""
    return open_front(LLM, model, engine, drafting, quiet=quiet)


def open_front(kind: type[F], model: str, engine: dict[str, Any], drafting: Any = True, *, quiet: bool = False) -> F:
    """:func:`open_model` for the interface that is named."""
    with plain_warnings():
        llm = kind(model, **engine, speculation=drafting, progress=not quiet)
    if not quiet:
        tell(*(in_flags(note, FLAGS) for note in llm.notes))
    return llm
