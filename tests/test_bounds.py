"""Too many requests are refused at once, and those that wait cost nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from paceline import LLM, OptionError, OverloadedError, ResourceError
from paceline.settings import EngineOptions
from tests.bench_models import model_folder, tiny_llm
from tests.toys import VOCAB, Clock, ScriptedDrafter, ToyRun, alone, path_rule, same

if TYPE_CHECKING:
    from paceline.request import Sequence

__all__ = ["model_folder", "tiny_llm"]

RULE = path_rule(VOCAB, seed=401)


def test_requests_beyond_the_queue_are_refused_with_the_numbers() -> None:
    run = ToyRun(RULE, max_num_seqs=2, max_waiting=1)
    sequences = [run.add([n], max_tokens=4) for n in range(3)]
    with pytest.raises(OverloadedError, match="3 requests are there, 2 run at once, and max_waiting is 1"):
        run.add([3], max_tokens=4)
    run.finish(sequences[0])
    sequences.append(run.add([3], max_tokens=4))
    run.engine.cancel(sequences[-1])
    sequences[-1] = run.add([3], max_tokens=4)
    run.finish(*sequences)
    for n, sequence in enumerate(sequences):
        same(sequence, alone(RULE, [n], max_tokens=4))
    run.check_empty()


def test_no_place_to_wait_is_no_place_beyond_those_that_run() -> None:
    run = ToyRun(RULE, max_num_seqs=2, max_waiting=0)
    sequences = [run.add([n], max_tokens=4) for n in range(2)]
    with pytest.raises(OverloadedError):
        run.add([3])
    run.finish(*sequences)
    run.check_empty()


def test_tokens_beyond_the_bound_are_refused_with_the_numbers() -> None:
    run = ToyRun(RULE, max_total_tokens=100)
    first = run.add([1] * 30, max_tokens=30)
    with pytest.raises(OverloadedError, match=r"grow to 41 tokens, .* to 60, and max_total_tokens is 100"):
        run.add([2], max_tokens=40)
    second = run.add([2], max_tokens=39)
    run.finish(first, second)
    run.finish(run.add([2], max_tokens=40))
    run.check_empty()


@pytest.mark.parametrize("lag", [0, 1])
def test_who_has_waited_too_long_is_told_so(lag: int) -> None:
    clock = Clock()
    run = ToyRun(RULE, max_num_seqs=1, clock=clock, max_wait_seconds=10.0, lag=lag)
    drafter = ScriptedDrafter(lambda tokens, budget: [])
    running = run.add([1], drafter, max_tokens=40, ignore_eos=True)
    run.engine.step()
    late = run.add([2], drafter, max_tokens=4)
    clock.now += 6
    later = run.add([3], drafter, max_tokens=4, ignore_eos=True)
    clock.now += 4
    run.engine.step()
    assert late in run.engine.scheduler.waiting
    clock.now += 0.5
    assert late in run.engine.step()
    assert late.finish_reason == "abort"
    assert isinstance(late.error, OverloadedError)
    assert str(late.error) == "the request has waited 10.5 s, and max_wait_seconds is 10: try again later."
    run.check()
    run.finish(running, later)
    assert (running.finish_reason, later.finish_reason) == ("length", "length")
    run.check_empty()
    assert not drafter.observed


def test_who_gave_way_has_not_waited() -> None:
    clock = Clock()
    run = ToyRun(RULE, pages=8, clock=clock, max_wait_seconds=1.0)
    sequences = [run.add([n] * 30, max_tokens=50, ignore_eos=True) for n in range(3)]
    run.engine.step()
    while not run.engine.idle:
        clock.now += 0.7
        run.engine.step()
        run.check()
    assert sum(sequence.record.preemptions for sequence in sequences) > 0
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * 3


def test_no_time_to_wait_is_a_turn_at_once_or_none() -> None:
    clock = Clock()
    run = ToyRun(RULE, max_num_seqs=2, clock=clock, max_wait_seconds=0.0)
    sequences = [run.add([n], max_tokens=4, ignore_eos=True) for n in range(3)]
    clock.now += 1
    run.finish(*sequences)
    assert [sequence.finish_reason for sequence in sequences] == ["length", "length", "abort"]


@pytest.mark.parametrize("jump", [-1e9, -3.0])
def test_a_clock_that_jumps_back_makes_nobody_late_or_patient(jump: float) -> None:
    clock = Clock()
    run = ToyRun(RULE, max_num_seqs=1, clock=clock, max_wait_seconds=10.0)
    running = run.add([1], max_tokens=60, ignore_eos=True)
    run.engine.step()
    late = run.add([2], max_tokens=4)
    clock.now += 6
    run.engine.step()
    clock.now += jump
    for _ in range(3):
        run.engine.step()
        assert late.finish_reason is None
    clock.now += 3
    run.engine.step()
    assert late.finish_reason is None
    clock.now += 1.5
    run.engine.step()
    assert isinstance(late.error, OverloadedError)
    run.finish(running)
    same(running, alone(RULE, [1], max_tokens=60, ignore_eos=True))


def calls_of_a_step(waiting: int) -> int:
    run = ToyRun(RULE, max_num_seqs=2, max_wait_seconds=1e6, max_waiting=10_000)
    sequences = [run.add([n % 7], max_tokens=60, ignore_eos=True) for n in range(2 + waiting)]
    for _ in range(5):
        run.engine.step()
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    for _ in range(10):
        run.engine.step()
    sys.setprofile(None)
    for sequence in sequences:
        run.engine.cancel(sequence)
    run.check_empty()
    return count


def test_two_thousand_that_wait_make_a_step_no_longer() -> None:
    few, many = calls_of_a_step(3), calls_of_a_step(2000)
    assert abs(many - few) <= 0.02 * few


def test_those_that_wait_come_and_go_in_any_order_and_leave_nothing() -> None:
    run = ToyRun(RULE, max_num_seqs=2, max_wait_seconds=1e6)
    sequences: list[Sequence] = [run.add([n % 7], max_tokens=2, priority=n % 3) for n in range(300)]
    for sequence in sequences[::2]:
        run.engine.cancel(sequence)
        assert sequence not in run.engine.scheduler.waiting
    assert len(run.engine.scheduler.waiting) == 150
    run.finish(*sequences)
    waiting = run.engine.scheduler.waiting
    assert (waiting._turns, waiting._members) == ([], {})
    run.check_empty()


def test_a_model_refuses_what_is_too_much(model_folder: Any, tiny_llm: LLM) -> None:
    from paceline import Sampling

    llm = LLM(str(model_folder), speculation=False, threads=2, max_num_seqs=2, max_waiting=1, cache_memory=1 << 22)
    sampling = Sampling(temperature=1.0, max_tokens=3, n=3, seed=1)
    with pytest.raises(OverloadedError, match="max_waiting is 1"):
        llm.generate("wheel", sampling.replace(n=4))
    assert llm.engine.idle  # none of its answers is left
    answers = llm.generate("wheel", sampling)
    assert [a.token_ids for a in answers] == [a.token_ids for a in tiny_llm.generate("wheel", sampling)]
    assert issubclass(OverloadedError, ResourceError)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be at least 1"),
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens is 15, and max_num_seqs is 16: .* raise the one"),
        ({"max_waiting": -1}, "max_waiting is -1; it must be at least 0"),
        ({"max_waiting": 1.5}, r"max_waiting is a whole number, not 1\.5"),
        ({"max_wait_seconds": -0.1}, r"max_wait_seconds is -0\.1; it must be"),
        ({"max_wait_seconds": float("nan")}, "max_wait_seconds is nan"),
        ({"max_total_tokens": 0}, "max_total_tokens is 0; it must be at least 1"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is true or false, not 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        EngineOptions(**options)
