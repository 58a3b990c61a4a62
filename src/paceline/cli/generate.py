"""``paceline generate``: one prompt, continued."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.answer import answer
from paceline.cli.flags import verb
from paceline.cli.model import (
    DRAFTING,
    ENGINE,
    SAMPLING,
    AsJson,
    CacheSalt,
    ModelName,
    NoSpeculation,
    Quiet,
    Written,
    chosen_speculation,
    open_model,
)
from paceline.cli.output import as_object, print_json, tell
from paceline.cli.paint import Painter
from paceline.cli.report import Run, comparison, promised, speedup, summary
from paceline.errors import OptionError
from paceline.options import Speculation
from paceline.sampling import Sampling
from paceline.targets.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.completion import Chunk
    from paceline.llm import LLM


@verb(engine=ENGINE, drafting=DRAFTING, sampling=SAMPLING)
def generate(
    *,
    engine: dict[str, Any],
    drafting: dict[str, Any],
    sampling: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it, or as -, it is read from standard input.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run it without speculation as well, and compare.")
    ] = False,
    as_json: AsJson = False,
    origins: Annotated[bool, typer.Option("--origins", help="Note for every token where it came from.")] = False,
    no_speculation: NoSpeculation = False,
    speculation: Written = None,
    cache_salt: CacheSalt = None,
    prediction: Annotated[
        str | None,
        typer.Option(
            "--prediction",
            metavar="TEXT",
            help="What the answer will mostly repeat, for methods that draft from it.",
            rich_help_panel="Speculation",
        ),
    ] = None,
    prediction_file: Annotated[
        Path | None,
        typer.Option(
            "--prediction-file",
            metavar="FILE",
            help="The same, from a file.",
            rich_help_panel="Speculation",
        ),
    ] = None,
    quiet: Quiet = False,
) -> int:
    wanted = chosen_speculation(drafting, not no_speculation, speculation)
    if compare and not Speculation.parse(wanted).enabled:
        raise typer.BadParameter("--compare needs speculation: leave out what switches it off.")
    settings = Sampling(**sampling)
    text = _read() if prompt in (None, "-") else str(prompt)
    expected = _expected(prediction, prediction_file)
    llm = open_model(model, engine, wanted, quiet=quiet)
    ids = llm.chat_ids([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
    request = {"origins": origins, "cache_salt": cache_salt, "prediction": expected}
    task = _Task(llm, ids, settings.over(llm.default_sampling), request)
    return _compare(task, as_json) if compare else _once(task, as_json, quiet)


@dataclass
class _Task:
    """One request, to be run with speculation or without."""

    llm: "LLM"
    ids: list[int]
    sampling: Sampling
    request: dict[str, Any]

    def run(self, speculation: Any, show: "Callable[[Chunk], None] | None") -> Run:
        """Run it; a single answer is shown as it comes."""
        return answer(self.llm, self.ids, self.sampling, show, speculation=speculation, **self.request)

    def warm_up(self) -> None:
        """A few tokens, so that neither side of a comparison pays for reading the weights from disk."""
        self.llm.generate([self.ids[-32:]], Sampling(temperature=0.0, max_tokens=4))

    def shown(self, run: Run) -> dict[str, Any]:
        """The object that --json prints for a run."""
        answers = [as_object(completion, self.llm.tokenizer) for completion in run.completions]
        one = answers[0] if self.sampling.n == 1 else {"completions": answers}
        return {**one, "tokens_per_second": run.speed}


def _read() -> str:
    """The prompt from standard input, without the line end that a shell puts behind it."""
    if sys.stdin.isatty():
        raise typer.BadParameter("a prompt is missing: give it as an argument or on standard input.")
    return sys.stdin.read().removesuffix("\n")


def _expected(text: str | None, file: Path | None) -> str | None:
    """What the answer is expected to repeat.

    Raises:
        OptionError: it is given twice, the file holds no text, or the text is the name of a file.
    """
    if file is None:
        if text is not None and _is_file(text):
            raise OptionError(
                f"--prediction takes the text itself, and {text!r} is a file: take --prediction-file to read it."
            )
        return text
    if text is not None:
        raise OptionError("--prediction and --prediction-file exclude each other; leave one of them out.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = str(error.strerror)
    raise OptionError(f"--prediction-file {str(file)!r} cannot be read ({reason}): name a file that holds the text.")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # it is too long for a name, or has a null in it
        return False


def _run(task: _Task, as_json: bool, painter: Painter) -> Run:
    """Run it as the options say, its text printed unless a JSON object is awaited."""
    run = task.run({}, None if as_json else painter.show)
    if as_json:
        return run
    if task.sampling.n > 1:
        print("\n\n".join(f"[{place}] {c.text}" for place, c in enumerate(run.completions)))
    else:
        painter.end()
    return run


def _once(task: _Task, as_json: bool, quiet: bool) -> int:
    painter = Painter()
    run = _run(task, as_json, painter)
    if as_json:
        print_json(task.shown(run))
    elif not quiet:
        tell(summary(run), *[painter.legend()] * bool(painter.origins))
    return 130 if run.interrupted else 0


def _compare(task: _Task, as_json: bool) -> int:
    task.warm_up()
    fast, plain = _run(task, as_json, Painter()), None
    if task.sampling.seed is None:
        task.sampling = task.sampling.replace(seed=fast.completions[0].record.seed)
    if not fast.interrupted:
        plain = task.run(False, None)
    if plain is None or plain.interrupted:
        if as_json:
            print_json({**task.shown(fast), "plain": plain and task.shown(plain), "comparison": None})
        return 130
    identical = [c.token_ids for c in fast.completions] == [c.token_ids for c in plain.completions]
    if as_json:
        found = {"identical": identical, "speedup": speedup(plain, fast)}
        print_json({**task.shown(fast), "plain": task.shown(plain), "comparison": found})
    else:
        print("", *comparison(plain, fast, identical), sep="\n")
    return 0 if identical or not promised(fast) else 1
