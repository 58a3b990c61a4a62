"""The highest ids of rows: C and torch give the same ones."""

from __future__ import annotations

import math
import random

import pytest
import torch

from paceline import race as plain
from paceline.kernels import sample
from tests.test_sampling_draw import KINDS, SIZES, available, rows


def test_c_and_torch_give_the_same_ids() -> None:
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    paths = available()
    for _ in range(60):
        size = rng.choice([*SIZES, rng.randint(1, max(SIZES))])
        made = torch.cat([rows(rng.choice(KINDS), size, generator, rng)[:1] for _ in range(rng.randint(1, 4))])
        count = min(size, rng.choice([1, 2, 8, 63]))
        expected = plain.top(made, count)
        assert torch.equal(made.gather(1, expected), made.sort(dim=1, descending=True).values[:, :count])
        for path in paths:
            assert torch.equal(path.top(made, count), expected)
        assert torch.equal(sample.top(made, count), expected)


def test_rows_apart_in_memory_and_no_rows_at_all() -> None:
    wide = torch.randn(5, 300, generator=torch.Generator().manual_seed(4))
    assert torch.equal(sample.top(wide[:, 10:200], 8), plain.top(wide[:, 10:200], 8))
    assert sample.top(wide[:0], 8).shape == (0, 8)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_whatever_a_row_holds_its_ids_are_different_and_others_are_not_touched(bad: float) -> None:
    made = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    made[1, 3:37] = bad
    found = sample.top(made, 8)
    assert torch.equal(found[[0, 2]], plain.top(made[[0, 2]], 8))
    assert len(set(found[1].tolist())) == 8
    assert 0 <= int(found.min()) <= int(found.max()) < 40
