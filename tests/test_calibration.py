"""Estimates of drafts become what they turn out to be worth, for every claim, depth, drafter and sequence."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.calibration import Calibration, Judge
from paceline.pacer import Pacer
from paceline.tree import Dropping, TokenTree
from tests.toys import trials

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

RIGHT, WRONG = 1, 2


def chain(claims: Seq[float], origin: str = "x") -> TokenTree:
    """A chain of right tokens, each with its claimed chance after the one before."""
    survival = [1.0]
    for claim in claims:
        survival.append(survival[-1] * claim)
    return TokenTree.chain(0, [RIGHT] * len(claims), survival[1:], origin)


def weighed(judge: Judge, claims: Seq[float], origin: str = "x") -> list[float]:
    """The calibrated chance of each node of a chain after the one before; nothing is learned from it."""
    tree = judge.weigh(chain(claims, origin))
    return [below / above for above, below in zip(tree.survival, tree.survival[1:], strict=False)]


def taught(judge: Judge, dice: random.Random, claims: Seq[float], rates: Seq[float], origin: str = "x") -> None:
    judge.weigh(chain(claims, origin))
    truth = []
    for rate in rates:
        truth.append(RIGHT if dice.random() < rate else WRONG)
        if truth[-1] == WRONG:
            break
    judge.learn(truth)


@pytest.mark.parametrize("true", [0.05, 0.3, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("claimed", [0.0, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0])
def test_a_claim_becomes_what_it_is_worth(claimed: float, true: float) -> None:
    """For sequences that are like the others: what was learned from them holds for a new one."""
    shared, dice = Calibration(), random.Random(7)
    for _ in range(60):
        judge = Judge(shared)
        for _ in range(40):
            taught(judge, dice, [claimed], [true])
    assert weighed(Judge(shared), [claimed]) == [pytest.approx(true, abs=0.06)]
    assert weighed(judge, [claimed]) == [pytest.approx(true, abs=0.25)]


def test_claims_are_told_apart_and_one_teaches_nothing_of_another() -> None:
    """A drafter that is right where it doubts and wrong where it is sure."""
    shared, dice = Calibration(), random.Random(8)
    worth = {0.0: 0.7, 0.1: 0.9, 0.3: 0.7, 0.5: 0.4, 0.7: 0.2, 0.95: 0.05, 1.0: 0.6}
    for _ in range(40):
        judge = Judge(shared)
        for claim, true in worth.items():
            for _ in range(20):
                taught(judge, dice, [claim], [true])
    for claim, true in worth.items():
        assert weighed(Judge(shared), [claim]) == [pytest.approx(true, abs=0.08)]
    assert weighed(Judge(shared), [0.98]) == [pytest.approx(0.98)]


def test_one_judgement_decides_nothing() -> None:
    """What a drafter claims counts for a few judgements, so estimates begin there and move by degrees."""
    for truth in (RIGHT, WRONG):
        shared, moved = Calibration(), []
        for _ in range(12):
            judge = Judge(shared)
            judge.weigh(chain([0.5]))
            judge.learn([truth])
            moved.append(abs(weighed(Judge(shared), [0.5])[0] - 0.5))
        assert moved == sorted(moved)
        assert moved[0] < 0.2 < 0.35 < moved[-1]


def test_depths_and_origins_are_told_apart() -> None:
    shared, dice = Calibration(), random.Random(9)
    rates = {"good": [0.9, 0.7, 0.5, 0.3], "bad": [0.3, 0.6, 0.9, 0.8]}
    for _ in range(100):
        for origin, each in rates.items():
            judge = Judge(shared)
            for _ in range(30):
                taught(judge, dice, [0.5] * 4, each, origin)
    for origin, each in rates.items():
        assert weighed(Judge(shared), [0.5] * 4, origin) == pytest.approx(each, abs=0.09)
        assert weighed(Judge(shared), [0.5] * 7, origin)[4:] == pytest.approx([each[3]] * 3, abs=0.09)
    assert weighed(Judge(shared), [0.5] * 3, "unknown") == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("usual", [0.1, 0.3, 0.7, 0.9])
def test_a_sequence_that_differs_is_noticed_soon(usual: float) -> None:
    """Within 32 drafts, better or worse than the others; and those learn little of it."""
    shared, dice = Calibration(), random.Random(10)
    for _ in range(60):
        judge = Judge(shared)
        for _ in range(30):
            taught(judge, dice, [0.5], [usual])
    for own in (0.0, 1.0):
        judge = Judge(shared)
        before = weighed(judge, [0.5])[0]
        assert before == pytest.approx(usual, abs=0.07)
        for _ in range(32):
            taught(judge, dice, [0.5], [own])
        after = weighed(judge, [0.5])[0]
        assert after == pytest.approx(own, abs=0.25), own
        assert weighed(judge, [0.8])[0] == pytest.approx(0.8, abs=0.2 if own else 0.8)  # what it says of other claims
        assert (weighed(judge, [0.8])[0] > 0.8) == bool(own)
        assert weighed(judge, [0.5], "another drafter") == [pytest.approx(0.5)]
        assert weighed(Judge(shared), [0.5])[0] == pytest.approx(usual, abs=0.12)


def test_a_sequence_is_believed_again_when_it_is_like_the_others() -> None:
    shared, dice = Calibration(), random.Random(11)
    for _ in range(50):
        other = Judge(shared)
        for _ in range(30):
            taught(other, dice, [0.5], [0.8])
    judge = Judge(shared)
    for _ in range(40):
        taught(judge, dice, [0.5], [0.0])
    assert weighed(judge, [0.5])[0] < 0.25
    for _ in range(60):
        taught(judge, dice, [0.5], [0.8])
    assert weighed(judge, [0.5])[0] > 0.6


def test_a_drafter_that_gets_worse_is_found_out() -> None:
    """Old judgements fade: after 1,500 new ones hardly anything of the first ones is left."""
    shared, dice = Calibration(), random.Random(12)
    for rate, count in ((0.95, 3000), (0.1, 1500)):
        for _ in range(count // 10):
            judge = Judge(shared)
            for _ in range(10):
                taught(judge, dice, [0.5], [rate])
    assert weighed(Judge(shared), [0.5])[0] < 0.25


def test_what_was_cut_before_verification_is_judged_by_what_followed() -> None:
    """The tree that was weighed counts, not what was left of it: here the root alone."""
    pacer = Pacer()
    pacer.start(0)
    for _ in range(60):
        tree = pacer.weigh(0, chain([0.5, 0.5]))
        cut = tree.best(1, Dropping())
        assert len(cut) == 1
        pacer.learn_outcome(0, [RIGHT])
    assert pacer.weigh(0, chain([0.5, 0.5])).survival[1] > 0.9
    shared = Calibration()
    judge = Judge(shared)
    for _ in range(60):
        judge.weigh(chain([0.5, 0.5]))
        assert judge.learn([RIGHT]) == (1, False)
    assert weighed(Judge(shared), [0.5, 0.5])[1] == pytest.approx(0.5)  # of the second nothing is known


def test_all_children_of_what_was_right_are_judged_and_none_of_what_was_wrong() -> None:
    tree = TokenTree.root(0)
    for parent, token, survival, origin in [
        *((0, WRONG, 0.5, "wrong"), (0, RIGHT, 0.5, "right")),
        *((1, RIGHT, 0.25, "unjudged"), (2, WRONG, 0.25, "late"), (2, 3, 0.25, "late")),
    ]:
        tree.add(parent, token, survival, origin)
    shared = Calibration()
    judge = Judge(shared)
    for _ in range(40):
        judge.weigh(tree)
        assert judge.learn([RIGHT, RIGHT, RIGHT]) == (1, True)
    assert tree.survival == [1.0, 0.5, 0.5, 0.25, 0.25, 0.25], "a drafter's own tree stays as it is"
    tree = judge.weigh(tree)
    chances = {
        tree.origin[node]: tree.survival[node] / tree.survival[tree.parents[node]] for node in range(1, len(tree))
    }
    assert chances["right"] > 0.9
    assert max(chances["wrong"], chances["late"]) < 0.1
    assert chances["unjudged"] == pytest.approx(0.5)


def test_a_tree_is_judged_once_and_only_what_was_drafted_is_counted() -> None:
    judge = Judge(Calibration())
    assert judge.learn([RIGHT]) == (0, False)
    judge.weigh(chain([0.5, 0.5]))
    assert judge.learn([RIGHT, RIGHT, WRONG]) == (2, False)
    assert judge.learn([RIGHT, RIGHT]) == (0, False)
    judge.weigh(chain([0.5, 0.5]))
    assert judge.learn([RIGHT, WRONG]) == (1, True)
    judge.weigh(chain([]))
    assert judge.learn([RIGHT]) == (0, False)
    judge.weigh(chain([0.5]))
    judge.weigh(chain([0.5] * 3))  # of two that were weighed the last counts
    assert judge.learn([RIGHT] * 4) == (3, False)


def _told(pacer: Pacer, sequence: int, truth: int, times: int = 200) -> None:
    for _ in range(times):
        pacer.weigh(sequence, chain([0.5]))
        pacer.learn_outcome(sequence, [truth])


def _asked(pacer: Pacer, sequence: int, salt: str | None) -> float:
    pacer.start(sequence, salt)
    tree = pacer.weigh(sequence, chain([0.5]))
    pacer.release(sequence)
    return tree.survival[1]


@pytest.mark.parametrize("truth", [RIGHT, WRONG])
def test_nothing_of_one_isolation_key_reaches_another(truth: int) -> None:
    pacer, salts = Pacer(), ["a", None, "", "b"]
    for sequence, salt in enumerate(salts):
        assert _asked(pacer, 100, salt) == pytest.approx(0.5)
        pacer.start(sequence, salt)
        _told(pacer, sequence, truth)
        for stranger in salts[sequence + 1 :]:
            assert _asked(pacer, 100, stranger) == pytest.approx(0.5)
        assert abs(_asked(pacer, 100, salt) - 0.5) > 0.4  # whereas a request of the same key gains by it
    pacer.forget()
    assert _asked(pacer, 100, "a") == pytest.approx(0.5)


def test_memory_is_bounded_by_the_keys_that_were_used_last() -> None:
    pacer = Pacer()
    pacer.start(10**6, "kept")
    _told(pacer, 10**6, RIGHT)
    dice = random.Random(3)
    for sequence in range(10_000):
        pacer.start(sequence, f"salt {sequence}")
        claims = [dice.random() for _ in range(3)]
        pacer.weigh(sequence, chain(claims, f"origin {sequence % 5}"))
        pacer.learn_outcome(sequence, [RIGHT, WRONG])
        pacer.release(sequence)
        if sequence % 50 == 0:
            assert _asked(pacer, -1, "kept") > 0.9  # a key in use is remembered
    assert len(pacer._lessons) <= 64
    assert list(pacer._states) == [10**6]


def test_what_is_remembered_of_one_key_does_not_grow_with_its_sequences() -> None:
    pacer, dice = Pacer(), random.Random(4)
    for sequence in range(10_000):
        pacer.start(sequence)
        depth = dice.randrange(1, 9)
        pacer.weigh(sequence, chain([dice.random() for _ in range(depth)], "ab"[sequence % 2]))
        pacer.learn_outcome(sequence, [RIGHT] * depth)
        pacer.release(sequence)
    (shared,) = pacer._lessons.values()
    assert len(shared.calibration.cells) <= 2 * 4 * 27  # origins, depths, steps of the odds
    assert not pacer._states


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree.root(0)
    for _ in range(draw(st.integers(0, 30))):
        parent = draw(st.integers(0, len(tree) - 1))
        token = draw(st.integers(0, 4))
        if token not in [tree.tokens[child] for child in tree.children(parent)]:
            share = draw(st.sampled_from([0.0, 1.0, 1e-300, 1 - 1e-16]) | st.floats(0.0, 1.0))
            tree.add(parent, token, tree.survival[parent] * share, draw(st.sampled_from("ab")))
    return tree


@trials(80)
@given(rounds=st.lists(st.tuples(trees(), st.lists(st.integers(0, 4), max_size=9)), max_size=25))
def test_survival_stays_above_nothing_and_never_rises(rounds: list[tuple[TokenTree, list[int]]]) -> None:
    judge = Judge(Calibration())
    for tree, truth in rounds:
        tokens, parents = list(tree.tokens), list(tree.parents)
        tree = judge.weigh(tree)
        assert (tree.tokens, tree.parents) == (tokens, parents)
        tree.check(5)
        assert tree.survival[0] == 1.0
        assert all(0.0 < chance <= 1.0 for chance in tree.survival)
        right, missed = judge.learn(truth)
        assert 0 <= right <= len(truth)
        assert (
            right == len(truth)
            or not missed
            or truth[right] not in [tree.tokens[child] for child in tree.children(_walked(tree, truth[:right]))]
        )


def _walked(tree: TokenTree, tokens: Seq[int]) -> int:
    node = 0
    for token in tokens:
        (node,) = (child for child in tree.children(node) if tree.tokens[child] == token)
    return node
