"""``paceline chat``: a conversation in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.answer import answer
from paceline.cli.flags import in_flags, verb
from paceline.cli.model import (
    DRAFTING,
    ENGINE,
    FLAGS,
    SAMPLING,
    CacheSalt,
    ModelName,
    NoSpeculation,
    Quiet,
    Written,
    chosen_speculation,
    open_model,
)
from paceline.cli.output import tell
from paceline.cli.paint import Painter
from paceline.cli.report import Run, details, line, summary
from paceline.errors import ContextLengthError, OptionError, RequestError
from paceline.sampling import Sampling
from paceline.targets.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.llm import LLM

COMMANDS = {
    "/clear": "forget the conversation",
    "/stats": "show figures of the last answer and of all, and what drafting brought in all",
    "/help": "list the commands",
}
KEYS = "Ctrl-C ends an answer, Ctrl-D the program; /help lists the commands."
LEAVING = "Ctrl-C again, or Ctrl-D, ends the program."


@verb(engine=ENGINE, drafting=DRAFTING, sampling=SAMPLING)
def chat(
    *,
    engine: dict[str, Any],
    drafting: dict[str, Any],
    sampling: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", help="A message that sets the model's role.")] = None,
    no_speculation: NoSpeculation = False,
    speculation: Written = None,
    cache_salt: CacheSalt = None,
    quiet: Quiet = False,
) -> int:
    wanted = chosen_speculation(drafting, not no_speculation, speculation)
    settings = Sampling(**sampling)
    if settings.n != 1:
        raise OptionError("--n is for generate: a conversation has one answer at a time.")
    llm = open_model(model, engine, wanted, quiet=quiet)
    if "max_tokens" not in sampling:
        settings = settings.replace(max_tokens=None)
    conversation = Conversation(llm, settings.over(llm.default_sampling), system, cache_salt, quiet)
    if not quiet:
        tell(KEYS)
    return talk(conversation)


class Conversation:
    """What was said, and how the answers came.

    Args:
        quiet: say nothing of the colours.

    Raises:
        RequestError: the model has no chat template.
    """

    def __init__(
        self,
        llm: "LLM",
        sampling: Sampling,
        system: str | None = None,
        cache_salt: str | None = None,
        quiet: bool = False,
    ) -> None:
        self._llm = llm
        self._quiet = quiet
        self._origins: list[str] = []
        self._cache_salt = cache_salt
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
        return [
            line("last answer", summary(self._runs[-1])),
            line("all answers", summary(everything)),
            *details(everything.record()),
        ]

    def say(self, text: str) -> None:
        """Stream the answer to a message. What an interrupt leaves of it stays in the conversation.

        Raises:
            RequestError: the conversation does not fit, or holds what is no text; the message is then forgotten.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        painter = Painter(self._origins)
        run = answer(self._llm, self._llm.chat_ids(messages), self._sampling, painter.show, cache_salt=self._cache_salt)
        painter.end()
        if painter.origins != self._origins and not self._quiet:
            tell(painter.legend())
        self._origins = painter.origins
        self._runs.append(run)
        self._messages = [*messages, {"role": "assistant", "content": run.completions[0].text}]


def talk(conversation: Conversation) -> int:
    """Read messages and commands until the input ends, an answer is interrupted twice, or the prompt is."""
    prompt, leaving = _prompt(), False
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return 0
        except KeyboardInterrupt:
            print()
            if leaving or not prompt:
                return 130
            tell(LEAVING)
            leaving = True
        else:
            leaving = False
            _answer(conversation, line.strip())


def _answer(conversation: Conversation, line: str) -> None:
    """Do what one line asks for."""
    if line == "/clear":
        conversation.clear()
    elif line == "/stats":
        tell(*conversation.stats())
    elif line == "/help":
        tell(*(f"{command:<8}{what}" for command, what in COMMANDS.items()), KEYS)
    elif line.startswith("/"):
        tell(f"{line.split()[0]} is no command; there are {', '.join(COMMANDS)}.")
    elif line:
        try:
            conversation.say(line)
        except ContextLengthError as error:
            tell(f"{in_flags(str(error), FLAGS)} Or /clear the conversation.")
        except RequestError as error:
            tell(in_flags(str(error), FLAGS))


def _prompt() -> str:
    """The prompt of a terminal, where lines can be edited and called back; nothing for a pipe."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    import readline  # noqa: F401 - input uses it from here on

    return "> "
