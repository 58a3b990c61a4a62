"""Prompt lookup against a search that is plain to see."""

from __future__ import annotations

import random
from collections import UserDict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import View
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import DrafterError
from tests.toys import VOCAB, ToyRun, alone, no_draw, path_rule, same, trials

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq


def view(tokens: Seq[int], number: int = 0) -> View:
    return View(number, tokens, no_draw)


def drafts(drafter: NgramDrafter, tokens: Seq[int], budget: int, number: int = 0) -> list[int]:
    (tree,) = drafter.propose([view(tokens, number)], [budget])
    tree.check(10**6)
    assert tree.tokens[0] == tokens[-1]
    assert tree.parents == list(range(-1, len(tree) - 1))
    assert set(tree.origin[1:]) <= {"ngram"}
    return tree.tokens[1:]


def proposed(tokens: Seq[int], budget: int, shortest: int, longest: int) -> list[int]:
    drafter = NgramDrafter(shortest, longest)
    drafter.start(view(tokens), 0)
    return drafts(drafter, tokens, budget)


def searched(tokens: Seq[int], budget: int, shortest: int, longest: int) -> list[int]:
    """The longest suffix that occurred before, of its places the latest, and what followed there, over and over."""
    n = len(tokens)
    for size in range(min(longest, n - 1), shortest - 1, -1):
        for start in range(n - size - 1, -1, -1):
            if list(tokens[start : start + size]) == list(tokens[n - size :]):
                followed = list(tokens[start + size :])
                return (followed * budget)[:budget]
    return []


tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=40)
bounds = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@trials(150)
@given(tokens=tokens_of, budget=st.integers(0, 10), bounds=bounds)
def test_it_finds_what_a_search_finds(tokens: list[int], budget: int, bounds: tuple[int, int]) -> None:
    assert proposed(tokens, budget, *bounds) == searched(tokens, budget, *bounds)


@trials(80)
@given(tokens=tokens_of, bounds=bounds, seed=st.integers(0, 999))
def test_an_index_that_grows_is_the_same_as_a_new_one(tokens: list[int], bounds: tuple[int, int], seed: int) -> None:
    """Asked after any number of tokens, forked, rewound and released on the way."""
    dice = random.Random(seed)
    drafter = NgramDrafter(*bounds)
    drafter.start(view(tokens[:1]), 0)
    number, length = 0, 1
    while length < len(tokens):
        assert drafts(drafter, tokens[:length], 4, number) == searched(tokens[:length], 4, *bounds)
        assert drafter.length(number) <= length
        action = dice.randrange(4)
        if action == 0:
            drafter.fork(number, view(tokens[:length], number + 1))
            drafter.release(number)
            number += 1
        elif action == 1:
            # What comes after the rewind may be something else than before it.
            kept = dice.randint(0, length)
            drafter.rewind(number, kept)
            assert drafter.length(number) <= kept
            tokens[kept:] = [dice.randrange(4) for _ in tokens[kept:]]
            length = max(1, kept)
        length += dice.randint(1, 5)
    drafter.release(number)
    drafter.release(number)
    assert not drafter._indices


def test_the_longest_match_counts_then_the_latest() -> None:
    #          long match, 5 after it           short match, 9 after it
    tokens = [1, 2, 3, 5, 0, 7, 3, 9, 0, 8, 1, 2, 3]
    assert proposed(tokens, 1, 1, 3) == [5]
    assert proposed(tokens, 1, 1, 1) == [9]
    assert proposed([1, 2, 5, 1, 2, 6, 1, 2], 1, 2, 2) == [6]


@pytest.mark.parametrize(
    ("tokens", "bounds", "expected"),
    [
        ([1], (2, 4), []),
        ([1], (1, 4), []),
        ([1, 1], (1, 4), [1] * 5),
        ([1, 1], (2, 4), []),
        ([1, 2], (1, 4), []),
        ([7] * 9, (2, 4), [7] * 5),
        ([0] * 3, (1, 1), [0] * 5),
        ([4, 5, 4, 5, 4], (1, 3), [5, 4, 5, 4, 5]),
        ([1, 2, 3, 9, 1, 2, 3], (2, 3), [9, 1, 2, 3, 9]),
        ([1, 2, 3, 4, 5], (1, 5), []),
        ([0, 0, 1, 0, 0], (2, 2), [1, 0, 0, 1, 0]),
    ],
)
def test_short_prompts_and_periods(tokens: list[int], bounds: tuple[int, int], expected: list[int]) -> None:
    assert proposed(tokens, 5, *bounds) == expected


@pytest.mark.parametrize("budget", [0, 1, 2, 63])
def test_never_more_than_the_budget(budget: int) -> None:
    assert len(proposed([3] * 50, budget, 1, 5)) == budget


def test_a_token_costs_the_same_however_long_the_sequence_is() -> None:
    """Counted in operations of the index: a write for each length of an n-gram, and as many reads for a proposal."""

    class Counting(UserDict[Any, Any]):
        reads = 0
        writes = 0

        def __setitem__(self, key: Any, value: Any) -> None:
            self.writes += 1
            super().__setitem__(key, value)

        def get(self, key: Any, default: Any = None) -> Any:
            self.reads += 1
            return self.data.get(key, default)

    drafter = NgramDrafter(2, 5)
    tokens = [random.Random(1).randrange(3) for _ in range(4000)]
    drafter.start(view(tokens[:10]), 0)
    counting = Counting()
    drafter._indices[0].places = counting  # type: ignore[assignment]
    drafts(drafter, tokens[:10], 4)
    for length in range(11, len(tokens)):
        counting.reads = counting.writes = 0
        drafts(drafter, tokens[:length], 4)
        assert counting.writes <= 4
        assert counting.reads <= 4


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3), (-1, -1)])
def test_bounds_that_make_no_sense_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(DrafterError, match="prompt_lookup_min"):
        NgramDrafter(shortest, longest)


def test_survival_falls_and_sequences_do_not_mix() -> None:
    drafter = NgramDrafter(1, 3)
    first, second = [1, 2, 1], [3, 4, 3]
    drafter.start(view(first, 1), 0)
    drafter.start(view(second, 2), 0)
    trees = drafter.propose([view(first, 1), view(second, 2)], [3, 2])
    assert [tree.tokens for tree in trees] == [[1, 2, 1, 2], [3, 4, 3]]
    assert trees[0].survival == sorted(trees[0].survival, reverse=True)
    assert trees[0].survival[-1] < 1.0


@pytest.mark.parametrize("prompt", [[1], [1, 1], [0], [5] * 40, list(range(30)), list(b"abcabcabcabc")])
@pytest.mark.parametrize("bounds", [(1, 1), (2, 4), (3, 9)])
def test_answers_are_plain_whatever_the_prompt(prompt: list[int], bounds: tuple[int, int]) -> None:
    rule = path_rule(VOCAB, seed=61, memory=1, spread=8.0)
    expected = alone(rule, prompt, ignore_eos=True, max_tokens=60)
    run = ToyRun(rule)
    sequence = run.add(prompt, NgramDrafter(*bounds), ignore_eos=True, max_tokens=60)
    run.finish(sequence)
    same(sequence, expected)


def test_a_periodic_answer_is_drafted_whole() -> None:
    """A greedy walk on a table of single tokens runs into a circle, and then every draft is right."""
    rule = path_rule(VOCAB, seed=62, memory=1, spread=8.0)
    run = ToyRun(rule)
    sequence = run.add([1], NgramDrafter(1, 3), ignore_eos=True, max_tokens=200)
    run.finish(sequence)
    assert sequence.record.accepted > 100
