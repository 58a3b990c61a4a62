"""``paceline generate``: one prompt, continued."""

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import speculation as chosen_speculation
from paceline.cli.flags import with_flags
from paceline.cli.model import (
    DRAFTING,
    ENGINE,
    SAMPLING,
    AsJson,
    Debug,
    ModelName,
    NoSpeculation,
    Quiet,
    Written,
    open_model,
)
from paceline.cli.output import as_object, print_json, tell
from paceline.cli.paint import Painter
from paceline.cli.report import Run, comparison, speedup, summary
from paceline.options import Speculation
from paceline.sampling import Sampling
from paceline.targets.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.completion import Chunk
    from paceline.llm import LLM


@with_flags(engine=ENGINE, drafting=DRAFTING, sampling=SAMPLING)
def generate(
    context: typer.Context,
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
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    wanted = chosen_speculation(drafting, not no_speculation, speculation)
    enabled = Speculation.parse(wanted).enabled
    if compare and not enabled:
        raise typer.BadParameter("--compare needs speculation: leave out what switches it off.")
    settings = Sampling(**sampling)
    text = _read() if prompt in (None, "-") else str(prompt)
    llm = open_model(model, engine, wanted, quiet=quiet)
    ids = llm.chat_ids([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
    task = _Task(llm, ids, settings.over(llm.default_sampling), origins)
    return _compare(task, as_json) if compare else _once(task, as_json, quiet)


@dataclass
class _Task:
    """One request, to be run with speculation or without."""

    llm: "LLM"
    ids: list[int]
    sampling: Sampling
    origins: bool

    def run(self, speculation: Any, show: "Callable[[Chunk], None]") -> Run:
        """Run it; a single answer is shown as it comes.

        Raises:
            _InterruptedError: with what was produced so far.
        """
        if self.sampling.n > 1:
            started = time.perf_counter()
            answers = self.llm.generate([self.ids], self.sampling, speculation=speculation, origins=self.origins)[0]
            return Run(answers, sum(len(a.token_ids) for a in answers), time.perf_counter() - started)
        seen = _Seen()
        try:
            for chunk in self.llm.stream(self.ids, self.sampling, speculation=speculation, origins=self.origins):
                seen.add(chunk)
                show(chunk)
        except KeyboardInterrupt:
            raise _InterruptedError(seen) from None
        return seen.run()

    def warm_up(self) -> None:
        """A few tokens, so that neither side of a comparison pays for reading the weights from disk."""
        self.llm.generate([self.ids[-32:]], Sampling(temperature=0.0, max_tokens=4))

    def shown(self, run: Run) -> dict[str, Any]:
        """The object that --json prints for a run."""
        answers = [as_object(completion, self.llm.tokenizer) for completion in run.completions]
        one = answers[0] if self.sampling.n == 1 else {"completions": answers}
        return {**one, "tokens_per_second": run.speed}

    def shown_part(self, seen: "_Seen") -> dict[str, Any]:
        """The object for an answer that was interrupted."""
        return {
            "text": seen.text,
            "token_ids": seen.tokens,
            "finish_reason": "abort",
            "prompt_token_ids": self.ids,
            "prompt_tokens": len(self.ids),
            "completion_tokens": len(seen.tokens),
            "speculation": seen.chunks[-1].record.as_dict() if seen.chunks else None,
        }


@dataclass
class _Seen:
    """What has come of a stream."""

    chunks: "list[Chunk]" = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, chunk: "Chunk") -> None:
        self.times.append(time.perf_counter())
        self.chunks.append(chunk)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    def run(self) -> Run:
        completion = self.chunks[-1].completion
        assert completion is not None
        late = len(self.tokens) - len(self.chunks[0].token_ids)
        return Run([completion], late, self.times[-1] - self.times[0])


class _InterruptedError(Exception):
    def __init__(self, seen: "_Seen") -> None:
        self.seen = seen


def _read() -> str:
    """The prompt from standard input, without the line end that a shell puts behind it."""
    if sys.stdin.isatty():
        raise typer.BadParameter("a prompt is missing: give it as an argument or on standard input.")
    return sys.stdin.read().removesuffix("\n")


def _once(task: _Task, as_json: bool, quiet: bool) -> int:
    painter = Painter()
    try:
        run = task.run({}, _nothing if as_json else painter.show)
    except _InterruptedError as interrupted:
        print_json(task.shown_part(interrupted.seen)) if as_json else painter.end()
        return 130
    if as_json:
        print_json(task.shown(run))
        return 0
    if task.sampling.n > 1:
        print("\n\n".join(f"[{place}] {c.text}" for place, c in enumerate(run.completions)))
    else:
        painter.end()
    if not quiet:
        tell(summary(run), *[painter.legend()] * bool(painter.origins))
    return 0


def _compare(task: _Task, as_json: bool) -> int:
    painter = Painter()
    show = _nothing if as_json else painter.show
    task.warm_up()
    try:
        fast = task.run({}, show)
        if task.sampling.seed is None:
            task.sampling = task.sampling.replace(seed=fast.completions[0].record.seed)
        if not as_json:
            painter.end()
        plain = task.run(False, _nothing)
    except _InterruptedError as interrupted:
        print_json(task.shown_part(interrupted.seen)) if as_json else painter.end()
        return 130
    identical = [c.token_ids for c in fast.completions] == [c.token_ids for c in plain.completions]
    if as_json:
        found = {"identical": identical, "speedup": speedup(plain, fast)}
        print_json({**task.shown(fast), "plain": task.shown(plain), "comparison": found})
    else:
        print("", *comparison(plain, fast, identical), sep="\n")
    return 0 if identical else 1


def _nothing(chunk: "Chunk") -> None:
    """Nothing is shown while a JSON object is awaited."""
