"""What the engine taps for a drafter: a feature row for every committed row, in order, and the top-k of every scored
one; nothing of a rejected row passes for a committed one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.drafters import Needs
from paceline.targets.toy import ToyTarget
from tests.toys import VOCAB, Clock, Timed, ToyRun, TreeDrafter, alone, path_rule, random_tree, same

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.drafters import Outcome, View
    from paceline.pages import Slab
    from paceline.targets import Scores
    from paceline.tree import TokenTree

RULE = path_rule(VOCAB, seed=31)


class Pathwise(ToyTarget):
    """Features that tell the row's whole path: [hash of the path + layer, its length]."""

    asked: list[tuple[int, ...]]

    def __init__(self) -> None:
        super().__init__(RULE, VOCAB, 256)
        self.asked = []

    def forward(self, batch: Batch, slabs: Seq[Slab], features: Seq[int] = ()) -> Scores:
        scores = super().forward(batch, slabs)
        self.asked.append(tuple(features))
        paths = self.paths(batch, slabs, range(batch.rows))
        for layer in features:
            scores.features[layer] = torch.stack([fingerprint(path, layer) for path in paths])
        return scores


def fingerprint(path: Seq[int], layer: int) -> Tensor:
    key = layer
    for token in path:
        key = (key * 31 + token) % 65537
    return torch.tensor([float(key), float(len(path))])


class Attentive(TreeDrafter):
    """Proposes random trees, and keeps all that it is told of each sequence."""

    def __init__(self, answers: Mapping[int, Seq[int]], needs: Needs, seed: int) -> None:
        super().__init__(self._grow, needs=needs)
        self.answers = answers  # for each first token of a prompt: prompt and answer
        self.dice = random.Random(seed)
        self.rows: dict[int, list[int]] = {}
        self.features: dict[int, dict[int, list[Tensor]]] = {}
        self.scored: dict[int, list[tuple[int, tuple[int, ...], list[int]]]] = {}
        self.last: dict[int, int] = {}
        self.accepted: dict[int, int] = {}
        self.proposed: dict[int, int] = {}

    def _grow(self, tokens: Seq[int], budget: int) -> TokenTree:
        right = self.answers[tokens[0]][len(tokens) :]
        return random_tree(self.dice, tokens[-1], right, budget, width=3, depth=5, vocab=VOCAB)

    def start(self, view: View, valid: int) -> None:
        super().start(view, valid)
        self.rows[view.id], self.scored[view.id], self.accepted[view.id] = [], [], 0
        self.features[view.id] = {layer: [] for layer in self.needs.features}

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        for view in views:
            assert len(self.rows[view.id]) == len(view.tokens) - 1
            assert self.last[view.id] == view.tokens[-1]
        trees = super().propose(views, budgets)
        for view, tree in zip(views, trees, strict=True):
            self.proposed[view.id] = len(tree)
        return trees

    def observe(self, outcomes: Seq[Outcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            rows = self.rows[outcome.id]
            assert outcome.start == len(rows)
            rows += outcome.rows
            self.accepted[outcome.id] += outcome.accepted
            assert set(outcome.features) == set(self.needs.features)
            for layer, given in outcome.features.items():
                assert given.shape == (len(outcome.rows), 2)
                self.features[outcome.id][layer] += list(given)
            if outcome.token is not None:
                self.last[outcome.id] = outcome.token
            for path, best in outcome.scored:
                self.scored[outcome.id].append((outcome.start, path, best))
            if outcome.scored:
                assert len(outcome.scored) == self.proposed.pop(outcome.id, 1)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize("needs", [Needs(features=(0, 3), top_k=4), Needs(features=(2,)), Needs(top_k=2)])
def test_every_committed_row_is_observed_once_and_in_order(needs: Needs, rows: int, lag: int) -> None:
    prompts = [[n, *range(20, 20 + 13 * n)] for n in range(3)]
    expected = [alone(RULE, prompt, max_tokens=20) for prompt in prompts]
    answers = {n: [*prompt, *e.output] for n, (prompt, e) in enumerate(zip(prompts, expected, strict=True))}
    target = Pathwise()
    run = ToyRun(RULE, target=target, max_batch_tokens=rows + 40, lag=lag)
    drafter = Attentive(answers, needs, seed=rows)
    plain = run.add([99], max_tokens=30)
    sequences = [
        run.add(prompt, drafter, piece_limit=rows, max_tokens=20, speculation={"num_speculative_tokens": 9})
        for prompt in prompts
    ]
    run.finish(*sequences, plain)
    for n, (sequence, reference) in enumerate(zip(sequences, expected, strict=True)):
        same(sequence, reference)
        whole = answers[n]
        heard = drafter.rows[sequence.id]
        # With a lag, passes under way when the last token is delivered go a little further.
        assert heard[: len(whole) - 1] == whole[: len(heard)][: len(whole) - 1]
        assert len(heard) >= len(whole) - 1
        assert drafter.accepted[sequence.id] >= sequence.record.accepted > 0
        for layer in needs.features:
            for place, given in enumerate(drafter.features[sequence.id][layer][: len(whole)]):
                assert torch.equal(given, fingerprint(whole[: place + 1], layer))
        rejected = 0
        for start, path, best in drafter.scored[sequence.id]:
            if start + 1 + len(path) <= len(whole) and start >= sequence.prompt_length:
                truth = RULE([*whole[: start + 1], *path]).topk(needs.top_k).indices
                assert best == truth.tolist()
                rejected += list(path) != list(whole[start + 1 : start + 1 + len(path)])
        assert (rejected > 0) == bool(needs.top_k)
    assert set(target.asked) == {needs.features} or not needs.features or set(target.asked) == {needs.features, ()}


def test_only_what_is_declared_is_computed() -> None:
    target = Pathwise()
    run = ToyRun(RULE, target=target)
    drafters: list[Any] = [
        Attentive({5: alone(RULE, [5]).tokens, 6: alone(RULE, [6]).tokens}, needs, 0)
        for needs in (Needs(features=(4, 1)), Needs(features=(1, 7), top_k=1), Needs())
    ]
    run.finish(run.add([5], drafters[2], max_tokens=3))
    assert set(target.asked) == {()}
    target.asked.clear()
    first, second = run.add([5], drafters[0], max_tokens=3), run.add([6], drafters[1], max_tokens=6)
    run.finish(first, second)
    assert target.asked[0] == (1, 4, 7)
    assert target.asked[-1] == (1, 7)


def test_a_prompt_piece_says_which_token_follows() -> None:
    heard: list[tuple[int, list[int], int | None]] = []

    class Listening(TreeDrafter):
        def observe(self, outcomes: Seq[Outcome]) -> None:
            heard.extend((outcome.start, list(outcome.rows), outcome.token) for outcome in outcomes)

    run = ToyRun(RULE, max_batch_tokens=4)
    sequence = run.add([1, 2, 3, 4, 5, 6], Listening(lambda tokens, budget: None), max_tokens=2)  # type: ignore[arg-type, return-value]
    run.finish(sequence)
    first, second = sequence.output
    assert heard == [(0, [1, 2, 3, 4], 5), (4, [5, 6], first), (6, [first], second)]
    heard.clear()
    scored = run.add([1, 2, 3], Listening(lambda tokens, budget: None), prompt_logprobs=0, max_tokens=0)  # type: ignore[arg-type, return-value]
    run.finish(scored)
    assert heard == [(0, [1, 2, 3], None)]


def test_a_slow_target_is_charged_to_verifying() -> None:
    clock = Clock()
    run = ToyRun(RULE, target=Timed(ToyTarget(RULE, VOCAB), clock, lambda rows: 2.0), clock=clock)
    sequence = run.add([1, 2, 3], max_tokens=4)
    run.finish(sequence)
    seconds = sequence.record.seconds
    assert (seconds.draft, seconds.verify, seconds.sample, seconds.other) == (0.0, 8.0, 0.0, 0.0)
