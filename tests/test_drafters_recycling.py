"""Token recycling against a table and a tree that are plain to see."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, Sampling
from paceline.drafters import Outcome, View
from paceline.drafters.recycling import RecyclingDrafter
from paceline.errors import OptionError
from paceline.shape import TreeShape
from tests.toys import VOCAB, ToyRun, alone, drafts_that_change_nothing, no_draw, path_rule, same, trials

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from paceline.tree import TokenTree

CHANCES = (0.45, 0.1, 0.05, 0.035, 0.025, 0.02, 0.015, 0.01)
SMALL = 20


def view(tokens: Seq[int], number: int = 0, salt: str | None = None) -> View:
    return View(number, tokens, no_draw, salt)


def seen(drafter: RecyclingDrafter, scored: Seq[tuple[tuple[int, ...], Seq[int]]], root: int, number: int = 0) -> None:
    rows = [(path, list(best)) for path, best in scored]
    drafter.observe([Outcome(number, 0, [root], 0, None, {}, rows)])


def proposed(drafter: RecyclingDrafter, root: int, budget: int, number: int = 0, salt: str | None = None) -> TokenTree:
    (tree,) = drafter.propose([view([3, root], number, salt)], [budget])
    tree.check(10**6)
    assert tree.tokens[0] == root
    assert len(tree) <= budget + 1
    assert set(tree.origin[1:]) <= {"recycling"}
    return tree


def grown(table: dict[int, list[int]], root: int, budget: int, width: int) -> list[tuple[int, ...]]:
    """The paths of the likeliest nodes, those whose tokens are known, best first."""
    waiting: list[tuple[float, int, int, tuple[int, ...] | None]] = []
    path: tuple[int, ...] | None = (root,)
    paths: list[tuple[int, ...]] = []
    chance, made = 1.0, 0
    while made < 128 and len(paths) < budget:
        following = table.get(path[-1]) if path else None
        for rank in range(width):
            below = None if path is None or following is None else (*path, following[rank])
            heappush(waiting, (-chance * CHANCES[rank], made, rank, below))
        negative, _, _, path = heappop(waiting)
        chance = -negative
        made += 1
        if path is not None:
            paths.append(path[1:])
    return paths


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))]


rows_of = st.lists(
    st.tuples(st.lists(st.integers(0, SMALL - 1), max_size=3).map(tuple), st.permutations(range(SMALL))), max_size=30
)


@trials(120)
@given(scored=rows_of, root=st.integers(0, SMALL - 1), budget=st.integers(0, 63), width=st.sampled_from([1, 2, 5, 8]))
def test_it_finds_what_a_search_finds(scored: list[Any], root: int, budget: int, width: int) -> None:
    table: dict[int, list[int]] = {}
    drafter = RecyclingDrafter(SMALL, width=width)
    drafter.start(view([3, root]), 0)
    for place in range(0, len(scored), 7):
        rows = [(path, best[:8]) for path, best in scored[place : place + 7]]
        seen(drafter, rows, root)
        for path, best in rows:
            table[path[-1] if path else root] = list(best)
    tree = proposed(drafter, root, budget)
    assert paths_of(tree) == grown(table, root, budget, width)
    assert tree.survival == sorted(tree.survival, reverse=True)
    drafter.release(0)
    drafter.release(0)
    assert not drafter._states


def full(drafter: RecyclingDrafter, vocab: int, salt: str | None = None, seed: int = 0) -> dict[int, list[int]]:
    """Every token is seen."""
    dice = random.Random(seed)
    table = {token: dice.sample(range(vocab), 8) for token in range(vocab)}
    drafter.start(view([0], 50, salt), 0)
    seen(drafter, [((token,), best) for token, best in table.items()], 0, 50)
    drafter.release(50)
    return table


@pytest.mark.parametrize("budget", [0, 1, 5, 60, 63])
def test_the_whole_budget_is_used_where_all_is_known(budget: int) -> None:
    drafter = RecyclingDrafter(100)
    full(drafter, 100)
    assert len(proposed(drafter, 0, budget)) == budget + 1
    chain = RecyclingDrafter(100, width=1)
    table = full(chain, 100)
    tree = proposed(chain, 0, budget)
    assert tree.parents == list(range(-1, budget))
    assert all(table[a][0] == b for a, b in zip(tree.tokens, tree.tokens[1:], strict=False))


def test_a_chain_is_the_first_child_of_every_node() -> None:
    trees = []
    for width in (1, 8):
        drafter = RecyclingDrafter(100, width=width)
        full(drafter, 100)
        trees.append(paths_of(proposed(drafter, 7, 60)))
    assert set(trees[0][:4]) <= set(trees[1])


def test_what_was_seen_last_counts_and_nothing_is_proposed_for_what_was_not() -> None:
    drafter = RecyclingDrafter(100)
    drafter.start(view([3, 0]), 0)
    assert len(proposed(drafter, 0, 60)) == 1
    seen(drafter, [((), range(10, 18))], 0)
    seen(drafter, [((), range(20, 28)), ((20,), range(30, 38))], 0)
    assert paths_of(proposed(drafter, 0, 3)) == [(20,), (20, 30), (21,)]
    assert len(proposed(drafter, 0, 63)) == 17
    assert len(proposed(drafter, 99, 63)) == 1


def test_a_prompt_says_what_follows_where_nothing_was_known() -> None:
    drafter = RecyclingDrafter(100)
    drafter.start(view([3, 0]), 0)
    seen(drafter, [((), range(10, 18))], 5)
    drafter.observe([Outcome(0, 0, [5, 6, 7, 0, 6], 0, 8)])
    drafter.observe([Outcome(0, 5, [8, 9], 0, None)])
    drafter.observe([Outcome(0, 7, [9], 0, None)])
    assert proposed(drafter, 5, 1).tokens == [5, 10]
    # Of two places the later one counts; the last token of a prompt has no successor yet.
    assert proposed(drafter, 7, 63).tokens == [7, 0, 6, 8, 9]
    seen(drafter, [((), range(20, 28))], 6)
    assert proposed(drafter, 6, 8).tokens[1:] == list(range(20, 28))


def test_the_table_outlives_requests_and_serves_forks() -> None:
    drafter = RecyclingDrafter(100)
    full(drafter, 100)
    drafter.start(view([3, 4], 1), 0)
    drafter.fork(1, view([3, 4], 2))
    drafter.rewind(1, 0)
    drafter.release(1)
    assert drafter.length(2) == 0
    first = proposed(drafter, 4, 10, 2)
    seen(drafter, [((), range(8))], 4, 2)
    assert paths_of(proposed(drafter, 4, 1, 2)) == [(0,)]
    assert len(first) == 11


def test_the_table_of_one_key_never_serves_another() -> None:
    drafter = RecyclingDrafter(100)
    for place, key in enumerate([None, "", "a", "b"]):
        drafter.start(view([5], place, key), 0)
        seen(drafter, [((), range(10 * place + 8, 10 * place + 16))], 5, place)
    for place, key in enumerate([None, "", "a", "b"]):
        assert proposed(drafter, 5, 8, place, key).tokens[1:] == list(range(10 * place + 8, 10 * place + 16))
    assert len(proposed(drafter, 5, 8, 9, "c")) == 1


def test_the_number_of_keys_is_bounded_and_those_used_last_stay() -> None:
    drafter = RecyclingDrafter(50, tables=3)
    for place in range(10):
        full(drafter, 50, f"key {place}", place)
        full(drafter, 50, "kept", 99)
        assert len(drafter._tables) <= 3
    assert set(drafter._tables) == {"key 8", "key 9", "kept"}
    assert len(proposed(drafter, 1, 8, 0, "kept")) == 9
    assert len(proposed(drafter, 1, 8, 0, "key 2")) == 1
    # A request whose table went writes a new one.
    drafter.start(view([1], 4, "key 0"), 0)
    full(drafter, 50, "other", 1)
    full(drafter, 50, "another", 1)
    full(drafter, 50, "a third", 1)
    seen(drafter, [((), range(8))], 1, 4)
    assert proposed(drafter, 1, 1, 4, "key 0").tokens == [1, 0]


def test_a_vocabulary_smaller_than_the_table_is_wide() -> None:
    drafter = RecyclingDrafter(3)
    assert drafter.needs.top_k == 3
    rule = path_rule(3, seed=75, memory=1)
    run = ToyRun(rule, vocab=3)
    sequence = run.add([0, 1], drafter, eos=(), speculation={"num_speculative_tokens": 63})
    run.finish(sequence)
    same(sequence, alone(rule, [0, 1], vocab=3, eos=()))
    assert sequence.record.accepted > 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("width", [1, 8])
def test_answers_are_plain(width: int, temperature: float, lag: int) -> None:
    rule = path_rule(VOCAB, seed=73, memory=1 if temperature else 2, spread=6.0)
    drafter = RecyclingDrafter(VOCAB, width=width)
    accepted, missed = drafts_that_change_nothing(drafter, rule, temperature, lag)
    assert accepted > 20
    assert missed > 0
    assert not drafter._states


@pytest.mark.parametrize("tree", ["auto", "none"])
def test_not_one_token_of_the_default_model_differs(llm: LLM, tree: str) -> None:
    prompts = ["one two three one two three one two", "The rain fell on the race, and the rain"]
    for sampling in (
        Sampling(temperature=0.0, max_tokens=24),
        Sampling(temperature=0.8, top_p=0.95, seed=5, max_tokens=24),
    ):
        plain = llm.generate(prompts, sampling, speculation=False)
        method = {"method": "recycling", "tree": tree, "num_speculative_tokens": 30, "adaptive": False}
        for _ in range(2):
            drafted = llm.generate(prompts, sampling, speculation=method)
            assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
        assert all(a.record.drafted for a in drafted)
        assert sum(a.record.accepted for a in drafted) > 0
    llm.forget()


def test_a_shape_of_ones_own_is_filled() -> None:
    shape = TreeShape.parse([[0], [1], [1, 0], [2], [1, 0, 0], [1, 1]])
    drafter = RecyclingDrafter(100, shape=shape)
    table = full(drafter, 100)
    for budget in (1, 3, 6, 63):
        tree = proposed(drafter, 7, budget)
        head = shape.head(budget)
        assert tuple(tree.parents) == head.parents
        expected = []
        for path in head.paths():
            tokens = [7]
            for rank in path:
                tokens.append(table[tokens[-1]][rank])
            expected.append(tuple(tokens[1:]))
        assert paths_of(tree) == expected
    half = RecyclingDrafter(100, shape=shape)
    half.start(view([3, 7]), 0)
    seen(half, [((), range(10, 18)), ((10,), range(20, 28))], 7)
    assert paths_of(proposed(half, 7, 63)) == [(10,), (11,), (12,)]


def test_a_chain_is_a_shape_like_any_other() -> None:
    one, other = RecyclingDrafter(100, width=1), RecyclingDrafter(100, shape=TreeShape.chain(63))
    full(one, 100)
    full(other, 100)
    assert proposed(one, 3, 63) == proposed(other, 3, 63)


def test_a_shape_wider_than_the_table_is_refused() -> None:
    with pytest.raises(OptionError, match="9 children, and recycling knows 8"):
        RecyclingDrafter(100, shape=TreeShape.parse([[n] for n in range(9)]))


def test_answers_are_plain_with_a_shape_of_ones_own() -> None:
    rule = path_rule(VOCAB, seed=73, memory=2, spread=6.0)
    drafter = RecyclingDrafter(VOCAB, shape=TreeShape.parse([[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0]]))
    expected = alone(rule, [5, 6, 7], max_tokens=60, ignore_eos=True)
    run = ToyRun(rule)
    for _ in range(2):
        sequence = run.add([5, 6, 7], drafter, max_tokens=60, ignore_eos=True)
        run.finish(sequence)
        same(sequence, expected)
    assert sequence.record.accepted > 20


def test_the_default_model_with_a_tree_of_a_file(llm: LLM, tmp_path: Path) -> None:
    """Through the option, to the record: as many nodes as the file has, and not one token differs."""
    path = tmp_path / "tree.json"
    TreeShape.parse([[0], [1], [0, 0], [2], [0, 1], [0, 0, 0]]).write(path)
    sampling = Sampling(temperature=0.0, max_tokens=40)
    plain = llm.generate(["one two three one two three one two"], sampling, speculation=False)
    how = {"method": "recycling", "tree": str(path), "num_speculative_tokens": 6, "adaptive": False}
    for _ in range(2):
        drafted = llm.generate(["one two three one two three one two"], sampling, speculation=how)
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
    record = drafted[0].record
    assert 4 * record.steps < record.drafted <= 6 * record.steps
    assert record.accepted > 0
    assert len(record.reached) <= 3
    llm.forget()
