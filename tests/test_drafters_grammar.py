"""Forced tokens are drafted, and are right every time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, Sampling
from paceline.constraint import TokenAutomaton
from paceline.drafters import View
from paceline.drafters.grammar import METHOD, GrammarDrafter
from tests.toys import ToyRun, no_draw, path_rule, same, trials

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.constraint import Constraint
    from paceline.request import Sequence

V = 12
EOS = 11
PROMPT = [9, 9, 9]
# Two answers that begin alike, and one of them is the beginning of a longer one.
TEXTS = TokenAutomaton.from_texts([[1, 2, 3, 4], [1, 2, 5, 6, 7], [1, 2, 5, 6, 7, 8, 8]], EOS)


def view(output: Seq[int], constraint: Constraint | None = TEXTS, number: int = 0) -> View:
    return View(number, [*PROMPT, *output], no_draw, prompt_length=len(PROMPT), constraint=constraint)


def drafted(drafter: GrammarDrafter, seen: View, budget: int = 63) -> list[int]:
    (tree,) = drafter.propose([seen], [budget])
    tree.check(V)
    assert tree.tokens[0] == seen.tokens[-1]
    assert tree.parents == list(range(-1, len(tree) - 1))
    assert set(tree.survival) == {1.0}
    assert set(tree.origin[1:]) <= {"grammar"}
    return tree.tokens[1:]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [1, 2]),
        ([1], [2]),
        ([1, 2], []),
        ([1, 2, 3], [4]),  # behind it only the end may come, which the target says in the same pass
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, EOS], []),
        ([1, 2, 5], [6, 7]),  # behind it the text may end
        ([1, 2, 5, 6, 7], []),
        ([1, 2, 5, 6, 7, 8], [8]),
        ([3], []),  # not in the language
        ([3, 1, 2], []),
    ],
)
def test_a_chain_goes_up_to_the_next_choice_or_end(output: list[int], expected: list[int]) -> None:
    drafter = GrammarDrafter()
    drafter.start(view([]), 0)
    assert drafted(drafter, view(output)) == expected
    for budget in range(3):
        assert drafted(drafter, view(output), budget) == expected[:budget]
    # A sequence that is taken over in the middle is at the same place.
    drafter.start(view(output, number=1), len(output))
    assert drafted(drafter, view(output, number=1)) == expected


def test_a_circle_of_forced_tokens_is_drafted_to_the_budget() -> None:
    circle = TokenAutomaton({0: {1: 1}, 1: {2: 0}}, 0, [], ())
    drafter = GrammarDrafter()
    drafter.start(view([], circle), 0)
    assert drafted(drafter, view([], circle), 5) == [1, 2, 1, 2, 1]
    assert drafted(drafter, view([1, 2, 1], circle), 2) == [2, 1]


def test_without_a_constraint_there_is_nothing_to_say() -> None:
    drafter = GrammarDrafter()
    drafter.start(view([], None), 0)
    assert drafted(drafter, view([1], None)) == []
    drafter.fork(0, view([1], None, 1))
    drafter.rewind(1, 0)
    assert drafter.length(1) == 0
    drafter.release(1)
    drafter.release(0)


@trials(60)
@given(seed=st.integers(0, 9999))
def test_forked_rewound_and_released_it_says_the_same_as_a_new_one(seed: int) -> None:
    dice = random.Random(seed)
    output: list[int] = []
    drafter = GrammarDrafter()
    number = 0
    drafter.start(view(output), 0)
    for _ in range(20):
        fresh = GrammarDrafter()
        fresh.start(view([]), 0)
        assert drafted(drafter, view(output, number=number)) == drafted(fresh, view(output))
        assert drafter.length(number) <= len(PROMPT) + len(output)
        action = dice.randrange(4)
        if action == 0:
            drafter.fork(number, view(output, number=number + 1))
            drafter.release(number)
            number += 1
        elif action == 1:
            kept = dice.randint(0, len(PROMPT) + len(output))
            drafter.rewind(number, kept)
            assert drafter.length(number) <= max(kept, len(PROMPT))
            del output[max(0, kept - len(PROMPT)) :]
        state: Any = TEXTS.initial()
        for token in output:
            state = TEXTS.advance(state, token) if state is not None else None
        if state is not None and len(following := list(TEXTS.allowed(state).nonzero()[:, 0].tolist())):
            output.append(dice.choice(following) if dice.random() < 0.95 else dice.randrange(V))
    drafter.release(number)
    assert not drafter._places


def random_texts(dice: random.Random) -> TokenAutomaton:
    """Words in a row, most of whose tokens are forced; all of them end."""
    words = [[dice.randrange(EOS) for _ in range(dice.randint(2, 6))] for _ in range(4)]
    return TokenAutomaton.from_texts([dice.choice(words) + dice.choice(words) for _ in range(6)], EOS)


def answer(rule: Any, constraint: TokenAutomaton, drafter: GrammarDrafter | None, lag: int = 0, **o: Any) -> Sequence:
    run = ToyRun(rule, vocab=V, lag=lag)
    sequence = run.add(PROMPT, drafter, constraint=constraint, eos=(EOS,), **o)
    run.finish(sequence)
    run.check_empty()
    return sequence


@trials(40)
@given(seed=st.integers(0, 9999), temperature=st.sampled_from([0.0, 0.8]), lag=st.integers(0, 1))
def test_every_forced_token_is_accepted_and_the_answer_is_plain(seed: int, temperature: float, lag: int) -> None:
    automaton = random_texts(random.Random(seed))
    rule = path_rule(V, seed=seed)
    options: dict[str, Any] = {"temperature": temperature, "seed": seed}
    expected = answer(rule, automaton, None, **options)
    drafter = GrammarDrafter()
    speculation = {"num_speculative_tokens": 1 + seed % 8}
    sequence = answer(rule, automaton, drafter, lag, speculation=speculation, **options)
    same(sequence, expected)
    assert sequence.finish_reason == "stop"
    assert sequence.output[-1] == EOS
    record = sequence.record
    assert record.drafted == record.accepted
    assert record.steps <= expected.record.steps - record.accepted
    assert not drafter._places


def test_one_answer_alone_takes_as_many_passes_as_its_budget_asks_for() -> None:
    """The prompt's pass says the first token; 5 more and the end of text come with the next."""
    rule = path_rule(V, seed=3)
    sequence = answer(rule, TokenAutomaton.from_texts([[1, 2, 3, 4, 5, 6]], EOS), GrammarDrafter())
    assert sequence.output == [1, 2, 3, 4, 5, 6, EOS]
    assert (sequence.record.drafted, sequence.record.accepted, sequence.record.steps) == (5, 5, 1)
    assert sequence.sources == ["target", *["grammar"] * 5, "target"]


def test_it_is_a_method_without_options() -> None:
    nothing: Any = None
    assert isinstance(METHOD.make(nothing, nothing), GrammarDrafter)
    assert (METHOD.options, METHOD.model) == ((), "none")


def test_the_default_model_keeps_to_its_language(llm: LLM) -> None:
    texts = [" The answer is yes, without any doubt.", " The answer is no, for it was never true."]
    ids = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    constraint = TokenAutomaton.from_texts(ids, llm.tokenizer.eos_ids)
    prompts = ["Is water wet?", "Is the moon a cheese?"]
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.95, seed=5)):
        plain = llm.generate(prompts, sampling, speculation=False, constraint=constraint)
        method = {"method": "grammar", "num_speculative_tokens": 16, "adaptive": False}
        drafted = llm.generate(prompts, sampling, speculation=method, constraint=constraint)
        assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
        for answer in drafted:
            assert answer.text in texts
            assert answer.finish_reason == "stop"
            assert answer.record.drafted == answer.record.accepted > 4
