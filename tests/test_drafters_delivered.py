"""What is learned across requests is what was delivered: nothing behind the end of an answer, however far the drafts
and the engine had gone."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.drafters.cascade import CascadeDrafter
from paceline.drafters.recycling import RecyclingDrafter
from paceline.drafters.suffix import SuffixDrafter
from tests.toys import VOCAB, ScriptedDrafter, ToyRun, oracle, path_rule

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import View
    from paceline.request import Sequence
    from paceline.tree import TokenTree

TEXT = list(string.ascii_letters.encode())
PROMPT = [1, 2]
NOISE = path_rule(VOCAB, seed=5, spread=1.0)
ENDS: dict[str, dict[str, Any]] = {
    "stop string": {"stop": "klm"},
    "stop token": {"stop_token_ids": [ord("k")]},
    "length": {"max_tokens": 9},
}


def rule(path: list[int]) -> Tensor:
    """The target says TEXT; what else it thinks likely depends on the path."""
    row = NOISE(path).clone()
    row[TEXT[(len(path) - len(PROMPT)) % len(TEXT)]] = 50.0
    return row


class Led(CascadeDrafter):
    """Cascade whose members keep their books, while another proposes."""

    def __init__(self, drafts: int) -> None:
        self.suffix, self.recycling = SuffixDrafter(), RecyclingDrafter(VOCAB)
        super().__init__([self.suffix, self.recycling])
        self.needs = replace(self.needs, members=())
        self._drafts = drafts
        self._leader = ScriptedDrafter(oracle(TEXT, len(PROMPT)))

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        super().propose(views, budgets)
        return self._leader.propose(views, [min(budget, self._drafts) for budget in budgets])

    @property
    def texts(self) -> int:
        """How many tokens of answers there are."""
        return sum(runs.length for runs in self.suffix._answers.find(None))

    def table(self) -> Any:
        """Of every token the likeliest successors; VOCAB where none is known."""
        return self.recycling._table(None)


def ride(drafts: int, lag: int, steps: int = 99, **options: Any) -> tuple[Led, Sequence]:
    drafter = Led(drafts)
    run = ToyRun(rule, lag=lag)
    settings = {"max_tokens": 40, "ignore_eos": True, **options}
    speculation = {"num_speculative_tokens": 8}
    sequence = run.add(PROMPT, drafter, speculation=speculation, **settings)
    for _ in range(steps):
        if sequence.finish_reason is None:
            run.engine.step()
    run.engine.cancel(sequence)
    run.check_empty()
    return drafter, sequence


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("end", ENDS)
def test_what_is_learned_is_what_plain_decoding_teaches(end: str, drafts: int, lag: int) -> None:
    plain, expected = ride(0, 0, **ENDS[end])
    drafter, sequence = ride(drafts, lag, **ENDS[end])
    assert sequence.output == expected.output
    assert len(expected.output) < len(TEXT)
    assert sequence.record.drafted > 0
    assert drafter.texts == plain.texts == len(expected.output)
    assert torch.equal(torch.from_numpy(drafter.table()), torch.from_numpy(plain.table()))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_of_a_request_that_is_left_only_what_was_delivered_is_learned(steps: int, lag: int) -> None:
    drafter, sequence = ride(4, lag, steps)
    assert sequence.finish_reason == "abort"
    known = len(sequence.output)
    assert drafter.texts == known
    learned = (drafter.table()[:VOCAB, 0] != VOCAB).nonzero()[0].tolist()
    assert not set(learned) & set(TEXT[max(0, known - 1) :])
    assert set(learned) >= set(TEXT[: max(0, known - 1)])


def test_who_gives_way_and_comes_again_is_one_answer() -> None:
    """The cache holds one of two: the other is released, and taken in again."""
    drafter = Led(4)
    run = ToyRun(rule, lag=1, pages=5)
    sequences = [run.add(PROMPT, drafter, max_tokens=45, ignore_eos=True) for _ in range(2)]
    run.finish(*sequences)
    assert sum(sequence.record.preemptions for sequence in sequences) > 0
    assert drafter.texts == 90
    assert drafter.suffix._answers.texts == 2
    run.check_empty()
