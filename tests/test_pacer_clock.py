"""Never slower, exactly: the whole engine on a clock to which recorded costs of steps and of drafters are charged.

The figure is that of every measurement here: decode seconds of all requests together. What is drafted for a place of an
answer is right or wrong whoever asks, so all ways to draft meet the same luck.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from paceline.cost import Prices
from paceline.drafters import Needs
from paceline.drafters.cascade import CascadeDrafter
from paceline.trace import Trace
from tests.clock import ONE_ROW, Ride, Talker, fixed_seconds, recorded, talker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.toys import Clock

TURN = 48
REQUESTS = 16  # of a cell; one for each of 32 users
SCRIPTS: dict[str, Callable[[int], float]] = {
    "good": lambda done: 0.8,
    "fair": lambda done: 0.5,
    "useless": lambda done: 0.0,
    "perfect": lambda done: 1.0,
    "turns good": lambda done: float(done >= TURN),
    "turns bad": lambda done: 0.9 * (done < TURN),
}
DRAFTERS = {
    "lookup": ("lookup", 0.0, 0.018 * ONE_ROW),  # of every sequence
    "head": ("level", 0.12 * ONE_ROW, 0.0),  # of every level
    "model": ("level", 0.4 * ONE_ROW, 0.0),
}
LENGTHS = (0, 2, 4, 8)
TABLE = Prices(tuple(recorded(rows) for rows in range(1, 513)), known=True)


def wrong_table(few: float, many: float) -> Prices:
    """Off by these factors at one row and at 64, and by what lies between at others."""
    shares = [min(1.0, (rows - 1) / 63) for rows in range(1, 513)]
    seconds = [recorded(rows) * (few + (many - few) * share) for rows, share in enumerate(shares, 1)]
    return Prices(tuple(seconds), known=True)


WRONG = (wrong_table(0.85, 0.85), wrong_table(1.15, 1.15), wrong_table(0.85, 1.15), wrong_table(1.15, 0.85))


@pytest.mark.parametrize("users", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_never_slower_than_plain_and_as_fast_as_the_best_fixed_length(drafter: str, script: str, users: int) -> None:
    kind, each, call = DRAFTERS[drafter]
    right, rounds = SCRIPTS[script], max(1, REQUESTS // users)
    fixed = [fixed_seconds(right, users, length, each, call, rounds=rounds) for length in LENGTHS]
    auto = Ride(talker(right, kind, each, call), users, prices=TABLE, rounds=rounds).go().total  # type: ignore[arg-type]
    assert auto <= fixed[0] / 0.97
    assert auto <= min(fixed) / 0.95


@pytest.mark.parametrize("users", [1, 4, 32])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_table_that_is_wrong_by_15_percent_does_not_hurt_nor_does_none(script: str, users: int) -> None:
    kind, each, call = DRAFTERS["lookup"]
    right, rounds = SCRIPTS[script], max(1, REQUESTS // users)
    fixed = [fixed_seconds(right, users, length, each, call, rounds=rounds) for length in LENGTHS]
    for prices in (*WRONG, None):
        auto = Ride(talker(right, kind, each, call), users, prices=prices, rounds=rounds).go().total  # type: ignore[arg-type]
        assert auto <= fixed[0] / 0.97
        assert auto <= min(fixed) / 0.94


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fixed_lengths_are_what_the_engine_takes(drafter: str, users: int, length: int) -> None:
    kind, each, call = DRAFTERS[drafter]
    for right in (SCRIPTS["good"], SCRIPTS["turns good"]):
        took = Ride(talker(right, kind, each, call), users, fixed=length).go().total  # type: ignore[arg-type]
        assert took == pytest.approx(fixed_seconds(right, users, length, each, call))


@pytest.mark.parametrize("users", [1, 8, 32])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_useless_drafter_costs_under_3_percent_after_64_tokens(drafter: str, users: int) -> None:
    kind, each, call = DRAFTERS[drafter]
    for prices in (None, TABLE):
        short, long = (
            Ride(talker(SCRIPTS["useless"], kind, each, call), users, tokens, prices=prices).go().clock.now  # type: ignore[arg-type]
            for tokens in (64, 224)
        )
        plain = 160 * recorded(users)
        assert long - short < plain * 1.03


@pytest.mark.parametrize("users", [1, 2, 4, 8])
@pytest.mark.parametrize("drafter", ["lookup", "head"])
def test_a_drafter_that_turns_perfect_is_in_use_within_32_tokens(drafter: str, users: int) -> None:
    kind, each, call = DRAFTERS[drafter]
    for turn in (48, 96):
        ride = Ride(
            talker(lambda done, turn=turn: float(done >= turn), kind, each, call),  # type: ignore[misc, arg-type]
            users,
            160,
            prices=TABLE,
        ).go()
        for sequence in ride.running:
            sources = sequence.sources[turn:]
            assert "talker" in sources[:32]
            late = sources[32:]
            assert late.count("talker") > 0.6 * len(late)


def test_a_collapse_is_noticed_within_32_tokens_and_counted() -> None:
    for users in (1, 4):
        ride = Ride(talker(lambda done: float(done < 64)), users, 128, prices=TABLE).go()
        for sequence in ride.running:
            record = sequence.record
            assert record.collapsed == 1
            assert record.disabled_reason == "acceptance collapsed"
            drafted = [done for done, _ in ride.talker.calls]
            assert drafted
        steady = Ride(talker(lambda done: 0.8), users, 128, prices=TABLE).go()
        assert not any(sequence.record.collapsed for sequence in steady.running)
        before = Ride(talker(lambda done: float(done < 64)), users, 96, prices=TABLE).go()
        assert all(sequence.record.collapsed for sequence in before.running)


def pair(first: Callable[[int], float], second: Callable[[int], float]) -> Callable[[Clock], CascadeDrafter]:
    """A cascade of a lookup and a head."""

    def make(clock: Clock) -> CascadeDrafter:
        lookup = Talker(
            lambda tokens, budget: [], "lookup", Needs(cost="lookup"), right=first, clock=clock, call=0.018 * ONE_ROW
        )
        head = Talker(lambda tokens, budget: [], "head", Needs(), right=second, clock=clock, each=0.12 * ONE_ROW)
        return CascadeDrafter([lookup], head)

    return make


@pytest.mark.parametrize("users", [1, 4])
def test_of_two_drafters_the_one_that_is_right_is_asked(users: int) -> None:
    """The lookup knows the first half and the head the second; what a useless member takes is not spent for long."""
    ride = Ride(pair(lambda done: float(done < 64), lambda done: float(done >= 64)), users, 128, prices=TABLE).go()
    plain = fixed_seconds(lambda done: 0.0, users, 0, 0.0, 0.0, tokens=128)
    assert ride.total < 0.6 * plain
    for sequence in ride.running:
        assert sequence.sources[16:64].count("lookup") > 30
        assert sequence.sources[96:].count("head") > 16
        drafters = sequence.record.drafters
        assert drafters["lookup"]["kept"] > 30
        assert drafters["head"]["asked"] < sequence.record.steps
    useless = Ride(pair(lambda done: 1.0, lambda done: 0.0), users, 128, prices=TABLE).go()
    asked = sum(sequence.record.drafters["head"]["asked"] for sequence in useless.running)
    assert asked < 8 * users


def test_estimates_of_one_isolation_key_do_not_reach_another_but_costs_do() -> None:
    ride = Ride(talker(lambda done: 0.0), 2, prices=None).go()
    pacer = ride.pacer
    for sequence, salt in ((1000, None), (1001, "other")):
        pacer.start(sequence, salt, pacer.prices.of(ride.talker).number)
    price = pacer.prices.of(ride.talker)
    known, fresh = (pacer.habits(sequence).of(price) for sequence in (1000, 1001))
    assert known.worth < 0.05 < fresh.worth
    assert price.samples > 0


def test_every_step_can_be_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ride = Ride(talker(lambda done: 0.8), 2, prices=TABLE, trace=Trace(path)).go()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if not line["prompt_rows"]]
    assert len(steps) >= max(sequence.record.steps for sequence in ride.running)
    for line in steps:
        assert line["predicted"] == pytest.approx(line["measured"], rel=0.05)
        assert line["rows"] == line["sequences"] + sum(draft["kept"] for draft in line["drafts"])
        for draft in line["drafts"]:
            assert len(draft["survival"]) == len(draft["drafters"]) == draft["kept"] <= draft["offered"]
    assert sum(d["kept"] for line in steps for d in line["drafts"]) == sum(s.record.drafted for s in ride.running)
