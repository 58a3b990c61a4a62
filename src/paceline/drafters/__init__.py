"""What proposes tokens. A drafter can cost time, never correctness: it writes no target cache and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.tree import TokenTree


@dataclass(frozen=True)
class Needs:
    """What the engine must deliver to a drafter; declared, so that nothing is guessed.

    Attributes:
        features: layers whose input (residual stream) is wanted for every committed row; the number of layers
            itself asks for what the final norm reads.
        top_k: how many of the best target tokens are wanted for every scored row, 0 for none.
        cost: whether drafting costs one pass a level or one pass for a whole block.
    """

    features: tuple[int, ...] = ()
    top_k: int = 0
    cost: Literal["level", "block"] = "level"


@dataclass(frozen=True)
class View:
    """What a drafter may see of a sequence.

    Attributes:
        id: the sequence.
        tokens: the committed tokens, prompt included, the last of them the root of the next tree; the sequence's own
            list, which grows with it; not to be changed.
        draw: ``draw(logits, path)`` applies the request's rules and the noise that the verification rule demands to
            float32 [vocab] logits for the token after the drafted ``path``, and returns the token drawn.
        cache_salt: the request's isolation key: what is learned from it may serve requests of the same key alone.
    """

    id: int
    tokens: Sequence[int]
    draw: Callable[[Tensor, Sequence[int]], int]
    cache_salt: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one forward pass did to one sequence.

    Attributes:
        id: the sequence.
        start: how many tokens had keys before the pass.
        rows: the tokens of the committed rows, in order: a piece of a prompt, or the root and what was accepted
            below it.
        accepted: how many drafts were accepted; 0 for a piece of a prompt.
        token: the token that follows the last row: the one that the target added, after a piece that does not end
            the prompt the prompt's next; None where nothing follows.
        features: for each declared layer float32 [len(rows), hidden].
        scored: for each scored row (rejected ones too) its tokens on the path below the root and its top-k ids, where
            top-k is declared.
    """

    id: int
    start: int
    rows: Sequence[int]
    accepted: int
    token: int | None
    features: dict[int, Tensor] = field(default_factory=dict)
    scored: Sequence[tuple[tuple[int, ...], Tensor]] = ()


class Drafter(Protocol):
    """Proposes token trees. After an exception a drafter is rewound and the step goes on without it."""

    @property
    def name(self) -> str:
        """The method's name, which becomes the origin of its tokens."""

    @property
    def needs(self) -> Needs:
        """What the engine must deliver."""

    def start(self, view: View, valid: int) -> None:
        """Take over a sequence whose first ``valid`` tokens were already observed (0 for a new one)."""

    def fork(self, parent: int, child: View) -> None:
        """Give ``child`` the state of ``parent``."""

    def rewind(self, sequence: int, length: int) -> None:
        """Forget everything behind the first ``length`` tokens."""

    def release(self, sequence: int) -> None:
        """Forget a sequence; unknown ones are no error."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        """A tree for each view, of at most ``budget`` drafted nodes; the root alone where there is nothing to say."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was committed, after every forward pass."""

    def length(self, sequence: int) -> int:
        """How many leading tokens the state covers."""
