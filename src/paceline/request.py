"""A request, and the sequence that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.record import SpeculationRecord

if TYPE_CHECKING:
    from paceline.drafters import Drafter
    from paceline.options import Speculation
    from paceline.pages import PageTable
    from paceline.sampling import LogitRules, Logprobs, Sampling
    from paceline.text import Detokenizer


@dataclass(frozen=True)
class Request:
    """What was asked for; it never changes.

    Attributes:
        prompt: token ids, at least one.
        sampling: the settings, with ``max_tokens`` resolved.
        seed: the seed of all draws, given or chosen.
        choice: which of ``sampling.n`` answers this is.
        stop_ids: ids that end the answer.
        limit: the longest sequence, prompt included, in tokens.
        speculation: how to draft for it.
        origins: whether to note where each token came from.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    choice: int
    stop_ids: frozenset[int]
    limit: int
    speculation: Speculation
    origins: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """What a request has become.

    ``tokens`` and ``filled`` are the contents that passes work on: the committed tokens, prompt included, and how
    many of them have keys in the cache. One token without keys is the root of the next tree; several are a prompt
    (or what is left of it) that goes in by pieces. ``delivered`` is what the host has taken over so far: everything
    that was emitted lies below it.
    """

    id: int
    request: Request
    rules: LogitRules
    text: Detokenizer
    record: SpeculationRecord
    drafter: Drafter | None
    tables: tuple[PageTable, ...] = ()
    tokens: list[int] = field(default_factory=list)
    filled: int = 0
    delivered: int = 0
    reach: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[self.prompt_length : self.delivered]

    @property
    def waiting_rows(self) -> int:
        """Committed tokens whose keys are not in the cache yet."""
        return len(self.tokens) - self.filled
