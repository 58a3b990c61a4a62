"""A scripted model for the command line."""

from __future__ import annotations

import dataclasses
import io
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import paceline.cli.model
from paceline.completion import Chunk
from paceline.draw import Logprob
from paceline.errors import ContextLengthError, RequestError
from paceline.options import Speculation
from paceline.record import Origin, SpeculationRecord
from paceline.sampling import Sampling
from paceline.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANSWER = "yes, yes: ü\tand no"


def letters() -> Tokenizer:
    """Every byte is a token."""
    backend = Backend(
        models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@dataclasses.dataclass
class Script:
    """A model that always gives the same answer, three tokens a step where it speculates."""

    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: list[tuple[list[int], Sampling, Any]] = dataclasses.field(default_factory=list)
    answer: str = ANSWER
    plain_answer: str | None = None
    at: Callable[[int], None] = lambda step: None
    notes: tuple[str, ...] = ("model: scripted",)
    template: bool = True
    room: int = 10_000
    default_sampling: Sampling = dataclasses.field(default_factory=Sampling)
    running: list[Answer] = dataclasses.field(default_factory=list)
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = letters()

    def __call__(self, model: str, **made: Any) -> Script:
        self.made = {"model": model, **made}
        return self

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.template:
            raise RequestError("the model has no chat template.")
        return self.tokenizer.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def stream(
        self,
        ids: list[int],
        sampling: Sampling,
        speculation: Any = True,
        origins: bool = False,
        **request: Any,
    ) -> ScriptedStream:
        if not ids:
            raise RequestError("the prompt is empty: give at least one token.")
        if len(ids) > self.room:
            raise ContextLengthError("the context is full.")
        self.calls.append((ids, sampling, speculation))
        self.requests.append(request)
        fast = Speculation.parse(speculation).enabled
        text = self.answer if fast or self.plain_answer is None else self.plain_answer
        tokens = self.tokenizer.encode(text)[: sampling.max_tokens]
        made = [Answer(self, ids, sampling, tokens, fast, origins, choice) for choice in range(sampling.n)]
        self.running += made
        return ScriptedStream(self, made)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> None:
        """What warms a comparison up."""


@dataclasses.dataclass
class ScriptedStream:
    """The chunks of some answers."""

    script: Script
    answers: list[Answer]

    def __iter__(self) -> Iterator[Chunk]:
        while any(one.finish_reason is None for one in self.answers):
            self.script.at(max(one.steps for one in self.answers))
            for one in self.answers:
                given = one.given
                if one.finish_reason is None:
                    one.go_on()
                yield Chunk.of(one, given)  # type: ignore[arg-type]

    def cancel(self) -> None:
        """Let the step that follows be the last."""
        for one in self.answers:
            one.cancelled = True

    def __enter__(self) -> ScriptedStream:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.answers:
            if one in self.script.running:
                one.end("abort")


@dataclasses.dataclass(eq=False)
class Answer:
    """An answer of a script on its way: what the engine shows of a sequence."""

    script: Script
    prompt: list[int]
    sampling: Sampling
    tokens: list[int]
    fast: bool
    origins: bool
    choice: int
    cancelled: bool = False
    steps: int = 0
    given: int = 0
    sources: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = dataclasses.field(default_factory=lambda: [None])
    finish_reason: str | None = None
    error: None = None

    def __post_init__(self) -> None:
        seed = 7 if self.sampling.seed is None else self.sampling.seed
        method = "ngram" if self.fast else "none"
        self.record = SpeculationRecord(method, seed, "bits", origins=[] if self.origins else None)
        self.text = Detokenizer(self.script.tokenizer)
        self.request = self  # of which prompt, sampling and choice are asked for

    @property
    def prompt_length(self) -> int:
        return 0  # its tokens are those of the answer alone

    @property
    def delivered(self) -> int:
        return self.given

    @property
    def output(self) -> list[int]:
        return self.tokens[: self.given]

    def go_on(self) -> None:
        new = self.tokens[self.given : self.given + (3 if self.fast and self.steps else 1)]
        for place, token in enumerate(new):
            self.text.push(token)
            self.sources.append("ngram" if place + 1 < len(new) else "target")
            self.logprobs.append(Logprob(token, -1.0, 1, ()))
            if self.record.origins is not None:
                self.record.origins.append(Origin(self.sources[-1], self.steps, 0))
        if self.steps:
            self.record.judge(len(new), len(new) - 1, True)
        self.given, self.steps = self.given + len(new), self.steps + 1
        self.record.seconds.verify += 0.5
        if self.cancelled or self.given == len(self.tokens):
            self.end("abort" if self.cancelled else "length")

    def end(self, reason: str) -> None:
        self.finish_reason = reason
        self.text.finish()
        self.script.running.remove(self)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    model = Script()
    monkeypatch.setattr(paceline.cli.model, "LLM", model)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return model


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def interrupt(step: int) -> None:
    if step == 1:
        signal.raise_signal(signal.SIGINT)
