"""Any order of operations on an engine, with drafters of every kind, the hostile ones too.

Every answer is the plain one, after every step the books agree, and at the end nothing is left.
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

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.pages import PagePool
from tests.toys import (
    VOCAB,
    Clock,
    PairTarget,
    ScriptedDrafter,
    StrictTarget,
    Timed,
    ToyRun,
    TreeDrafter,
    alone,
    oracle,
    path_rule,
    random_tree,
    same,
    trials,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.drafters import Outcome, View
    from paceline.request import Sequence
    from paceline.targets import Target
    from paceline.tree import TokenTree

RULE = path_rule(VOCAB, seed=111, memory=3)
DRAFT = path_rule(VOCAB, seed=112)
KINDS = ("none", "oracle", "ngram", "model", "tree", "garbage", "raises")
STOPS: tuple[Any, ...] = ((), "a", ("ab", "\x00"))


def draft_rule(path: list[int]) -> Any:
    return RULE(path) if len(path) % 3 else DRAFT(path)


@cache
def reference(
    prompt: tuple[int, ...], temperature: float, seed: int, tokens: int, stop: int, penalty: float, window: int | None
) -> Sequence:
    target = None if window is None else PairTarget(RULE, VOCAB, 256, window)
    return alone(
        RULE,
        prompt,
        target=target,
        temperature=temperature,
        seed=seed,
        max_tokens=tokens,
        stop=STOPS[stop],
        repetition_penalty=penalty,
        logprobs=0,
    )


class Raising(ScriptedDrafter):
    """Raises in about every third call."""

    dice: random.Random

    def _maybe(self) -> None:
        if self.dice.random() < 0.3:
            raise ValueError("not today")

    def rewind(self, sequence: int, length: int) -> None:
        self._maybe()
        super().rewind(sequence, length)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        self._maybe()

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        self._maybe()
        return super().propose(views, budgets)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        lag=st.integers(0, 2),
        running=st.integers(1, 5),
        rows=st.sampled_from([1, 5, 30, 64]),
        pages=st.sampled_from([8, 14, 40]),
        window=st.sampled_from([None, None, 8]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, lag: int, running: int, rows: int, pages: int, window: int | None, seed: int) -> None:
        logging.disable(logging.CRITICAL)
        self.window = window
        # The pacer reads a clock, which must tell the same when an example is run again.
        clock = Clock()
        inner: Target = StrictTarget(RULE, VOCAB, 256)
        if window is not None:
            inner = PairTarget(RULE, VOCAB, 256, window)
        self.run = ToyRun(
            RULE,
            target=Timed(inner, clock, lambda rows: 1 + 0.05 * rows),
            clock=clock,
            lag=lag,
            max_num_seqs=running,
            max_batch_tokens=rows,
            pages=pages,
        )
        self.dice = random.Random(seed)
        model = StrictTarget(draft_rule, VOCAB, window=window)
        self.draft_pool = PagePool(model.groups[0], 20)
        self.ngram = NgramDrafter(1, 3)
        self.model = DraftModelDrafter(model, [self.draft_pool], 256)
        self.pairs: list[tuple[Sequence, Sequence]] = []
        self.cancelled: set[int] = set()

    def drafter(self, kind: str, expected: Sequence) -> Any:
        start, answer = expected.prompt_length, expected.output
        dice = random.Random(self.dice.random())

        def garbage(tokens: Seq[int], budget: int) -> Any:
            tree = random_tree(dice, tokens[-1], answer, 1 + dice.randrange(70), width=4, depth=9, vocab=VOCAB)
            spoiled = dice.randrange(6)
            if spoiled == 0:
                return dice.choice([None, [], 7, tree.tokens])
            columns: list[list[Any]] = [tree.tokens, tree.parents, tree.survival, tree.origin]
            column = columns[spoiled % 4]
            for _ in range(dice.randrange(3)):
                column[dice.randrange(len(column))] = dice.choice([-1, 0, 1, 64, 10**9, 0.5, 2.0, None, "x"])
            return tree

        if kind == "tree":
            return TreeDrafter(
                lambda t, b: random_tree(dice, t[-1], answer[len(t) - start :], b, width=3, depth=6, vocab=VOCAB)
            )
        if kind == "raises":
            drafter = Raising(oracle(answer, start))
            drafter.dice = dice
            return drafter
        return {
            "none": None,
            "oracle": ScriptedDrafter(oracle(answer, start)),
            "ngram": self.ngram,
            "model": self.model,
            "garbage": TreeDrafter(garbage),
        }[kind]

    @rule(
        length=st.integers(1, 40),
        kind=st.sampled_from(KINDS),
        temperature=st.sampled_from([0.0, 0.8]),
        tokens=st.integers(1, 20),
        budget=st.sampled_from([1, 2, 5, 12, 63]),
        stop=st.integers(0, len(STOPS) - 1),
        penalty=st.sampled_from([1.0, 1.3]),
        adaptive=st.booleans(),
        piece=st.sampled_from([1, 3, 17, 64]),
    )
    def add(
        self,
        length: int,
        kind: str,
        temperature: float,
        tokens: int,
        budget: int,
        stop: int,
        penalty: float,
        adaptive: bool,
        piece: int,
    ) -> None:
        seed = len(self.pairs)
        prompt = tuple((31 * i + seed) % 7 + 97 for i in range(length))
        expected = reference(prompt, temperature, seed, tokens, stop, penalty, self.window)
        sequence = self.run.add(
            prompt,
            self.drafter(kind, expected),
            temperature=temperature,
            seed=seed,
            max_tokens=tokens,
            stop=STOPS[stop],
            repetition_penalty=penalty,
            logprobs=0,
            piece_limit=piece,
            speculation={"num_speculative_tokens": budget, "adaptive": adaptive},
        )
        self.pairs.append((sequence, expected))

    @precondition(lambda self: not self.run.engine.idle)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for sequence in self.run.engine.step():
                assert sequence.finish_reason != "abort" or sequence.id in self.cancelled
            self.run.check()

    @precondition(lambda self: self.pairs)
    @rule()
    def cancel(self) -> None:
        sequence, _ = self.dice.choice(self.pairs)
        self.cancelled.add(sequence.id)
        self.run.engine.cancel(sequence)

    @invariant()
    def so_far_as_expected(self) -> None:
        for sequence, expected in getattr(self, "pairs", []):
            assert sequence.output == expected.output[: len(sequence.output)]
            if sequence.finish_reason not in (None, "abort"):
                same(sequence, expected)
        if hasattr(self, "pairs"):
            self.run.check()
            states = self.model._states.values()
            self.draft_pool.check([table for state in states for table in state.tables])

    def teardown(self) -> None:
        if not hasattr(self, "pairs"):
            return
        for _ in range(5000):
            if self.run.engine.idle:
                break
            self.run.engine.step()
        self.so_far_as_expected()
        for sequence, _ in self.pairs:
            assert sequence.finish_reason is not None
            assert (sequence.finish_reason == "abort") <= (sequence.id in self.cancelled)
        self.run.check_empty()
        assert not self.ngram._indices
        assert not self.model._states
        assert self.draft_pool.free == self.draft_pool.pages
        logging.disable(logging.NOTSET)


TestEngine = EngineMachine.TestCase
TestEngine.settings = trials(30)


@pytest.mark.long
def test_for_long() -> None:
    run_state_machine_as_test(EngineMachine, settings=trials(1500))
