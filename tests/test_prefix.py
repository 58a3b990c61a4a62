"""Requests that begin alike share what is computed for the beginning, and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.drafters import Needs
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.recycling import RecyclingDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.pages import PAGE, CacheGroup, PagePool, PageTable
from paceline.prefix import Chain, PrefixIndex
from tests.toys import (
    VOCAB,
    PairTarget,
    ScriptedDrafter,
    StrictTarget,
    ToyRun,
    alone,
    mix,
    path_rule,
    same,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from paceline.batch import Batch
    from paceline.drafters import View
    from paceline.pages import Slab
    from paceline.request import Sequence
    from paceline.targets import Scores

RULE = path_rule(VOCAB, seed=301)
SHARED = [7, 8, 9, 10] * 15  # 60 tokens, 3 pages and a part of one


class Counting(StrictTarget):
    """Counts the rows that it computes."""

    computed = 0

    def forward(self, batch: Batch, slabs: Seq[Slab], features: Seq[int] = ()) -> Scores:
        self.computed += batch.rows
        return super().forward(batch, slabs, features)


def counted(**settings: Any) -> tuple[ToyRun, Counting]:
    target = Counting(RULE, VOCAB, 256)
    return ToyRun(RULE, target=target, **settings), target


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 60])
def test_the_second_time_only_what_is_not_a_full_page_is_computed(length: int, lag: int) -> None:
    """And the last token of the prompt in any case."""
    prompt = SHARED[:length]
    expected = alone(RULE, prompt, max_tokens=3)
    run, target = counted(lag=lag)
    first = run.add(prompt, max_tokens=3)
    run.finish(first)
    before = target.computed
    second = run.add(prompt, max_tokens=3)
    run.finish(second)
    for sequence in (first, second):
        same(sequence, expected)
    known = (length - 1) // PAGE * PAGE
    assert (first.record.cached_tokens, second.record.cached_tokens) == (0, known)
    assert target.computed - before == before - known
    run.check_empty()


def test_what_was_answered_is_found_again_in_the_next_turn() -> None:
    run, _ = counted()
    first = run.add(SHARED, max_tokens=40, ignore_eos=True)
    run.finish(first)
    following = [*SHARED, *first.output, 1, 2, 3]
    second = run.add(following, max_tokens=5)
    run.finish(second)
    same(second, alone(RULE, following, max_tokens=5))
    assert second.record.cached_tokens == 96  # of 100 tokens of the first all but the last have keys


def test_requests_that_part_ways_share_what_they_have_in_common() -> None:
    run, _ = counted()
    prompts = [[*SHARED[:40], *[n] * 30] for n in range(4)]
    sequences = [run.add(prompts[0], max_tokens=4)]
    run.finish(*sequences)
    sequences += [run.add(prompt, max_tokens=4) for prompt in prompts[1:]]
    run.finish(*sequences)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        same(sequence, alone(RULE, prompt, max_tokens=4))
    assert [sequence.record.cached_tokens for sequence in sequences] == [0, 32, 32, 32]


def test_nothing_is_shared_under_another_salt_or_by_a_request_for_prompt_logprobs() -> None:
    run, _ = counted()
    run.finish(run.add(SHARED, max_tokens=2, cache_salt="a"))
    for settings, known in (
        ({"cache_salt": "a"}, 48),
        ({"cache_salt": "b"}, 0),
        ({}, 0),
        ({"cache_salt": "a", "prompt_logprobs": 1}, 0),
    ):
        sequence = run.add(SHARED, max_tokens=2, **settings)
        run.finish(sequence)
        assert sequence.record.cached_tokens == known
        same(sequence, alone(RULE, SHARED, max_tokens=2, **settings))


def test_it_can_be_switched_off() -> None:
    run, _ = counted(prefix_caching=False)
    for _ in range(2):
        sequence = run.add(SHARED, max_tokens=2)
        run.finish(sequence)
        assert sequence.record.cached_tokens == 0
    run.check_empty()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("length", [1, 16, 17, 60])
def test_the_prompt_of_several_answers_is_computed_once(length: int, lag: int, caching: bool) -> None:
    prompt = SHARED[:length]
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    expected = [alone(RULE, prompt, choice=choice, **settings) for choice in range(3)]
    run, target = counted(prefix_caching=caching, lag=lag)
    leader = run.add(prompt, choice=0, **settings)
    sequences = [leader, *(run.add(prompt, choice=choice, leader=leader, **settings) for choice in (1, 2))]
    run.finish(*sequences)
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
        assert sequence.leader is None
    assert [sequence.record.cached_tokens for sequence in sequences] == [0, length - 1, length - 1]
    rows = length + 2 + 3 * 11  # the prompt, its last token for the other two, and each answer but its last token
    assert rows <= target.computed <= rows + 3 * lag
    assert len({tuple(sequence.output) for sequence in sequences}) > 1
    run.check_empty()


@pytest.mark.parametrize("step", range(6))
def test_answers_go_on_without_the_first(step: int) -> None:
    """It may be cancelled before, while and after its prompt is taken in."""
    run, _ = counted(max_batch_tokens=20, max_num_seqs=2)
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    leader = run.add(SHARED, choice=0, **settings)
    others = [run.add(SHARED, choice=choice, leader=leader, **settings) for choice in (1, 2)]
    for _ in range(step):
        run.engine.step()
        run.check()
    run.engine.cancel(leader)
    run.check()
    run.finish(*others)
    for choice, sequence in enumerate(others, 1):
        same(sequence, alone(RULE, SHARED, choice=choice, **settings))
    run.check_empty()


@dataclass
class Feeling(ScriptedDrafter):
    """Lives on features, and has those of as many rows of a sequence as ``has`` says."""

    needs: Needs = field(default_factory=lambda: Needs(features=(0,)))
    has: int = 0

    def start(self, view: View, valid: int) -> None:
        self.observed[view.id] = list(view.tokens[: min(valid, self.has)])


@pytest.mark.parametrize(("has", "known"), [(0, 0), (15, 0), (16, 16), (40, 32), (100, 48)])
def test_what_a_drafter_has_not_seen_is_computed_for_it(has: int, known: int) -> None:
    run, _ = counted()
    expected = alone(RULE, SHARED, max_tokens=9)
    run.finish(run.add(SHARED, max_tokens=2))
    drafter = Feeling(mix(expected.output, len(SHARED), 0.7), has=has)
    sequence = run.add(SHARED, drafter, max_tokens=9)
    run.engine.step()
    assert sequence.record.cached_tokens == known
    assert drafter.observed[sequence.id] == SHARED
    run.finish(sequence)
    same(sequence, expected)
    assert sequence.record.drafted > 0


@pytest.mark.parametrize("kind", ["ngram", "suffix", "recycling", "model"])
def test_drafters_that_read_tokens_draft_behind_a_shared_beginning(kind: str) -> None:
    periodic = path_rule(VOCAB, seed=302, memory=1)
    pool = PagePool(StrictTarget(periodic, VOCAB).groups[0], 40)
    makers: dict[str, Callable[[], Any]] = {
        "ngram": lambda: NgramDrafter(1, 3),
        "suffix": SuffixDrafter,
        "recycling": lambda: RecyclingDrafter(VOCAB),
        "model": lambda: DraftModelDrafter(StrictTarget(periodic, VOCAB), [pool], 256),
    }
    run, drafter = ToyRun(periodic), makers[kind]()
    for known in (0, 48):
        sequence = run.add(SHARED, drafter, max_tokens=60, ignore_eos=True)
        run.finish(sequence)
        same(sequence, alone(periodic, SHARED, max_tokens=60, ignore_eos=True))
        assert sequence.record.cached_tokens == known
        assert sequence.record.accepted > 0
    assert pool.free == pool.pages


@pytest.mark.parametrize("window", [1, 4, 16, 20, 40])
def test_with_a_window_only_where_all_is_there_that_the_next_row_sees(window: int) -> None:
    """Pages that the first answer gave up behind its window may be gone; what is found is right."""
    target = PairTarget(RULE, VOCAB, 256, window)
    expected = [alone(RULE, SHARED[:length], target=target, max_tokens=30) for length in (60, 45, 20)]
    for pages in (6, 9, 40):
        run = ToyRun(RULE, target=target, pages=(40, pages), max_batch_tokens=24)
        known = 0
        for _ in range(2):
            for length, reference in zip((60, 45, 20), expected, strict=True):
                sequence = run.add(SHARED[:length], max_tokens=30)
                run.finish(sequence)
                same(sequence, reference)
                known += sequence.record.cached_tokens
        assert known > 0
        run.check_empty()


@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_longest_out_of_use_goes_first(lag: int) -> None:
    run = ToyRun(RULE, pages=8, lag=lag)
    prompts = [[n] * 33 for n in range(5)]  # two full pages each, and one more to run
    for prompt in prompts[:3]:
        run.finish(run.add(prompt, max_tokens=2))
    again = run.add(prompts[0], max_tokens=2)
    run.finish(again)
    assert again.record.cached_tokens == 32
    run.finish(run.add(prompts[3], max_tokens=2))
    known = []
    for prompt in (prompts[0], prompts[3], prompts[1]):
        sequence = run.add(prompt, max_tokens=2)
        run.finish(sequence)
        known.append(sequence.record.cached_tokens)
    assert known == [32, 32, 16]  # of the second prompt the last page has gone, which is worth least alone
    run.check_empty()


def test_who_gave_way_finds_its_pages_again_where_nobody_needed_them() -> None:
    run, target = counted(pages=9)
    sequences = [run.add([n] * 40, max_tokens=30, ignore_eos=True) for n in range(2)]
    late = run.add([5] * 40, max_tokens=1)
    run.finish(*sequences, late)
    assert sequences[1].record.preemptions + late.record.preemptions > 0
    assert target.computed < 40 * 3 + 30 * 2 + 40
    for n, sequence in enumerate(sequences):
        same(sequence, alone(RULE, [n] * 40, max_tokens=30, ignore_eos=True))


def test_an_equal_key_with_other_tokens_is_no_hit() -> None:
    """Ids are compared, whatever the hash says."""
    group = CacheGroup("test", 1, 1, 1, torch.float32)
    pool = PagePool(group, 4)
    index = PrefixIndex([pool])
    chain, other = Chain.of([1] * 16, None), Chain.of([2] * 16, None)
    table = PageTable(pool, 64)
    table.reserve(16)
    index.enter(chain, [table], 16)
    assert index.find(Chain.of([1] * 16, None), 16) == 1
    assert index.find(other, 16) == 0
    other.keys[:] = chain.keys
    assert index.find(other, 16) == 0
    twin = PageTable(pool, 64)
    twin.reserve(16)
    index.enter(other, [twin], 16)
    index.check()
    twin.free()
    assert not pool.idle(1)
    table.free()
    assert pool.idle(0)
    index.forget()
    index.check()
    pool.check([])
    assert len(index) == 0


def test_keys_tell_all_that_matters_apart() -> None:
    tokens = list(range(64))
    chains = [
        Chain.of(tokens, "model", None),
        Chain.of(tokens, "model", "None"),
        Chain.of(tokens, "mode", "lNone"),
        Chain.of(tokens, "model", ""),
        Chain.of([*tokens[:15], 99, *tokens[16:]], "model", None),
        Chain.of([99, *tokens[1:]], "model", None),
    ]
    keys = [chain.key(place) for chain in chains for place in range(4)]
    assert len(set(keys)) == len(keys)
    assert Chain.of(tokens[:32], "model", None).key(1) == chains[0].key(1)


def test_the_same_in_any_order_and_any_room() -> None:
    """Requests that begin alike in many ways, many at once, in pools from tiny to ample."""
    dice = random.Random(4)
    beginnings = [[n] * 16 + SHARED[: 8 * n] for n in range(4)]
    requests = [[*dice.choice(beginnings), *[n % 3] * dice.randrange(1, 20)] for n in range(24)]
    expected: list[Sequence] = [alone(RULE, prompt, max_tokens=12, seed=1) for prompt in requests]
    for pages in (6, 10, 30):
        run = ToyRun(RULE, pages=pages, max_batch_tokens=30, lag=pages % 4 // 2)
        order = dice.sample(range(24), 24)
        sequences = {
            n: run.add(requests[n], ScriptedDrafter(mix(expected[n].output, len(requests[n]), 0.6)), max_tokens=12)
            for n in order
        }
        run.finish(*sequences.values())
        for n, sequence in sequences.items():
            assert sequence.output == expected[n].output
        assert sum(sequence.record.cached_tokens for sequence in sequences.values()) > 0
        run.check_empty()
