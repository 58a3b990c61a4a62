"""Constraints: the automaton against an enumeration of its language, and the rules that apply one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.constraint import Constraint, TokenAutomaton
from paceline.errors import OptionError, RequestError
from paceline.sampling import LogitRules, Sampling
from paceline.tree import TokenTree
from tests.toys import ScriptedDrafter, ToyRun, TreeDrafter, path_rule, random_tree, same, trials

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import Drafter, View
    from paceline.request import Sequence

V = 8
EOS = 7
TWO = TokenAutomaton.from_texts([[1], [2, 3, 3]], EOS)

texts_of = st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=6)


def after(automaton: TokenAutomaton, tokens: Seq[int]) -> Any:
    state: Any = automaton.initial()
    for token in tokens:
        if state is not None:
            state = automaton.advance(state, token)
    return state


def ids(mask: Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def left(row: Tensor) -> set[int]:
    return ids(row > -torch.inf)


def rules(constraint: Any = TWO, words: Seq[Seq[int]] = (), **options: Any) -> LogitRules:
    return LogitRules(Sampling(**options), [0], V, [EOS], words, constraint)


# The automaton


@trials(100)
@given(texts=texts_of)
def test_an_automaton_of_texts_allows_exactly_their_beginnings(texts: list[list[int]]) -> None:
    automaton = TokenAutomaton.from_texts(texts, [EOS, 6])
    assert isinstance(automaton, Constraint)
    whole = {tuple(text) for text in texts}
    begun = {text[:n] for text in whole for n in range(len(text) + 1)}
    for start in begun:
        state = after(automaton, start)
        following = {token for token in range(4) if (*start, token) in begun}
        assert ids(automaton.allowed(state)) == following | ({6, EOS} if start in whole else set())
        alone = len(following) == 1 and start not in whole
        assert automaton.forced(state) == (min(following) if alone else None)
        assert hash(state) == hash(after(automaton, start))
        for token in {0, 1, 2, 3} - following:
            assert automaton.advance(state, token) is None


def test_transitions_may_run_in_circles_and_states_may_be_anything_hashable() -> None:
    automaton = TokenAutomaton({"out": {1: "in"}, "in": {2: "in", 3: ("done",)}}, "out", [("done",)], EOS)
    assert [automaton.forced(after(automaton, t)) for t in ([], [1], [1, 2], [1, 3])] == [1, None, None, None]
    assert after(automaton, [1, 2, 2, 2]) == after(automaton, [1])
    assert ids(automaton.allowed(after(automaton, [1, 2, 3]))) == {EOS}
    ended = after(automaton, [1, 3, EOS])
    assert ended is not None
    assert not automaton.allowed(ended).any()
    assert automaton.forced(ended) is None


def test_what_was_given_may_change_afterwards() -> None:
    transitions = {0: {1: 1}, 1: {2: 0}}
    automaton = TokenAutomaton(transitions, 0, [], ())
    transitions[0][2] = 1
    assert automaton.advance(automaton.initial(), 2) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({0: {-1: 1}}, 0, [1], EOS), "-1 is none"),
        (({0: {True: 1}}, 0, [1], EOS), "True is none"),
        (({0: {"a": 1}}, 0, [1], EOS), "'a' is none"),
        (({0: {1: 1}}, 0, [1], -7), "-7 is none"),
        (({0: {1: 1}, 1: {EOS: 0}}, 0, [1], EOS), "token 7 ends the output"),
        (({0: {1: 1}}, 0, [1], ()), "needs eos"),
    ],
)
def test_what_is_no_automaton_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TokenAutomaton(*arguments)


def test_texts_that_make_no_constraint_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one"):
        TokenAutomaton.from_texts([], EOS)
    with pytest.raises(OptionError, match="token 7 ends the output"):
        TokenAutomaton.from_texts([[1, EOS]], EOS)


# The rules


def test_a_row_is_a_function_of_output_and_path() -> None:
    some = rules()
    row = torch.arange(V, dtype=torch.float32)
    cases: list[tuple[list[int], set[int]]] = [
        ([], {1, 2}),
        ([2], {3}),
        ([2, 3], {3}),
        ([2, 3, 3], {EOS}),
        ([1], {EOS}),
    ]
    for tokens, expected in cases:
        for cut in range(len(tokens) + 1):
            counts = some.counts(tokens[:cut])
            for kept in (None, counts):
                result = some.apply(row, tokens[:cut], tokens[cut:], kept)
                assert left(result) == expected
                assert result[sorted(expected)].tolist() == [float(token) for token in sorted(expected)]
            assert counts == some.counts(tokens[:cut]), "a path never enters the counts"
    assert row.tolist() == list(range(V))


def test_counts_that_grow_are_those_of_the_whole_output() -> None:
    some = rules()
    counts = some.counts()
    for place, token in enumerate([2, 3, 3, EOS, 5]):
        assert counts == some.counts([2, 3, 3, EOS, 5][:place])
        counts.commit([token])
    assert some.counts([2]) != rules(None).counts([2])


@pytest.mark.parametrize("tokens", [[5], [2, 1], [2, 3, 3, EOS], [1, EOS, 4], [4, EOS]])
def test_rows_that_nothing_is_emitted_from_are_left_alone(tokens: list[int]) -> None:
    """Behind an end of text, or a draft that will be rejected, there is nothing that could be wrong."""
    for cut in range(len(tokens) + 1):
        assert left(rules().apply(torch.zeros(V), tokens[:cut], tokens[cut:])) == set(range(V))


def test_a_stop_token_ends_it_too() -> None:
    some = rules(TokenAutomaton({0: {1: 1}}, 0, [], ()), stop_token_ids=[1])
    assert left(some.apply(torch.zeros(V), [])) == {1}
    assert left(some.apply(torch.zeros(V), [], [1])) == set(range(V))


@pytest.mark.parametrize(
    ("options", "tokens", "expected"),
    [
        ({"logit_bias": {1: 5.0, 4: 100.0}}, [], {1: 5.0, 2: 0.0}),
        ({"presence_penalty": 1.0}, [2], {3: 0.0}),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, [2, 3], {3: -1.5}),
        ({"allowed_token_ids": [0, 2, 3]}, [], {2: 0.0}),
        ({"allowed_token_ids": [0, 1]}, [1], {}),
        ({"min_tokens": 2}, [1], {}),
        ({"min_tokens": 3}, [2, 3], {3: 0.0}),
        ({"min_tokens": 3}, [2, 3, 3], {EOS: 0.0}),
        ({"words": [[1]]}, [], {2: 0.0}),
        ({"words": [[2, 3]]}, [2], {}),
        ({"words": [[3, 3]]}, [2], {3: 0.0}),
        ({"words": [[3, 3]]}, [2, 3], {}),
    ],
)
def test_together_with_other_rules_what_all_of_them_allow_is_left(
    options: dict[str, Any], tokens: list[int], expected: dict[int, float]
) -> None:
    some = rules(**options)
    for cut in range(len(tokens) + 1):
        row = some.apply(torch.zeros(V), tokens[:cut], tokens[cut:])
        assert {token: float(row[token]) for token in left(row)} == expected


class _Padded(Constraint):
    """Any number of ones, by a mask as long as a padded head's; of the padding it allows one id."""

    def initial(self) -> Any:
        return 0

    def advance(self, state: Any, token: int) -> Any:
        return 0 if token == 1 else None

    def allowed(self, state: Any) -> Tensor:
        mask = torch.zeros(1000, dtype=torch.bool)
        mask[[1, 900]] = True
        return mask

    def forced(self, state: Any) -> int | None:
        return None


def test_a_mask_may_be_longer_than_the_vocabulary() -> None:
    assert left(rules(_Padded()).apply(torch.zeros(V), [])) == {1}
    assert left(rules(_Padded()).apply(torch.zeros(V + 3), [])) == {1}


@pytest.mark.parametrize(
    "constraint",
    [
        TokenAutomaton({0: {1: 0, 900: 1}}, 0, [], ()),
        TokenAutomaton({0: {1: 1}, 1: {2: 2}}, 0, [2], (V - 1, 900)),
        TokenAutomaton.from_texts([[1], [2, 3, 900]], EOS),
    ],
)
def test_an_automaton_of_another_vocabulary_is_refused(constraint: TokenAutomaton) -> None:
    assert constraint.highest == 900
    with pytest.raises(RequestError, match=f"allows token 900, but the model has {V} ids, up to {V - 1}: make it with"):
        rules(constraint)
    assert TokenAutomaton({}, 0, [], ()).highest == -1


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        rules(ignore_eos=True)
    with pytest.raises(RequestError, match="methods initial, advance, allowed and forced"):
        rules({"regex": "a+"})
    assert rules(None).trivial
    assert not rules().trivial


# The engine


def accepted(automaton: TokenAutomaton, output: Seq[int], finish: str | None) -> bool:
    """Whether an output is in the language, or was cut while it could still become one."""
    state = after(automaton, output)
    return state is not None and (finish != "stop" or output[-1] == EOS)


def random_automaton(dice: random.Random) -> TokenAutomaton:
    """Up to five states, at most three tokens each; every state that nothing follows is accepting."""
    states = range(dice.randint(1, 5))
    arcs = {s: {t: dice.choice(states) for t in dice.sample(range(EOS), dice.randint(0, 3))} for s in states}
    return TokenAutomaton(arcs, 0, [s for s in states if not arcs[s] or dice.random() < 0.3], EOS)


def plain(rule: Any, constraint: TokenAutomaton, **options: Any) -> Sequence:
    run = ToyRun(rule, vocab=V)
    sequence = run.add([0], constraint=constraint, eos=(EOS,), **options)
    run.finish(sequence)
    return sequence


def hostile(dice: random.Random) -> Drafter:
    """Drafts of anything at all, the end of text among it."""
    return TreeDrafter(
        lambda tokens, budget: random_tree(dice, tokens[-1], [], budget, width=4, depth=6, vocab=V),
    )


@trials(40)
@given(seed=st.integers(0, 9999), temperature=st.sampled_from([0.0, 1.5]), lag=st.integers(0, 1))
def test_output_is_in_the_language_whatever_is_drafted(seed: int, temperature: float, lag: int) -> None:
    dice = random.Random(seed)
    automaton = random_automaton(dice)
    rule = path_rule(V, seed=seed)
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 20}
    expected = plain(rule, automaton, **options)
    assert accepted(automaton, expected.output, expected.finish_reason)
    run = ToyRun(rule, vocab=V, lag=lag)
    drafters = [
        hostile(dice),
        ScriptedDrafter(lambda tokens, budget: [*expected.output, 1, 2, 3][len(tokens) - 1 :][:budget]),
    ]
    for drafter in drafters:
        sequence = run.add(
            [0], drafter, constraint=automaton, eos=(EOS,), speculation={"num_speculative_tokens": 24}, **options
        )
        run.finish(sequence)
        same(sequence, expected)
    run.check_empty()


class Drawing(TreeDrafter):
    """Draws trees from logits of its own, those of the rules that need it sampled; some of its drafts are illegal."""

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        trees = []
        for seen, budget in zip(views, budgets, strict=True):
            tree = TokenTree.root(seen.tokens[-1])
            logits = torch.randn(16, V, generator=torch.Generator().manual_seed(len(seen.tokens)))
            node = 0
            while len(tree) <= budget and node < len(tree):
                path = [tree.tokens[above] for above in tree.path(node)[1:]]
                drawn = seen.draw(logits[node % 16][None], [path], self.width(budget + 1 - len(tree)), nodes=[node])[0]
                tree.grow(node, drawn, self.name)
                node += 1
            trees.append(tree)
        return trees

    def width(self, most: int) -> int:
        return min(most, 2)


class DrawingChain(Drawing):
    def width(self, most: int) -> int:
        return 1


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block", "recursive", "traversal", "typical"])
@pytest.mark.parametrize("seed", range(12))
def test_output_is_in_the_language_under_every_rule(rule: str, seed: int) -> None:
    dice = random.Random(seed)
    automaton = random_automaton(dice)
    drafters: list[Drafter] = []
    if rule in ("recursive", "traversal", "coupled", "typical"):
        drafters.append(Drawing(lambda tokens, budget: TokenTree.root(tokens[-1])))
    if rule in ("ratio", "block", "coupled"):
        drafters.append(DrawingChain(lambda tokens, budget: TokenTree.root(tokens[-1])))
    if rule in ("coupled", "typical"):
        drafters.append(hostile(dice))
    for drafter in drafters:
        run = ToyRun(path_rule(V, seed=seed, spread=1.0), vocab=V)
        sequence = run.add(
            [0],
            drafter,
            constraint=automaton,
            eos=(EOS,),
            speculation={"rule": rule, "num_speculative_tokens": 12},
            temperature=1.0,
            seed=seed,
            max_tokens=20,
        )
        run.finish(sequence)
        assert sequence.error is None
        assert accepted(automaton, sequence.output, sequence.finish_reason)
        assert not sequence.record.failed
        run.check_empty()


def test_the_end_comes_where_nothing_else_may() -> None:
    """The target loves token 5, which is never allowed, and hates to stop."""

    def rule(path: list[int]) -> Tensor:
        row = torch.zeros(V)
        row[5], row[EOS] = 50.0, -1000.0
        return row

    sequence = plain(rule, TokenAutomaton.from_texts([[3, 4]], EOS), logprobs=1, logprobs_mode="processed")
    assert sequence.output == [3, 4, EOS]
    assert sequence.finish_reason == "stop"
    assert all(entry.logprob == 0.0 for entry in sequence.logprobs)


@pytest.mark.parametrize("drafting", [False, True])
def test_a_dead_end_ends_the_request_alone(drafting: bool) -> None:
    rule = path_rule(V, seed=5)
    dead = TokenAutomaton({0: {1: 1}, 1: {2: 2}, 2: {3: 3}}, 0, [], ())
    run = ToyRun(rule, vocab=V)
    drafter = ScriptedDrafter(lambda tokens, budget: [1, 2, 3, 4][len(tokens) - 1 :][:budget]) if drafting else None
    sequence = run.add([0], drafter, constraint=dead, eos=(EOS,))
    beside = run.add([0], eos=(EOS,))
    run.finish(sequence, beside)
    assert isinstance(sequence.error, RequestError)
    assert "leave no token to choose" in str(sequence.error)
    assert sequence.output == [1, 2, 3], "what was right before the dead end is delivered, drafted or not"
    assert beside.error is None
    run.check_empty()


class _Broken(TokenAutomaton):
    """Fails where the output is two tokens long: in ``advance``, or by a mask that is none."""

    def __init__(self, where: str) -> None:
        super().__init__({0: {1: 1}, 1: {2: 2}, 2: {3: 3}}, 0, [3], EOS)
        self._where = where

    def advance(self, state: Any, token: int) -> Any:
        if self._where == "advance" and token == 2:
            raise KeyError("a bug of the caller's")
        return super().advance(state, token)

    def allowed(self, state: Any) -> Any:
        return ["no tensor"] if self._where == "allowed" and state == 2 else super().allowed(state)


@pytest.mark.parametrize("where", ["advance", "allowed"])
@pytest.mark.parametrize("drafting", [False, True])
def test_a_constraint_that_fails_ends_its_request_alone(where: str, drafting: bool) -> None:
    rule = path_rule(V, seed=5)
    run = ToyRun(rule, vocab=V)
    drafter = ScriptedDrafter(lambda tokens, budget: [1, 2, 3, 4][len(tokens) - 1 :][:budget]) if drafting else None
    sequence = run.add([0], drafter, constraint=_Broken(where), eos=(EOS,), repetition_penalty=1.5)
    beside = run.add([0], eos=(EOS,))
    run.finish(sequence, beside)
    assert isinstance(sequence.error, RequestError)
    assert "the constraint failed" in str(sequence.error)
    assert sequence.output == [1, 2]
    assert beside.error is None
    run.check_empty()
