"""What verifying and measuring share on the command line: prompts, the file of cells, progress."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench.environment import environment, settings
from paceline.bench.runner import Runner
from paceline.cli.flags import Group
from paceline.cli.output import tell
from paceline.errors import OptionError
from paceline.prompts import Prompt, read_prompts, spread
from paceline.settings import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from paceline.llm import LLM

LOADING = Group(
    "Model",
    EngineOptions,
    {"threads": "--threads -t", **dict.fromkeys(("dtype", "max_model_len", "max_num_seqs", "cache_memory"))},
)
"""The flags of what loads a model in several number formats, its cache as large as the measurement needs."""

Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        help="A JSONL file (Spec-Bench's fields, HumanEval's, or prompt), or how many of the shipped prompts.",
    ),
]
Count = Annotated[int | None, typer.Option("--count", help="Take so many of the prompts, from all categories in turn.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "--resume", "-o", help="Write each cell to this JSONL file as it is taken, and go on where it ends."
    ),
]
Formats = Annotated[list[str] | None, typer.Option("--dtype", help="A number format of the weights; give several.")]

_EVERY = 10.0  # seconds between two lines of progress in a file or pipe


def chosen(prompts: str | None, count: int | None, shipped: int | None = None) -> list[Prompt]:
    """The prompts asked for; of those shipped at most ``shipped`` where nothing is said."""
    if prompts is not None and prompts.isdecimal():
        return spread(read_prompts(), min(int(prompts), count or int(prompts)))
    found = read_prompts(prompts)
    count = shipped if count is None and prompts is None else count
    return found if count is None else spread(found, count)


def runner(llm: LLM, prompts: Sequence[Prompt], output: Path | None, tell: Ticker, **others: Any) -> Runner:
    """The runner of a measurement with ``others`` as its settings."""
    return Runner(output, environment(llm), settings(llm, prompts, **others), tell)


def numbers(flag: str, text: str, low: int, high: int) -> list[int]:
    """Several numbers written as 1,2,4.

    Raises:
        OptionError: they are not, or one is out of range.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{flag} takes numbers, as in {flag} 1,2,4, not {text!r}.") from None
    for number in found:
        if not low <= number <= high:
            raise OptionError(f"{flag} has {number}; each must be {low} to {high}.")
    return list(dict.fromkeys(found))


class Ticker:
    """Shows each cell as it is taken: on one line of a terminal, else a line now and then."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._count = 0
        self._last = time.monotonic()

    def __enter__(self) -> Ticker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._count and not self._quiet:
            print(file=sys.stderr)

    def __call__(self, line: str) -> None:
        self._count += 1
        text = f"{self._count} cells · {line}"
        if self._quiet:
            return
        if self._live:
            print(f"\r\x1b[2K{text[:100]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            tell(text)
