"""A request that cannot go on ends alone: its neighbours keep their bits, and all that it held is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.errors import ModelError, RequestError
from tests.toys import VOCAB, ScriptedDrafter, ToyRun, alone, oracle, path_rule, same

if TYPE_CHECKING:
    from torch import Tensor

RULE = path_rule(VOCAB, seed=33)
POISON, LEFT = 7, list(b"ab")
NEIGHBOUR = list(b"the neighbours go on")
NO_TOKEN: dict[str, Any] = {"allowed_token_ids": LEFT, "bad_words": ["aa", "ab", "ba", "bb"]}


def poisoned(path: list[int]) -> Tensor:
    """Logits that are no numbers once the poison is four tokens back, or anywhere in a prompt."""
    if POISON in path[:-4]:
        return torch.full((VOCAB,), torch.nan)
    return RULE(path)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("kind", ["rules", "logits", "prompt", "prompt logprobs"])
def test_a_request_that_fails_ends_alone(kind: str, lag: int) -> None:
    run = ToyRun(RULE if kind == "rules" else poisoned, lag=lag, max_batch_tokens=16)
    answer = alone(RULE, NEIGHBOUR)
    drafter = ScriptedDrafter(oracle(answer.output, len(NEIGHBOUR)))
    before = run.add(NEIGHBOUR, drafter)
    if kind == "rules":
        bad = run.add([1, 2, 3], drafter, **NO_TOKEN)
    elif kind == "logits":
        bad = run.add([1, 2, POISON], drafter)
    else:
        long = [POISON, *range(30, 60)]
        bad = run.add(long, drafter, prompt_logprobs=1 if kind == "prompt logprobs" else None)
    after = run.add(NEIGHBOUR, drafter)
    run.finish(before, bad, after)
    same(before, answer)
    same(after, answer)
    assert bad.finish_reason == "abort"
    assert isinstance(bad.error, RequestError if kind == "rules" else ModelError)
    assert before.error is after.error is None
    run.check_empty()
    assert not drafter.observed


def test_a_step_that_breaks_off_tells_every_request_why() -> None:
    def rule(path: list[int]) -> Tensor:
        if len(path) > 9:
            raise MemoryError("no memory is left")
        return RULE(path)

    run = ToyRun(rule)
    sequences = [run.add([n], max_tokens=20) for n in range(2)]
    with pytest.raises(MemoryError) as caught:
        run.finish(*sequences)
    assert all(sequence.error is caught.value for sequence in sequences)
    run.check_empty()


def test_cancelling_in_the_middle_of_a_step_waits_for_its_end() -> None:
    """As when the end of a stream is collected there."""
    answer = alone(RULE, NEIGHBOUR)

    def rule(path: list[int]) -> Tensor:
        if len(path) == len(NEIGHBOUR) + 3:
            run.engine.cancel(sequences[0])
            assert sequences[0].finish_reason is None
        return RULE(path)

    run = ToyRun(rule)
    sequences = [run.add(NEIGHBOUR) for _ in range(2)]
    run.finish(*sequences)
    assert sequences[0].finish_reason == "abort"
    assert sequences[0].output == answer.output[: len(sequences[0].output)] != []
    same(sequences[1], answer)
    run.check_empty()
