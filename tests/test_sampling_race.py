"""Several tokens of one row: C and torch give the same ones, the first of them is what a draw gives, and why."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline import draw as plain
from paceline import race as plain_race
from paceline.acceptance import Noise, probabilities
from paceline.draw import Filter, kept, processed
from paceline.errors import KernelError, ModelError, RequestError
from paceline.kernels import sample
from paceline.noise import noise_key
from tests.test_engine_coupled import fits
from tests.test_sampling_draw import KINDS, SIZES, any_filter, available, rows

if TYPE_CHECKING:
    from torch import Tensor

INF = math.inf
GREEDY = Filter(temperature=0.0)


def some_ids(size: int, generator: torch.Generator, rng: random.Random) -> Tensor | None:
    """None, ids in order, in any order, or up to the highest id there may be."""
    ids = torch.randperm(2 * size, generator=generator)[:size] + rng.choice([0, 0, 2**31 - 2 * size])
    return rng.choice([None, ids.sort().values, ids])


def whole(row: Tensor, ids: Tensor | None) -> Tensor:
    """The row scattered to a vocabulary, -inf elsewhere."""
    if ids is None:
        return row
    result = torch.full((int(ids.max()) + 2,), -INF)
    result[ids] = row
    return result


def one(
    kernels: Any, row: Tensor, ids: Tensor | None, options: Filter, key: int, position: int, count: int
) -> tuple[list[int], list[float]]:
    """The children of one row."""
    found: tuple[list[int], list[float]] = kernels.children(row[None], ids, options, key, [position], count)[0]
    return found


def compare(seed: int, count: int, sizes: tuple[int, ...]) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    paths = available()
    for _ in range(count):
        size = rng.choice([*sizes, rng.randint(1, max(sizes))])
        kind = rng.choice(KINDS)
        row, ids = rows(kind, size, generator, rng)[0], some_ids(size, generator, rng)
        options = rng.choice([GREEDY, any_filter(rng, size)])
        key, position, wanted = rng.getrandbits(64), rng.randrange(1 << 31), rng.choice([0, 1, 2, 8, 63, 300])
        expected = one(plain_race, row, ids, options, key, position, wanted)
        for path in paths:
            found = one(path, row, ids, options, key, position, wanted)
            assert found == expected, (kind, size, options, wanted, path.path)
        level = rows(kind, size, generator, rng)
        positions = [rng.randrange(1 << 31) for _ in level]
        singly = [one(plain_race, row, ids, options, key, at, wanted) for row, at in zip(level, positions, strict=True)]
        assert plain_race.children(level, ids, options, key, positions, wanted) == singly
        for path in paths:
            assert path.children(level, ids, options, key, positions, wanted) == singly
        shares = plain.shares(row, options)
        order = plain_race.draws(shares, key, position, wanted)
        for path in paths:
            assert torch.equal(path.shares(row, options), shares), (kind, size, options, path.path)
            assert torch.equal(path.processed(row, options), plain.processed(row, options)), (kind, size, options)
            assert path.draws(shares, key, position, wanted) == order, (kind, size, options, path.path)


@pytest.mark.parametrize("seed", range(4))
def test_c_and_torch_give_the_same_children(seed: int) -> None:
    compare(seed, 150, SIZES)


def test_c_and_torch_give_the_same_children_of_whole_vocabularies() -> None:
    compare(11, 12, (49_152, 20_011))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 104))
def test_c_and_torch_give_the_same_children_of_many_rows(seed: int) -> None:
    compare(seed, 1500, SIZES)
    compare(seed, 100, (49_152, 50_257, 151_936))


def test_the_first_child_is_the_draw() -> None:
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    for _ in range(150):
        size = rng.choice([1, 2, 65, 700])
        row, ids = (
            rows(rng.choice(KINDS), size, generator, rng)[0],
            torch.randperm(2 * size, generator=generator)[:size],
        )
        options = rng.choice([GREEDY, any_filter(rng, size)])
        key, position = rng.getrandbits(64), rng.randrange(1 << 31)
        drawn = plain.draw(whole(row, ids)[None], options, key, [position])
        alone = plain.draw(row[None], options, key, [position])
        for path in available():
            assert one(path, row, ids, options, key, position, 3)[0][:1] == drawn
            assert one(path, row, None, options, key, position, 3)[0][:1] == alone


def test_each_child_is_the_draw_once_those_before_it_are_out() -> None:
    """Without a filter, that is: the filters look at the row as it was."""
    row = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    for path in available():
        for seed in range(20):
            tokens, _ = one(path, row, None, Filter(temperature=0.9), noise_key(seed), 4, 8)
            left = row.clone()
            for token in tokens:
                assert path.draw(left[None], Filter(temperature=0.9), noise_key(seed), [4]) == [token]
                left[token] = -INF


# Worst cases


def test_equal_logits_go_by_id() -> None:
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(2))[:3000]
    for path in available():
        for value in (0.0, -0.0, 7.5, -3e38, 3e38):
            tokens, chances = one(path, torch.full((3000,), value), ids, GREEDY, 1, 2, 8)
            assert tokens == ids.sort().values[:8].tolist()
            assert chances == pytest.approx([1 / 3000] * 8)
            kept_by_id, _ = one(path, torch.full((3000,), value), ids, Filter(top_k=3), 1, 2, 8)
            assert sorted(kept_by_id) == ids.sort().values[:3].tolist()
        zeros = torch.zeros(300)
        zeros[::2] *= -0.0
        assert one(path, zeros, None, GREEDY, 1, 2, 4)[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [GREEDY, Filter(), Filter(temperature=1e-9), Filter(top_p=0.9), Filter(top_k=2)])
def test_fewer_where_fewer_are_possible(options: Filter) -> None:
    row = torch.full((1000,), -INF)
    row[[3, 700, 44]] = torch.tensor([1.0, 2.0, -1e30])
    possible = {3, 700} if options.temperature == 1.0 and (options.top_p < 1 or options.top_k) else {3, 44, 700}
    for path in available():
        tokens, chances = one(path, row, None, options, 1, 2, 8)
        assert set(tokens) == possible
        assert len(chances) == len(tokens)
        assert one(path, row, None, options, 1, 2, 2)[0] == tokens[:2]
        assert one(path, row, None, options, 1, 2, 0) == ([], [])
        assert set(path.draws(path.shares(row, options), 1, 2, 8)) <= possible


@pytest.mark.parametrize("options", [GREEDY, Filter(top_p=0.5), Filter(top_k=5)])
@pytest.mark.parametrize("size", [0, 1, 700])
def test_none_where_none_is_possible(options: Filter, size: int) -> None:
    row = torch.full((size,), -INF)
    assert one(plain_race, row, None, options, 1, 2, 3) == ([], [])
    for path in available():
        assert one(path, row, torch.arange(size), options, 1, 2, 3) == ([], [])
        assert path.draws(torch.zeros(size, dtype=torch.float64), 1, 2, 3) == []
        if size:
            for rows_of in (path.shares, plain.shares):
                with pytest.raises(RequestError):
                    rows_of(row, options)


@pytest.mark.parametrize("options", [GREEDY, Filter(top_p=0.5)])
@pytest.mark.parametrize("wrong", [math.nan, -math.nan, INF])
@pytest.mark.parametrize("rest", [0.0, -INF])
def test_numbers_that_are_none(options: Filter, wrong: float, rest: float) -> None:
    row = torch.full((700,), rest)
    row[650] = wrong
    for path in available():
        for kernels in (path, plain_race):
            with pytest.raises(ModelError):
                one(kernels, row, None, options, 1, 2, 3)
        rows_of = (
            [path.shares, plain.shares] if options.temperature == 0 else [path.shares, path.processed, plain.shares]
        )
        for function in rows_of:
            with pytest.raises(ModelError):
                function(row, options)


def test_rows_that_rise_and_fall() -> None:
    """The highest side by side: every one of them in the same few groups of columns."""
    row = torch.arange(20_000) / 7
    for path in available():
        assert one(path, row, None, GREEDY, 1, 2, 63)[0] == list(range(19_999, 19_936, -1))
        assert one(path, row.flip(0), None, GREEDY, 1, 2, 63)[0] == list(range(63))
        for wanted in (8, 300, 20_000):
            expected = one(plain_race, row, None, Filter(temperature=1e6), 1, 2, wanted)
            assert one(path, row, None, Filter(temperature=1e6), 1, 2, wanted) == expected


def test_rows_that_are_not_side_by_side() -> None:
    table = torch.randn(600, 9, generator=torch.Generator().manual_seed(1)) * 3
    wide = torch.stack([torch.randperm(600), torch.zeros(600, dtype=torch.int64)], 1)
    for path in available():
        for options in (GREEDY, Filter(top_p=0.8)):
            expected = one(plain_race, table[:, 4].clone(), wide[:, 0].clone(), options, 5, 6, 8)
            assert one(path, table[:, 4], wide[:, 0], options, 5, 6, 8) == expected
            assert torch.equal(path.shares(table[:, 4], options), plain.shares(table[:, 4].clone(), options))
        spread = plain.shares(table[:, 4], Filter())[None].expand(2, -1).t()[:, 0]
        assert path.draws(spread, 5, 6, 8) == plain_race.draws(spread.clone(), 5, 6, 8)


def test_ids_of_another_number_or_type() -> None:
    row = torch.randn(100, generator=torch.Generator().manual_seed(1))
    for path in available():
        with pytest.raises(KernelError, match="give one for each"):
            one(path, row, torch.arange(99), GREEDY, 1, 2, 3)
        assert one(path, row, torch.arange(100, dtype=torch.int32), Filter(), 1, 2, 3) == one(
            plain_race, row, None, Filter(), 1, 2, 3
        )


# What the numbers mean


def test_chances_are_the_softmax_of_what_runs() -> None:
    row = torch.randn(400, generator=torch.Generator().manual_seed(3)) * 3
    tokens, chances = one(sample, row, None, GREEDY, 1, 2, 6)
    exact = row.double().softmax(0)
    assert tokens == exact.topk(6).indices.tolist()
    assert chances == pytest.approx(exact.topk(6).values.tolist(), rel=1e-5)
    options = Filter(temperature=0.8, top_p=0.9)
    columns, height = plain.scores(row, None, options, 1, 2)
    exact = torch.zeros(400, dtype=torch.float64)
    exact[columns] = height.softmax(0)
    tokens, chances = one(sample, row, None, options, 1, 2, 6)
    assert tokens == exact.topk(6).indices.tolist()
    assert chances == pytest.approx(exact.topk(6).values.tolist(), rel=1e-5)
    everything = one(sample, row, None, options, 1, 2, 400)
    assert sorted(everything[0]) == columns.tolist()
    assert sum(everything[1]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("options", [Filter(), Filter(temperature=0.6, top_p=0.9), Filter(top_k=3, min_p=0.01)])
def test_shares_are_the_filtered_softmax(options: Filter) -> None:
    row = torch.randn(3000, generator=torch.Generator().manual_seed(4)) * 4
    found = sample.shares(row, options)
    assert found.nonzero()[:, 0].tolist() == kept(row, options).sort().values.tolist()
    assert torch.allclose(found, processed(row, options).double().softmax(0), rtol=2e-6, atol=0.0)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-14)
    assert (probabilities(row, options) == found.numpy()).all()


def test_children_in_their_order_are_draws_without_replacement() -> None:
    row = torch.tensor([0.1, 0.2, 0.0, 0.7]).log()
    counts = Counter(tuple(one(sample, row, None, Filter(), noise_key(seed), 3, 2)[0]) for seed in range(2000))
    likely = row.exp().tolist()
    expected: dict[tuple[int, ...], float] = {
        (i, j): likely[i] * likely[j] / (1 - likely[i]) for i in (0, 1, 3) for j in (0, 1, 3) if i != j
    }
    assert fits(counts, expected)


def test_children_of_two_drafters_that_agree_are_the_same() -> None:
    """Logits and noise decide, not the place of a column: a drafter with a vocabulary of its own draws alike."""
    row = torch.randn(600, generator=torch.Generator().manual_seed(5)) * 2
    order = torch.randperm(600, generator=torch.Generator().manual_seed(6))
    for seed in range(20):
        whole_row = one(sample, row, None, Filter(temperature=0.7), noise_key(seed), 9, 5)
        assert one(sample, row[order], order, Filter(temperature=0.7), noise_key(seed), 9, 5) == whole_row


def test_the_draws_of_a_round_are_the_race_of_its_noise() -> None:
    q = torch.rand(2000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    q[q < 0.9] = 0.0
    noise = Noise(3, 1, 12)
    for node in range(5):
        assert noise.children(node, q.numpy(), 7) == plain_race.draws(q, noise._draws, node, 7)
