"""A request, and the sequence that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafters import Drafter
    from paceline.draw import Logprob
    from paceline.options import Speculation
    from paceline.pages import PageTable
    from paceline.record import SpeculationRecord
    from paceline.sampling import Sampling
    from paceline.scheduler import Piece
    from paceline.text import Detokenizer
    from paceline.verify import Chooser


@dataclass(frozen=True)
class Request:
    """What was asked for; it never changes.

    Attributes:
        prompt: token ids, at least one.
        sampling: the settings as given; ``limit`` is what ``max_tokens`` comes to.
        seed: the seed of all draws, given or chosen.
        choice: which of ``sampling.n`` answers this is.
        stop_ids: ids that end the answer.
        limit: the longest sequence, prompt included, in tokens.
        speculation: how to draft for it.
        piece_limit: the most rows of the prompt that one pass may take.
        origins: whether the record notes where each token came from, with the target's probability of it.
        cache_salt: what drafters learn from this request serves requests of the same key alone.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    choice: int
    stop_ids: frozenset[int]
    limit: int
    speculation: Speculation
    piece_limit: int
    origins: bool = False
    cache_salt: str | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """What a request has become.

    ``tokens`` and ``filled`` are the contents that passes work on: the committed tokens, prompt included, and how
    many of them have keys in the cache. The host may lag behind them: ``planned`` is how many rows of the prompt
    have been planned, ``delivered`` how many tokens it has taken over, and ``in_flight`` the most that passes it has
    not heard of yet may add. ``error`` is why a sequence broke off, for the one that asked for it.
    """

    id: int
    request: Request
    text: Detokenizer
    choose: Chooser
    record: SpeculationRecord
    drafter: Drafter | None
    tables: tuple[PageTable, ...] = ()
    tokens: list[int] = field(default_factory=list)
    filled: int = 0
    planned: int = 0
    delivered: int = 0
    in_flight: int = 0
    sources: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=lambda: [None])
    finish_reason: str | None = None
    error: BaseException | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[self.prompt_length : self.delivered]

    @property
    def reach(self) -> int:
        """The most tokens that may be committed by now."""
        return self.delivered + self.in_flight

    def take(self, token: int) -> str | None:
        """Take over the next emitted token; returns why the answer ends with it, if it does."""
        request = self.request
        self.delivered += 1
        if token in request.stop_ids:
            self.text.push(token, silent=True)
            return "stop"
        if self.text.push(token):
            return "stop"
        return "length" if self.delivered >= request.limit else None

    def score_prompt(self, piece: Piece, logits: Tensor) -> None:
        """Note what the target gave the prompt's tokens; ``logits`` are those of the piece's rows."""
        count = self.request.sampling.prompt_logprobs
        assert count is not None
        following = self.tokens[piece.start + 1 : min(piece.start + piece.rows + 1, self.prompt_length)]
        self.prompt_logprobs += [
            self.choose.raw_logprobs(logits[row], token, count) for row, token in enumerate(following)
        ]
