"""Branching trees on the toy target, which reads its path back out of the cache: whatever a drafter proposes, not one
token differs from plain decoding."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tree import TokenTree
from tests.test_tree import broken
from tests.toys import VOCAB, PairTarget, ToyRun, TreeDrafter, alone, path_rule, random_tree, same, trials

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from paceline.request import Sequence

RULE = path_rule(VOCAB, seed=2)
PROMPT = list(b"riders in a row")


def growing(answer: Seq[int], start: int, seed: int, width: int, depth: int) -> Callable[[Seq[int], int], TokenTree]:
    dice = random.Random(seed)

    def rule(tokens: Seq[int], budget: int) -> TokenTree:
        right = answer[len(tokens) - start :]
        return random_tree(dice, tokens[-1], right, budget, width=width, depth=depth, vocab=VOCAB)

    return rule


def scattered(answer: Seq[int], start: int) -> Callable[[Seq[int], int], TokenTree]:
    """The right chain, a wrong sibling before each of its nodes: no two accepted rows lie side by side."""

    def rule(tokens: Seq[int], budget: int) -> TokenTree:
        tree = TokenTree.root(tokens[-1])
        parent = 0
        for token in answer[len(tokens) - start :][: budget // 2]:
            tree.add(parent, (token + 1) % VOCAB, tree.survival[parent], "tree")
            parent = tree.add(parent, token, tree.survival[parent], "tree")
        return tree

    return rule


@trials(80)
@given(
    seed=st.integers(0, 2**32),
    width=st.integers(1, 4),
    depth=st.integers(1, 8),
    budget=st.integers(1, 63),
    temperature=st.sampled_from([0.0, 0.9]),
    length=st.integers(1, 20),
)
def test_random_trees(seed: int, width: int, depth: int, budget: int, temperature: float, length: int) -> None:
    prompt = PROMPT[:length]
    expected = alone(RULE, prompt, temperature=temperature, seed=seed, logprobs=1)
    run = ToyRun(RULE)
    drafter = TreeDrafter(growing(expected.output, length, seed, width, depth))
    sequence = run.add(
        prompt,
        drafter,
        speculation={"num_speculative_tokens": budget},
        temperature=temperature,
        seed=seed,
        logprobs=1,
    )
    run.finish(sequence)
    same(sequence, expected)
    run.check_empty()


@pytest.mark.parametrize("budget", [2, 9, 31, 32, 62, 63])
@pytest.mark.parametrize("target", ["whole", "window", "pair"])
def test_accepted_rows_that_are_scattered_move_together(budget: int, target: str) -> None:
    made: dict[str, dict[str, Any]] = {
        "whole": {},
        "window": {"window": 8},
        "pair": {"target": PairTarget(RULE, VOCAB, 256, 8)},
    }
    expected = alone(RULE, PROMPT, max_tokens=150, **made[target])
    run = ToyRun(RULE, **made[target])
    drafter = TreeDrafter(scattered(expected.output, len(PROMPT)))
    sequence = run.add(PROMPT, drafter, speculation={"num_speculative_tokens": budget}, max_tokens=150)
    run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.accepted > 100 * budget // (budget + 2)
    assert sequence.record.drafted - sequence.record.accepted >= sequence.record.accepted


@trials(50)
@given(
    seed=st.integers(0, 2**32),
    window=st.sampled_from([1, 8, 16]),
    length=st.sampled_from([1, 7, 8, 15, 16, 17, 70, 120]),
    rows=st.sampled_from([1, 3, 17, 64]),
    lag=st.integers(0, 2),
    pair=st.booleans(),
)
def test_windows(seed: int, window: int, length: int, rows: int, lag: int, pair: bool) -> None:
    """The prompt is longer and shorter than the window; pages before the window are given up on the way."""
    prompt = [(7 * i + seed) % 256 for i in range(length)]
    target = PairTarget(RULE, VOCAB, 256, window) if pair else None
    expected = alone(RULE, prompt, window=window, target=target, max_tokens=60)
    run = ToyRun(RULE, window=window, max_batch_tokens=rows, lag=lag, target=target)
    drafter = TreeDrafter(growing(expected.output, length, seed, 3, 8))
    sequence = run.add(prompt, drafter, speculation={"num_speculative_tokens": 20}, max_tokens=60)
    run.finish(sequence)
    same(sequence, expected)
    run.check_empty()


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("window", [8, 16])
def test_the_cache_of_a_window_is_bounded(window: int, lag: int) -> None:
    """Pages behind the window are free again, so that a sequence of any length fits a small pool."""
    budget = 15
    expected = alone(RULE, PROMPT, window=window, max_tokens=480, max_model_len=512)
    run = ToyRun(RULE, window=window, lag=lag, max_model_len=512)
    drafter = TreeDrafter(scattered(expected.output, len(PROMPT)))
    sequence = run.add(PROMPT, drafter, speculation={"num_speculative_tokens": budget}, max_tokens=480)
    most = 0
    while sequence.finish_reason is None:
        run.engine.step()
        run.check()
        most = max(most, run.pool.pages - run.pool.free)
    same(sequence, expected)
    assert most <= (window + (lag + 1) * (budget + 1)) // 16 + 3


@pytest.mark.parametrize("pages", [3, 4, 6])
def test_a_window_and_a_lag_make_do_with_little(pages: int) -> None:
    """The largest trees, two passes behind, in a pool of few more pages than the window has."""
    expected = alone(RULE, PROMPT, window=8, max_tokens=480, max_model_len=512)
    run = ToyRun(RULE, window=8, lag=2, max_model_len=512, pages=pages)
    drafter = TreeDrafter(scattered(expected.output, len(PROMPT)))
    sequence = run.add(PROMPT, drafter, speculation={"num_speculative_tokens": 63}, max_tokens=480)
    run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.accepted > 0


def hostile(kind: str, answer: Seq[int], start: int) -> Callable[[Seq[int], int], Any]:
    """Right but for one thing at every step."""

    def rule(tokens: Seq[int], budget: int) -> Any:
        right = list(answer[len(tokens) - start :][:budget])
        tree = TokenTree.chain(tokens[-1], right, [0.5] * len(right), "tree")
        if kind == "wrong root":
            tree.tokens[0] = (tokens[-1] + 1) % VOCAB
        elif kind == "an id beyond the vocabulary":
            tree.tokens[-1] = VOCAB
        elif kind == "no tree":
            return None
        elif kind == "a list":
            return right
        elif kind == "a large tree that rises":
            tree.survival = [0.1, *([0.9] * len(right))]
            for _ in range(5):
                tree.add(0, VOCAB - 1 - len(tree), 0.95, "tree")
        elif kind == "a large tree of an orphan":
            tree = TokenTree.chain(tokens[-1], [1] * 40, [0.5] * 40, "tree")
            tree.parents[30] = 35
        elif kind == "a large ragged tree":
            tree = TokenTree.chain(tokens[-1], [1] * 40, [0.5] * 20, "tree")
        else:
            tree = broken()[kind]
            if tree.tokens:
                tree.tokens[0] = tokens[-1]
        return tree

    return rule


KINDS = [
    *(kind for kind in broken() if kind != "an id beyond the vocabulary"),
    *("wrong root", "an id beyond the vocabulary", "no tree", "a list"),
    *("a large tree that rises", "a large tree of an orphan", "a large ragged tree"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_proposal_that_cannot_be_verified_is_left_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(RULE, PROMPT, max_tokens=8)
    run = ToyRun(RULE)
    drafter = TreeDrafter(hostile(kind, expected.output, len(PROMPT)))
    with caplog.at_level(logging.WARNING):
        sequence = run.add(PROMPT, drafter, max_tokens=8)
        run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.steps == 7
    assert sequence.record.drafted == sequence.record.accepted == 0
    # The last step has no room for a draft, so that nothing is asked; every other one is worth one line.
    assert len(caplog.records) == 6
    assert all("tree" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("length", [6, 64, 1000])
def test_a_proposal_that_is_too_long_is_cut(length: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(RULE, PROMPT)

    def rule(tokens: Seq[int], budget: int) -> TokenTree:
        right = [*expected.output[len(tokens) - len(PROMPT) :], *([1] * length)][:length]
        return TokenTree.chain(tokens[-1], right, [0.9**d for d in range(length)], "tree")

    run = ToyRun(RULE)
    sequence = run.add(PROMPT, TreeDrafter(rule))
    run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.accepted == sequence.record.drafted
    assert sequence.record.mean_accepted_length == pytest.approx(31 / sequence.record.steps)
    assert not caplog.records


def test_the_likeliest_nodes_are_verified() -> None:
    """Of a tree twice as large as the budget the nodes of highest survival are taken, wherever they stand."""
    expected = alone(RULE, PROMPT)

    def rule(tokens: Seq[int], budget: int) -> TokenTree:
        tree = TokenTree.root(tokens[-1])
        for token in range(budget):
            tree.add(0, token, 0.01, "tree")
        parent = 0
        for token in expected.output[len(tokens) - len(PROMPT) :][:budget]:
            if token not in [tree.tokens[n] for n in tree.children(parent)]:
                parent = tree.add(parent, token, tree.survival[parent] * 0.9, "tree")
            else:
                break
        return tree

    run = ToyRun(RULE)
    sequence = run.add(PROMPT, TreeDrafter(rule))
    run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.accepted > 15


def test_an_invalid_tree_does_not_spoil_its_neighbours() -> None:
    expected: list[Sequence] = [alone(RULE, [n]) for n in range(3)]
    answers = {n: sequence.output for n, sequence in enumerate(expected)}

    def rule(tokens: Seq[int], budget: int) -> TokenTree:
        right = answers[tokens[0]][len(tokens) - 1 :][:budget]
        tree = TokenTree.chain(tokens[-1], right, [0.5] * len(right), "tree")
        if tokens[0] == 1:
            tree.parents[-1] = 99
        return tree

    run, drafter = ToyRun(RULE), TreeDrafter(rule)
    sequences = [run.add([n], drafter) for n in range(3)]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    assert [s.record.accepted > 0 for s in sequences] == [True, False, True]
