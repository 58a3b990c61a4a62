"""A request, and the sequence that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.choose import Chooser
    from paceline.constraint import Constraint
    from paceline.drafters import Drafter
    from paceline.draw import Logprob
    from paceline.options import Speculation
    from paceline.pages import PageTable
    from paceline.prefix import Chain
    from paceline.record import SpeculationRecord
    from paceline.sampling import Sampling
    from paceline.text import Detokenizer


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
        prediction: the ids of a text that the caller expects.
        constraint: what the output must satisfy.
        priority: requests of a lower number come first, those of equal ones as they arrive.
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
    prediction: tuple[int, ...] = ()
    constraint: Constraint | None = None
    priority: int = 0

    @property
    def rule(self) -> str:
        """The rule of acceptance: without drafts the tokens are those of ``coupled``."""
        return self.speculation.rule if self.speculation.enabled else "coupled"

    @property
    def firm(self) -> bool:
        """Whether every step drafts as many: under a rule whose tokens depend on the drafts a seed that was given fixes
        them only if nothing measured, and no other request, does."""
        return self.rule != "coupled" and self.sampling.seed is not None

    @property
    def paced(self) -> bool:
        """Whether drafts may be longer or shorter as it pays."""
        return self.speculation.adaptive and not self.firm

    @property
    def ceiling(self) -> int:
        """The most drafted tokens of a step."""
        return self.speculation.ceiling(self.paced)


@dataclass(slots=True, eq=False)
class Sequence:
    """What a request has become.

    ``tokens`` and ``filled`` are the contents that passes work on: the committed tokens, prompt included, and how
    many of them have keys in the cache. The host may lag behind them: ``intake`` is how many rows are to be taken in as
    pieces, the prompt's or, where the sequence had to give way, those of all that it has committed but the last token;
    ``planned`` is how many of them have been planned, ``delivered`` how many tokens the host has taken over, and
    ``in_flight`` the most that passes it has not heard of yet may add. ``chain`` finds the pages of its committed
    tokens; ``leader`` is another answer to the same prompt, until the prompt is taken over from it. ``error`` is why a
    sequence broke off, for the one that asked for it.
    """

    id: int
    request: Request
    text: Detokenizer
    choose: Chooser
    record: SpeculationRecord
    drafter: Drafter | None
    chain: Chain
    leader: Sequence | None = None
    tables: tuple[PageTable, ...] = ()
    tokens: list[int] = field(default_factory=list)
    filled: int = 0
    intake: int = 0
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
    def turn(self) -> tuple[int, int]:
        """What sequences are served in the order of: priority, then arrival."""
        return self.request.priority, self.id

    @property
    def fresh(self) -> bool:
        """Whether the host knows of no token behind the prompt."""
        return self.delivered == self.prompt_length

    @property
    def filling(self) -> bool:
        """Whether rows are still to be taken in as pieces."""
        return self.planned < self.intake

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

    def score_prompt(self, start: int, logits: Tensor) -> None:
        """Note what the target gave the prompt's tokens behind ``start``; ``logits`` are the rows from there on."""
        count = self.request.sampling.prompt_logprobs or 0
        following = self.tokens[start + 1 : min(start + logits.shape[0] + 1, self.prompt_length)]
        self.prompt_logprobs += [
            self.choose.raw_logprobs(logits[row], token, count) for row, token in enumerate(following)
        ]
