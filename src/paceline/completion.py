"""What a request brings back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.draw import Logprob
    from paceline.record import SpeculationRecord
    from paceline.request import Sequence


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: without the stop token and, unless asked for, without the stop string.
        token_ids: the emitted tokens, the stop token included.
        finish_reason: "stop", "length" or "abort".
        logprobs: one entry a token, where asked for.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: one entry a prompt token, None for the first, where asked for.
        record: what speculation did.
        offsets: for each token the length of the text after it.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[Logprob] | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprob | None] | None
    record: SpeculationRecord
    offsets: list[int]

    @classmethod
    def of(cls, running: Sequence) -> Completion:
        """What a finished sequence has become."""
        sampling = running.request.sampling
        return cls(
            text=running.text.text,
            token_ids=running.output,
            finish_reason=running.finish_reason or "abort",
            logprobs=None if sampling.logprobs is None else running.logprobs,
            prompt_token_ids=list(running.request.prompt),
            prompt_logprobs=None if sampling.prompt_logprobs is None else running.prompt_logprobs,
            record=running.record,
            offsets=running.text.token_offsets,
        )


@dataclass(frozen=True)
class Chunk:
    """What one step adds to a streamed answer, or several where they were not taken one by one.

    Attributes:
        text: what may be shown now; it need not end where the tokens do, as half a character and what may be the
            beginning of a stop string are held back.
        token_ids: the step's tokens.
        offsets: for each of them the length of the whole text after it.
        origins: for each of them a drafter's name or "target".
        completion: the whole answer, in its last chunk alone.
        record: what speculation did so far.
        choice: which of ``n`` answers this is of.
    """

    text: str
    token_ids: list[int]
    offsets: list[int]
    origins: list[str]
    completion: Completion | None
    record: SpeculationRecord
    choice: int = 0

    @classmethod
    def of(cls, running: Sequence, given: int) -> Chunk:
        """What a sequence has gained since its first ``given`` tokens."""
        ended = running.finish_reason is not None
        return cls(
            text=running.text.delta(),
            token_ids=running.tokens[running.prompt_length + given : running.delivered],
            offsets=running.text.offsets(given),
            origins=running.sources[given:],
            completion=Completion.of(running) if ended else None,
            record=running.record if ended else running.record.copy(),
            choice=running.request.choice,
        )

    def __add__(self, later: Chunk) -> Chunk:
        """Both as one, of the same answer."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            offsets=self.offsets + later.offsets,
            origins=self.origins + later.origins,
        )
