"""Tiers 0 and 1 of the rule ``coupled``.

The tokens have exactly the target's distribution, and are for each seed those of plain decoding whatever drafts. What
would break this is caught: the engine is broken on purpose, in many ways, and the checks of this suite must see it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.batch import Rows
from paceline.choose import Chooser
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine import Engine
from paceline.options import Speculation
from paceline.pages import PagePool, PageTable
from paceline.request import Request
from paceline.rules import LogitRules
from paceline.sampling import Sampling
from paceline.tree import Drawn, TokenTree
from paceline.verify import Verdict, Verifier
from tests import test_drafters_draft_model, test_engine_sampling, test_engine_trees
from tests.toys import (
    VOCAB,
    ScriptedDrafter,
    StrictTarget,
    ToyRun,
    TreeDrafter,
    alone,
    mix,
    oracle,
    path_rule,
    random_tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import Drafter

PROMPT = [0, 1, 0]


def drawn(rule: Callable[[list[int]], Tensor], vocab: int, seed: int, count: int, **sampling: Any) -> list[int]:
    """Plain decoding without an engine: one draw after another."""
    settings = Sampling(**{"temperature": 1.0, "max_tokens": count, **sampling})
    tokens = list(PROMPT)
    request = Request(
        prompt=tuple(PROMPT),
        sampling=settings,
        seed=seed,
        choice=0,
        stop_ids=frozenset(),
        limit=len(PROMPT) + count,
        speculation=Speculation(),
        piece_limit=64,
    )
    choose = Chooser(request, LogitRules(settings, PROMPT, vocab), tokens)
    for _ in range(count):
        tokens.append(choose(rule(tokens), ()))
    return tokens[len(PROMPT) :]


def exact(
    rule: Callable[[list[int]], Tensor],
    vocab: int,
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> dict[tuple[int, ...], float]:
    """The target's probability of every answer of ``count`` tokens."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for answer, probability in joint.items():
            row = torch.softmax(rule([*PROMPT, *answer]).double() / temperature, 0)
            ranked = sorted(range(vocab), key=lambda t, r=row: -float(r[t]))  # type: ignore[misc]
            kept = ranked[: top_k or vocab]
            total = sum(float(row[t]) for t in kept)
            mass, best = 0.0, []
            for token in kept:
                best.append(token)
                mass += float(row[token])
                if mass >= top_p * total:
                    break
            for token in best:
                longer[(*answer, token)] = probability * float(row[token]) / mass
        joint = longer
    return joint


def fits(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> bool:
    """Chi-square at a size of 5e-4 (Wilson and Hilferty's normal form), cells below 5 expected pooled."""
    total = sum(counts.values())
    if set(counts) - set(expected):
        return False
    cells = [(counts[answer], total * p) for answer, p in expected.items()]
    small = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if sum(e for _, e in small) > 1:
        cells.append((sum(c for c, _ in small), sum(e for _, e in small)))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.29 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic < limit


def check_joint(vocab: int, count: int, sampling: dict[str, Any], seeds: int) -> None:
    for table in range(3):
        rule = path_rule(vocab, seed=90 + table, spread=1.0)
        counts = Counter(tuple(drawn(rule, vocab, seed, count, **sampling)) for seed in range(seeds))
        expected = exact(rule, vocab, count, **sampling)
        assert math.isclose(sum(expected.values()), 1.0, rel_tol=1e-9)
        assert fits(counts, expected)
        # The same counts do not fit the same table at another temperature, nor another table.
        warmer = {**sampling, "temperature": 3.0 * sampling.get("temperature", 1.0)}
        assert not fits(counts, exact(rule, vocab, count, **warmer))
        assert not fits(counts, exact(path_rule(vocab, seed=99, spread=1.0), vocab, count))


SETTINGS: list[tuple[int, int, dict[str, Any]]] = [
    (4, 3, {}),
    (5, 2, {"temperature": 0.6}),
    (5, 2, {"temperature": 1.7, "top_k": 3}),
    (5, 2, {"temperature": 1.2, "top_p": 0.8}),
]


@pytest.mark.parametrize(("vocab", "count", "sampling"), SETTINGS)
def test_the_joint_distribution_is_the_targets(vocab: int, count: int, sampling: dict[str, Any]) -> None:
    """3000 seeds find, in 95 of 100 cases, a total variation of 0.08 over 64 cells and of 0.06 over 25."""
    check_joint(vocab, count, sampling, 3000)


@pytest.mark.long
@pytest.mark.parametrize(("vocab", "count", "sampling"), SETTINGS)
def test_the_joint_distribution_is_the_targets_closely(vocab: int, count: int, sampling: dict[str, Any]) -> None:
    """50,000 seeds find a total variation of 0.02."""
    check_joint(vocab, count, sampling, 50_000)


def small_drafters(answer: Seq[int], seed: int, vocab: int, length: int) -> list[Drafter]:
    dice = random.Random(seed)
    other = StrictTarget(path_rule(vocab, seed=7, spread=1.0), vocab)
    return [
        ScriptedDrafter(oracle(answer, len(PROMPT))),
        ScriptedDrafter(mix(answer, len(PROMPT), 0.5, seed)) if seed % 2 else NgramDrafter(1, 2),
        TreeDrafter(
            lambda t, b: random_tree(dice, t[-1], answer[len(t) - len(PROMPT) :], b, width=3, depth=length, vocab=vocab)
        ),
        DraftModelDrafter(other, [PagePool(other.groups[0], 8)], 64),
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab", [4, 5])
def test_every_seed_gives_the_plain_tokens(vocab: int, length: int) -> None:
    rule = path_rule(vocab, seed=95, spread=1.0)

    for seed in range(12):
        answer = drawn(rule, vocab, seed, 9)
        for drafter in small_drafters(answer, seed, vocab, length):
            if isinstance(drafter, ScriptedDrafter):
                inner = drafter.rule
                drafter.rule = lambda t, b, inner=inner: [token % vocab for token in inner(t, b)]  # type: ignore[misc]
            run = ToyRun(rule, vocab=vocab, max_model_len=64, pages=8)
            sequence = run.add(
                PROMPT,
                drafter,
                temperature=1.0,
                seed=seed,
                max_tokens=9,
                speculation={"num_speculative_tokens": length},
            )
            run.finish(sequence)
            assert sequence.output == answer


def test_coupled_drafts_are_accepted_almost_as_often_as_can_be() -> None:
    """The chance that two tables with common noise agree is at least (1 - TV) / (1 + TV), and at most 1 - TV."""
    vocab = 5
    target, draft = path_rule(vocab, seed=96, spread=1.0), path_rule(vocab, seed=97, spread=1.0)
    agreed, n = 0, 3000
    for seed in range(n):
        agreed += drawn(target, vocab, seed, 1) == drawn(draft, vocab, seed, 1)
    p, q = (torch.softmax(rule(PROMPT).double(), 0) for rule in (target, draft))
    distance = 0.5 * float((p - q).abs().sum())
    low, high = (1 - distance) / (1 + distance), 1 - distance
    slack = 4 * math.sqrt(0.25 / n)
    assert low - slack < agreed / n < high + slack
    assert distance > 0.1


# What follows breaks the engine on purpose, and shows that this suite sees it.


def accepts_a_child_that_differs(patch: pytest.MonkeyPatch) -> None:
    right = Verifier.accept

    def accept(self: Verifier, sequence: Any, tree: TokenTree, logits: Tensor) -> Verdict:
        verdict = right(self, sequence, tree, logits)
        children = tree.children(verdict.path[-1])
        if not children or len(verdict.tokens) < 2:
            return verdict
        tokens = [*verdict.tokens[:-1], tree.tokens[children[0]], verdict.tokens[-1]]
        return replace(verdict, path=[*verdict.path, children[0]], tokens=tokens)

    patch.setattr(Verifier, "accept", accept)


def draws_a_draft_with_the_noise_of_another_place(patch: pytest.MonkeyPatch) -> None:
    right = Chooser.draft

    def draft(self: Chooser, rows: Tensor, paths: Seq[Seq[int]], *rest: Any, **more: Any) -> list[Drawn]:
        return right(self, rows, [[*path, 0] for path in paths], *rest, **more)

    patch.setattr(Chooser, "draft", draft)


def judges_with_the_noise_of_the_node_instead_of_its_depth(patch: pytest.MonkeyPatch) -> None:
    def accept(self: Verifier, sequence: Any, tree: TokenTree, logits: Tensor) -> Verdict:
        node, nodes, tokens = 0, [0], []
        while True:
            token = sequence.choose(logits[node], [0] * node)
            tokens.append(token)
            following = [child for child in tree.children(node) if tree.tokens[child] == token]
            if not following:
                return Verdict(nodes, tokens, bool(tree.children(node)), [], [])
            node = following[0]
            nodes.append(node)

    patch.setattr(Verifier, "accept", accept)


def leaves_the_rows_where_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageTable, "commit", lambda self, base, path: None)


def commits_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    right = PageTable.commit

    def commit(self: PageTable, base: int, path: Seq[int]) -> None:
        right(self, base, [max(0, node - (node > place)) for place, node in enumerate(path)])

    patch.setattr(PageTable, "commit", commit)


def moves_rows_one_by_one_from_the_end(patch: pytest.MonkeyPatch) -> None:
    def commit(self: PageTable, base: int, path: Seq[int]) -> None:
        for place in range(len(path) - 1, -1, -1):
            if path[place] != place:
                self.pool.slab.move_rows(self.tensor, [base + path[place]], [base + place])

    patch.setattr(PageTable, "commit", commit)


def lets_siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenTree, "masks", lambda self: [(1 << (n + 1)) - 1 for n in range(len(self))])


def leaves_a_rejected_row_visible(patch: pytest.MonkeyPatch) -> None:
    right = Verifier.accept

    def accept(self: Verifier, sequence: Any, tree: TokenTree, logits: Tensor) -> Verdict:
        verdict = right(self, sequence, tree, logits)
        if verdict.missed:
            sequence.filled += 1
        return verdict

    patch.setattr(Verifier, "accept", accept)


def counts_positions_by_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenTree, "depths", lambda self: list(range(len(self))))


def drops_a_page_too_early(patch: pytest.MonkeyPatch) -> None:
    right = PageTable.drop_before
    patch.setattr(PageTable, "drop_before", lambda self, row: right(self, row + 16))


def forgets_the_path_in_penalties(patch: pytest.MonkeyPatch) -> None:
    right = LogitRules.apply
    patch.setattr(
        LogitRules, "apply", lambda self, row, output, path=(), counts=None: right(self, row, output, (), counts)
    )


def counts_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    right = Verifier.accept

    def accept(self: Verifier, sequence: Any, tree: TokenTree, logits: Tensor) -> Verdict:
        sequence.choose._counts.commit(tree.tokens[1:])
        return right(self, sequence, tree, logits)

    patch.setattr(Verifier, "accept", accept)


def looks_for_a_stop_at_the_end_of_a_step_alone(patch: pytest.MonkeyPatch) -> None:
    right = Engine._emit

    def emit(self: Any, sequence: Any, tree: TokenTree, verdict: Verdict, step: int) -> int:
        for token in verdict.tokens[:-1]:
            sequence.delivered += 1
            sequence.text.push(token, silent=True)
        last = replace(verdict, path=[0], tokens=verdict.tokens[-1:], logprobs=verdict.logprobs[-1:])
        return len(verdict.tokens) - 1 + right(self, sequence, tree, last, step)

    patch.setattr(Engine, "_emit", emit)


def reads_logits_one_row_off(patch: pytest.MonkeyPatch) -> None:
    right = Verifier.accept

    def accept(self: Verifier, sequence: Any, tree: TokenTree, logits: Tensor) -> Verdict:
        return right(self, sequence, tree, logits.roll(1, 0))

    patch.setattr(Verifier, "accept", accept)


def scores_the_wrong_row_of_a_prompt(patch: pytest.MonkeyPatch) -> None:
    right = Rows.batch

    def batch(self: Rows) -> Any:
        made = right(self)
        return replace(
            made, context=made.context.clamp(min=2) - 1 if int(made.visible.abs().sum()) == 0 else made.context
        )

    patch.setattr(Rows, "batch", batch)


def trees() -> None:
    test_engine_trees.test_accepted_rows_that_are_scattered_move_together(9, "whole")


def windows() -> None:
    test_engine_trees.test_accepted_rows_that_are_scattered_move_together(9, "window")


def own_drafter() -> None:
    test_drafters_draft_model.test_the_target_as_its_own_drafter_is_accepted_fully(5, 1, 0.8, 0)


def half_wrong() -> None:
    rule = path_rule(VOCAB, seed=98)
    expected = alone(rule, PROMPT, temperature=0.8, seed=1)
    run = ToyRun(rule)
    drafter = ScriptedDrafter(mix(expected.output, len(PROMPT), 0.5))
    sequence = run.add(PROMPT, drafter, temperature=0.8, seed=1)
    run.finish(sequence)
    assert sequence.output == expected.output


def sampled_trees() -> None:
    rule = path_rule(VOCAB, seed=98)
    expected = alone(rule, PROMPT, temperature=1.0, seed=1)
    run = ToyRun(rule)
    drafter = TreeDrafter(test_engine_trees.scattered(expected.output, len(PROMPT)))
    sequence = run.add(PROMPT, drafter, temperature=1.0, seed=1)
    run.finish(sequence)
    assert sequence.output == expected.output


def penalties() -> None:
    test_engine_sampling.test_penalties({"frequency_penalty": 0.8}, 0.0)


def stops() -> None:
    test_engine_sampling.test_stop_ids_and_ignored_ends(2)


def prompts() -> None:
    assert alone(
        path_rule(5, seed=95, spread=1.0), PROMPT, vocab=5, temperature=1.0, seed=4, max_tokens=9
    ).output == drawn(path_rule(5, seed=95, spread=1.0), 5, 4, 9)


MUTANTS: list[tuple[Any, Callable[[], None]]] = [
    (accepts_a_child_that_differs, half_wrong),
    (draws_a_draft_with_the_noise_of_another_place, own_drafter),
    (judges_with_the_noise_of_the_node_instead_of_its_depth, sampled_trees),
    (leaves_the_rows_where_they_are, trees),
    (commits_the_wrong_row, trees),
    (moves_rows_one_by_one_from_the_end, trees),
    (lets_siblings_see_each_other, trees),
    (leaves_a_rejected_row_visible, half_wrong),
    (counts_positions_by_rows, trees),
    (drops_a_page_too_early, windows),
    (forgets_the_path_in_penalties, penalties),
    (counts_what_was_rejected, penalties),
    (looks_for_a_stop_at_the_end_of_a_step_alone, stops),
    (reads_logits_one_row_off, half_wrong),
    (scores_the_wrong_row_of_a_prompt, prompts),
]


@pytest.mark.parametrize("mutant", range(len(MUTANTS)), ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_wrong_variant_is_caught(mutant: int, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, check = MUTANTS[mutant]
    check()
    breaks(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        check()
    monkeypatch.undo()
    check()
