"""Noise: a pure function of five things, uniform, and independent across each of them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch

from paceline.elementary import exp, log
from paceline.noise import Purpose, bits, gumbels, noise_key, stream, uniforms

if TYPE_CHECKING:
    from torch import Tensor

N = 1 << 15
IDS = torch.arange(N)


def row(seed: int = 1, choice: int = 0, purpose: Purpose = Purpose.TARGET, position: int = 9) -> Tensor:
    return uniforms(noise_key(seed, choice, purpose), position, IDS)


def across_positions(token: int) -> Tensor:
    key = noise_key(3)
    return torch.cat([uniforms(key, position, torch.tensor([token])) for position in range(8_000)])


def across_seeds(token: int) -> Tensor:
    return torch.cat([uniforms(noise_key(seed), 5, torch.tensor([token])) for seed in range(4_000)])


def chi_square(u: Tensor, bins: int = 64) -> float:
    """Standard deviations by which the statistic exceeds its mean, nearly normal at so many degrees."""
    expected = u.shape[0] / bins
    counts = torch.bincount((u * bins).long(), minlength=bins).double()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / math.sqrt(2 * (bins - 1))


def test_the_stream_is_splitmix64() -> None:
    # the first outputs from seed 1234567, as published with the generator
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [stream(1234567, index) for index in range(4)] == expected


def test_the_bits_are_those_of_the_stream() -> None:
    key = noise_key(5, 2)
    expected = [max(stream(stream(key, 77), token) >> 11, 1) for token in range(100)]
    assert bits(key, 77, torch.arange(100)).tolist() == expected


def test_the_noise_of_an_id_does_not_depend_on_the_ids_beside_it() -> None:
    key, chosen = noise_key(8), torch.tensor([30_000, 0, 17])
    assert torch.equal(uniforms(key, 3, chosen), uniforms(key, 3, IDS)[chosen])


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 131_071, 2**31])
def test_never_0_or_1_and_always_whole_multiples(seed: int, position: int) -> None:
    u = row(seed, position=position)
    assert 0.0 < u.min() < 2e-3
    assert 1 - 2e-3 < u.max() < 1.0
    assert torch.equal((u * 2**53).round(), u * 2**53)
    assert torch.isfinite(gumbels(noise_key(seed), position, IDS)).all()


@pytest.mark.parametrize("place", range(52))
def test_each_of_the_bits_is_fair(place: int) -> None:
    ones = int(((bits(noise_key(4), 2, IDS) >> place) & 1).sum())
    assert abs(ones - N / 2) < 4.5 * math.sqrt(N) / 2


@pytest.mark.parametrize(
    "u",
    [
        row(),
        row(seed=0, position=0),
        row(seed=2**62, choice=3, purpose=Purpose.COIN),
        across_positions(0),
        across_positions(49_151),
        across_seeds(7),
        (row() * 4096) % 1.0,
        (row() * 2.0**40) % 1.0,
    ],
    ids=["ids", "zeros", "others", "positions-0", "positions-last", "seeds", "bits-12", "bits-40"],
)
def test_uniform(u: Tensor) -> None:
    assert abs(chi_square(u)) < 4.5
    ordered = u.sort().values
    grid = (torch.arange(u.shape[0], dtype=torch.float64) + 0.5) / u.shape[0]
    assert float((ordered - grid).abs().max()) < 2.2 / math.sqrt(u.shape[0])  # Kolmogorov: p = 1e-4


ROWS = {
    "base": row(),
    "next position": row(position=10),
    "far position": row(position=9 + 2**20),
    "next seed": row(seed=2),
    "high seed": row(seed=1 + 2**32),
    "next choice": row(choice=1),
    "other purpose": row(purpose=Purpose.DRAFT),
    "seed and choice swapped": row(seed=0, choice=1),
    "next id": row().roll(1),
    "far id": row().roll(4096),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ROWS, 2)))
def test_independent(first: str, second: str) -> None:
    a, b = ROWS[first], ROWS[second]
    correlation = float(((a - 0.5) * (b - 0.5)).mean() * 12 * math.sqrt(N))
    assert abs(correlation) < 4.5
    assert abs(chi_square(((a * 16).long() * 16 + (b * 16).long()).double().add(0.5) / 256, 256)) < 4.5
    assert not torch.equal(a, b)


def test_keys_differ_in_each_part() -> None:
    parts = itertools.product((0, 1, 2, 2**32, 2**63 - 1), range(4), Purpose)
    keys = [noise_key(seed, choice, purpose) for seed, choice, purpose in parts]
    assert len(set(keys)) == len(keys)
    assert len({stream(key, position) for key in keys for position in range(50)}) == 50 * len(keys)


def test_gumbels_have_their_moments() -> None:
    g = gumbels(noise_key(11), 0, torch.arange(1 << 18))
    assert float(g.mean()) == pytest.approx(0.5772157, abs=1.2e-2)
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, abs=4e-2)


def test_log_is_right_to_two_units_in_the_last_place() -> None:
    near_one = 1.0 - torch.arange(1, 2000, dtype=torch.float64) * 2.0**-53
    tiny = 2.0 ** -torch.arange(1, 200, dtype=torch.float64)
    x = torch.cat([row(), row() * 40, near_one, tiny, torch.tensor([2.0**-53, 0.5, 2.0, math.sqrt(0.5)])])
    exact = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    assert ((log(x) - exact).abs() <= 2 * torch.finfo(torch.float64).eps * exact.abs()).all()


def test_exp_is_right_to_two_units_in_the_last_place() -> None:
    x = -torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.cat([x * 700, x, x * 2.0**-30, torch.tensor([0.0, -700.0, -0.5 * math.log(2.0)], dtype=torch.float64)])
    exact = torch.tensor([math.exp(value) for value in x.tolist()], dtype=torch.float64)
    assert ((exp(x) - exact).abs() <= 2 * torch.finfo(torch.float64).eps * exact).all()
    assert (
        exp(torch.tensor([-1e9, -math.inf], dtype=torch.float64)).tolist() == [float(exp(x.new_tensor([-700.0])))] * 2
    )
