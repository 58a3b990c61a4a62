"""The rules on floats with real noise: as on fractions, at the edges of arithmetic, and over whole answers."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.acceptance import RULES, Noise, probabilities
from paceline.acceptance.rows import chance, normalised, resumption, without
from paceline.draw import Filter
from paceline.errors import DrafterError, ModelError
from paceline.noise import Purpose, noise_key, stream, uniforms
from paceline.tree import TokenTree
from tests.exact import Model, Shape, chain, extended, shapes
from tests.test_engine_coupled import fits

if TYPE_CHECKING:
    from paceline.acceptance import Row

CHAIN_RULES = ["ratio", "block"]
TREE_RULES = ["recursive", "traversal"]
ALL = CHAIN_RULES + TREE_RULES


def floats(row: Row) -> Row:
    return row.astype(np.float64)


def drawn(
    noise: Noise, shape: Shape, q: Model, prefix: tuple[int, ...] = ()
) -> tuple[TokenTree, list[tuple[int, ...]]]:
    """A draft of a shape, its numbers those of production, and the prefix of each node."""
    tree, prefixes, place = TokenTree.root(0), [prefix], {0: 0}
    for node in range(len(shape)):
        children = [child for child, parent in enumerate(shape) if parent == node]
        if node in place and children:
            parent = place[node]
            tokens = noise.children(parent, floats(q(prefixes[parent])), len(children))
            for child, token in zip(children, tokens, strict=False):
                place[child] = tree.add(parent, token, 1.0, "exact")
                prefixes.append((*prefixes[parent], token))
    return tree, prefixes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6), st.integers(0, 2**63 - 1), st.sampled_from(shapes(5, 4) + shapes(6, 4)), st.integers(2, 4)
)
def test_floats_and_fractions_decide_alike(seed: int, noise_seed: int, shape: Shape, vocab: int) -> None:
    """The same function on the same coins: the exact proof is about the code that makes text."""
    p, q = Model(seed, vocab, zeros=0.2), Model(seed + 1, vocab, zeros=0.2)
    noise = Noise(noise_seed, 0, 5)
    tree, prefixes = drawn(noise, shape, q)
    is_chain = tree.parents == list(range(-1, len(tree) - 1))
    for rule in TREE_RULES + CHAIN_RULES * is_chain:
        target, draft = ([model(prefix) for prefix in prefixes] for model in (p, q))
        exact = RULES[rule].accept(tree, target, draft, noise)
        assert RULES[rule].accept(tree, [*map(floats, target)], [*map(floats, draft)], noise) == exact
        matrix = np.stack([floats(row) for row in target])
        assert RULES[rule].accept(tree, matrix, dict(enumerate(map(floats, draft))), noise) == exact


@pytest.mark.parametrize("rule", ALL)
def test_what_is_not_needed_is_not_read(rule: str) -> None:
    """A leaf has no row in q; a rejected first draft of rules that go down asks for no row below it."""
    tree = TokenTree([0, 1, 2], [-1, 0, 1], [1.0] * 3, [""] * 3)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.4, 0.4])
    RULES[rule].accept(tree, [p, p, p], {0: q, 1: q}, Noise(1, 0, 0))
    if rule in ("ratio", "recursive"):
        never = np.array([0.5, 0.0, 0.5])
        outcome = RULES[rule].accept(tree, {0: never}, {0: q}, Noise(1, 0, 0))
        assert outcome.path == [0]


# Whole answers: round after round, noise from the root's position.


def answer(rule: str, shape: Shape, p: Model, q: Model, seed: int, count: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while len(tokens) < count:
        noise = Noise(seed, 0, len(tokens))
        tree, prefixes = drawn(noise, shape, q, tokens)
        target, draft = ([floats(model(prefix)) for prefix in prefixes] for model in (p, q))
        outcome = RULES[rule].accept(tree, target, draft, noise)
        tokens = (*prefixes[outcome.path[-1]], outcome.token)
    return tokens[:count]


def counted(rule: str, shape: Shape, seeds: int) -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], float]]:
    p, q = Model(31, 3), Model(41, 3)
    counts = Counter(answer(rule, shape, p, q, seed, 4) for seed in range(seeds))
    return counts, {tokens: float(m) for tokens, m in extended({(): Fraction(1)}, p, 4).items()}


ANSWERS = [(rule, chain(3)) for rule in CHAIN_RULES] + [(rule, (-1, 0, 0, 1, 1)) for rule in TREE_RULES]


@pytest.mark.parametrize(("rule", "shape"), ANSWERS)
def test_whole_answers_have_the_targets_distribution(rule: str, shape: Shape) -> None:
    """Chi-square of size 5e-4 over 81 answers: 1500 seeds find, in 95 of 100 cases, a total variation of 0.12."""
    assert fits(*counted(rule, shape, 1500))


@pytest.mark.long
@pytest.mark.parametrize(("rule", "shape"), ANSWERS)
def test_whole_answers_have_the_targets_distribution_closely(rule: str, shape: Shape) -> None:
    """20,000 seeds find a total variation of 0.035."""
    assert fits(*counted(rule, shape, 20_000))


@pytest.mark.parametrize(("rule", "shape"), ANSWERS)
def test_one_noise_for_all_purposes_is_caught(rule: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, coins and picks that share their numbers."""
    monkeypatch.setattr(Noise, "children", shares_its_number_with_the_coin)
    assert not fits(*counted(rule, shape, 1500))


@pytest.mark.long
def test_noise_of_the_tokens_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule block looks at drafts that it then does not commit; the next round must not meet their noise again."""

    right = Noise

    class ByPlace(right):  # type: ignore[valid-type, misc]
        def __init__(self, seed: int, choice: int, position: int) -> None:
            super().__init__(seed, choice, position)
            self._rounds = [right(seed, choice, position + depth) for depth in range(4)]

        def children(self, node: int, q: Row, count: int) -> list[int]:
            return self._rounds[node].children(0, q, count)

        def accept(self, node: int, chance: float | Fraction) -> bool:
            return self._rounds[node].accept(0, chance)

    monkeypatch.setattr("tests.test_acceptance_noise.Noise", ByPlace)
    assert not fits(*counted("block", chain(3), 25_000))


def shares_its_number_with_the_coin(self: Noise, node: int, q: Row, count: int) -> list[int]:
    left, tokens = q.copy(), list[int]()
    while len(tokens) < count and left.any():
        u = max(1, stream(self._coins, node + 1) >> 11) * 2.0**-53
        tokens.append(int((left.cumsum() / left.sum()).searchsorted(u, side="right")))
        left[tokens[-1]] = 0.0
    return tokens


# Noise.


@given(st.integers(0, 2**63 - 1), st.integers(0, 127), st.integers(0, 10**6), st.integers(0, 63))
def test_coins_are_numbers_of_the_one_noise(seed: int, choice: int, position: int, node: int) -> None:
    key = stream(noise_key(seed, choice, Purpose.COIN), position)
    u = float(uniforms(key, node, torch.tensor([0]))[0])
    assert 0.0 < u < 1.0
    flat = max(1, stream(key, node) >> 11) * 2.0**-53
    noise = Noise(seed, choice, position)
    assert noise.accept(node, math.nextafter(flat, 1.0))
    assert not noise.accept(node, flat)
    assert noise.accept(node, 1)
    assert not noise.accept(node, 0)


def test_draft_coin_and_pick_are_independent() -> None:
    """Contingency of (first draft, coin, pick) over 2000 rounds."""
    row = np.array([0.2, 0.3, 0.5])
    counts: Counter[tuple[int, ...]] = Counter()
    for position in range(2000):
        noise = Noise(7, 0, position)
        counts[noise.children(0, row, 1)[0], int(noise.accept(1, 0.4)), noise.pick(row)] += 1
    expected: dict[tuple[int, ...], float] = {
        (x, coin, y): float(row[x] * row[y]) * (0.4 if coin else 0.6)
        for x, coin, y in product(range(3), (0, 1), range(3))
    }
    assert fits(counts, expected)


def test_siblings_are_drawn_in_order_without_replacement() -> None:
    row = np.array([0.1, 0.2, 0.0, 0.7])
    counts = Counter(tuple(Noise(seed, 0, 3).children(2, row, 2)) for seed in range(2000))
    expected: dict[tuple[int, ...], float] = {
        (i, j): float(row[i] * row[j] / (1 - row[i])) for i in (0, 1, 3) for j in (0, 1, 3) if i != j
    }
    assert fits(counts, expected)
    assert sorted(Noise(1, 0, 3).children(2, row, 9)) == [0, 1, 3]
    assert Noise(1, 0, 3).children(2, row, 2) == Noise(1, 0, 3).children(2, row, 3)[:2]
    assert Noise(1, 0, 3).children(2, row, 0) == []


def test_noise_is_new_at_every_node_and_in_every_round() -> None:
    row = np.full(1000, 0.001)
    seen = [
        Noise(seed, choice, position).children(node, row, 3)
        for seed in (1, 2)
        for choice in (0, 1)
        for position in (4, 5)
        for node in (0, 1)
    ]
    assert len({tuple(tokens) for tokens in seen}) == 16


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0.0, 1e-300), st.floats(0.0, 1.0)), min_size=1), st.integers(0, 10**9)
)
def test_a_pick_has_weight(weights: list[float], seed: int) -> None:
    row = np.array(weights)
    if row.any():
        assert row[Noise(seed, 0, 0).pick(row)] > 0.0


def test_a_pick_does_not_depend_on_the_zeros_between() -> None:
    rng = np.random.default_rng(1)
    places = np.sort(rng.choice(3000, 40, replace=False))
    row = np.zeros(3000)
    row[places] = rng.random(40)
    for seed in range(200):
        assert Noise(seed, 0, 0).pick(row) == places[Noise(seed, 0, 0).pick(row[places])]


def test_a_pick_that_rounding_carries_over_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.acceptance.coins._uniform", lambda key, index: 1.0 - 2.0**-53)
    assert Noise(0, 0, 0).pick(np.array([5e-324, 5e-324, 0.0])) == 1
    assert Noise(0, 0, 0).pick(np.array([0.0, 1.0, 0.0])) == 1


# The edges of arithmetic.


def test_a_token_that_cannot_have_been_drawn() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.4, 0.6])
    for wrong in (0.0, math.nan):
        with pytest.raises(DrafterError, match="probability"):
            chance(0.5, wrong)
    for rule in ALL:
        with pytest.raises(DrafterError, match="give the row"):
            RULES[rule].accept(TokenTree.chain(0, [0], [1.0], ""), [p, p], [q, q], Noise(0, 0, 0))


@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_sibling_twice_or_one_too_many(rule: str) -> None:
    """Without replacement neither can be drawn."""
    p = np.array([0.0, 0.0, 1.0])
    for tokens, q in (([0, 0], np.array([0.5, 0.5, 0.0])), ([1, 0], np.array([0.0, 1.0, 0.0]))):
        tree = TokenTree([0, *tokens], [-1, 0, 0], [1.0] * 3, [""] * 3)
        with pytest.raises(DrafterError, match="probability"):
            RULES[rule].accept(tree, [p, p, p], {0: q}, Noise(0, 0, 0))


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_tree_under_a_rule_for_chains(rule: str) -> None:
    row = np.array([0.5, 0.5])
    tree = TokenTree([0, 0, 1], [-1, 0, 0], [1.0] * 3, [""] * 3)
    with pytest.raises(DrafterError, match="chains, not trees"):
        RULES[rule].accept(tree, [row] * 3, [row] * 3, Noise(0, 0, 0))


class Never:
    """Coins that fail wherever they may, even where the chance is 1 but for rounding."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def accept(self, node: int, chance: float | Fraction) -> bool:
        self.asked.append(float(chance))
        return node == 0

    def pick(self, weights: Row) -> int:
        assert weights.sum() > 0
        assert np.isfinite(weights).all()
        return int(weights.argmax())


@pytest.mark.parametrize("rule", ALL)
def test_nothing_is_left_where_p_and_q_are_equal(rule: str) -> None:
    """The residual is 0 everywhere; p itself takes its place, whatever the coins say."""
    row = np.array([0.1, 0.3, 0.6])
    coins = Never()
    outcome = RULES[rule].accept(TokenTree.chain(0, [1, 2], [1.0, 1.0], ""), [row] * 3, [row] * 3, coins)
    assert (outcome.path, outcome.token) == ([0], 2)
    assert set(coins.asked) == {1.0}


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("scale", [1.0, 1 + 1e-15, 1 - 1e-15, 5e-323, 1e-300])
def test_tiny_and_almost_equal_rows(rule: str, scale: float) -> None:
    p = np.array([0.1, 0.3, 0.6])
    q = np.array([0.1 * scale, 0.3, 1 - 0.3 - 0.1 * scale])
    for tokens in product(range(3), repeat=2):
        chain_of = TokenTree.chain(0, list(tokens), [1.0, 1.0], "")
        for first, second in ((p, q), (q, p)):
            for coins in (Never(), Noise(3, 0, 1)):
                outcome = RULES[rule].accept(chain_of, [first] * 3, [second] * 3, coins)
                assert first[outcome.token] > 0


def test_sums_of_nothing() -> None:
    none = np.zeros(3)
    some = np.array([0.0, 0.5, 0.5])
    assert normalised(none, some) is some
    assert without(np.array([0.0, 1.0, 0.0]), 1).tolist() == [0.0, 0.0, 0.0]
    assert without(some, 1).tolist() == [0.0, 0.0, 1.0]
    assert some.tolist() == [0.0, 0.5, 0.5]
    assert resumption(0.0, 1.0) == 1
    assert resumption(1e-320, 1.0) == 1.0
    assert resumption(0.0, 0.5) == 0.0


def test_a_sure_target_makes_every_rule_greedy() -> None:
    """At temperature 0 the rows hold a single 1: right drafts are accepted, then comes the target's token."""
    sure = [np.eye(3)[token] for token in (1, 2, 0)]
    for rule in ALL:
        for guess, path, token in (([1, 2], [0, 1, 2], 0), ([1, 0], [0, 1], 2), ([0, 2], [0], 1)):
            draft = [np.eye(3)[token] for token in guess]
            for seed in range(8):
                found = RULES[rule].accept(TokenTree.chain(0, guess, [1.0, 1.0], ""), sure, draft, Noise(seed, 0, 0))
                assert (found.path, found.token) == (path, token)


# From logits to rows.


def test_rows_are_what_a_token_is_drawn_from() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, -math.inf, 2.0])
    assert probabilities(row, Filter(temperature=0.0)).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    for options in (Filter(), Filter(temperature=0.5), Filter(temperature=2.0, top_k=3), Filter(top_p=0.6)):
        found = probabilities(row, options)
        assert found.dtype == np.float64
        assert math.isclose(found.sum(), 1.0, rel_tol=1e-12)
        assert found[3] == 0.0
    plain = torch.softmax(row.double() / 0.5, 0).numpy()
    np.testing.assert_allclose(probabilities(row, Filter(temperature=0.5)), plain, rtol=1e-6)
    top = probabilities(row, Filter(top_k=2))
    np.testing.assert_allclose(top, [0.0, 0.5, 0.5, 0.0, 0.0])
    with pytest.raises(ModelError):
        probabilities(torch.tensor([math.nan, 0.0]), Filter())


# Rule typical.


def test_typical_accepts_what_is_likely_for_how_sure_the_target_is() -> None:
    accept = RULES["typical"].accept
    sure, flat = np.array([0.92, 0.05, 0.03]), np.full(100, 0.01)
    third = np.array([0.1, 0.45, 0.45])

    def path(row: Row, token: int) -> list[int]:
        return accept(TokenTree.chain(0, [token], [1.0], ""), [row, row], {}, Noise(0, 0, 0)).path

    assert path(sure, 0) == [0, 1]
    assert path(sure, 1) == [0]  # 0.05 <= 0.09
    assert path(third, 0) == [0, 1]  # 0.1 > 0.09 and 0.3 exp(-0.95) = 0.116 is more
    assert path(flat, 5) == [0, 1]  # 0.01 > 0.3 exp(-log 100) = 0.003


def test_typical_takes_the_longest_path_then_the_likeliest() -> None:
    accept = RULES["typical"].accept
    row, other = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    tree = TokenTree([0, 0, 1, 2, 0, 1], [-1, 0, 0, 0, 2, 3], [1.0] * 6, [""] * 6)
    found = accept(tree, [row, row, other, other, row, row], {}, Noise(0, 0, 0))
    assert found.path == [0, 3, 5]  # 0.2 * 0.6 = 0.12, above 0.3 * 0.2 = 0.06
    shallow = tree.head(4)
    assert accept(shallow, [row] * 4, {}, Noise(0, 0, 0)).path == [0, 1]


def test_typical_draws_its_last_token_and_loses_the_distribution() -> None:
    """It is greedy at temperature 0; elsewhere what it accepts is not as likely as the target would have it."""
    accept = RULES["typical"].accept
    p = np.array([0.5, 0.3, 0.2])
    alone: Counter[tuple[int, ...]] = Counter(
        (accept(TokenTree.root(0), [p], {}, Noise(seed, 0, 0)).token,) for seed in range(2000)
    )
    assert fits(alone, {(i,): float(p[i]) for i in range(3)})
    chain_of = TokenTree.chain(0, [2], [1.0], "")
    assert all(accept(chain_of, [p, p], {}, Noise(seed, 0, 0)).path == [0, 1] for seed in range(50))
    sure = np.array([0.0, 1.0, 0.0])
    assert accept(chain_of, [sure, sure], {}, Noise(0, 0, 0)).path == [0]
    assert accept(chain_of, [sure, sure], {}, Noise(0, 0, 0)).token == 1
