"""Lookahead decoding against the paper's algorithm, written down with its rows and masks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, Sampling
from paceline.drafters import Outcome, View
from paceline.drafters.lookahead import METHOD, LookaheadDrafter
from paceline.errors import DrafterError
from paceline.options import Speculation
from paceline.tree import MAX_NODES, Dropping
from tests.toys import VOCAB, ToyRun, alone, no_draw, path_rule, same, trials

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from paceline.tree import TokenTree

    Greedy = Callable[[list[int]], int]
    Pool = dict[int, list[tuple[int, ...]]]

SMALL = 9


def view(tokens: Seq[int], number: int = 0) -> View:
    return View(number, tokens, no_draw)


def greedy_of(seed: int, vocab: int = SMALL, memory: int = 2) -> Greedy:
    rule = path_rule(vocab, seed=seed, memory=memory)
    return lambda path: int(rule(path).argmax())


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(len(tree))]


class Session:
    """One greedy request: proposes, scores every node, commits, lets the drafter observe."""

    def __init__(self, drafter: LookaheadDrafter, greedy: Greedy, prompt: Seq[int], number: int = 0) -> None:
        self.drafter, self.greedy, self.number = drafter, greedy, number
        self.tokens = list(prompt)
        self.accepted = 0
        drafter.start(view(self.tokens, number), 0)

    def step(self, budget: int = MAX_NODES - 1) -> TokenTree:
        (tree,) = self.drafter.propose([view(self.tokens, self.number)], [budget])
        tree.check(10**6)
        assert len(tree) <= budget + 1
        assert tree.tokens[0] == self.tokens[-1]
        assert set(tree.origin[1:]) <= {"lookahead"}
        paths = paths_of(tree)
        best = {path: self.greedy([*self.tokens, *path]) for path in paths}
        path: tuple[int, ...] = ()
        while (*path, best[path]) in best:
            path = (*path, best[path])
        scored = [(p, [best[p]]) for p in paths]
        rows = [self.tokens[-1], *path]
        start = len(self.tokens) - 1
        self.tokens += [*path, best[path]]
        self.accepted += len(path)
        self.drafter.observe([Outcome(self.number, start, rows, len(path), best[path], {}, scored)])
        return tree


class Paper:
    """The window as in the authors' program: its rows, the first of them without the last committed token."""

    def __init__(self, window: int, level: int, guesses: int, first: Seq[int], greedy: Greedy) -> None:
        self.window, self.level, self.guesses, self.greedy = window, level, guesses, greedy
        self.rows: list[list[int]] = [list(first)]
        self.pool: Pool = {}

    def path(self, row: int, column: int) -> list[int]:
        """What a token of the window sees behind the last committed one, itself included."""
        return [*self.rows[0][:column], *(self.rows[level][column] for level in range(1, row + 1))]

    def step(self, tokens: Seq[int]) -> set[tuple[int, ...]]:
        """One iteration; returns the paths of all the rows that it scores."""
        last = len(self.rows) - 1
        columns = len(self.rows[0]) + 1
        seen = {tuple(self.path(row, column)) for column in range(columns) for row in range(last + 1)}
        seen |= {tail[:n] for tail in self.pool.get(tokens[-1], []) for n in range(len(tail) + 1)}
        new = [self.greedy([*tokens, *self.path(last, column)]) for column in range(columns)]
        if len(self.rows) < self.level - 1:
            self.rows = [self.rows[0][1:], *(row[1:] for row in self.rows[1:]), new[1:]]
        else:
            self.collect(tokens[-1], new)
            self.rows = [*self.rows[1:], new]
            self.rows[0] = self.rows[0][1:]
        return seen

    def collect(self, root: int, new: Seq[int]) -> None:
        for column in range(self.window):
            first = self.rows[0][column - 1] if column else root
            tail = (*(row[column] for row in self.rows[1:]), new[column])
            tails = self.pool.setdefault(first, [])
            if tail in tails:
                tails.remove(tail)
            tails.append(tail)
            del tails[: -self.guesses]


sizes = st.sampled_from([(7, 5, 7), (1, 2, 1), (3, 2, 2), (1, 3, 2), (2, 4, 1), (5, 4, 16), (1, 17, 1), (62, 2, 2)])


@trials(60)
@given(sizes=sizes, seed=st.integers(0, 999), steps=st.integers(1, 40))
def test_pool_and_rows_are_those_of_the_paper(sizes: tuple[int, int, int], seed: int, steps: int) -> None:
    window, level, guesses = sizes
    greedy = greedy_of(seed, memory=1 + seed % 3)
    session = Session(LookaheadDrafter(*sizes), greedy, [seed % SMALL, 3, 1])
    first = [column[0] for column in session.drafter._windows[0].columns[1:]]
    assert set(first) <= {seed % SMALL, 3, 1}
    assert len(first) == window + level - 3
    paper = Paper(window, level, guesses, first, greedy)
    whole = all((window + level - 2 - fill) * (fill + 1) <= MAX_NODES for fill in range(level - 1))
    for _ in range(steps):
        rows = paper.step(list(session.tokens))
        tree = session.step()
        if whole:
            assert set(paths_of(tree)) == rows
            assert session.drafter._windows[0].pool == paper.pool
    assert all(len(tail) == level - 1 for tails in session.drafter._windows[0].pool.values() for tail in tails)
    assert all(len(tails) <= guesses for tails in session.drafter._windows[0].pool.values())


def test_a_worked_example() -> None:
    """The target counts upwards, whatever came before: W = 2, N = 3, G = 1."""
    session = Session(LookaheadDrafter(2, 3, 1), lambda path: path[-1] + 1, [10])
    window = session.drafter._windows[0]
    assert window.columns == [[10], [10], [10]]
    assert paths_of(session.step()) == [(), (10,), (10, 10)]
    # Each column has a second level; the first column went with its place.
    assert session.tokens == [10, 11]
    assert window.columns == [[10, 11], [10, 11]]
    assert window.pool == {}
    assert paths_of(session.step()) == [(), (11,), (10,), (10, 11)]
    # The columns' n-grams: root 11, level 1, and what came after; column 1 began with 10.
    assert window.pool == {11: [(11, 12)], 10: [(11, 12)]}
    assert window.columns == [[11, 12], [11, 12]]
    assert session.tokens == [10, 11, 12]
    assert paths_of(session.step()) == [(), (12,), (11,), (11, 12)]
    assert window.columns == [[12, 13], [12, 13]]
    assert session.tokens == [10, 11, 12, 13]
    assert window.pool == {11: [(12, 13)], 10: [(11, 12)], 12: [(12, 13)]}


def test_guesses_come_first_the_latest_of_them_before_all() -> None:
    drafter = LookaheadDrafter(1, 3, 3)
    drafter.start(view([5]), 0)
    drafter._windows[0].pool = {5: [(1, 2), (3, 4), (1, 6)]}
    drafter._windows[0].columns = [[5, 8]]
    for budget, tokens in [
        (0, []),
        (1, [1]),
        (2, [1, 6]),
        (3, [1, 6, 3]),
        (5, [1, 6, 3, 4, 2]),
        (9, [1, 6, 3, 4, 2, 8]),
    ]:
        (tree,) = drafter.propose([view([5])], [budget])
        assert tree.tokens[1:] == tokens
    assert tree.parents == [-1, 0, 1, 0, 3, 1, 0]
    assert min(tree.survival[:6]) > tree.survival[6] > 0.0
    assert [tree.best(n, Dropping()).tokens for n in (2, 6)] == [[5, 1], [5, 1, 6, 3, 4, 2]]


@trials(40)
@given(budgets=st.lists(st.integers(0, 63), max_size=60), seed=st.integers(0, 99), sizes=sizes)
def test_with_any_budget_trees_are_valid_and_something_is_learned(
    budgets: list[int], seed: int, sizes: tuple[int, int, int]
) -> None:
    greedy = greedy_of(seed)
    session = Session(LookaheadDrafter(*sizes), greedy, [1, 2, 3])
    for budget in budgets:
        session.step(budget)
    for place in range(3, len(session.tokens)):
        assert session.tokens[place] == greedy(session.tokens[:place])
    columns = session.drafter._windows[0].columns
    assert len(columns) >= sizes[0]
    assert all(1 <= len(column) <= sizes[1] - 1 for column in columns)


@pytest.mark.parametrize("budget", [4, 5, 12, 27, 40])
def test_a_small_budget_learns_too(budget: int) -> None:
    """Of the window as many columns move as there is room for, in turn."""
    session = Session(LookaheadDrafter(), greedy_of(4, memory=1), [1, 2, 3])
    for _ in range(60):
        session.step(budget)
    assert session.accepted > 0


def test_a_step_without_drafts_changes_nothing() -> None:
    session = Session(LookaheadDrafter(), greedy_of(4), [1, 2, 3])
    for _ in range(3):
        session.step()
    columns = [list(column) for column in session.drafter._windows[0].columns]
    session.step(0)
    after = session.drafter._windows[0].columns
    assert [column[1:] for column in after] == [column[1:] for column in columns]
    session.drafter.observe([Outcome(0, 0, [1, 2, 3], 0, 4)])
    assert [column[1:] for column in after] == [column[1:] for column in columns]


def test_forks_go_their_own_way_and_nothing_is_left() -> None:
    drafter = LookaheadDrafter(3, 3, 2)
    session = Session(drafter, greedy_of(8), [1, 2], number=1)
    for _ in range(6):
        session.step()
    drafter.fork(1, view(session.tokens, 2))
    twin = drafter.propose([view(session.tokens, 2)], [63])[0]
    assert paths_of(twin) == paths_of(session.step())
    assert paths_of(drafter.propose([view(list(session.tokens[:-1]) + twin.tokens[:1], 2)], [63])[0]) == paths_of(twin)
    drafter.rewind(1, 0)
    assert drafter.length(1) == 0
    for number in (1, 2, 2, 7):
        drafter.release(number)
    assert not drafter._windows


def test_a_column_that_begins_like_a_deep_guess_is_no_likelier() -> None:
    drafter = LookaheadDrafter(1, 33, 1)
    drafter.start(view([5]), 0)
    drafter._windows[0].pool = {5: [tuple(range(100, 132))]}
    drafter._windows[0].columns = [[5, *range(100, 130), 7]]
    (tree,) = drafter.propose([view([5])], [63])
    tree.check(200)
    assert tree.tokens[1:] == [*range(100, 132), 7]
    assert tree.parents[-1] == 30


@pytest.mark.parametrize("sizes", [(8, 5, 8), (1, 2, 1), (62, 2, 2), (1, 33, 1)])
def test_as_large_as_a_tree_may_be(sizes: tuple[int, int, int]) -> None:
    LookaheadDrafter(*sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 5, 9), "trees of 68 nodes.*at most 64"),
        ((63, 2, 2), "65 nodes.*at most 64"),
        ((0, 5, 7), "not 0, 7 and 5"),
        ((7, 1, 7), "not 7, 7 and 1"),
        ((7, 5, 0), "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        LookaheadDrafter(*sizes)


def test_it_is_made_from_its_options() -> None:
    nothing: Any = None
    drafter: Any = METHOD.make(Speculation(lookahead_window=2, lookahead_ngram=3, lookahead_guesses=4), nothing)
    assert (drafter._width, drafter._levels, drafter._guesses) == (2, 2, 4)
    assert METHOD.options == ("lookahead_window", "lookahead_ngram", "lookahead_guesses")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("budget", [5, 63])
def test_answers_are_plain(budget: int, temperature: float, lag: int) -> None:
    rule = path_rule(VOCAB, seed=73, memory=1, spread=6.0)
    prompts = [[0], [5, 6, 7, 5, 6], [0, 0, 9] * 20]
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": 60, "ignore_eos": True}
    drafter = LookaheadDrafter()
    run = ToyRun(rule, lag=lag, max_batch_tokens=256)
    speculation = {"num_speculative_tokens": budget}
    sequences = [
        run.add(prompt, drafter, seed=n, speculation=speculation, **options) for n, prompt in enumerate(prompts)
    ]
    run.finish(*sequences)
    for n, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        same(sequence, alone(rule, prompt, seed=n, **options))
    assert sum(sequence.record.accepted for sequence in sequences) > 0
    assert sum(sequence.record.drafted for sequence in sequences) > 100
    run.check_empty()
    assert not drafter._windows


def test_a_target_of_short_memory_is_looked_ahead_of() -> None:
    """What follows depends on one token alone, so every n-gram that the window writes is one of the answer to come."""
    greedy = greedy_of(3, vocab=40, memory=1)
    session = Session(LookaheadDrafter(), greedy, random.Random(1).sample(range(40), 6))
    steps = 0
    while len(session.tokens) < 120:
        session.step()
        steps += 1
    assert session.accepted / steps > 1.0


def test_not_one_token_of_the_default_model_differs(llm: LLM) -> None:
    prompts = ["def fibonacci(n):\n", "The rain fell on the race, and the rain"]
    for sampling in (
        Sampling(temperature=0.0, max_tokens=64),
        Sampling(temperature=0.8, top_p=0.95, seed=5, max_tokens=64),
    ):
        plain = llm.generate(prompts, sampling, speculation=False)
        method = {"method": "lookahead", "num_speculative_tokens": 55, "adaptive": False}
        drafted = llm.generate(prompts, sampling, speculation=method)
        assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
        assert all(a.record.drafted for a in drafted)
        assert sum(a.record.accepted for a in drafted) > 0
