"""A second toy target drafts: accepted as often as can be, never more in its cache than was committed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from torch.nn.functional import pad

from paceline import drafting
from paceline.drafters.draft_model import DraftModelDrafter
from tests.draft_models import OTHER, PROMPT, RULE, Draft, half_right, ride
from tests.toys import EOS, VOCAB, PairTarget, StrictTarget, ToyRun, alone, path_rule, same

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.drafters import View
    from paceline.tree import TokenTree


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_target_as_its_own_drafter_is_accepted_fully(length: int, count: int, temperature: float, lag: int) -> None:
    """At token 10 and at token 100, alone and together, greedy and sampled."""
    prompts = [PROMPT[: 5 + 9 * n] for n in range(count)]
    most = 1 + 12 * (length + 1)
    settings: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "max_tokens": most}
    run = ToyRun(RULE, lag=lag)
    draft = Draft(StrictTarget(RULE, VOCAB))
    spec = {"num_speculative_tokens": length}
    sequences = [
        run.add(prompt, draft.drafter, speculation=spec, seed=n, **settings) for n, prompt in enumerate(prompts)
    ]
    ride(run, draft, sequences)
    for n, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        same(sequence, alone(RULE, prompt, seed=n, **settings))
        record = sequence.record
        assert record.accepted == record.drafted
        assert record.accepted_at == record.reached
        if not lag:
            assert record.steps == 12
            assert record.drafted == 12 * length


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("rule", [OTHER, half_right], ids=["another", "half right"])
@pytest.mark.parametrize("windows", [(None, None), (None, 8), (8, None), (16, 16)])
def test_any_model_drafts_and_keeps_its_books(rule: Any, windows: tuple[int | None, int | None], lag: int) -> None:
    expected = [
        alone(RULE, PROMPT[: 9 * n + 1], window=windows[0], temperature=0.5 * n, seed=n, max_tokens=30)
        for n in range(3)
    ]
    run = ToyRun(RULE, window=windows[0], lag=lag, max_batch_tokens=20)
    draft = Draft(StrictTarget(rule, VOCAB, window=windows[1]))
    sequences = [
        run.add(
            PROMPT[: 9 * n + 1],
            draft.drafter,
            temperature=0.5 * n,
            seed=n,
            max_tokens=30,
            speculation={"num_speculative_tokens": 3 + n},
        )
        for n in range(3)
    ]
    ride(run, draft, sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
    if rule is half_right and windows == (None, None):
        assert all(0 < s.record.accepted < s.record.drafted for s in sequences)
        assert sum(s.record.accepted_at[1] for s in sequences) > 0


def test_the_cache_after_every_number_of_accepted_drafts() -> None:
    """The keys of what was accepted stay, those of the others are written over; a full accept lacks the last one's."""
    wrong_at: set[int] = set()

    def mostly(path: list[int]) -> Any:
        return OTHER(path) if len(path) in wrong_at else RULE(path)

    length, start = 5, len(PROMPT)
    expected = alone(RULE, PROMPT, ignore_eos=True, max_tokens=60)
    draft = Draft(StrictTarget(mostly, VOCAB))
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, draft.drafter, ignore_eos=True, max_tokens=60)
    seen = set()
    run.engine.step()
    for accepts in [0, 1, 2, 3, 4, 5, 5, 0, 5, 2, 0, 0, 3]:
        wrong_at = {len(sequence.tokens) + accepts}
        before = len(sequence.tokens)
        run.engine.step()
        accepted = len(sequence.tokens) - before - 1
        draft.check([sequence])
        assert draft.drafter.length(sequence.id) == before + min(accepted, length - 1)
        seen.add(accepted)
        if accepted == accepts:
            assert sequence.record.drafted == sequence.record.steps * length
    assert seen == set(range(6))
    assert sequence.tokens == [*PROMPT, *expected.output[: len(sequence.tokens) - start]]


@pytest.mark.parametrize("length", [1, 5])
def test_a_draft_model_of_a_shorter_context_stops_where_it_ends(length: int) -> None:
    """The request goes on without it, and the next one speculates again."""
    prompt = [(7 * i) % 256 for i in range(60)]
    expected = alone(RULE, prompt, max_tokens=40, ignore_eos=True, max_model_len=128)
    run = ToyRun(RULE, max_model_len=128)
    longest: list[int] = []

    class Watched(StrictTarget):
        def forward(self, batch: Any, *rest: Any) -> Any:
            longest.append(int(batch.positions.max()))
            return super().forward(batch, *rest)

    draft = Draft(Watched(RULE, VOCAB, max_positions=64), max_model_len=128)
    for _ in range(2):
        sequence = run.add(
            prompt,
            draft.drafter,
            max_tokens=40,
            ignore_eos=True,
            speculation={"num_speculative_tokens": length},
        )
        ride(run, draft, [sequence])
        same(sequence, expected)
        record = sequence.record
        assert 0 < record.accepted == record.drafted <= 4
        assert max(longest) < 64
    beyond = run.add([3] * 70, draft.drafter, max_tokens=20)
    ride(run, draft, [beyond])
    assert beyond.record.drafted == 0
    same(beyond, alone(RULE, [3] * 70, max_tokens=20, max_model_len=128))


@pytest.mark.parametrize("rows", [100, VOCAB - 1, VOCAB + 64])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"logit_bias": {255: 5.0, 3: 2.0}},
        {"allowed_token_ids": [3, 200, 255, EOS]},
        {"allowed_token_ids": [255, EOS], "ignore_eos": True},
        {"min_tokens": 5},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"bad_words": ["a"]},
    ],
    ids=lambda rules: "+".join(rules),
)
def test_heads_of_another_height(rows: int, rules: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A draft model whose head has fewer or more rows than the target's drafts what both have."""

    def rule(path: list[int]) -> Any:
        row = half_right(path)
        return row[:rows] if rows < VOCAB else pad(row, (0, rows - VOCAB), value=99.0)

    settings: dict[str, Any] = {"temperature": 2.0, "seed": 3, **rules}
    expected = alone(RULE, PROMPT, **settings)
    run = ToyRun(RULE)
    draft = Draft(StrictTarget(rule, rows))
    sequence = run.add(PROMPT, draft.drafter, **settings)
    ride(run, draft, [sequence])
    same(sequence, expected)
    if rows > 100 or 255 not in rules.get("allowed_token_ids", [])[:1]:
        assert sequence.record.drafted > 0
    assert not caplog.records


def test_ends_that_come_at_any_time_leave_nothing() -> None:
    dice = random.Random(5)
    run = ToyRun(RULE, max_num_seqs=3)
    draft = Draft(StrictTarget(half_right, VOCAB))
    sequences = [run.add(PROMPT[: dice.randint(1, 28)], draft.drafter, max_tokens=30) for _ in range(9)]
    while not run.engine.idle:
        run.engine.step()
        if dice.random() < 0.4:
            run.engine.cancel(dice.choice(sequences))
        draft_states = draft.drafter._states
        assert set(draft_states) == {s.id for s in run.engine.scheduler.running}
    run.check_empty()
    draft.check_empty()


def test_a_prompt_is_taken_in_however_late_it_is_asked() -> None:
    """The first draft comes when the sequence is longer than one piece, and long after the last one."""
    rule = path_rule(VOCAB, seed=73)
    draft = Draft(StrictTarget(rule, VOCAB), pages=80, max_model_len=1200)
    run = ToyRun(rule, max_model_len=1200, pages=80)
    asked = 0

    class Seldom(DraftModelDrafter):
        def propose(self, views: Any, budgets: Any) -> Any:
            nonlocal asked
            asked += 1
            few = [budget if asked % 7 == 0 else 0 for budget in budgets]
            return super().propose(views, few)

    draft.drafter = Seldom(draft.model, draft.pools, 1200)
    prompt = [(i * i) % 256 for i in range(1060)]
    sequence = run.add(prompt, draft.drafter, piece_limit=512, max_tokens=60, ignore_eos=True)
    ride(run, draft, [sequence])
    assert sequence.record.drafted > 10
    assert sequence.record.accepted == sequence.record.drafted


class Counting(DraftModelDrafter):
    """Keeps how many of the sequences of each step were drafted for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.counts: list[tuple[int, int]] = []

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        trees = super().propose(views, budgets)
        self.counts.append((sum(len(tree) > 1 for tree in trees), len(trees)))
        return trees


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("tree", [1, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_what_finds_no_page_is_not_drafted_for_and_the_others_are(
    window: int | None, tree: int, lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool too small for all: no step fails, and as long as all want drafts some of them find room."""
    model = StrictTarget(RULE, VOCAB) if window is None else PairTarget(RULE, VOCAB, 256, window)
    run = ToyRun(RULE, lag=lag)
    draft = Draft(model, pages=8, tree=tree)
    draft.drafter = counting = Counting(model, draft.pools, 256, tree=tree)
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    prompts = [[*PROMPT, n] for n in range(4)]
    sequences = [run.add(p, draft.drafter, seed=n, **options) for n, p in enumerate(prompts)]
    ride(run, draft, sequences)
    for n, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        same(sequence, alone(RULE, prompt, seed=n, **options))
        assert not sequence.record.failed
    assert sum(sequence.record.accepted for sequence in sequences) > 10
    assert caplog.records == []
    assert all(drafted for drafted, asked in counting.counts if asked == 4)  # later some rest on pages of their own
    assert any(drafted < asked for drafted, asked in counting.counts)
    assert sum(drafted for drafted, _ in counting.counts) > len(counting.counts)


def test_a_sequence_larger_than_the_pool_is_decoded_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    run = ToyRun(RULE)
    draft = Draft(StrictTarget(RULE, VOCAB), pages=2)
    sequences = [run.add(PROMPT, draft.drafter, max_tokens=60, seed=n) for n in range(2)]
    ride(run, draft, sequences)
    for n, sequence in enumerate(sequences):
        same(sequence, alone(RULE, PROMPT, max_tokens=60, seed=n))
        assert not sequence.record.failed
    assert caplog.records == []


def test_forks_and_rewinds() -> None:
    draft = Draft(StrictTarget(RULE, VOCAB), pages=8)
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, draft.drafter, max_tokens=60)
    for _ in range(4):
        run.engine.step()
    drafter = draft.drafter
    filled = drafter.length(sequence.id)
    child = drafting.view(sequence)
    twin = type(child)(99, child.tokens, child.draw)
    drafter.fork(sequence.id, twin)
    assert drafter.length(99) == filled
    assert draft.held(99, filled) == draft.held(sequence.id, filled) == sequence.tokens[:filled]
    trees = drafter.propose([twin, child], [5, 5])
    assert trees[0].tokens == trees[1].tokens
    drafter.rewind(99, filled + 99)
    drafter.rewind(sequence.id, 3)
    assert drafter.length(sequence.id) <= 3
    again = drafter.propose([child], [5])
    assert again[0].tokens == trees[0].tokens
    drafter.release(99)
    drafter.release(99)
    run.engine.cancel(sequence)
    draft.check_empty()


def test_a_fork_without_a_page_leaves_nothing_behind() -> None:
    """Of a model with two cache groups the second has no page left for the fork."""
    model = PairTarget(RULE, VOCAB, 256, 64)
    draft = Draft(model, pages=4)
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, draft.drafter, max_tokens=30)
    run.engine.step()
    run.engine.step()
    free = draft.pools[1].free
    taken = [draft.pools[1].take() for _ in range(free)]
    view = drafting.view(sequence)
    with pytest.raises(Exception, match="in use"):
        draft.drafter.fork(sequence.id, type(view)(99, view.tokens, view.draw))
    for page in taken:
        draft.pools[1].release(page)
    draft.check([sequence])
    run.engine.cancel(sequence)
    draft.check_empty()
