"""The command line: verbs that load only when they are called, and errors as exit codes.

Exit codes: 0 done; 1 it failed; 2 it was called wrongly; 130 it was interrupted; 141 nobody reads its output.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli.flags import Debug, in_flags
from paceline.cli.help import Headed
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERBS = {
    "generate": "Continue a prompt, with speculation or without.",
    "chat": "Talk with a model.",
    "pull": "Fetch a model and convert it, once.",
    "inspect": "Show what a model is, and whether another can draft for it.",
    "env": "Show the versions, the processor, and the kernels in use.",
    "verify": "Compare every token with and without speculation.",
    "bench": "Measure speed and quality.",
    "train": "Train a drafter for a target, on what the target itself says.",
}
_UsageError = typer.BadParameter.mro()[1]  # typer has it, but exports no name for it


class Verbs(TyperGroup):
    """Knows every verb by its line of help, and imports one only to run it: models need seconds to import."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load(str(name)), rest


def load(verb: str) -> Any:
    """The verb's command, from the module of its name: a function, or a group of verbs of its own."""
    found = getattr(import_module(f"paceline.cli.{verb}"), verb)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(verb, cls=Headed, help=VERBS[verb])(found)
    return typer.main.get_command(alone)


def command() -> Any:
    """The whole command line."""
    app = typer.Typer(cls=Verbs, add_completion=False, rich_markup_mode=None)
    for verb, line in VERBS.items():
        app.command(verb, help=line)(lambda: None)
    app.callback(help="Lossless speculative decoding: the same text, sooner.")(_options)
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    with _streams():
        return _main(arguments)


@contextmanager
def _streams() -> Iterator[None]:
    """Standard streams that can be used: one that the caller closed reads nothing, and nobody reads it."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    with ExitStack() as stack:
        for name in closed:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, stack.enter_context(Path(os.devnull).open(mode, encoding="utf-8")))
        yield
    for name in closed:
        setattr(sys, name, None)


def _main(arguments: Sequence[str] | None) -> int:
    settings: dict[str, Any] = {}
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "backslashreplace")
    given = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    try:
        whole = command()
        with whole.make_context("paceline", given, obj=settings) as context:
            code = whole.invoke(context)
        sys.stdout.flush()  # here, where it can still be said what became of it
    except typer.Exit as end:
        return end.exit_code
    except Exception as error:
        if settings.get("debug"):
            traceback.print_exc()
            return _code(error)
        return _report(error)
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Debug = False,
) -> None:
    context.obj["debug"] = debug


def _report(error: Exception) -> int:
    """One sentence on standard error."""
    if _nobody_reads(error):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # nor what is left to flush
            os.dup2(nowhere, stream.fileno())
    elif isinstance(error, _UsageError):
        print(f"paceline: {getattr(error, 'format_message')()}", file=sys.stderr)  # noqa: B009
    elif isinstance(error, PacelineError):
        from paceline.cli.model import FLAGS  # every verb has imported it by now

        print(f"paceline: {in_flags(str(error), FLAGS)}", file=sys.stderr)
    elif isinstance(error, OSError) and error.strerror:
        print(f"paceline: {error.filename or 'the output'}: {error.strerror}.", file=sys.stderr)
    elif not isinstance(error, typer.Abort):
        print(
            f"paceline: {type(error).__name__}: {error} (this should not happen: --debug shows where)",
            file=sys.stderr,
        )
    return _code(error)


def _nobody_reads(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _code(error: Exception) -> int:
    if isinstance(error, typer.Abort):
        return 130
    if _nobody_reads(error):
        return 141  # what a shell makes of SIGPIPE
    return 2 if isinstance(error, OptionError | _UsageError) else 1
