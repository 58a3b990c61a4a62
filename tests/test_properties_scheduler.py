"""Any order of requests that begin alike, in caches too small for them, on a toy and on a tiny model.

Every answer is the one that the request has alone and without speculation, after every step the books agree, no drafter
fails, and at the end nothing is left.
"""

from __future__ import annotations

import logging
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.drafters import Needs
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.recycling import RecyclingDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.pages import PagePool
from tests.decoders import tiny_decoder, tiny_spec
from tests.toys import (
    Clock,
    PairTarget,
    ScriptedDrafter,
    StrictTarget,
    Timed,
    ToyRun,
    alone,
    mix,
    path_rule,
    same,
    trials,
)

if TYPE_CHECKING:
    from paceline.request import Sequence
    from paceline.targets import Target

VOCAB = 101
RULE = path_rule(VOCAB, seed=501, memory=3)
KINDS = ("none", "mix", "wrong", "feels", "ngram", "suffix", "recycling", "model")
LIMIT = 160


@cache
def tiny() -> Any:
    return tiny_decoder(tiny_spec(max_positions=LIMIT), "int8")


def beginning(family: int) -> list[int]:
    return [(7 * place + family) % 11 for place in range(70)]


@cache
def reference(target: str, prompt: tuple[int, ...], choice: int, settings: tuple[tuple[str, Any], ...]) -> Sequence:
    return alone(
        RULE, prompt, target=made(target), vocab=VOCAB, max_model_len=LIMIT, eos=(), choice=choice, **dict(settings)
    )


def made(target: str) -> Target:
    if target == "tiny":
        decoder: Target = tiny()
        return decoder
    if target == "window":
        return PairTarget(RULE, VOCAB, LIMIT, 20)
    return StrictTarget(RULE, VOCAB, LIMIT)


class Faults(logging.Handler):
    """What drafters raised."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.getMessage()}: {record.exc_info}")


class SchedulerMachine(RuleBasedStateMachine):
    targets: tuple[str, ...] = ("toy", "toy", "window")

    @initialize(
        data=st.data(),
        lag=st.integers(0, 1),
        running=st.integers(2, 6),
        rows=st.sampled_from([6, 20, 64, 200]),
        pages=st.sampled_from([8, 9, 10, 12, 40]),
        draft_pages=st.sampled_from([2, 9, 40]),
        caching=st.sampled_from([True, True, False]),
        seed=st.integers(0, 2**32),
    )
    def begin(
        self, data: Any, lag: int, running: int, rows: int, pages: int, draft_pages: int, caching: bool, seed: int
    ) -> None:
        self.target = data.draw(st.sampled_from(self.targets))
        self.dice = random.Random(seed)
        clock = Clock()  # the pacer reads it, and it must tell the same when an example is run again
        self.run = ToyRun(
            RULE,
            target=Timed(made(self.target), clock, lambda rows: 1 + 0.05 * rows),
            clock=clock,
            lag=lag,
            max_model_len=LIMIT,
            max_num_seqs=running,
            max_batch_tokens=rows,
            pages=pages,
            prefix_caching=caching,
        )
        model = tiny().prefix(1) if self.target == "tiny" else StrictTarget(RULE, VOCAB, LIMIT)
        self.draft_pool = PagePool(model.groups[0], draft_pages)
        self.shared: dict[str, Any] = {
            "none": None,
            "ngram": NgramDrafter(1, 3),
            "suffix": SuffixDrafter(),
            "recycling": RecyclingDrafter(VOCAB),
            "model": DraftModelDrafter(model, [self.draft_pool], LIMIT),
        }
        self.pairs: list[tuple[Sequence, Sequence]] = []
        self.cancelled: set[int] = set()
        self.faults = Faults()
        logging.getLogger("paceline.drafting").addHandler(self.faults)
        logging.getLogger("paceline.drafting").propagate = False

    def drafter(self, kind: str, expected: Sequence) -> Any:
        if kind in self.shared:
            return self.shared[kind]
        script = mix(expected.output, expected.prompt_length, 0.0 if kind == "wrong" else 0.7, self.dice.randrange(99))
        return ScriptedDrafter(
            lambda tokens, budget: [token % VOCAB for token in script(tokens, budget)],
            needs=Needs(features=(0,)) if kind == "feels" else Needs(),
        )

    @rule(
        family=st.integers(0, 2),
        common=st.sampled_from([0, 15, 16, 17, 40, 64]),
        tail=st.integers(1, 20),
        crowd=st.sampled_from([1, 1, 4]),
        answers=st.sampled_from([1, 1, 1, 3]),
        kind=st.sampled_from(KINDS),
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 2),
        tokens=st.sampled_from([1, 2, 17, 40, 40]),
        logprobs=st.sampled_from([None, None, 1]),
        budget=st.sampled_from([1, 5, 12, 63]),
        adaptive=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        salt=st.sampled_from([None, None, "salt"]),
    )
    def add(
        self,
        family: int,
        common: int,
        tail: int,
        crowd: int,
        answers: int,
        kind: str,
        temperature: float,
        seed: int,
        tokens: int,
        logprobs: int | None,
        budget: int,
        adaptive: bool,
        priority: int,
        salt: str | None,
    ) -> None:
        for one in range(crowd):
            prompt = (*beginning((family + one) % 3)[:common], *[(seed + place) % 5 for place in range(tail + one)])
            speculation = {"num_speculative_tokens": budget, "adaptive": adaptive}
            settings = {
                "temperature": temperature,
                "seed": seed,
                "max_tokens": tokens,
                "logprobs": logprobs,
                "prompt_logprobs": logprobs,
            }
            request = {"priority": priority, "cache_salt": salt}
            self.ask(prompt, 1 if one else answers, kind, speculation, settings, **request)

    def ask(
        self,
        prompt: tuple[int, ...],
        answers: int,
        kind: str,
        speculation: dict[str, Any],
        settings: dict[str, Any],
        **request: Any,
    ) -> None:
        leader = None
        for choice in range(answers):
            expected = reference(self.target, prompt, choice, tuple(settings.items()))
            sequence = self.run.add(
                prompt,
                self.drafter(kind, expected),
                choice=choice,
                leader=leader,
                eos=(),
                speculation=speculation,
                **request,
                **settings,
            )
            leader = leader or sequence
            self.pairs.append((sequence, expected))

    @precondition(lambda self: not self.run.engine.idle)
    @rule(steps=st.integers(1, 20))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for sequence in self.run.engine.step():
                assert sequence.finish_reason != "abort" or sequence.id in self.cancelled
            self.check()

    @precondition(lambda self: self.pairs)
    @rule()
    def cancel(self) -> None:
        sequence, _ = self.dice.choice(self.pairs)
        self.cancelled.add(sequence.id)
        self.run.engine.cancel(sequence)
        assert sequence not in self.run.engine.scheduler.waiting
        assert sequence not in self.run.engine.scheduler.running
        assert not sequence.tables

    @rule()
    def forget(self) -> None:
        self.run.engine.scheduler.forget()

    def check(self) -> None:
        self.run.check()
        states = self.shared["model"]._states.values()
        self.draft_pool.check([table for state in states for table in state.tables])
        assert self.faults.found == []

    @invariant()
    def so_far_as_expected(self) -> None:
        for sequence, expected in getattr(self, "pairs", []):
            assert sequence.output == expected.output[: len(sequence.output)]
            if sequence.finish_reason not in (None, "abort"):
                same(sequence, expected)
            assert not sequence.record.failed
        if hasattr(self, "pairs"):
            self.check()

    def teardown(self) -> None:
        if not hasattr(self, "pairs"):
            return
        try:
            for _ in range(5000):
                if self.run.engine.idle:
                    break
                self.run.engine.step()
                self.check()
            self.so_far_as_expected()
            for sequence, _ in self.pairs:
                assert sequence.finish_reason is not None
                assert (sequence.finish_reason == "abort") <= (sequence.id in self.cancelled)
            self.run.check_empty()
            assert self.draft_pool.free == self.draft_pool.pages
            assert not self.shared["model"]._states
            assert not self.shared["suffix"]._states
        finally:
            logging.getLogger("paceline.drafting").removeHandler(self.faults)
            logging.getLogger("paceline.drafting").propagate = True


class TinyMachine(SchedulerMachine):
    targets = ("tiny",)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = trials(25)
TestTiny = TinyMachine.TestCase
TestTiny.settings = trials(15)


@pytest.mark.long
@pytest.mark.parametrize("machine", [SchedulerMachine, TinyMachine])
def test_for_long(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=trials(600))
