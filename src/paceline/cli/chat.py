"""``paceline chat``: a conversation in the terminal."""

import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import speculation as chosen_speculation
from paceline.cli.flags import with_flags
from paceline.cli.model import (
    DRAFTING,
    ENGINE,
    SAMPLING,
    Debug,
    ModelName,
    NoSpeculation,
    Quiet,
    Written,
    open_model,
)
from paceline.cli.output import tell
from paceline.cli.paint import Painter
from paceline.cli.report import Run, details, summary
from paceline.errors import ContextLengthError, OptionError, RequestError
from paceline.options import Speculation
from paceline.sampling import Sampling
from paceline.targets.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from paceline.llm import LLM

HELP = "Ctrl-C ends an answer, Ctrl-D the program; /clear forgets the conversation, /stats shows figures."


@with_flags(engine=ENGINE, drafting=DRAFTING, sampling=SAMPLING)
def chat(
    context: typer.Context,
    *,
    engine: dict[str, Any],
    drafting: dict[str, Any],
    sampling: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", help="A message that sets the model's role.")] = None,
    no_speculation: NoSpeculation = False,
    speculation: Written = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    wanted = chosen_speculation(drafting, not no_speculation, speculation)
    Speculation.parse(wanted)
    settings = Sampling(**sampling)
    if settings.n != 1:
        raise OptionError("--n is for generate: a conversation has one answer at a time.")
    llm = open_model(model, engine, wanted, quiet=quiet)
    if "max_tokens" not in sampling:
        settings = settings.replace(max_tokens=None)
    conversation = Conversation(llm, settings.over(llm.default_sampling), system)
    if not quiet:
        tell(HELP)
    return talk(conversation)


class Conversation:
    """What was said, and how the answers came.

    Raises:
        RequestError: the model has no chat template.
    """

    def __init__(self, llm: "LLM", sampling: Sampling, system: str | None = None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)
        self._runs: list[Run] = []
        llm.chat_ids([*self._first, {"role": "user", "content": ""}])

    def clear(self) -> None:
        """Forget what was said."""
        self._messages = list(self._first)

    def stats(self) -> list[str]:
        """Figures of all answers so far."""
        if not self._runs:
            return ["no answer yet"]
        everything = Run(
            [completion for run in self._runs for completion in run.completions],
            sum(run.tokens for run in self._runs),
            sum(run.seconds for run in self._runs),
        )
        return ["last:  " + summary(self._runs[-1]), "all:   " + summary(everything), *details(everything.record())]

    def say(self, text: str) -> None:
        """Stream the answer to a message. What an interrupt leaves of it stays in the conversation.

        Raises:
            RequestError: the conversation does not fit, or holds what is no text; the message is then forgotten.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        painter = Painter()
        stream = self._llm.stream(self._llm.chat_ids(messages), self._sampling, speculation={})
        answer, tokens, times = "", 0, []
        with Interrupt() as interrupt:
            for chunk in stream:
                times.append(time.perf_counter())
                painter.show(chunk)
                answer += chunk.text
                if len(times) > 1:
                    tokens += len(chunk.token_ids)
                if chunk.completion is not None:
                    self._runs.append(Run([chunk.completion], tokens, times[-1] - times[0]))
                elif interrupt.came:
                    break
        painter.end()
        self._messages = [*messages, {"role": "assistant", "content": answer}]


class Interrupt:
    """Notes the first Ctrl-C, so that a step is never cut in two; the second one is a KeyboardInterrupt again."""

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: "FrameType | None") -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


def talk(conversation: Conversation) -> int:
    """Read messages and commands until the input ends, or an interrupt comes that ends no answer."""
    prompt = _prompt()
    try:
        while True:
            _answer(conversation, input(prompt).strip())
    except EOFError:
        if prompt:
            print()
        return 0
    except KeyboardInterrupt:
        print()
        return 130


def _answer(conversation: Conversation, line: str) -> None:
    """Do what one line asks for."""
    if line == "/clear":
        conversation.clear()
    elif line == "/stats":
        tell(*conversation.stats())
    elif line.startswith("/"):
        tell(f"{line.split()[0]} is no command. {HELP}")
    elif line:
        try:
            conversation.say(line)
        except ContextLengthError as error:
            tell(f"{error} Or /clear the conversation.")
        except RequestError as error:
            tell(str(error))


def _prompt() -> str:
    """The prompt of a terminal, where lines can be edited and called back; nothing for a pipe."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    import readline  # noqa: F401 - input uses it from here on

    return "> "
