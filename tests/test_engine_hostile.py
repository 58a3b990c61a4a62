"""A drafter can cost time and nothing else: whatever it raises or returns, the answer is the plain one."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from paceline.drafters import Needs
from tests.toys import VOCAB, ScriptedDrafter, ToyRun, alone, oracle, path_rule, same, wrong

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from paceline.drafters import Outcome, View
    from paceline.request import Sequence
    from paceline.tree import TokenTree

RULE = path_rule(VOCAB, seed=21)
PROMPT = list(b"nobody breaks the wind")


class Moody(ScriptedDrafter):
    """Raises in the calls that ``fails(name, count)`` picks; counts them from 1."""

    def __init__(
        self,
        rule: Callable[[Seq[int], int], list[int]],
        fails: Callable[[str, int], bool],
        needs: Needs | None = None,
    ) -> None:
        super().__init__(rule, name="moody", needs=needs or Needs())
        self.calls: Counter[str] = Counter()
        self.fails = fails

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if self.fails(name, self.calls[name]):
            raise RuntimeError(f"no {name} today")

    def start(self, view: View, valid: int) -> None:
        super().start(view, valid)
        self._call("start")

    def rewind(self, sequence: int, length: int) -> None:
        self._call("rewind")
        super().rewind(sequence, length)

    def release(self, sequence: int) -> None:
        super().release(sequence)
        self._call("release")

    def observe(self, outcomes: Seq[Outcome]) -> None:
        self._call("observe")
        for outcome in outcomes:
            self.observed[outcome.id] += outcome.rows

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        self._call("propose")
        return super().propose(views, budgets)


def rode(drafter: Moody, expected: Sequence, count: int = 1, **engine: Any) -> list[Sequence]:
    run = ToyRun(RULE, **engine)
    limit = len(expected.output)
    sequences = [run.add(PROMPT, drafter, max_tokens=limit) for _ in range(count)]
    run.finish(*sequences)
    for sequence in sequences:
        same(sequence, expected)
    run.check_empty()
    assert not drafter.observed
    return sequences


@pytest.mark.parametrize("call", ["propose", "observe"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_drafter_that_fails_once_goes_on(call: str, count: int, lag: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(RULE, PROMPT, max_tokens=31)
    drafter = Moody(oracle(expected.output, len(PROMPT)), lambda name, n: name == call and n == 3)
    sequences = rode(drafter, expected, count, lag=lag)
    assert len(caplog.records) == 1
    assert "moody" in caplog.text
    assert drafter.calls["rewind"] == count
    for sequence in sequences:
        # 30 tokens after the first; a failing step brings one instead of six, a failing observation costs nothing.
        assert sequence.record.steps == (6 if call == "propose" else 5)
        assert sequence.record.disabled_reason is None


@pytest.mark.parametrize("call", ["propose", "observe"])
def test_a_drafter_that_always_fails_is_as_good_as_none(call: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(RULE, PROMPT)
    drafter = Moody(oracle(expected.output, len(PROMPT)), lambda name, n: name == call)
    (sequence,) = rode(drafter, expected)
    assert len(caplog.records) == drafter.calls[call]
    assert (sequence.record.accepted == 0) == (call == "propose")


@pytest.mark.parametrize("call", ["start", "rewind", "release"])
def test_a_drafter_that_fails_outside_a_step(call: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(RULE, PROMPT)
    drafter = Moody(
        oracle(expected.output, len(PROMPT)),
        lambda name, n: name == call or (call == "rewind" and name == "propose" and n == 2),
    )
    sequences = rode(drafter, expected, 2)
    for sequence in sequences:
        left_out = call != "release"
        assert sequence.record.disabled_reason == ("the drafter failed" if left_out else None)
        assert (sequence.record.accepted > 20) == (call == "release")
    if call == "start":
        assert drafter.calls["propose"] == drafter.calls["observe"] == 0
    if call == "rewind":
        assert drafter.calls["propose"] == 2
    assert drafter.calls["release"] == 2


def test_a_drafter_that_lost_its_features_is_left_out() -> None:
    """The features of the tokens so far are gone, so it could not go on rightly."""
    expected = alone(RULE, PROMPT)
    drafter = Moody(
        oracle(expected.output, len(PROMPT)),
        lambda name, n: name == "propose" and n == 2,
        Needs(features=(0,)),
    )
    (sequence,) = rode(drafter, expected)
    assert sequence.record.disabled_reason == "the drafter failed"
    assert drafter.calls["propose"] == 2
    assert sequence.record.accepted == 5


@pytest.mark.parametrize(
    "trees",
    [
        lambda trees: None,
        lambda trees: [],
        lambda trees: trees[:-1],
        lambda trees: [*trees, trees[0]],
        lambda trees: {"trees": trees},
        lambda trees: 5,
        lambda trees: [None] * len(trees),
    ],
    ids=["none", "empty", "one less", "one more", "a mapping", "a number", "no trees"],
)
def test_a_wrong_number_of_trees(trees: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(RULE, PROMPT, max_tokens=4)

    class Miscounting(ScriptedDrafter):
        def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
            return trees(super().propose(views, budgets))  # type: ignore[no-any-return]

        def observe(self, outcomes: Seq[Outcome]) -> None:
            pass

    run = ToyRun(RULE)
    drafter = Miscounting(oracle(expected.output, len(PROMPT)))
    with caplog.at_level(logging.WARNING):
        sequences = [run.add(PROMPT, drafter, max_tokens=4) for _ in range(2)]
        run.finish(*sequences)
    for sequence in sequences:
        same(sequence, expected)
        assert sequence.record.drafted == 0
        assert sequence.record.steps == 3
    # Of three steps the last has no room for a draft.
    assert len(caplog.records) in (2, 4)
    run.check_empty()


def test_a_failing_drafter_does_not_touch_requests_of_another() -> None:
    expected = alone(RULE, PROMPT)
    run = ToyRun(RULE)
    bad = Moody(oracle(expected.output, len(PROMPT)), lambda name, n: name == "propose")
    good = ScriptedDrafter(oracle(expected.output, len(PROMPT)))
    sequences = [run.add(PROMPT, drafter) for drafter in (bad, good, None)]
    run.finish(*sequences)
    for sequence in sequences:
        same(sequence, expected)
    assert [s.record.accepted for s in sequences] == [0, 25, 0]


def test_speculation_that_is_switched_off_asks_no_drafter() -> None:
    expected = alone(RULE, PROMPT)
    drafter = Moody(wrong(expected.output, len(PROMPT)), lambda name, n: False)
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, drafter, speculation={"num_speculative_tokens": 0})
    run.finish(sequence)
    same(sequence, expected)
    assert drafter.calls["propose"] == 0
    assert sequence.record.drafted == 0


def test_the_fixed_length_is_what_is_asked_for() -> None:
    asked: list[int] = []
    expected = alone(RULE, PROMPT)

    def rule(tokens: Seq[int], budget: int) -> list[int]:
        asked.append(budget)
        return []

    for length in (1, 4, 63):
        asked.clear()
        run = ToyRun(RULE)
        sequence = run.add(PROMPT, ScriptedDrafter(rule), speculation={"num_speculative_tokens": length})
        run.finish(sequence)
        same(sequence, expected)
        assert asked == [min(length, room) for room in range(30, 0, -1)]
