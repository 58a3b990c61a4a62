"""A prediction that is followed, left and joined again, against a search that is plain to see."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, Sampling
from paceline.drafters import View
from paceline.drafters.prediction import METHOD, Places, PredictionDrafter
from paceline.targets.toy import script_rule
from tests.toys import VOCAB, ToyRun, alone, no_draw, path_rule, same, trials

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

PROMPT = [200, 201]
CODE = list(b"def area(width, height):\n    return width * height\n\n\ndef volume(a, b, c):\n    return a * b * c\n")


def view(prediction: Seq[int], output: Seq[int], number: int = 0) -> View:
    return View(number, [*PROMPT, *output], no_draw, prompt_length=len(PROMPT), prediction=tuple(prediction))


def drafted(drafter: PredictionDrafter, seen: View, budget: int = 63) -> list[int]:
    (tree,) = drafter.propose([seen], [budget])
    tree.check(10**6)
    assert tree.tokens[0] == seen.tokens[-1]
    assert tree.parents == list(range(-1, len(tree) - 1))
    assert len(tree) <= budget + 1
    assert set(tree.origin[1:]) <= {"prediction"}
    return tree.tokens[1:]


def proposed(prediction: Seq[int], output: Seq[int], budget: int = 63) -> list[int]:
    drafter = PredictionDrafter()
    drafter.start(view(prediction, []), 0)
    return drafted(drafter, view(prediction, output), budget)


def searched(text: Seq[int], output: Seq[int], left: int) -> tuple[int, int] | None:
    """Runs of 8 and 4 count anywhere, those of 2 and 1 up to 64 tokens ahead; the first place ahead, or the last."""
    for size in (8, 4, 2, 1):
        run = list(output[-size:])
        ends = [end for end in range(size, len(text) + 1) if len(run) == size and list(text[end - size : end]) == run]
        ahead = [end for end in ends if end >= left]
        if size < 4:
            ahead, ends = [end for end in ahead if end <= left + 64], []
        if ahead or ends:
            return (ahead or ends[-1:])[0], size
    return None


def walked(text: Seq[int], output: Seq[int]) -> list[int]:
    """What is expected to follow an output."""
    place: int | None = 0
    run, left, replaced = 4, 0, 0
    for n, token in enumerate(output, 1):
        if place is not None and list(text[place : place + 1]) == [token]:
            place, run, replaced = place + 1, run + 1, 0
        elif found := searched(text, output[:n], left):
            (place, run), replaced = found, 0
        else:
            replaced += 1
            place, run = None if place is None or replaced > 3 else place + 1, 0
        if place is not None and run >= 4:
            left = place
    return [] if place is None else list(text[place:])


tokens_of = st.lists(st.integers(0, 3), max_size=40)


@trials(150)
@given(text=tokens_of, output=st.lists(st.integers(0, 3), min_size=1, max_size=12), left=st.integers(0, 40))
def test_the_index_finds_what_a_search_finds(text: list[int], output: list[int], left: int) -> None:
    assert Places(tuple(text)).find(output, left) == searched(text, output, left)


@trials(60)
@given(seed=st.integers(0, 9999), left=st.integers(0, 400))
def test_the_index_finds_what_a_search_finds_in_long_texts(seed: int, left: int) -> None:
    dice = random.Random(seed)
    text = [dice.randrange(40) for _ in range(400)]
    start = dice.randrange(380)
    output = [*text[start : start + dice.randint(0, 9)], *[dice.randrange(40) for _ in range(dice.randint(0, 1))], 7][
        :9
    ]
    assert Places(tuple(text)).find(output, left) == searched(text, output, left)


def edited(dice: random.Random, text: Seq[int], edits: int) -> list[int]:
    """A text with stretches inserted, deleted, replaced, repeated or moved."""
    result = list(text)
    for _ in range(edits):
        at, size = dice.randint(0, len(result)), dice.randint(1, 6)
        new = [dice.randrange(8) for _ in range(dice.randint(1, 6))]
        match dice.randrange(4):
            case 0:
                result[at:at] = new
            case 1:
                del result[at : at + size]
            case 2:
                result[at : at + size] = new
            case _:
                to = dice.randint(0, len(result))
                result[to:to] = result[at : at + size]
    return result


@trials(120)
@given(text=tokens_of, seed=st.integers(0, 9999), edits=st.integers(0, 5), budget=st.integers(0, 63))
def test_any_edit_is_followed_as_a_plain_walk_follows_it(text: list[int], seed: int, edits: int, budget: int) -> None:
    """Asked after any number of tokens, forked, rewound and released on the way."""
    dice = random.Random(seed)
    output = edited(dice, text, edits)
    drafter = PredictionDrafter()
    drafter.start(view(text, []), 0)
    number, length = 0, 0
    while length <= len(output):
        assert drafted(drafter, view(text, output[:length], number), budget) == walked(text, output[:length])[:budget]
        assert drafter.length(number) == len(PROMPT) + length
        action = dice.randrange(4)
        if action == 0:
            drafter.fork(number, view(text, output[:length], number + 1))
            drafter.release(number)
            number += 1
        elif action == 1:
            kept = dice.randint(0, length)
            drafter.rewind(number, len(PROMPT) + kept)
            output[kept:] = edited(dice, output[kept:], 1)
            length = kept
        length += dice.randint(1, 5)
    drafter.release(number)
    drafter.release(number)
    assert not drafter._courses


@pytest.mark.parametrize(
    ("text", "output", "expected"),
    [
        ("abcdef", "", "abcdef"),
        ("abcdef", "abc", "def"),
        ("abcdef", "abcdef", ""),
        ("abcdef", "abcdefg", ""),
        ("", "abc", ""),
        ("abcdefgh", "abX", "defgh"),  # left, and not yet joined: taken for a token replaced
        ("abcdefgh", "abXYZ", "fgh"),
        ("abcdefgh", "abWXYZ", ""),  # but not for so many
        ("abcdefgh", "abXd", "efgh"),
        ("abcdefgh", "abXe", "fgh"),
        ("abcdefgh", "abXYc", "defgh"),  # tokens inserted
        ("abcdefgh", "abg", "h"),  # tokens deleted
        ("abcdefgh", "Xa", "bcdefgh"),  # something before the text
        ("abxcdxefxgh", "abxcdYx", "efxgh"),  # the nearest place ahead
        ("abxcdxefxgh", "abxcdxZx", "efxgh"),  # which may be the one that was left: a line inserted
        ("line1\nline2\nline1\nline3\n", "line1\nline2\nline1\n", "line3\n"),  # repeated lines are told apart
        ("one two three four", "one two three fone two ", "three four"),  # repeated: four tokens lead back
        ("one two three four", "one two three fon", "r"),  # but not one of them
    ],
)
def test_left_and_joined_again(text: str, output: str, expected: str) -> None:
    assert bytes(proposed(text.encode(), output.encode())) == expected.encode()


def test_a_place_that_was_joined_wrongly_does_not_count_as_ahead() -> None:
    """After one token in common with a later place the output goes on where it was, in sight of where it left."""
    text = b"0123456789q" + b"r" * 30 + b"x?" + b"s" * 10
    output = b"01234x"
    assert bytes(proposed(text, output)[:1]) == b"?"
    assert bytes(proposed(text, output + b"6")) == text[7:]


def test_short_runs_do_not_lead_far_away() -> None:
    text = [1, 2, 3, *[9] * 70, 4, 5, 6, 7, 8]
    assert proposed(text, [1, 2, 4, 5], 2) == [9, 9]
    assert proposed(text, [1, 2, 4, 5, 6, 0]) == []
    assert proposed(text, [1, 2, 4, 5, 6, 7]) == [8]


@pytest.mark.parametrize("budget", [0, 1, 7, 63])
def test_never_more_than_the_budget(budget: int) -> None:
    assert proposed(CODE, CODE[:10], budget) == CODE[10 : 10 + budget]


def test_survival_falls_with_depth_and_rises_with_what_agreed() -> None:
    drafter = PredictionDrafter()
    drafter.start(view(CODE, []), 0)
    for output, chances in [(CODE[:4], [9 / 10, 9 / 11, 9 / 12]), ([*CODE[:4], 0, *CODE[4:5]], [2 / 3, 2 / 4, 2 / 5])]:
        (tree,) = drafter.propose([view(CODE, output)], [3])
        assert tree.survival == pytest.approx([1.0, *chances])
        drafter.rewind(0, 0)


def test_sequences_do_not_mix_and_share_the_index_of_one_requests_text() -> None:
    """Not that of an equal text: how soon an index is there would tell one caller what another expects."""
    drafter, text = PredictionDrafter(), (1, 2, 3)
    drafter.start(view(text, [], 1), 0)
    drafter.start(view([4, 5, 6], [], 2), 0)
    drafter.start(view(text, [], 3), 0)
    drafter.start(view([1, 2, 3], [], 4), 0)
    trees = drafter.propose([view([4, 5, 6], [4], 2), view(text, [], 1), view(text, [3], 3)], [9, 1, 9])
    assert [tree.tokens[1:] for tree in trees] == [[5, 6], [1], []]
    assert drafter._courses[1].places is drafter._courses[3].places
    assert drafter._courses[4].places is not drafter._courses[1].places


def test_forks_go_their_own_way() -> None:
    drafter = PredictionDrafter()
    drafter.start(view(CODE, [], 1), 0)
    drafter.fork(1, view(CODE, [], 2))
    assert drafted(drafter, view(CODE, CODE[:6], 1), 3) == CODE[6:9]
    assert drafted(drafter, view(CODE, CODE[:2], 2), 3) == CODE[2:5]


def test_the_prompt_is_not_part_of_what_is_looked_up() -> None:
    assert proposed([1, 5, 7, PROMPT[-1], 5, 6], [5], 1) == [7]


def test_it_is_a_method_without_options() -> None:
    nothing: Any = None
    assert isinstance(METHOD.make(nothing, nothing), PredictionDrafter)
    assert (METHOD.options, METHOD.model) == ((), "none")


# The engine


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda text: text, 0),
        (lambda text: text.replace(b"width", b"w"), 0),
        (lambda text: b"# new\n" + text, 6),
        (lambda text: text.replace(b"def volume(a, b, c):\n    return a * b * c\n", b""), 0),
        (lambda text: text.replace(b"\n\n\n", b"\n\n\ndef one():\n    return 1\n\n\n"), 6),
    ],
)
def test_an_edited_file_is_mostly_drafted(change: Any, lost: int) -> None:
    script = [*change(bytes(CODE)), 256]
    prompt = [1, 2, 3]
    rule = script_rule(VOCAB, script, len(prompt))
    run = ToyRun(rule)
    sequence = run.add(prompt, PredictionDrafter(), prediction=CODE, max_tokens=200)
    run.finish(sequence)
    assert sequence.output == script
    assert sequence.finish_reason == "stop"
    # Five drafted tokens and one of the target's a step, and so many steps more.
    assert sequence.record.steps <= -(-len(script) // 6) + lost
    run.check_empty()


@pytest.mark.parametrize("prediction", [[], [5], CODE, CODE * 3, [256, 256, 256], [0] * 300])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("lag", [0, 1])
def test_answers_are_plain_whatever_is_expected(prediction: list[int], temperature: float, lag: int) -> None:
    rule = path_rule(VOCAB, seed=61, memory=1, spread=8.0)
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 40}
    expected = alone(rule, PROMPT, **options)
    run = ToyRun(rule, lag=lag)
    drafter = PredictionDrafter()
    for budget in (1, 5, 63):
        speculation = {"num_speculative_tokens": budget}
        sequence = run.add(PROMPT, drafter, prediction=prediction, speculation=speculation, **options)
        run.finish(sequence)
        same(sequence, expected)
    assert not drafter._courses
    run.check_empty()


@trials(25)
@given(seed=st.integers(0, 9999), edits=st.integers(0, 6), temperature=st.sampled_from([0.0, 0.8]))
def test_an_answer_expected_with_errors_stays_plain(seed: int, edits: int, temperature: float) -> None:
    dice = random.Random(seed)
    rule = path_rule(VOCAB, seed=seed, memory=2)
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 48, "ignore_eos": True}
    expected = alone(rule, PROMPT, **options)
    prediction = edited(dice, expected.output, edits)
    run = ToyRun(rule)
    sequence = run.add(PROMPT, PredictionDrafter(), prediction=prediction, **options)
    run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.accepted > 0


def test_not_one_token_of_the_default_model_differs(llm: LLM) -> None:
    prompt = "one two three four, one two three four, one two three four,"
    for sampling in (
        Sampling(temperature=0.0, max_tokens=24),
        Sampling(temperature=0.8, top_p=0.95, seed=5, max_tokens=24),
    ):
        (plain,) = llm.generate([prompt], sampling, speculation=False)
        for prediction in (plain.text, plain.token_ids[2:], "quite another text", "", None):
            method = {"method": "prediction", "adaptive": False}
            (drafted,) = llm.generate([prompt], sampling, speculation=method, prediction=prediction)
            assert drafted.token_ids == plain.token_ids
            if prediction == plain.token_ids[2:]:
                assert drafted.record.accepted >= len(prediction) // 2
