"""What proposes tokens. A drafter can cost time, never correctness: it writes no target cache and decides nothing.

Every module of this package whose name has no underscore before it is a method of that name: it holds ``METHOD``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.constraint import Constraint
    from paceline.options import Speculation
    from paceline.pages import CacheGroup, PagePool
    from paceline.targets.decoder import Decoder
    from paceline.targets.load import Loaded
    from paceline.tree import Drawn, Dropping, TokenTree


Cost = Literal["level", "block", "lookup"]


@dataclass(frozen=True)
class Needs:
    """What the engine must deliver to a drafter; declared, so that nothing is guessed.

    Attributes:
        features: layers whose input (residual stream) is wanted for every committed row; the number of layers
            itself asks for what the final norm reads.
        top_k: how many of the best target tokens are wanted for every scored row, 0 for none.
        cost: what drafting costs: a pass of a model for each level of a tree or for a whole block, or next to nothing.
        members: drafters that are asked in this order, each for what pays given what those before it said; their trees
            are merged. Without any the drafter itself is asked.
        wish: what of a request it drafts from, and cannot do without.
        ended: is told of every request that has ended, before it is released, with what was delivered of it: for what
            is learned across requests.
    """

    features: tuple[int, ...] = ()
    top_k: int = 0
    cost: Cost = "level"
    members: tuple[Drafter, ...] = ()
    wish: Literal["prediction", "constraint"] | None = None
    ended: Callable[[View], None] | None = field(default=None, compare=False)


class Draw(Protocol):
    """How a drafter draws: with the request's rules, and with the noise that the verification rule demands."""

    def __call__(
        self,
        rows: Tensor,
        paths: Sequence[Sequence[int]],
        count: int = 1,
        *,
        nodes: Sequence[int] = (0,),
        ids: Tensor | None = None,
    ) -> list[Drawn]:
        """Draw children of some nodes of one tree.

        Args:
            rows: float32 [M, N], for each node the drafter's raw logits for the token after its path; they may be
                shorter than the target's rows, and are then silent on the ids that they lack.
            paths: for each node the drafted tokens between the root and the children.
            count: the most children of each.
            nodes: their indices in the tree.
            ids: int64 [N], the target ids of the columns; without it they are 0 to N - 1.

        Returns:
            The children of each, in the order in which they were drawn; none where the rules leave no token.
        """


@dataclass(frozen=True)
class View:
    """What a drafter may see of a sequence.

    Attributes:
        id: the sequence.
        tokens: the committed tokens, prompt included, the last of them the root of the next tree; the sequence's own
            list, which grows with it; not to be changed.
        draw: how children are drawn from the drafter's own logits.
        cache_salt: the request's isolation key: what is learned from it may serve requests of the same key alone.
        prompt_length: how many of the tokens are the prompt.
        prediction: the ids of a text that the caller expects; empty where there is none.
        constraint: what the output must satisfy, where the request asks for it.
        dropping: the liberty to drop what was drawn; None where the rule of acceptance forbids it.
        delivered: how many of the tokens are certain to be of the answer, the prompt's among them: those behind may
            turn out to stand behind its end. None is all.
    """

    id: int
    tokens: Sequence[int]
    draw: Draw
    cache_salt: str | None = None
    prompt_length: int = 0
    prediction: tuple[int, ...] = ()
    constraint: Constraint | None = None
    dropping: Dropping | None = None
    delivered: int | None = None


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
        delivered: as in a view, before this pass; None is all, those of this pass too.
    """

    id: int
    start: int
    rows: Sequence[int]
    accepted: int
    token: int | None
    features: dict[int, Tensor] = field(default_factory=dict)
    scored: Sequence[tuple[tuple[int, ...], list[int]]] = ()
    delivered: int | None = None


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
        """Forget a sequence, which has ended or may come again; unknown ones are no error."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        """A tree for each view, of at most ``budget`` drafted nodes; the root alone where there is nothing to say."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was committed, after every forward pass."""

    def length(self, sequence: int) -> int:
        """How many leading tokens the state covers."""


class Weighty(Protocol):
    """What has weights of its own."""

    @property
    def weight_bytes(self) -> int:
        """Their size."""


W = TypeVar("W", bound=Weighty)


class Models(Protocol):
    """The target, and what drafts for it; each is loaded once."""

    @property
    def target(self) -> Loaded:
        """The model that verifies, with its tokenizer."""

    def prefix(self, layers: int) -> Decoder:
        """The target's own first layers with its norm and head, weights shared."""

    def draft_model(self, name: str) -> Loaded:
        """A model by name, in the target's number format.

        Raises:
            ModelError: it cannot be loaded.
        """

    def kept(self, key: tuple[object, ...], make: Callable[[], W]) -> W:
        """What ``make`` made for ``key``, now or earlier."""


class Surroundings(Models, Protocol):
    """What a drafter may be made from."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""

    def pools(self, groups: Sequence[CacheGroup]) -> list[PagePool]:
        """Page pools for the groups that a drafter declares.

        Raises:
            ResourceError: the memory for keys and values has no room for them.
        """

    def drafter(self, speculation: Speculation) -> Drafter:
        """The drafter of other options, shared with the requests that ask for it by itself."""


def _no_groups(speculation: Speculation, models: Models) -> Sequence[CacheGroup]:
    return ()


@dataclass(frozen=True)
class Method:
    """How the drafter of a method is made.

    Attributes:
        make: makes it.
        groups: the cache groups that it will ask pools for, so that the cache can be planned before it is made.
        options: the options that it is made from: requests that agree in them share a drafter.
        model: whether it drafts with a checkpoint that ``model`` names, or with a part of the target: "none" refuses
            one, "needed" refuses to be without.
        sampled: whether its drafts are drawn from probabilities of its own, in draw order and none of them dropped, as
            rules that compare those with the target's demand.
        trees: whether ``tree`` can make it draft more than chains.
        shapes: whether it fills a tree that a file gives.
    """

    make: Callable[[Speculation, Surroundings], Drafter]
    groups: Callable[[Speculation, Models], Sequence[CacheGroup]] = _no_groups
    options: tuple[str, ...] = ()
    model: Literal["none", "optional", "needed"] = "none"
    sampled: bool = False
    trees: bool = False
    shapes: bool = False
