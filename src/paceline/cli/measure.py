"""What verifying and measuring share on the command line: prompts, the file of cells, progress, the result."""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - a flag is made of this type
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.async_llm import AsyncLLM
from paceline.bench.environment import environment, settings
from paceline.bench.runner import Runner
from paceline.cli.flags import Group
from paceline.cli.model import open_front, open_model
from paceline.cli.output import print_json, tell
from paceline.cli.tables import header, show
from paceline.errors import OptionError
from paceline.prompts import Prompt, read_prompts, spread
from paceline.settings import EngineOptions
from paceline.tree import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from rich.table import Table

    from paceline.front import Front
    from paceline.llm import LLM

LOADING = Group(
    "Model",
    EngineOptions,
    {"threads": "--threads -t", **dict.fromkeys(("dtype", "max_model_len", "max_num_seqs", "cache_memory"))},
)
"""The flags of what loads a model in several number formats, its cache as large as the measurement needs."""

Formats = Annotated[list[str] | None, typer.Option("--dtype", help="A number format of the weights; give several.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="How often each cell is taken.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of each answer.")]
Drafts = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", min=1, max=MAX_NODES - 1, help="The most tokens drafted at a time."),
]
Adaptive = Annotated[bool | None, typer.Option("--adaptive/--no-adaptive", help="Draft less where it does not pay.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="The share of the mass to draw from.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of sampled answers.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="How often all kinds are gone through.")]

_EVERY = 10.0  # seconds between two lines of progress in a file or pipe


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which prompts are taken.

    Attributes:
        prompts: a JSONL file (Spec-Bench's fields, HumanEval's, or prompt), or how many of the shipped prompts.
        count: take so many of the prompts, from all categories in turn.
        categories: only these, as in qa,rag; mt_bench is its eight small ones.
    """

    prompts: str | None = None
    count: int | None = None
    categories: str | None = None

    def take(self, shipped: int | None = None, *, quiet: bool = False) -> list[Prompt]:
        """The prompts asked for; of those shipped at most ``shipped`` where no number is said.

        Where there are fewer, a line says so, unless ``quiet``.

        Raises:
            OptionError: there is no such prompt.
        """
        number = int(self.prompts) if self.prompts is not None and self.prompts.isdecimal() else None
        found = of_categories(read_prompts(None if number is not None else self.prompts), self.categories)
        for wanted in (number, self.count):
            if wanted is not None and wanted > len(found) and not quiet:
                tell(f"{wanted} prompts are asked for, and there are {len(found)}: all of them are taken.")
        if self.prompts is None and self.count is None:
            number = shipped
        limits = [limit for limit in (number, self.count) if limit is not None]
        return spread(found, min(limits)) if limits else found


ASKED = Group("Prompts", Asked)
REQUESTS = Group("Prompts", Asked, {"count": "--count --num-prompts"})
"""The same, each prompt's first turn a request."""


def of_categories(prompts: list[Prompt], categories: str | None) -> list[Prompt]:
    """The prompts of the categories named.

    Raises:
        OptionError: one of them has no prompt.
    """
    if categories is None:
        return prompts
    wanted = [name.strip() for name in categories.split(",")]
    known = {name for prompt in prompts for name in (prompt.category, prompt.group)}
    for name in wanted:
        if name not in known:
            raise OptionError(f"no prompt is of the category {name!r}; there are {', '.join(sorted(known))}.")
    return [prompt for prompt in prompts if prompt.category in wanted or prompt.group in wanted]


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Where the cells of a measurement go, and how its result is shown.

    Attributes:
        output: write each cell to this JSONL file as it is taken, and go on where it ends.
        as_json: print one JSON object.
        quiet: only the result, no remarks.
    """

    output: Path | None = None
    as_json: bool = False
    quiet: bool = False

    def open(self, model: str, engine: dict[str, Any]) -> LLM:
        """Load the model that is measured; it drafts only where the measurement says so."""
        return open_model(model, engine, False, quiet=self.quiet)

    def open_async(self, model: str, engine: dict[str, Any], drafting: Any = False) -> AsyncLLM:
        """The same, for asyncio; ``drafting`` is what its cache is planned for."""
        return open_front(AsyncLLM, model, engine, drafting, quiet=self.quiet)

    @contextmanager
    def cells(self, llm: Front, prompts: Sequence[Prompt], **others: Any) -> Iterator[Runner]:
        """The runner of a measurement of this model on these prompts, with ``others`` as its settings."""
        with self.ticker() as ticker:
            yield Runner(self.output, environment(llm), settings(llm, prompts, **others), ticker)

    def ticker(self) -> Ticker:
        """What is told of every cell."""
        return Ticker(self.quiet)

    def show(self, report: dict[str, Any], *tables: Table) -> None:
        """Print the result."""
        if self.as_json:
            print_json(report)
        else:
            tell(header(report["environment"]))
            show(*tables)


MEASURING = Group(
    "Result",
    Measuring,
    {"output": "--output --resume -o", "as_json": "--json", "quiet": "--quiet -q"},
)


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


def rates(flag: str, text: str) -> list[float]:
    """Several requests a second written as 0.5,2.

    Raises:
        OptionError: they are not, or one is not above 0.
    """
    found = decimals(flag, text)
    if 0.0 in found:
        raise OptionError(f"{flag} has 0; each must be a finite number above 0.")
    return found


def decimals(flag: str, text: str) -> list[float]:
    """Several numbers written as 0,0.5,2.

    Raises:
        OptionError: they are not, or one is below 0.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{flag} takes numbers, as in {flag} 0.5,2, not {text!r}.") from None
    for value in found:
        if not 0 <= value < math.inf:
            raise OptionError(f"{flag} has {value:g}; each must be a finite number, 0 or above.")
    return list(dict.fromkeys(found))


def common_options(drafts: int | None, adaptive: bool | None) -> dict[str, Any]:
    """The options of all methods that were given."""
    given = {"num_speculative_tokens": drafts, "adaptive": adaptive}
    return {name: value for name, value in given.items() if value is not None}


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
