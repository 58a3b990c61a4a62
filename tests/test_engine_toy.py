"""Tier 1: every kind of drafter end to end on the toy target; not one token may differ from plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.drafters.ngram import NgramDrafter
from paceline.targets.toy import script_rule, table_rule
from tests.toys import EOS, VOCAB, ScriptedDrafter, ToyRun, oracle, wrong

if TYPE_CHECKING:
    from paceline.drafters import Drafter
    from paceline.request import Sequence

RULE = table_rule(VOCAB, seed=1, spread=4.0)
PROMPT = "a paceline is a row of riders, a paceline is a row"


def plain(prompt: Any, rule: Any = RULE, **sampling: Any) -> Sequence:
    run = ToyRun(rule)
    sequence = run.add(prompt, **sampling)
    run.finish(sequence)
    return sequence


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_every_drafter_gives_the_plain_tokens(length: int, temperature: float) -> None:
    expected = plain(PROMPT, temperature=temperature, seed=3)
    answer, start = expected.output, expected.prompt_length
    drafters: list[Drafter] = [
        ScriptedDrafter(oracle(answer, start)),
        ScriptedDrafter(wrong(answer, start)),
        ScriptedDrafter(lambda tokens, budget: []),
        ScriptedDrafter(lambda tokens, budget: [1] * 1000),
        NgramDrafter(1, 3),
    ]
    for drafter in drafters:
        run = ToyRun(RULE)
        spec = {"num_speculative_tokens": length}
        sequence = run.add(PROMPT, drafter, speculation=spec, temperature=temperature, seed=3)
        run.finish(sequence)
        assert sequence.output == answer
        assert sequence.text.text == expected.text.text
        assert run.pool.free == run.pool.pages


def test_oracle_is_accepted_fully() -> None:
    expected = plain(PROMPT, max_tokens=31)
    run = ToyRun(RULE)
    drafter = ScriptedDrafter(oracle(expected.output, expected.prompt_length))
    sequence = run.add(PROMPT, drafter, max_tokens=31)
    run.finish(sequence)
    record = sequence.record
    assert record.steps == 5
    assert record.accepted == record.drafted == 25
    assert record.mean_accepted_length == 6.0
    assert record.as_dict()["accepted_by_position"] == [{"accepted": 5, "reached": 5}] * 5


@pytest.mark.parametrize("place", range(7))
def test_eos_inside_a_block_ends_the_answer(place: int) -> None:
    script = [*range(65, 65 + place), EOS, *range(97, 120)]
    rule = script_rule(VOCAB, script, 3)
    run = ToyRun(rule)
    sequence = run.add([1, 2, 3], ScriptedDrafter(oracle(script, 3)))
    run.finish(sequence)
    assert sequence.output == script[: place + 1]
    assert sequence.finish_reason == "stop"
    assert sequence.text.text == bytes(script[:place]).decode()


@pytest.mark.parametrize("limit", range(1, 17))
def test_max_tokens_is_exact(limit: int) -> None:
    script = list(range(65, 97))
    run = ToyRun(script_rule(VOCAB, script, 1))
    sequence = run.add([9], ScriptedDrafter(oracle(script, 1)), max_tokens=limit, logprobs=0)
    run.finish(sequence)
    assert sequence.output == script[:limit]
    assert len(sequence.logprobs) == limit
    assert sequence.finish_reason == "length"
    record = sequence.record
    assert record.accepted + record.steps + 1 == limit


def test_stop_string_cuts_everything_at_one_token() -> None:
    script = list(b"foo STOP bar baz qux")
    run = ToyRun(script_rule(VOCAB, script, 2))
    sequence = run.add([1, 2], ScriptedDrafter(oracle(script, 2)), stop="STOP", logprobs=2)
    run.finish(sequence)
    assert sequence.text.text == "foo "
    assert bytes(sequence.output) == b"foo STOP"
    assert len(sequence.logprobs) == 8
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("lag", [1, 2])
def test_the_host_may_run_behind(lag: int) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"max_tokens": 7},
        {"stop": "e"},
    ]
    prompts = [PROMPT, PROMPT[:9], "x", PROMPT + PROMPT[:30]]
    expected = [plain(p, **s) for p, s in zip(prompts, settings, strict=True)]
    run = ToyRun(RULE, lag=lag, max_num_seqs=3, max_batch_tokens=17)
    drafter = NgramDrafter(1, 2)
    sequences = [run.add(p, drafter, **s) for p, s in zip(prompts, settings, strict=True)]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        assert sequence.output == reference.output
        assert sequence.text.text == reference.text.text
        assert sequence.finish_reason == reference.finish_reason
