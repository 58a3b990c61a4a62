"""EAGLE drafters: exact output with any head, the same drafts as the network from scratch, and books that balance."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline.drafters import Outcome, _eagle
from paceline.drafters._eagle import EagleDrafter
from paceline.drafting import view as view_of
from paceline.heads.eagle import EagleNetwork, path_logits
from paceline.heads.spec import EagleSpec
from paceline.pages import PagePool
from paceline.shape import TreeShape
from paceline.targets.head_decoder import HeadDecoder
from paceline.targets.linear import unpack_linear
from paceline.tree import Drawn
from tests.decoders import Cache, piece, random_ids, tiny_decoder, tiny_spec
from tests.draws import assert_drawn_from, emitted_under
from tests.heads import EAGLES, bigram_decoder, knowing_eagle, tiny_eagle
from tests.toys import ToyRun, path_rule, same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import View
    from paceline.heads.head import Head
    from paceline.request import Sequence
    from paceline.targets.decoder import Decoder
    from paceline.targets.linear import Format
    from paceline.tree import TokenTree

FEW = 11
PROMPTS = [[token % FEW for token in random_ids(n, seed=n)] for n in (19, 2, 33)]
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4})
LIMIT = 128


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of the network's rows, which are small, torch's threads would make a slow test on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Watched(EagleDrafter):
    """Keeps what it was asked to draw from, and what it drafted."""

    def __init__(self, head: Head, target: Decoder, width: int | TreeShape, pages: int = 64) -> None:
        self.fitted = HeadDecoder(head, target)
        self.pool = PagePool(self.fitted.groups[0], pages)
        super().__init__(head.spec.kind, self.fitted, self.pool, LIMIT, width)
        self.seen: list[tuple[list[int], list[int], Tensor]] = []
        self.drafted: list[tuple[View, int, list[int], TokenTree]] = []

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        trees = super().propose([self.watch(view) for view in views], budgets)
        for view, budget, tree in zip(views, budgets, trees, strict=True):
            self.drafted.append((view, budget, list(view.tokens), tree))
        return trees

    def watch(self, view: View) -> View:
        def draw(rows: Tensor, paths: Seq[Seq[int]], *rest: Any, **more: Any) -> list[Drawn]:
            self.seen += [(list(view.tokens), list(path), row) for row, path in zip(rows.clone(), paths, strict=True)]
            return view.draw(rows, paths, *rest, **more)

        return replace(view, draw=draw)

    def check(self, sequences: Seq[Sequence]) -> None:
        running = {s.id: s for s in sequences if s.finish_reason is None}
        assert set(self._states) == set(running)
        self.pool.check([state.table for state in self._states.values()])
        for number, state in self._states.items():
            assert state.filled <= state.known == self.length(number) == running[number].filled


def run_on(target: Decoder, **changes: Any) -> ToyRun:
    settings: dict[str, Any] = {"max_model_len": LIMIT, "pages": 64, "max_batch_tokens": 100, **changes}
    return ToyRun(path_rule(1), target=target, vocab=target.vocab_size, **settings)


def answers(target: Decoder, **sampling: Any) -> list[Sequence]:
    run = run_on(target)
    plain = [run.add(prompt, eos=(), max_tokens=30, **sampling) for prompt in PROMPTS]
    run.finish(*plain)
    return plain


def ride(target: Decoder, drafter: Watched, prompts: Seq[Seq[int]], length: int = 7, **sampling: Any) -> list[Sequence]:
    run = run_on(target)
    speculation = {"num_speculative_tokens": length}
    settings: dict[str, Any] = {"eos": (), "max_tokens": 30, "piece_limit": 14, "speculation": speculation, **sampling}
    sequences = [run.add(prompt, drafter, **settings) for prompt in prompts]
    while any(sequence.finish_reason is None for sequence in sequences):
        run.engine.step()
        run.check()
        drafter.check(sequences)
    run.check_empty()
    assert drafter.pool.free == drafter.pool.pages
    return sequences


def network_of(head: Head, target: Decoder) -> EagleNetwork:
    plan = target.plan
    assert plan.format == "fp32"
    assert isinstance(head.spec, EagleSpec)
    return EagleNetwork(
        head.spec,
        head.tensors,
        embedding=plan.tensors["embedding.data"],
        head=unpack_linear(plan.linear("head"), target.vocab_size, plan.spec.hidden, "fp32"),
    )


def states_of(head: Head, target: Decoder, tokens: Seq[int]) -> Tensor:
    """The target's states at every place before the last token's, from nothing."""
    assert isinstance(head.spec, EagleSpec)
    taps = head.spec.taps(len(target.spec.layers))
    scores = Cache(target).run(piece(0, tokens[:-1]), features=taps)
    return scores.hidden if head.spec.kind == "eagle" else torch.cat([scores.features[tap] for tap in taps], 1)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1", "eagle3, few ids"])
def test_not_one_token_differs(name: str, settings: dict[str, Any], width: int) -> None:
    """With a head that knows nothing, of so few ids that it is sometimes right."""
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    expected = answers(target, **settings)
    drafter = Watched(tiny_eagle(name, vocab=FEW), target, width)
    together = ride(target, drafter, PROMPTS, **settings)
    alone = [ride(target, drafter, [prompt], **settings)[0] for prompt in PROMPTS]
    for sequences in (together, alone):
        for sequence, plain in zip(sequences, expected, strict=True):
            same(sequence, plain)
        assert sum(s.record.accepted for s in sequences) >= 3
        assert sum(s.record.drafted - s.record.accepted for s in sequences) >= 3


@pytest.mark.parametrize("lag", [1, 2])
def test_an_engine_that_runs_behind_gives_the_same(lag: int) -> None:
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    expected = answers(target, temperature=0.8)
    run, drafter = run_on(target, lag=lag), Watched(tiny_eagle("eagle3", vocab=FEW), target, 4)
    sequences = [run.add(prompt, drafter, eos=(), max_tokens=30, temperature=0.8) for prompt in PROMPTS]
    run.finish(*sequences)
    for sequence, plain in zip(sequences, expected, strict=True):
        same(sequence, plain)
        assert not sequence.record.failed
    assert sum(sequence.record.accepted for sequence in sequences) > 5


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["eagle", "eagle3, own width"])
def test_not_one_token_differs_in_other_formats(name: str, form: Format) -> None:
    target = tiny_decoder(tiny_spec(vocab_size=FEW), form, threads=2)
    for sequence, plain in zip(
        ride(target, Watched(tiny_eagle(name, vocab=FEW), target, 3), PROMPTS), answers(target), strict=True
    ):
        same(sequence, plain)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("name", EAGLES)
def test_every_row_of_a_draft_is_that_of_the_network_from_nothing(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was accepted and rejected before: a stale state, key or position would show."""
    monkeypatch.setattr(_eagle, "_PIECE", 9)
    head, target = tiny_eagle(name, vocab=FEW), tiny_decoder(tiny_spec(vocab_size=FEW))
    network = network_of(head, target)
    drafter = Watched(head, target, width)
    sequences = ride(target, drafter, PROMPTS, temperature=0.8, seed=1)
    assert sum(sequence.record.accepted for sequence in sequences) >= 5
    assert len(drafter.seen) > 100
    for tokens, path, logits in drafter.seen[:: len(drafter.seen) // 100]:
        states = states_of(head, target, tokens)
        assert torch.allclose(logits, path_logits(network, tokens, states, path)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["eagle", "eagle3, few ids"])
def test_trees_are_those_of_the_paper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the best of each level give, then the best of it all: drafted by the network from nothing."""
    monkeypatch.setattr(_eagle, "_WORTH", 0.0)
    head, target = tiny_eagle(name, vocab=FEW), tiny_decoder(tiny_spec(vocab_size=FEW))
    network = network_of(head, target)
    drafter = Watched(head, target, 4)
    ride(target, drafter, PROMPTS[:1], length=20)
    full = 0
    for view, budget, tokens, tree in drafter.drafted[:-4:2]:
        wanted = _by_the_paper(network, replace(view, tokens=tokens), states_of(head, target, tokens), budget)
        assert {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))} == wanted
        full += len(tree) == budget + 1
    assert full > 3


def _by_the_paper(network: EagleNetwork, view: View, states: Tensor, budget: int) -> set[tuple[int, ...]]:
    ids = network.target_ids if network.spec.own_ids else None
    survival: dict[tuple[int, ...], float] = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(_eagle._LEVELS):
        new: dict[tuple[int, ...], float] = {}
        for path in level:
            drawn = view.draw(path_logits(network, view.tokens, states, path)[-1:], [path], 4, ids=ids)[0]
            for token, chance in zip(drawn.tokens, drawn.chances, strict=True):
                new[*path, token] = survival[path] * chance
        survival |= new
        level = sorted(new, key=lambda path: -new[path])[:4]
    return set(sorted(survival, key=lambda path: -survival[path])[1 : budget + 1])


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1", "eagle3, few ids"])
@pytest.mark.parametrize("width", [1, 10])
def test_a_head_that_knows_the_target_is_accepted(name: str, width: int) -> None:
    target = bigram_decoder()
    prompts = [random_ids(n, seed=n) for n in (19, 2, 33)]
    run = run_on(target)
    plain = [run.add(prompt, eos=(), max_tokens=30, temperature=0.8) for prompt in prompts]
    run.finish(*plain)
    sequences = ride(target, Watched(knowing_eagle(name, target), target, width), prompts, temperature=0.8)
    for sequence, reference in zip(sequences, plain, strict=True):
        same(sequence, reference)
        record = sequence.record
        if name == "eagle3, few ids":
            assert 0 < record.accepted < record.drafted
        else:
            assert record.steps <= 5 if width == 1 else record.accepted > record.steps
            assert width > 1 or record.accepted == record.drafted


def a_step_in(width: int = 3, prompt: Seq[int] = PROMPTS[0]) -> tuple[ToyRun, Watched, Sequence, View]:
    """A run that has drafted once."""
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    drafter, run = Watched(tiny_eagle("eagle3", vocab=FEW), target, width), run_on(target)
    sequence = run.add(prompt, drafter, eos=(), max_tokens=60, temperature=0.5)
    while not drafter.drafted:
        run.engine.step()
    return run, drafter, sequence, view_of(sequence)


def test_proposing_twice_gives_the_same_tree() -> None:
    _, drafter, _, view = a_step_in()
    first, second = (drafter.propose([view], [9])[0] for _ in range(2))
    assert first == second
    assert len(first) == 10
    assert len(drafter.propose([view], [0])[0]) == 1


def test_a_fork_drafts_what_its_parent_does_and_shares_its_pages() -> None:
    run, drafter, sequence, view = a_step_in(prompt=PROMPTS[2])
    before = drafter.pool.free
    twin = replace(view, id=99)
    drafter.fork(sequence.id, twin)
    assert before - drafter.pool.free <= 1
    assert drafter.length(99) == drafter.length(sequence.id) == len(view.tokens) - 1
    trees = drafter.propose([twin, view], [7, 7])
    assert trees[0] == trees[1]
    drafter.release(99)
    drafter.release(99)
    run.engine.cancel(sequence)
    assert drafter.pool.free == drafter.pool.pages


@pytest.mark.parametrize("length", [0, 1, 7, 18, 19])
def test_after_a_rewind_it_waits_for_the_states_that_it_lost(length: int) -> None:
    """What is observed again, in whatever pieces, makes the same draft as before."""
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    _, drafter, sequence, view = a_step_in()
    tokens = list(view.tokens)
    expected = drafter.propose([view], [9])[0]
    taps = drafter.fitted.taps
    features = Cache(target).run(piece(0, tokens[:-1]), features=taps).features

    def observe(start: int, end: int) -> None:
        kept = {tap: features[tap][start:end] for tap in taps}
        drafter.observe([Outcome(sequence.id, start, tokens[start:end], 0, tokens[end], kept)])

    drafter.rewind(sequence.id, length)
    assert drafter.length(sequence.id) == max(0, length - 1)
    assert len(drafter.propose([view], [9])[0]) == 1
    observe(length + 1, len(tokens) - 1)  # a gap: nothing is made of it
    assert drafter.length(sequence.id) == max(0, length - 1)
    observe(max(0, length - 4), length + 1)
    assert drafter.length(sequence.id) == length + 1
    assert length + 1 == len(tokens) - 1 or len(drafter.propose([view], [9])[0]) == 1
    drafter.rewind(sequence.id, length)  # what waits can be cut anywhere
    assert drafter.length(sequence.id) == length
    observe(0, len(tokens) - 1)
    assert drafter.propose([view], [9])[0] == expected


def test_a_sequence_whose_first_states_never_come_is_left_alone() -> None:
    _, drafter, _, view = a_step_in()
    drafter.start(replace(view, id=50), 12)
    drafter.observe(
        [Outcome(50, 12, view.tokens[12:-1], 0, view.tokens[-1], {0: torch.zeros(len(view.tokens) - 13, 40)})]
    )
    assert len(drafter.propose([replace(view, id=50)], [9])[0]) == 1
    assert drafter.length(50) == 0


def test_long_prompts_are_taken_in_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_eagle, "_PIECE", 16)
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    drafter, run = Watched(tiny_eagle("eagle", vocab=FEW), target, 2), run_on(target)
    sequence = run.add([3, 5] * 40, drafter, eos=(), max_tokens=5)
    waits = []
    while not drafter.drafted:
        run.engine.step()
        state = drafter._states[sequence.id]
        waits.append(state.known - state.filled)
    assert max(waits) < 16 + 14
    run.finish(sequence)


@pytest.mark.parametrize("width", [1, 4])
def test_drafts_end_where_positions_do(width: int) -> None:
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    run, drafter = run_on(target), Watched(tiny_eagle("eagle3", vocab=FEW), target, width)
    sequence = run.add([4] * (LIMIT - 12), drafter, eos=(), max_tokens=12, speculation={"num_speculative_tokens": 30})
    run.finish(sequence)
    reference = run.add([4] * (LIMIT - 12), eos=(), max_tokens=12)
    run.finish(reference)
    same(sequence, reference)
    assert sequence.record.drafted > 0
    assert not sequence.record.failed


@pytest.mark.parametrize(("width", "pages"), [(1, 3), (3, 3), (3, 4)])
def test_a_pool_that_is_too_small_costs_the_drafts_of_those_without_a_page(
    width: int, pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    expected = answers(target)
    run, drafter = run_on(target), Watched(tiny_eagle("eagle3", vocab=FEW), target, width, pages=pages)
    sequences = [run.add(prompt, drafter, eos=(), max_tokens=30) for prompt in PROMPTS]
    run.finish(*sequences)
    for sequence, plain in zip(sequences, expected, strict=True):
        same(sequence, plain)
        assert not sequence.record.failed
    assert caplog.records == []
    assert drafter.pool.free == drafter.pool.pages
    asked, drafted = Counter[int](), Counter[int]()
    for view, _, tokens, tree in drafter.drafted:
        asked[len(tokens)] += 1
        drafted[view.id] += len(tree) > 1
    assert 0 < drafted.total() < asked.total()
    assert max(drafted.values()) > 5


@pytest.mark.parametrize(("width", "budget"), [(1, 9), (3, 12), (10, 63), (63, 63)])
def test_the_shape_of_a_sampled_tree_does_not_depend_on_what_was_drawn(width: int, budget: int) -> None:
    """Rules that compare the target with the draft's probabilities demand it; first drawn children stay first."""
    _, drafter, _, view = a_step_in()
    drafter._tree = width
    shapes = set()
    for seed in range(4):
        draws = Draws(seed)
        tree = drafter.propose([replace(view, draw=draws)], [budget])[0]
        shapes.add(tuple(tree.parents))
        assert len(tree) == budget + 1 if width < 63 else len(tree) > 10
        for node in range(len(tree)):
            path = tuple(tree.tokens[n] for n in tree.path(node)[1:])
            children = [tree.tokens[child] for child in tree.children(node)]
            assert children == draws.orders.get(path, [])[: len(children)]
            assert (node in tree.q) == bool(children)
    assert len(shapes) == 1


class Draws:
    """Draws anything at all, and says from what."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.orders: dict[tuple[int, ...], list[int]] = {}

    def __call__(
        self,
        rows: Tensor,
        paths: Seq[Seq[int]],
        count: int = 1,
        *,
        nodes: Seq[int] = (0,),
        ids: Tensor | None = None,
    ) -> list[Drawn]:
        found = []
        for path in paths:
            tokens = self.dice.sample(range(FEW), min(count, FEW))
            self.orders[tuple(path)] = tokens
            found.append(Drawn(tokens, [self.dice.random() for _ in tokens], np.full(FEW, 1 / FEW)))
        return found


@pytest.mark.parametrize(("rule", "width"), [("ratio", 1), ("block", 1), ("recursive", 3), ("traversal", 3)])
def test_rules_that_compare_probabilities_keep_the_distribution(rule: str, width: int) -> None:
    target = tiny_decoder(tiny_spec(vocab_size=4))
    drafter = Watched(tiny_eagle("eagle3", vocab=4), target, width)
    emitted = emitted_under(rule, target, drafter, 1500)
    assert sum(sequence.record.accepted for sequence in emitted) > 300
    assert sum(sequence.record.drafted - sequence.record.accepted for sequence in emitted) > 300
    assert_drawn_from(target, emitted)


def test_a_shape_is_filled_with_what_is_drawn() -> None:
    """Node for node; a smaller budget takes its first nodes, and fewer positions cut it at their depth."""
    shape = TreeShape.parse([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])
    _, drafter, sequence, view = a_step_in()
    drafter._tree = shape
    for budget in (7, 5, 1, 30):
        draws = Draws(3)
        tree = drafter.propose([replace(view, draw=draws)], [budget])[0]
        paths = [[tree.tokens[n] for n in tree.path(node)[1:]] for node in range(1, len(tree))]
        wanted = shape.head(budget).paths()
        ranks = [[draws.orders[tuple(path[:d])].index(path[d]) for d in range(len(path))] for path in paths]
        assert sorted(ranks) == sorted(wanted)
    target = tiny_decoder(tiny_spec(vocab_size=FEW))
    for plain, shaped in zip(
        answers(target), ride(target, Watched(tiny_eagle("eagle3", vocab=FEW), target, shape), PROMPTS), strict=True
    ):
        same(shaped, plain)
        assert shaped.record.drafted > 0
    assert sequence.record.drafted > 0
