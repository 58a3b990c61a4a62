"""A request that fails in the middle of its answer has emitted what plain decoding would have, whatever was drafted
beyond, under every rule of acceptance."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest
import torch

from paceline.acceptance import RULES
from paceline.errors import ModelError, RequestError
from paceline.options import Speculation
from paceline.shape import TreeShape
from paceline.targets.toy import ToyTarget
from tests.test_engine_coupled import fits
from tests.test_engine_rules import (
    COUNT,
    PROMPT,
    SEEDS,
    SHAPES,
    TARGET,
    TREE,
    VOCAB,
    TableDrafter,
    add,
    arena,
    joint,
    speculate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.request import Sequence

END = 2
ERRORS = {math.nan: ModelError, -math.inf: RequestError}


def ending(fill: float, after: int = 1) -> Callable[[list[int]], Tensor]:
    """The target's table, in which END is followed by no row, once there are so many tokens."""

    def rule(path: list[int]) -> Tensor:
        answer = path[len(PROMPT) :]
        return torch.full((VOCAB,), fill) if len(answer) >= after and END in answer[after - 1 :] else TARGET(path)

    return rule


def run_all(rule: str, fill: float, lag: int) -> list[Sequence]:
    run = arena(target=ToyTarget(ending(fill), VOCAB, 32), lag=lag)
    drafter, speculation = TableDrafter(shape=SHAPES.get(rule, TREE)), speculate(rule)
    sequences = [add(run, speculation, drafter, seed) for seed in range(SEEDS)]
    while not run.engine.idle:
        for sequence in run.engine.step():
            if sequence.finish_reason is None and len(sequence.output) >= COUNT:
                run.engine.cancel(sequence)
    run.check_empty()
    assert sum(sequence.record.accepted for sequence in sequences) > SEEDS / 10
    return sequences


def until_the_end() -> dict[tuple[int, ...], float]:
    """The probability of every answer, which ends with END or is of COUNT tokens."""
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for answer, probability in joint().items():
        found[answer[: answer.index(END) + 1] if END in answer else answer] += probability
    return found


@pytest.mark.parametrize(("fill", "lag"), list(zip(ERRORS, (0, 1), strict=True)))
@pytest.mark.parametrize("rule", SHAPES)
def test_where_a_request_ends_has_the_targets_distribution(rule: str, fill: float, lag: int) -> None:
    sequences = run_all(rule, fill, lag)
    counts = Counter(tuple(sequence.output[:COUNT]) for sequence in sequences)
    assert fits(counts, until_the_end())
    for sequence in sequences:
        if len(sequence.output) < COUNT:
            assert isinstance(sequence.error, ERRORS[fill])
            assert sequence.output.index(END) == len(sequence.output) - 1


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("fill", ERRORS)
@pytest.mark.parametrize("rule", ["coupled", *RULES])
def test_what_was_right_before_the_end_is_delivered(rule: str, fill: float, lag: int) -> None:
    """Greedy, with drafts that are all right and go on behind the end."""
    speculation = Speculation.parse({"rule": rule, "num_speculative_tokens": 6, "adaptive": False})

    def ride(drafts: bool) -> Sequence:
        drafter = TableDrafter(shape=TreeShape.chain(6), table=TARGET) if drafts else None
        run = arena(target=ToyTarget(ending(fill, 5), VOCAB, 32), lag=lag if drafts else 0)
        sequence = add(run, speculation, drafter, 0, temperature=0.0, logprobs=1)
        run.finish(sequence)
        run.check_empty()
        return sequence

    plain, sequence = ride(False), ride(True)
    assert len(plain.output) > 4
    assert sequence.output == plain.output
    assert sequence.logprobs == plain.logprobs
    assert sequence.record.accepted > 0
    assert isinstance(sequence.error, ERRORS[fill])
    assert str(sequence.error) == str(plain.error)
