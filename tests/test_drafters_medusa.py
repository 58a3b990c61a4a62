"""Medusa drafters: exact output with any heads, and trees of what the network says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.drafters import Outcome
from paceline.drafters.medusa import MedusaDrafter
from paceline.drafting import view as view_of
from paceline.errors import DrafterError
from paceline.heads.head import Head, Provenance
from paceline.heads.medusa import MedusaNetwork
from paceline.heads.spec import MedusaSpec
from paceline.kernels import REFERENCE
from paceline.shape import TreeShape
from paceline.targets.linear import unpack_linear
from paceline.targets.medusa_decoder import MedusaDecoder
from tests.decoders import VOCAB, Cache, paths, piece, random_ids, tiny_decoder, tiny_spec
from tests.draws import assert_drawn_from, emitted_under
from tests.heads import bigram_decoder, eagle_spec, random_weights, tiny_medusa
from tests.toys import ToyRun, path_rule, same

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import View
    from paceline.request import Sequence
    from paceline.targets.decoder import Decoder
    from paceline.targets.linear import Format
    from paceline.tree import TokenTree

FEW = 11
PROMPTS = [[token % FEW for token in random_ids(n, seed=n)] for n in (19, 2, 33)]
KINDS: dict[str, dict[str, Any]] = {
    "each": {"head": "each"},
    "shared": {"head": "shared", "layers": 2, "bias": False},
    "target": {"head": "target", "heads": 6},
    "few ids": {"head": "each", "draft_vocab_size": 7, "own_ids": True},
    "one head": {"head": "each", "heads": 1},
}


def heads_of(kind: str, vocab: int = FEW) -> Head:
    return tiny_medusa(vocab=vocab, **{"draft_vocab_size": vocab, **KINDS[kind]})


def network_of(head: Head, target: Decoder) -> MedusaNetwork:
    assert isinstance(head.spec, MedusaSpec)
    rows = unpack_linear(target.plan.linear("head"), target.vocab_size, 40, "fp32")
    return MedusaNetwork(head.spec, head.tensors, head=rows)


class Watched(MedusaDrafter):
    """Keeps what it drafted."""

    def __init__(self, head: Head, target: Decoder, width: int | TreeShape) -> None:
        super().__init__(MedusaDecoder(head, target), width)
        self.drafted: list[tuple[View, int, list[int], TokenTree]] = []

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        trees = super().propose(views, budgets)
        for view, budget, tree in zip(views, budgets, trees, strict=True):
            self.drafted.append((view, budget, list(view.tokens), tree))
        return trees


def run_on(target: Decoder) -> ToyRun:
    vocab = target.vocab_size
    return ToyRun(path_rule(1), target=target, vocab=vocab, max_model_len=128, max_batch_tokens=100)


def answers(target: Decoder, prompts: Seq[Seq[int]] = PROMPTS, **sampling: Any) -> list[Sequence]:
    run = run_on(target)
    plain = [run.add(prompt, eos=(), max_tokens=30, **sampling) for prompt in prompts]
    run.finish(*plain)
    return plain


def ride(target: Decoder, drafter: Watched, prompts: Seq[Seq[int]], length: int = 9, **sampling: Any) -> list[Sequence]:
    run, speculation = run_on(target), {"num_speculative_tokens": length}
    settings: dict[str, Any] = {"eos": (), "max_tokens": 30, "piece_limit": 14, "speculation": speculation, **sampling}
    sequences = [run.add(prompt, drafter, **settings) for prompt in prompts]
    while any(sequence.finish_reason is None for sequence in sequences):
        run.engine.step()
        assert set(drafter._states) == {s.id for s in sequences if s.finish_reason is None}
        assert all(drafter.length(s.id) == s.filled for s in sequences if s.finish_reason is None)
    run.check_empty()
    return sequences


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [paths()[0], REFERENCE])
@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_logits_are_those_of_the_network(kind: str, path: str, form: Format) -> None:
    head, target = heads_of(kind, VOCAB), tiny_decoder(tiny_spec(), form, path=path)
    taps = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    decoder = MedusaDecoder(head, target)
    states = decoder.states(taps)
    norm = target.plan.tensors["norm"]
    assert torch.allclose(states, torch.nn.functional.rms_norm(taps, (40,), norm, 1e-5), atol=1e-5)
    with torch.no_grad():
        wanted = network_of(head, tiny_decoder(tiny_spec()))(states)
    for heads in range(1, wanted.shape[0] + 1):
        found = decoder.forward(states, heads)
        assert torch.allclose(found, wanted[:heads], atol=1e-4 if form == "fp32" else 0.15)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_not_one_token_differs(kind: str, settings: dict[str, Any], width: int) -> None:
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    expected = answers(target, **settings)
    drafter = Watched(heads_of(kind), target, width)
    together = ride(target, drafter, PROMPTS, **settings)
    alone = [ride(target, drafter, [prompt], **settings)[0] for prompt in PROMPTS]
    for sequences in (together, alone):
        for sequence, plain in zip(sequences, expected, strict=True):
            same(sequence, plain)
        assert sum(s.record.accepted for s in sequences) >= 2
        assert sum(s.record.drafted - s.record.accepted for s in sequences) >= 5


@pytest.mark.parametrize("kind", ["shared", "few ids"])
@pytest.mark.parametrize("width", [1, 4])
def test_trees_hold_the_likeliest_paths_from_nothing(kind: str, width: int) -> None:
    """By the network, from the state that gave the root, whatever was accepted before."""
    head, target = heads_of(kind), tiny_decoder(tiny_spec(vocab_size=FEW))
    network, drafter = network_of(head, target), Watched(head, target, width)
    ride(target, drafter, PROMPTS)
    for view, budget, tokens, tree in drafter.drafted[:-8:3]:
        state = Cache(target).run(piece(0, tokens[:-1])).hidden[-1]
        with torch.no_grad():
            logits = network(state)
        wanted = _likeliest(replace(view, tokens=tokens), logits, head.target_ids, width, budget)
        assert {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))} == wanted


def _likeliest(view: View, logits: Tensor, ids: Tensor, width: int, budget: int) -> set[tuple[int, ...]]:
    survival: dict[tuple[int, ...], float] = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for row in logits:
        new = {}
        for path in level:
            drawn = view.draw(row[None], [path], width, ids=ids)[0]
            for token, chance in zip(drawn.tokens, drawn.chances, strict=True):
                new[*path, token] = survival[path] * chance
        survival |= new
        level = list(new)
    return set(sorted(survival, key=lambda path: -survival[path])[1 : budget + 1])


@pytest.mark.parametrize("width", [1, 4])
def test_heads_that_know_the_target_are_accepted(width: int) -> None:
    """Of a target whose next token is a function of the last one, head h holds that function h + 2 times over."""
    target = bigram_decoder()
    every = Cache(target).run(piece(0, range(VOCAB)))
    spec = MedusaSpec(hidden=40, vocab_size=VOCAB, draft_vocab_size=VOCAB, heads=3, bias=False)
    tensors = {name: torch.zeros(shape) for name, shape in spec.shapes().items()}
    following = every.logits.argmax(1)
    then = following
    for place in range(3):
        then = following[then]
        tensors[f"heads.{place}.head"].index_add_(0, then, every.hidden)  # a state is nearest to itself
    head = Head(spec, tensors, Provenance("random"))
    prompts = [random_ids(n, seed=n) for n in (19, 2, 33)]
    for sequence, plain in zip(
        ride(target, Watched(head, target, width), prompts, length=3), answers(target, prompts), strict=True
    ):
        same(sequence, plain)
        assert sequence.record.accepted_at[0] > 0.7 * sequence.record.steps


def test_forks_rewinds_and_gaps() -> None:
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    drafter, run = Watched(heads_of("each"), target, 3), run_on(target)
    sequence = run.add(PROMPTS[0], drafter, eos=(), max_tokens=30)
    while not drafter.drafted:
        run.engine.step()
    view = view_of(sequence)
    drafter.fork(sequence.id, replace(view, id=99))
    first, second = drafter.propose([view, replace(view, id=99)], [9, 9])
    assert first == second
    assert len(first) == 10
    drafter.rewind(99, len(view.tokens) - 1)
    assert drafter.propose([replace(view, id=99)], [9])[0] == first
    drafter.rewind(99, 3)
    assert drafter.length(99) == 3
    assert len(drafter.propose([replace(view, id=99)], [9])[0]) == 1
    features = Cache(target).run(piece(0, view.tokens[:-1]), features=[2]).features
    last = {2: features[2][3:]}
    drafter.observe([Outcome(99, 3, view.tokens[3:-1], 0, view.tokens[-1], last)])
    assert drafter.propose([replace(view, id=99)], [9])[0] == first
    drafter.start(replace(view, id=50), 5)
    assert len(drafter.propose([replace(view, id=50)], [9])[0]) == 1
    for number in (99, 50, 50, sequence.id):
        drafter.release(number)
    assert not drafter._states


def test_heads_that_do_not_fit_are_refused() -> None:
    target = tiny_decoder(tiny_spec())
    with pytest.raises(DrafterError, match="method 'eagle3'"):
        MedusaDecoder(random_weights(eagle_spec("eagle3")), target)
    with pytest.raises(DrafterError, match="hidden size"):
        MedusaDecoder(tiny_medusa(hidden=48), target)
    with pytest.raises(DrafterError, match="have none"):
        MedusaDecoder(tiny_medusa(head="target", draft_vocab_size=7, own_ids=True), target)


@pytest.mark.parametrize(("rule", "width"), [("block", 1), ("recursive", 3), ("traversal", 2)])
def test_rules_that_compare_probabilities_keep_the_distribution(rule: str, width: int) -> None:
    target = tiny_decoder(tiny_spec(vocab_size=4))
    head = tiny_medusa(vocab=4)
    emitted = emitted_under(rule, target, Watched(head, target, width), 1500)
    assert sum(sequence.record.accepted for sequence in emitted) > 300
    assert sum(sequence.record.drafted - sequence.record.accepted for sequence in emitted) > 300
    assert_drawn_from(target, emitted)


def test_a_shape_is_filled_with_what_is_drawn() -> None:
    target, shape = tiny_decoder(tiny_spec(vocab_size=FEW)), TreeShape.parse([[0], [1], [0, 0], [2], [0, 1], [0, 0, 0]])
    drafter = Watched(heads_of("each"), target, shape)
    for plain, shaped in zip(answers(target), ride(target, drafter, PROMPTS), strict=True):
        same(shaped, plain)
    full = [tree for _, budget, _, tree in drafter.drafted if budget >= 6]
    assert full
    assert all(sorted(tree.depths()) == sorted(shape.depths()) for tree in full)
    assert all([len(tree.children(node)) for node in range(3)] == [3, 2, 0] for tree in full)
