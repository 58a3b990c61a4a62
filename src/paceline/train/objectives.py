"""What a head of each kind learns from a pack of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from paceline.heads.eagle import EagleNetwork
from paceline.heads.medusa import MedusaNetwork
from paceline.heads.spec import EagleSpec, MedusaSpec
from paceline.train.losses import NOTHING, against_distribution, against_states, against_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.heads.network import HeadNetwork
    from paceline.train.pack import Pack
    from paceline.train.shared import Shared

Against = Literal["tokens", "distribution"]

_FADING = 0.8  # what a depth weighs against the one before it, in Medusa as in EAGLE-3


@dataclass(frozen=True)
class Measured:
    """What a pack says of a head.

    Attributes:
        loss: to be made smaller.
        right: for each depth of a draft how many first guesses were the target's own tokens, its tokens before them
            given.
        total: of how many.
    """

    loss: Tensor
    right: tuple[int, ...]
    total: tuple[int, ...]


class Objective(Protocol):
    """What the loop trains."""

    @property
    def head(self) -> Head:
        """The head as it was before."""

    @property
    def network(self) -> HeadNetwork:
        """Its tensors as they are now."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs packs must hold, in order."""

    def __call__(self, pack: Pack) -> Measured:
        """The loss of one pack."""


def objective_for(
    head: Head, shared: Shared, *, steps: int = 3, against: Against = "tokens", state_weight: float = 1.0
) -> Objective:
    """What ``head`` learns beside the target that ``shared`` comes from.

    Args:
        steps: how deep EAGLE heads draft in training; Medusa heads are all trained.
        against: what guesses are compared with: the tokens of the examples, or the target's own distribution.
        state_weight: of the distance to the target's states, for EAGLE-1 and 2.

    Raises:
        DrafterError: the head needs something that the target lacks.
    """
    if isinstance(head.spec, MedusaSpec):
        return MedusaObjective(head, head.spec, shared, against)
    return EagleObjective(head, head.spec, shared, against, steps, state_weight)


class _Guesses:
    """Adds up what a pack says of guesses, depth by depth."""

    def __init__(self, network: HeadNetwork, shared: Shared, against: Against, pack: Pack, final: Tensor) -> None:
        """Judge the guesses of ``network``; ``final`` is the input of the final norm, by which the target guesses."""
        self.roots = pack.roots()
        self._pack, self._shared, self._against, self._final = pack, shared, against, final
        self._ids = network.target_ids
        self._columns = torch.full((network.spec.vocab_size,), NOTHING)
        self._columns[self._ids] = torch.arange(len(self._ids))
        self._losses: list[Tensor] = []
        self._right: list[int] = []
        self._total: list[int] = []

    def judge(self, depth: int, logits: Tensor) -> Tensor:
        """Take in the logits [M, N] that drafts from the roots have at ``depth``; returns which count, bool [M]."""
        labels = self._pack.labels(self.roots, depth)
        counted = labels != NOTHING
        columns = self._columns[labels].where(counted, NOTHING)
        if self._against == "tokens":
            loss = against_tokens(logits, columns)
        else:
            there, _ = self._pack.ahead(self.roots, depth + 1)
            wanted = self._shared.logits(self._final[there])
            reachable = self._columns[wanted.argmax(-1)] != NOTHING
            loss = against_distribution(logits, wanted[:, self._ids], counted & reachable)
        self._losses.append(loss)
        guessed = logits.detach().argmax(-1) == columns
        self._right.append(int((guessed & counted).sum()))
        self._total.append(int(counted.sum()))
        return counted

    def measured(self, more: Tensor | float = 0.0) -> Measured:
        """All depths together, each of less weight than the one before it, and what else there is to pay."""
        loss = sum((_FADING**depth * loss for depth, loss in enumerate(self._losses)), torch.zeros(()))
        return Measured(loss + more, tuple(self._right), tuple(self._total))


class MedusaObjective:
    """Every head guesses its token from the state that gave the last one (arXiv 2401.10774, section 2.1)."""

    def __init__(self, head: Head, spec: MedusaSpec, shared: Shared, against: Against) -> None:
        self.head = head
        self.network = MedusaNetwork(spec, head.tensors, head=shared.head)
        self.layers = (len(shared.spec.layers),)
        self._shared, self._against = shared, against

    def __call__(self, pack: Pack) -> Measured:
        guesses = _Guesses(self.network, self._shared, self._against, pack, pack.taps[-1])
        for depth, logits in enumerate(self.network(self._shared.states(pack.taps[-1][guesses.roots]))):
            guesses.judge(depth, logits)
        return guesses.measured()


class EagleObjective:
    """A head drafts as it will: first from the target's states, then from its own (EAGLE-3's training-time test, arXiv
    2503.01840, section 3; with one step EAGLE-1's training, arXiv 2401.15077, section 4.2).

    At depth d, the row of each root reads the token d + 1 places on, its own output at depth d - 1, and the keys that
    it would see in a draft: those of the target's states up to the root, and its own of the depths before.
    """

    def __init__(
        self, head: Head, spec: EagleSpec, shared: Shared, against: Against, steps: int, state_weight: float
    ) -> None:
        self.head = head
        self.network = EagleNetwork(spec, head.tensors, embedding=shared.embedding, head=shared.head)
        final = len(shared.spec.layers)
        self._taps = spec.taps(final)
        self.layers = (*self._taps, final) if against == "distribution" else self._taps
        self._spec, self._shared, self._against = spec, shared, against
        self._steps, self._state_weight = steps, state_weight

    def __call__(self, pack: Pack) -> Measured:
        network, guesses = self.network, _Guesses(self.network, self._shared, self._against, pack, pack.taps[-1])
        roots, states = guesses.roots, self._states(pack)
        rows = (pack.owner[1:] == pack.owner[:-1]).nonzero()[:, 0]
        seen = _seen(pack, rows)
        outputs, cache = network(pack.tokens[rows + 1], network.fuse(states[rows]), pack.places[rows], visible=seen)
        places = torch.searchsorted(rows, roots)
        outputs, seen, own = outputs[places], seen[places], torch.eye(len(roots), dtype=torch.bool)
        apart = torch.zeros(())
        for depth in range(self._steps):
            there, _ = pack.ahead(roots, depth + 1)
            if depth:
                seen = torch.cat([seen, own], 1)
                inputs = pack.tokens[there], network.next_state(outputs), pack.places[roots] + depth
                outputs, cache = network(*inputs, visible=seen, cache=cache)
            counted = guesses.judge(depth, network.logits(outputs))
            if self._spec.kind == "eagle":
                apart = apart + _FADING**depth * against_states(outputs, states[there], counted)
        return guesses.measured(self._state_weight * apart)

    def _states(self, pack: Pack) -> Tensor:
        """What rows read where the target has been, float32 [R, fused * hidden]."""
        taps = pack.taps[: len(self._taps)]
        return self._shared.states(taps[0]) if self._spec.kind == "eagle" else torch.cat(taps, 1)


def _seen(pack: Pack, rows: Tensor) -> Tensor:
    """Which of ``rows`` each of them sees: those of its own example up to itself."""
    owner, place = pack.owner[rows], pack.places[rows]
    return (owner[:, None] == owner) & (place[:, None] >= place)
