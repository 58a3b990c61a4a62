"""The draw: its filters, its distribution, and that C and torch give the same token."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
import torch

from paceline import draw as plain
from paceline import kernels, noise
from paceline.draw import Filter, kept, log_probability, masses, processed
from paceline.errors import ModelError, RequestError
from paceline.kernels import PATHS
from paceline.kernels.sample import SampleKernels
from paceline.sampling import Sampling, argmax, draw, logprobs, noise_key

if TYPE_CHECKING:
    from torch import Tensor

INF = math.inf


def available() -> list[SampleKernels]:
    library = kernels.library()
    assert library is not None, "a compiler is needed to test the C library"
    best = SampleKernels(library.c).best
    return [SampleKernels(library.c, path) for path in PATHS[: best + 1]]


def rows(kind: str, size: int, generator: torch.Generator, rng: random.Random) -> Tensor:
    """One row [1, size] of a kind that is awkward in its own way."""
    row = torch.randn(size, generator=generator) * rng.choice([0.1, 1.0, 3.0, 10.0])
    match kind:
        case "peaked":
            row[rng.randrange(size)] += 30.0
        case "flat":
            row *= 1e-4
        case "tied":
            row = row.round()
        case "zeros":
            row = row.round()
            row[::2] *= -0.0
        case "same":
            row[:] = rng.choice([0.0, -0.0, 5.0, -1e30])
        case "huge":
            row *= 10.0 ** rng.uniform(0, 30)
        case "masked":
            kept_one = rng.randrange(size)
            mask = torch.rand(size, generator=generator) < 0.9
            mask[kept_one] = False
            row[mask] = -INF
    return row[None]


KINDS = ("plain", "peaked", "flat", "tied", "zeros", "same", "huge", "masked")
SIZES = (1, 2, 3, 7, 63, 64, 65, 127, 255, 256, 257, 1000, 4097)
TEMPERATURES = (1e-320, 1e-9, 1e-3, 0.1, 0.7, 0.8, 1.0, 1.5, 3.0, 100.0, 1e20)
TOP_P = (0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-16, 1.0, 1.0)


def any_filter(rng: random.Random, size: int) -> Filter:
    return Filter(
        temperature=rng.choice(TEMPERATURES),
        top_k=rng.choice([0, 0, 0, 1, 2, 5, 50, size, size + 5, max(1, size // 2)]),
        top_p=rng.choice(TOP_P),
        min_p=rng.choice([0.0, 0.0, 0.0, 1e-5, 0.05, 0.5, 1.0]),
    )


def compare(seed: int, count: int, sizes: tuple[int, ...]) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    paths = available()
    for _ in range(count):
        size = rng.choice([*sizes, rng.randint(1, max(sizes))])
        kind = rng.choice(KINDS)
        row, options = rows(kind, size, generator, rng), any_filter(rng, size)
        key, position = rng.getrandbits(64), rng.randrange(1 << 31)
        expected = plain.draw(row, options, key, [position])
        for path in paths:
            assert path.draw(row, options, key, [position]) == expected, (kind, size, options, path.path)
        token, listed = rng.randrange(size), rng.choice([0, 1, 5, size])
        report = plain.logprobs(row[0], token, listed)
        for path in paths:
            assert path.logprobs(row[0], token, listed) == report, (kind, size, path.path)
            assert path.argmax(row) == plain.argmax(row)


@pytest.mark.parametrize("seed", range(4))
def test_c_and_torch_draw_the_same_token(seed: int) -> None:
    compare(seed, 300, SIZES)


def test_c_and_torch_draw_the_same_token_from_whole_vocabularies() -> None:
    compare(11, 12, (49_152, 20_011))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 104))
def test_c_and_torch_draw_the_same_token_from_many_rows(seed: int) -> None:
    compare(seed, 2000, SIZES)
    compare(seed, 100, (49_152, 50_257, 151_936))


def test_c_and_torch_have_the_same_noise() -> None:
    ids = torch.randperm(10_000)
    for path in available():
        for key in (0, 1, 2**64 - 1):
            assert torch.equal(path.uniforms(key, 7, ids), noise.uniforms(key, 7, ids))


def test_rows_are_drawn_as_they_are_alone() -> None:
    table = torch.randn(9, 600, generator=torch.Generator().manual_seed(1)) * 3
    cut, positions = table[:, 44:555], list(range(30, 39))
    for path in available():
        for options in (Filter(), Filter(temperature=0.0), Filter(top_p=0.8), Filter(top_k=5)):
            alone = [
                plain.draw(row.clone()[None], options, 5, [place])[0] for row, place in zip(cut, positions, strict=True)
            ]
            assert path.draw(cut, options, 5, positions) == alone
            assert path.draw(cut.t().contiguous().t(), options, 5, positions) == alone
    assert draw(table[:0], Filter(), 5, []) == plain.draw(table[:0], Filter(), 5, []) == []
    assert argmax(table[:0]) == plain.argmax(table[:0]) == []


# Temperature 0, ties, and rows that nothing can be drawn from


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-3])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, -1])
def test_no_temperature_is_the_most_likely_token(temperature: float, top_p: float, top_k: int) -> None:
    table = torch.randn(10, 1000, generator=torch.Generator().manual_seed(3))
    table[torch.arange(10), torch.arange(10) * 7] += 5.0
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    for seed in range(10):
        assert draw(table, sampling, noise_key(seed), range(10)) == table.argmax(1).tolist()


@pytest.mark.parametrize("options", [Filter(top_p=0.0), Filter(top_p=1e-9), Filter(top_k=1)])
def test_one_token_of_a_hot_row_is_the_most_likely(options: Filter) -> None:
    table = torch.randn(10, 1000, generator=torch.Generator().manual_seed(4))
    assert draw(table, options, noise_key(1), range(10)) == table.argmax(1).tolist()


def test_the_lowest_id_of_a_tie_wins() -> None:
    row = torch.zeros(1, 300)
    row[0, [70, 71, 299]] = 2.0
    for path in available():
        assert path.argmax(row) == path.draw(row, Filter(top_p=0.0), 1, [0]) == [70]
        assert path.argmax(torch.tensor([[-0.0, 0.0], [0.0, -0.0]])) == [0, 0]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([-INF, -INF, -INF], RequestError),
        ([1.0, math.nan, 2.0], ModelError),
        ([1.0, -math.nan, 2.0], ModelError),
        ([1.0, INF, 2.0], ModelError),
    ],
)
def test_rows_without_a_token(values: list[float], error: type[Exception]) -> None:
    row = torch.tensor([values])
    for padded in (row, torch.cat([torch.full((1, 700), -INF), row], 1)):
        for path in available():
            for choose in (path.argmax, plain.argmax):
                with pytest.raises(error):
                    choose(padded)
            for sample in (path.draw, plain.draw):
                with pytest.raises(error):
                    sample(padded, Filter(top_p=0.5), 1, [0])
            for report in (path.logprobs, plain.logprobs):
                with pytest.raises(error):
                    report(padded[0], 0, 1)


# What the filters keep


def test_top_k_keeps_the_lowest_ids_of_a_tie() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(row, Filter(top_k=3)).tolist() == [1, 2, 3]
    assert kept(row, Filter(top_k=100)).tolist() == [1, 2, 3, 4, 0, 5]


def test_top_p_keeps_the_token_that_crosses() -> None:
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for share, ids in ((0.0, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 2])):
        assert kept(row, Filter(top_p=share)).tolist() == ids
    assert kept(torch.zeros(8), Filter(top_p=0.5)).tolist() == [0, 1, 2, 3]


def test_min_p_is_a_share_of_the_highest_probability() -> None:
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert kept(row, Filter(min_p=0.45)).tolist() == [1, 3, 2]
    assert kept(row, Filter(min_p=1.0)).tolist() == [1]
    assert kept(row, Filter(min_p=0.45, temperature=0.5)).tolist() == [1, 3]


def test_top_p_is_a_share_of_what_the_other_filters_leave() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(row, Filter(top_p=0.6)).tolist() == [0, 1]
    assert kept(row, Filter(top_p=0.55, top_k=2)).tolist() == [0]
    assert kept(row, Filter(top_p=0.55, min_p=0.7)).tolist() == [0]


def test_masses_are_the_exponentials() -> None:
    row = -torch.rand(5000, generator=torch.Generator().manual_seed(2)) * 30
    exact = row.double().mul(1.25).exp() * 2.0**40
    assert torch.allclose(masses(row, 0.0, 1.25).double(), exact, rtol=4e-6, atol=1.0)
    assert masses(torch.tensor([3.0, -INF]), 3.0, 1e30).tolist() == [2**40, 0]


def test_processed_logits_are_what_is_drawn_from() -> None:
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    options = Filter(temperature=0.5, top_k=2)
    probability = processed(row, options).softmax(0)
    assert probability.tolist() == pytest.approx([0.0, 0.64, 0.0, 0.36], abs=1e-6)
    assert processed(row, Filter(temperature=0.0, top_k=2)) is row


# The distribution


def chi_square(row: Tensor, options: Filter, draws: int, seed: int = 77) -> float:
    """Standard deviations by which draws at as many positions miss the filtered softmax."""
    key = noise_key(seed)
    tokens = draw(row.expand(draws, -1), options, key, range(draws))
    counts = torch.bincount(torch.tensor(tokens), minlength=row.shape[0]).double()
    likely = processed(row, options).double().softmax(0)
    assert counts[likely == 0].sum() == 0
    kept_ids = likely > 0
    expected = likely[kept_ids] * draws
    assert expected.min() > 5
    statistic = float(((counts[kept_ids] - expected) ** 2 / expected).sum())
    degrees = int(kept_ids.sum()) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "options",
    [
        Filter(),
        Filter(temperature=0.5),
        Filter(temperature=3.0),
        Filter(top_k=4),
        Filter(top_p=0.8),
        Filter(min_p=0.2),
        Filter(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("size", [2, 11, 40])
def test_draws_follow_the_filtered_softmax(options: Filter, size: int) -> None:
    row = torch.rand(size, generator=torch.Generator().manual_seed(size)) * 2
    if len(kept(row, options)) > 1:
        assert abs(chi_square(row, options, 20_000)) < 4.5


def test_a_wrong_distribution_would_be_seen() -> None:
    row = torch.randn(11, generator=torch.Generator().manual_seed(11))
    tokens = draw((row * 1.1).expand(20_000, -1), Filter(), noise_key(77), range(20_000))
    expected = row.double().softmax(0) * 20_000
    counts = torch.bincount(torch.tensor(tokens), minlength=11).double()
    assert float(((counts - expected) ** 2 / expected).sum()) > 10 + 4.5 * math.sqrt(20)


@pytest.mark.parametrize("what", ["position", "seed", "choice"])
def test_draws_are_independent(what: str) -> None:
    row = torch.tensor([0.5, 0.3, 0.2]).log()[None]
    count = 9000
    if what == "position":
        tokens = draw(row.expand(count, -1), Filter(), noise_key(5), range(count))
    elif what == "seed":
        tokens = [draw(row, Filter(), noise_key(seed), [3])[0] for seed in range(count)]
    else:
        tokens = [draw(row, Filter(), noise_key(5, choice), [3])[0] for choice in range(count)]
    pairs = torch.tensor(tokens[:-1]) * 3 + torch.tensor(tokens[1:])
    counts = torch.bincount(pairs, minlength=9).double()
    likely = row[0].double().exp()
    expected = torch.outer(likely, likely).flatten() * (count - 1)
    assert float(((counts - expected) ** 2 / expected).sum()) < 8 + 4.5 * 4


def test_seeds_and_choices_differ_and_repeat() -> None:
    row = torch.randn(1, 1000, generator=torch.Generator().manual_seed(6))
    assert len({draw(row, Filter(), noise_key(seed), [5])[0] for seed in range(1, 21)}) > 10
    assert len({draw(row, Filter(), noise_key(1, choice), [5])[0] for choice in range(20)}) > 10
    assert len({draw(row, Filter(), noise_key(42), [5])[0] for _ in range(5)}) == 1


def test_a_drafter_with_nearly_the_same_logits_draws_nearly_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(9)
    target = torch.randn(400, 100, generator=generator) * 2
    drafter = target + torch.randn(400, 100, generator=generator) * 0.05
    key, places = noise_key(3), range(400)
    same = zip(draw(target, Filter(), key, places), draw(drafter, Filter(), key, places), strict=True)
    assert sum(a == b for a, b in same) > 380


# Log-probabilities


def test_logprobs_are_the_log_softmax() -> None:
    row = torch.randn(5000, generator=torch.Generator().manual_seed(8)) * 4
    exact = row.double().log_softmax(0)
    report = logprobs(row, 17, 5)
    assert report.logprob == pytest.approx(float(exact[17]), abs=2e-6)
    assert log_probability(row, 17) == report.logprob
    assert report.rank == 1 + int((row > row[17]).sum())
    assert [i for i, _ in report.top] == exact.topk(5).indices.tolist()
    assert [value for _, value in report.top] == pytest.approx(exact.topk(5).values.tolist(), abs=2e-6)
    whole = logprobs(row, 0, 5000)
    assert sum(math.exp(value) for _, value in whole.top) == pytest.approx(1.0, abs=1e-5)


def test_logprobs_of_ties_and_of_what_is_forbidden() -> None:
    row = torch.tensor([1.0, -INF, 2.0, 1.0, 2.0])
    report = logprobs(row, 3, 3)
    assert [i for i, _ in report.top] == [2, 4, 0]
    assert report.rank == 4
    assert logprobs(row, 1, 9).logprob == -INF
    assert [i for i, _ in logprobs(row, 1, 9).top] == [2, 4, 0, 3]


def test_logprobs_do_not_depend_on_the_number_of_threads() -> None:
    row, threads = torch.randn(50_001, generator=torch.Generator().manual_seed(8)) * 4, torch.get_num_threads()
    reports = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        reports.append((logprobs(row, 5, 3), plain.logprobs(row, 5, 3), draw(row[None], Filter(), 1, [2])))
    torch.set_num_threads(threads)
    assert reports[0] == reports[1] == reports[2]
    assert reports[0][0] == reports[0][1]
