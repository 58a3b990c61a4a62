"""The loss of every kind of head is that of drafts worked out one by one, from nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F

from paceline.heads.eagle import EagleNetwork
from paceline.heads.medusa import MedusaNetwork
from paceline.heads.spec import EagleSpec, MedusaSpec
from paceline.train.eagle import EagleObjective
from paceline.train.examples import Example
from paceline.train.features import Features
from paceline.train.judge import Judge
from paceline.train.medusa import MedusaObjective
from paceline.train.pack import Pack
from paceline.train.shared import Shared
from paceline.train.start import new_head
from tests.decoders import VOCAB, random_ids, tiny_decoder, tiny_spec
from tests.heads import EAGLES, tiny_eagle, tiny_medusa

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.targets.decoder import Decoder
    from paceline.train.judge import Against
    from paceline.train.objective import Measured, Objective

EXAMPLES = [
    Example.of(random_ids(6, seed=1), random_ids(5, seed=2)),
    Example.of(random_ids(1, seed=3), random_ids(4, seed=4)),
    Example.of(random_ids(9, seed=5), random_ids(1, seed=6)),
    Example(tuple(random_ids(12, seed=7)), (False,) * 3 + (True,) * 3 + (False,) * 2 + (True,) * 4),
]
HEADS = {
    "each": tiny_medusa(draft_vocab_size=VOCAB),
    "few ids": tiny_medusa(draft_vocab_size=37, own_ids=True),
    "target": tiny_medusa(head="target", heads=2, layers=2),
    **{name: tiny_eagle(name) for name in EAGLES},
}


def objective_for(head: Head, shared: Shared, against: Against = "tokens", **options: Any) -> Objective:
    judge = Judge(shared, head.target_ids, against)
    if head.spec.kind == "medusa":
        return MedusaObjective(head, shared, judge)
    return EagleObjective(head, shared, judge, **options)


def taps(target: Decoder, layers: Sequence[int], tokens: Sequence[int]) -> list[Tensor]:
    """The states that packs have, layer by layer, float32 [T, hidden]."""
    (states,) = Features(target, layers)([Example.of(tokens, ())])
    return list(states.float().unbind(1))


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder(tiny_spec(logit_softcap=4.0))


@pytest.mark.parametrize("against", ["tokens", "distribution"])
@pytest.mark.parametrize("name", HEADS)
def test_a_pack_is_worth_what_its_drafts_are(name: str, against: Against, target: Decoder) -> None:
    head, shared = HEADS[name], Shared.of(target)
    objective = objective_for(head, shared, against, steps=3, state_weight=0.3)
    measured = objective(Pack.of(EXAMPLES, Features(target, objective.layers)))
    depths = head.spec.heads if isinstance(head.spec, MedusaSpec) else 3
    loss, right, total = expected(head, shared, target, depths, against)
    assert measured.loss.item() == pytest.approx(loss, rel=1e-5)
    assert (measured.right, measured.total) == (right, total)
    assert total[:2] == (16, 11)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_more_steps_only_add(name: str, target: Decoder) -> None:
    """A head of one step is trained on the target's states alone."""
    shared = Shared.of(target)
    losses = []
    for steps in (1, 2, 5):
        objective = objective_for(HEADS[name], shared, steps=steps)
        measured: Measured = objective(Pack.of(EXAMPLES, Features(target, objective.layers)))
        loss, *_ = expected(HEADS[name], shared, target, steps, "tokens", state_weight=1.0)
        assert measured.loss.item() == pytest.approx(loss, rel=1e-5)
        losses.append(loss)
    assert losses == sorted(losses)


@pytest.mark.parametrize("name", HEADS)
def test_every_tensor_learns_and_nothing_of_the_target_does(name: str, target: Decoder) -> None:
    shared = Shared.of(target)
    objective = objective_for(HEADS[name], shared)
    torch.autograd.backward(objective(Pack.of(EXAMPLES, Features(target, objective.layers))).loss)
    for key, parameter in objective.network.named_parameters():
        assert parameter.grad is not None, key
        assert bool(parameter.grad.abs().sum() > 0), key
    assert not any(tensor.requires_grad for tensor in (shared.embedding, shared.head, shared.norm))


def test_a_label_that_the_head_has_no_column_for_does_not_count_and_is_no_hit(target: Decoder) -> None:
    shared = Shared.of(target)
    answers = {token for example in EXAMPLES for token in example.tokens}
    ids = [token for token in range(VOCAB) if token not in answers]
    objective = objective_for(new_head("eagle3", shared, 0, ids=ids), shared)
    measured = objective(Pack.of(EXAMPLES, Features(target, objective.layers)))
    assert measured.loss.item() == 0.0
    assert measured.right == (0, 0, 0)
    assert measured.total[0] == 16


def test_a_new_medusa_head_says_what_the_target_says(target: Decoder) -> None:
    shared = Shared.of(target)
    for ids in (None, list(range(3, VOCAB, 2))):
        head = new_head("medusa", shared, 0, ids=ids, heads=2)
        assert isinstance(head.spec, MedusaSpec)
        states = torch.randn(5, 40)
        for logits in MedusaNetwork(head.spec, head.tensors, head=shared.head)(states):
            assert torch.allclose(logits, (states @ shared.head.T)[:, head.target_ids], atol=1e-5)


def drafts(
    head: Head, shared: Shared, target: Decoder, tokens: tuple[int, ...], root: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What the head says at each depth of a draft from ``root`` along the text: logits, and for EAGLE the states."""
    spec = head.spec
    tap = [len(target.spec.layers)]
    if isinstance(spec, MedusaSpec):
        state = shared.states(taps(target, tap, tokens)[0][root])
        yield from ((logits, None) for logits in MedusaNetwork(spec, head.tensors, head=shared.head)(state))
        return
    network = EagleNetwork(spec, head.tensors, embedding=shared.embedding, head=shared.head)
    seen = taps(target, spec.taps(len(target.spec.layers)), tokens[: root + 1])
    states = network.fuse(shared.states(seen[0]) if spec.kind == "eagle" else torch.cat(seen, 1))
    outputs, cache = network(torch.tensor(tokens[1 : root + 2]), states, torch.arange(root + 1))
    for depth in range(len(tokens)):
        yield network.logits(outputs[-1]), outputs[-1]
        token = torch.tensor([tokens[root + 2 + depth]])
        state = network.next_state(outputs[-1:])
        outputs, cache = network(token, state, torch.tensor([root + 1 + depth]), cache=cache)


@torch.no_grad()
def expected(
    head: Head, shared: Shared, target: Decoder, depths: int, against: Against, state_weight: float = 0.3
) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    losses: list[list[float]] = [[] for _ in range(depths)]
    apart: list[list[float]] = [[] for _ in range(depths)]
    right, total = [0] * depths, [0] * depths
    ids = head.target_ids.tolist()
    for example in EXAMPLES:
        tokens, counts = example.tokens, example.counts
        (final,) = taps(target, [len(target.spec.layers)], tokens)
        for root in range(len(tokens) - 2):
            for depth, (logits, state) in zip(range(depths), drafts(head, shared, target, tokens, root), strict=False):
                place = root + 2 + depth
                if place >= len(tokens) or not counts[place]:
                    break
                total[depth] += 1
                right[depth] += ids[int(logits.argmax())] == tokens[place]
                if state is not None and isinstance(head.spec, EagleSpec) and head.spec.kind == "eagle":
                    apart[depth].append(F.smooth_l1_loss(state, shared.states(final[place - 1])).item())
                wanted = shared.logits(final[place - 1])
                if against == "tokens":
                    if tokens[place] in ids:
                        losses[depth].append(-logits.log_softmax(0)[ids.index(tokens[place])].item())
                elif tokens[place] in ids:
                    p, q = wanted[ids].softmax(0), logits.softmax(0)
                    losses[depth].append(float((p * (p / q).log()).sum()))
    loss = sum(0.8**depth * (mean(losses[depth]) + state_weight * mean(apart[depth])) for depth in range(depths))
    return loss, tuple(right), tuple(total)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
