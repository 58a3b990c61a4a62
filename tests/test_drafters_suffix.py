"""Suffix decoding against counts that are plain to see."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, OptionError, Sampling
from paceline.drafters import Outcome, View
from paceline.drafters._runs import Runs, chain
from paceline.drafters.suffix import Answers, SuffixDrafter
from tests.toys import VOCAB, drafts_that_change_nothing, no_draw, path_rule, trials

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.drafters._runs import State

Drafted = tuple[list[int], list[int], list[float]]


def view(tokens: Seq[int], number: int = 0, salt: str | None = None, prompt: int = 0) -> View:
    return View(number, tokens, no_draw, salt, prompt)


def drafts(drafter: SuffixDrafter, tokens: Seq[int], budget: int, number: int = 0, salt: str | None = None) -> Drafted:
    (tree,) = drafter.propose([view(tokens, number, salt)], [budget])
    tree.check(10**6)
    assert tree.tokens[0] == tokens[-1]
    assert len(tree) <= budget + 1
    assert set(tree.origin[1:]) <= {"suffix"}
    return tree.tokens[1:], tree.parents[1:], tree.survival[1:]


def answer(drafter: SuffixDrafter, prompt: list[int], output: list[int], salt: str | None = None) -> None:
    """A whole request that comes and goes."""
    tokens = list(prompt)
    drafter.start(view(tokens, 77, salt, len(prompt)), 0)
    tokens += output
    assert drafter.needs.ended is not None
    drafter.needs.ended(view(tokens, 77, salt, len(prompt)))
    drafter.release(77)


def followers(texts: Seq[Seq[int]], run: Seq[int]) -> list[tuple[int, int]]:
    """What followed the run and how often, most frequent first, of equally frequent ones the latest."""
    found: dict[int, tuple[int, int]] = {}
    for place, text in enumerate(texts):
        for end in range(len(run), len(text)):
            if list(text[end - len(run) : end]) == list(run):
                count, _ = found.get(text[end], (0, 0))
                found[text[end]] = (count + 1, place * 10_000 + end)
    ranked = sorted(found.items(), key=lambda item: item[1], reverse=True)
    return [(token, count) for token, (count, _) in ranked]


def grown(texts: Seq[Seq[int]], run: Seq[int], budget: int, width: int, least: float) -> Drafted:
    """The likeliest nodes below the run, best first."""
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    waiting: list[Any] = []
    parent, chance, path = 0, 1.0, list(run)
    while len(tokens) < budget:
        following = followers(texts, path)
        total = sum(count for _, count in following)
        for token, count in following[: min(width, 8)]:
            share = chance * (count / total)
            if share >= least:
                heappush(waiting, (-share, len(tokens), len(waiting) + 1000 * len(tokens), parent, [*path, token]))
        if not waiting:
            break
        negative, _, _, parent, path = heappop(waiting)
        chance = -negative
        tokens.append(path[-1])
        parents.append(parent)
        survival.append(chance)
        parent = len(tokens)
    return tokens, parents, survival


def searched(
    texts: Seq[Seq[int]], tokens: Seq[int], budget: int, depth: int, factor: float, least: float, width: int
) -> Drafted:
    """Of all lengths of a match the draft that promises most, of equal ones the longest match's."""
    best: Drafted = ([], [], [])
    matched = 0
    for length in range(1, min(depth, len(tokens) + 1)):
        bound = min(budget, int(factor * length), depth - length)
        draft = grown(texts, tokens[len(tokens) - length :], bound, width, least)
        if draft[0] and sum(draft[2]) >= sum(best[2]):
            best, matched = draft, length
    return best[0], best[1], tempered(best, matched) if best[0] else []


def tempered(draft: Drafted, matched: int) -> list[float]:
    """The shares of counts, less sure the shorter the run that was followed."""
    depths = [0]
    for parent in draft[1]:
        depths.append(depths[parent] + 1)
    return [share * matched / (matched + depth) for share, depth in zip(draft[2], depths[1:], strict=True)]


tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=40)
texts_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=5)
settings = st.fixed_dictionaries(
    {
        "depth": st.integers(2, 12),
        "factor": st.sampled_from([0.0, 0.5, 1.0, 2.5]),
        "least": st.sampled_from([0.0, 0.1, 0.4, 1.0]),
        "width": st.sampled_from([1, 2, 8]),
    }
)


def occurrences(texts: Seq[Seq[int]], run: Seq[int]) -> int:
    size = len(run)
    return sum(list(t[i : i + size]) == list(run) for t in texts for i in range(len(t) - size + 1))


def states(runs: Runs) -> list[State]:
    found = {runs.root: None}
    waiting = [runs.root]
    while waiting:
        for state in waiting.pop().after.values():
            if state not in found:
                found[state] = None
                waiting.append(state)
    return list(found)


def ask(dice: random.Random, among: Seq[State], depth: int) -> None:
    """Ask some states what follows, those of runs that leave room for it."""
    for state in dice.sample(among, len(among) // 2):
        if state.link is None or state.link.length < depth - 1:
            state.continuations(dice.randint(1, 8))


@trials(150)
@given(texts=texts_of, last=tokens_of, depth=st.integers(2, 8), asked=st.integers(0, 2**30))
def test_every_run_is_counted(texts: list[list[int]], last: list[int], depth: int, asked: int) -> None:
    """Whole texts and one that grows; what is likely is asked for on the way, and must stay right."""
    dice = random.Random(asked)
    runs = Runs(depth)
    for text in texts:
        runs.add(text)
        ask(dice, states(runs), depth)
    for place, token in enumerate(last):
        runs.push(token)
        ask(dice, runs.ends, depth)
        assert runs.ends == chain(runs.ends[0])
        assert runs.ends[0].length >= min(place + 1, depth) > (runs.ends[0].link or runs.root).length
    together = [*texts, last]
    length = sum(map(len, together))
    assert runs.length == length
    assert runs.size == len(states(runs)) <= 2 * length + 1
    for text in together:
        for start in range(len(text)):
            state = runs.root
            for end in range(start, min(start + depth, len(text))):
                following = followers(together, text[start:end])
                assert state.followed == sum(count for _, count in following)
                shares = [(token, count / state.followed) for token, count in following]
                assert [(token, share) for token, share, _ in state.continuations(8)] == shares
                state = state.after[text[end]]
                assert state.count == occurrences(together, text[start : end + 1])
                assert set(state.after) <= {token for token, _ in followers(together, text[start : end + 1])}


@trials(150)
@given(tokens=tokens_of, budget=st.integers(0, 10), options=settings)
def test_it_finds_what_a_search_finds(tokens: list[int], budget: int, options: dict[str, Any]) -> None:
    drafter = SuffixDrafter(**options)
    drafter.start(view(tokens), 0)
    assert drafts(drafter, tokens, budget) == searched([tokens], tokens, budget, **options)


@trials(100)
@given(texts=texts_of, tokens=tokens_of, budget=st.integers(1, 10), options=settings)
def test_the_better_of_the_request_and_of_earlier_answers(
    texts: list[list[int]], tokens: list[int], budget: int, options: dict[str, Any]
) -> None:
    drafter = SuffixDrafter(**options)
    drafter.start(view(tokens), 0)
    for done, text in enumerate([[], *texts]):
        if done:
            answer(drafter, [3], text)
        # Asked after every answer, so that what was matched before it does not count.
        own, earlier = (
            searched(source, tokens, budget, **options) for source in ([tokens], texts[:done] if done else [])
        )
        drafted = drafts(drafter, tokens, budget)
        assert drafted in (own, earlier)
        assert sum(drafted[2]) == max(sum(own[2]), sum(earlier[2]))


@trials(80)
@given(tokens=tokens_of, texts=texts_of, options=settings, seed=st.integers(0, 999))
def test_a_state_that_grows_is_the_same_as_a_new_one(
    tokens: list[int], texts: list[list[int]], options: dict[str, Any], seed: int
) -> None:
    """Asked after any number of tokens, told what was committed or not, forked, rewound and released on the way."""
    dice = random.Random(seed)
    drafter = SuffixDrafter(**options)
    for text in texts:
        answer(drafter, [1, 2], text)
    drafter.start(view(tokens[:1]), 0)
    number, length = 0, 1
    while length < len(tokens):
        fresh = SuffixDrafter(**options)
        for text in texts:
            answer(fresh, [], text)
        fresh.start(view(tokens[:length], 5), 0)
        assert drafts(drafter, tokens[:length], 6, number) == drafts(fresh, tokens[:length], 6, 5)
        assert drafter.length(number) == length
        action = dice.randrange(4)
        if action == 0:
            drafter.fork(number, view(tokens[:length], number + 1))
            drafter.release(number)
            number += 1
        elif action == 1:
            kept = dice.randint(0, length)
            drafter.rewind(number, kept)
            assert drafter.length(number) <= kept or kept == length
            tokens[kept:] = [dice.randrange(4) for _ in tokens[kept:]]
            length = max(1, kept)
        step = dice.randint(1, 5)
        if action == 2:
            start = dice.randint(0, length)
            rows = tokens[start : length + step]
            drafter.observe([Outcome(number, start, rows, 0, None)])
            assert drafter.length(number) == start + len(rows)
        length += step
    drafter.release(number)
    drafter.release(number)
    assert not drafter._states


def test_rows_that_do_not_follow_what_is_known_are_left_for_later() -> None:
    drafter = SuffixDrafter()
    drafter.start(view([1]), 0)
    drafter.observe([Outcome(0, 3, [1, 2], 0, None)])
    assert drafter.length(0) == 0


def test_only_answers_are_kept_and_prompts_are_not() -> None:
    drafter = SuffixDrafter()
    answer(drafter, [1, 2, 3, 4, 5], [6, 7, 8, 9])
    drafter.start(view([2, 3]), 0)
    assert drafts(drafter, [2, 3], 5)[0] == []
    assert drafts(drafter, [2, 3, 6, 7], 5)[0] == [8, 9]


def test_the_text_of_one_key_is_never_proposed_to_another() -> None:
    drafter = SuffixDrafter()
    keys = [None, "", "a", "b"]
    for place, key in enumerate(keys):
        answer(drafter, [0], [1, 2, 3, 100 + place, 200 + place], key)
    for place, key in enumerate(keys):
        drafter.start(view([0, 1, 2, 3], place, key), 0)
        assert drafts(drafter, [0, 1, 2, 3], 5, place, key)[0] == [100 + place, 200 + place]
    drafter.start(view([0, 1, 2, 3], 9, "c"), 0)
    assert drafts(drafter, [0, 1, 2, 3], 5, 9, "c")[0] == []


def test_one_answer_does_not_run_into_the_next() -> None:
    drafter = SuffixDrafter()
    answer(drafter, [9], [1, 2, 3])
    answer(drafter, [9], [4, 5, 6])
    drafter.start(view([1, 2, 3]), 0)
    assert drafts(drafter, [1, 2, 3], 5)[0] == []
    drafter.start(view([1, 2], 1), 0)
    assert drafts(drafter, [1, 2], 5, 1)[0] == [3]


@pytest.mark.parametrize(("texts", "states_"), [(10**6, 400), (7, 10**6), (1, 10**6), (3, 300), (2, 10**6)])
def test_memory_stays_within_its_bound(texts: int, states_: int) -> None:
    """Over many answers of several keys; the newest are there, the oldest went first."""
    dice = random.Random(5)
    answers = Answers(16, texts, states_)
    written: list[tuple[str, list[int]]] = []
    for _ in range(600):
        key, text = dice.choice("abc"), [dice.randrange(6) for _ in range(dice.randint(1, 60))]
        answers.add(key, text)
        written.append((key, text))
        assert answers.size <= states_
        assert 1 <= answers.texts <= texts
        kept = written[-answers.texts :]
        for name in "abc":
            found = answers.find(name)
            assert sum(runs.length for runs in found) == sum(len(text) for owner, text in kept if owner == name)
            assert sum(runs.texts for runs in found) == sum(owner == name for owner, _ in kept)
    generations = (answers._young, answers._old)
    assert all(age.size == sum(len(states(runs)) for runs in age.runs.values()) for age in generations)


@pytest.mark.long
def test_memory_stays_within_its_bound_over_a_million_tokens() -> None:
    dice = random.Random(6)
    answers = Answers(64, 10_000, 2**14)
    words = [[dice.randrange(1000) for _ in range(dice.randint(1, 30))] for _ in range(300)]
    tokens = 0
    while tokens < 10**6:
        text = [token for word in dice.choices(words, k=10) for token in word]
        answers.add(dice.choice("ab"), text)
        tokens += len(text)
        assert answers.size <= 2**14
    assert answers.texts > 20


def test_an_answer_larger_than_the_bound_is_not_kept_and_drives_none_out() -> None:
    answers = Answers(8, 10, 100)
    answers.add("a", [1, 2, 3])
    answers.add("a", list(range(30)))
    assert [runs.length for runs in answers.find("a")] == [3]
    answers = Answers(8, 0)
    answers.add(None, [1, 2, 3])
    assert not answers.find(None)


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("budget", [0, 1, 5, 63])
def test_never_more_than_the_budget(budget: int, width: int) -> None:
    tokens = [0, 0, 1, 0, 2, 0] * 30
    drafter = SuffixDrafter(depth=128, width=width)
    drafter.start(view(tokens), 0)
    drafted, parents, survival = drafts(drafter, tokens, budget)
    assert len(drafted) == budget
    assert survival == sorted(survival, reverse=True)
    if width == 1:
        assert parents == list(range(budget))


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    """Counted in states that are visited: ends of bounded length, however periodic the text is."""
    for tokens in ([7] * 3000, [0, 1] * 1500, [random.Random(1).randrange(3) for _ in range(3000)]):
        runs = Runs(32)
        for token in tokens:
            runs.push(token)
            assert len(runs.ends) <= 33
        assert runs.size <= 2 * len(tokens)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("width", [1, 8])
def test_answers_are_plain(width: int, temperature: float, lag: int) -> None:
    rule = path_rule(VOCAB, seed=71, memory=2, spread=6.0)
    drafter = SuffixDrafter(width=width)
    accepted, missed = drafts_that_change_nothing(drafter, rule, temperature, lag)
    assert accepted > 100
    assert missed > 0
    assert not drafter._states
    # What was kept are the delivered answers, nothing behind their ends.
    assert sum(runs.length for runs in drafter._answers.find(None)) == 3 * 3 * 50


@pytest.mark.parametrize("tree", ["auto", "none"])
def test_not_one_token_of_the_default_model_differs(llm: LLM, tree: str) -> None:
    prompts = ["one two three one two three one two", "The rain fell on the race, and the rain"]
    for sampling in (
        Sampling(temperature=0.0, max_tokens=24),
        Sampling(temperature=0.8, top_p=0.95, seed=5, max_tokens=24),
    ):
        plain = llm.generate(prompts, sampling, speculation=False)
        method = {"method": "suffix", "tree": tree, "num_speculative_tokens": 8, "adaptive": False}
        for _ in range(2):
            drafted = llm.generate(prompts, sampling, speculation=method)
            assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
        assert all(a.record.accepted for a in drafted)  # by now it knows the whole answer
    llm.forget()


@pytest.mark.parametrize("method", ["suffix", "recycling"])
def test_what_is_learned_serves_its_own_key_alone_until_it_is_forgotten(llm: LLM, method: str) -> None:
    """Seen from outside: a prompt whose answer is known is drafted from its first step, for one key only."""
    llm.forget()
    prompt, sampling = "The rain fell on the", Sampling(temperature=0.0, max_tokens=24)
    options = {"method": method, "num_speculative_tokens": 8, "adaptive": False}

    def accepted(salt: str | None) -> int:
        return int(llm.generate(prompt, sampling, speculation=options, cache_salt=salt).record.accepted)

    first = accepted("a")
    known = accepted("a")
    assert known > first
    assert accepted("b") == accepted(None) == first
    assert accepted("b") > first
    stream = llm.stream(prompt, sampling, speculation=options, cache_salt="c")
    assert [chunk.completion for chunk in stream][-1].record.accepted == first  # type: ignore[union-attr]
    messages = [{"role": "user", "content": prompt}]
    for _ in range(2):
        assert llm.chat(messages, sampling, speculation=options, cache_salt="d").record.drafted
    with llm.paused():
        (running,) = llm.submit(prompt, sampling, speculation=options, cache_salt="e")
        assert running.request.cache_salt == "e"
    llm.forget()
    assert accepted("a") == first
    with pytest.raises(OptionError, match="cache_salt is a text, not 3"):
        llm.generate(prompt, sampling, cache_salt=3)  # type: ignore[arg-type]
    llm.forget()
