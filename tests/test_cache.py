"""The memory for keys and values: how much of it every group gets, and what is said where it does not suffice."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, OptionError, ResourceError, Sampling
from paceline.amount import amount
from paceline.cache import CacheBudget
from paceline.pages import PAGE, CacheGroup
from paceline.settings import EngineOptions
from paceline.tree import MAX_NODES
from tests.bench_models import model_folder
from tests.toys import trials

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["model_folder"]

TARGET = CacheGroup("target", 2, 1, 4, torch.float32)
LOCAL = CacheGroup("local", 3, 1, 4, torch.float32, window=32)
DRAFT = CacheGroup("draft", 1, 1, 4, torch.bfloat16)


def budget(
    *groups: CacheGroup, memory: int | None = None, seqs: int = 2, length: int = 100, rows: int = 512
) -> CacheBudget:
    return CacheBudget(groups, memory, seqs, length, rows)


def sizes(pools: Any) -> list[int]:
    return [pool.pages for pool in pools]


def test_as_many_pages_as_sequences_can_use_where_memory_suffices() -> None:
    """Each of them as long as it may become, with the tree behind its last token."""
    each = -(-(100 + MAX_NODES) // PAGE)
    for memory in (None, 1 << 24):
        assert sizes(budget(TARGET, memory=memory).cut([TARGET])) == [2 * each]
        assert sizes(budget(TARGET, DRAFT, memory=memory, seqs=3).cut([TARGET, DRAFT])) == [3 * each] * 2


def test_as_many_pages_as_memory_holds_where_less_suffices_for_all() -> None:
    page = TARGET.page_bytes + DRAFT.page_bytes
    for pages in (1, 7, 13):
        plan = budget(TARGET, DRAFT, memory=pages * page + page - 1)
        assert sizes(plan.cut([TARGET])) == [pages]
        assert plan.used == pages * TARGET.page_bytes
        assert sizes(plan.cut([DRAFT])) == [pages]
        assert plan.used == pages * page <= plan.memory


def test_a_window_takes_what_its_rows_can_reach() -> None:
    """Of each sequence the window and a pass; never more than the whole sequence."""
    needed = 2 + 512 // PAGE + 2
    assert sizes(budget(TARGET, LOCAL, length=10_000, memory=1 << 24).cut([TARGET, LOCAL])) == [2 * 629, 2 * needed]
    assert sizes(budget(TARGET, LOCAL, length=100, memory=1 << 24).cut([TARGET, LOCAL])) == [22, 22]
    few = budget(TARGET, LOCAL, length=10_000, rows=1, memory=1 << 24)
    assert sizes(few.cut([LOCAL])) == [2 * (2 + MAX_NODES // PAGE + 2)]


@pytest.mark.parametrize("memory", [0, 1, TARGET.page_bytes - 1])
def test_less_than_a_page_is_refused_with_both_numbers(memory: int) -> None:
    with pytest.raises(
        ResourceError, match=rf"16 tokens .* {amount(TARGET.page_bytes)}, and {memory} bytes .* cache_memory"
    ):
        budget(TARGET, memory=memory)
    assert sizes(budget(TARGET, memory=TARGET.page_bytes).cut([TARGET])) == [1]


def test_more_than_is_free_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free:
        available = 40 * TARGET.page_bytes

    monkeypatch.setattr(psutil, "virtual_memory", Free)
    with pytest.raises(
        ResourceError, match=rf"is {amount(80 * TARGET.page_bytes)}, and {amount(Free.available)} are free"
    ):
        budget(TARGET, memory=80 * TARGET.page_bytes)
    with pytest.raises(ResourceError):
        budget(TARGET, memory=Free.available + 1)
    assert sizes(budget(TARGET, memory=Free.available).cut([TARGET])) == [22]
    plan = budget(TARGET)
    assert sizes(plan.cut([TARGET])) == [10]  # unless said a quarter
    assert sizes(plan.cut([TARGET])) == [10]  # and for a drafter that comes later as much again, while it is free
    Free.available = 39 * TARGET.page_bytes
    with pytest.raises(ResourceError, match="cache_memory are left"):
        plan.cut([TARGET])


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (368_640, "360 KiB"),
        (3 << 20, "3 MiB"),
        (5 << 29, "2.5 GiB"),
        (123_456_789_012, "115 GiB"),
    ],
)
def test_amounts_have_units(size: int, shown: str) -> None:
    assert amount(size) == shown


def test_every_refusal_says_how_memory_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = budget(TARGET, memory=10 * TARGET.page_bytes)
    plan.cut([TARGET])
    calls = (lambda: budget(TARGET, memory=1), lambda: budget(TARGET, memory=1 << 60), lambda: plan.cut([DRAFT]))
    for call in calls:
        with pytest.raises(ResourceError, match=r"cache_memory.*\(2 GiB is 2 \* 2\*\*30 in Python, 2G as a flag\)\.$"):
            call()
    with pytest.raises(OptionError, match=r"a number of bytes, not '2G': 2 GiB is 2 \* 2\*\*30 in Python"):
        EngineOptions(cache_memory="2G")  # type: ignore[arg-type]


def test_what_a_drafter_wants_beyond_it_is_refused_with_both_numbers_and_a_way_out() -> None:
    plan = budget(TARGET, memory=10 * TARGET.page_bytes + 5)
    plan.cut([TARGET])
    with pytest.raises(
        ResourceError, match=rf"takes {amount(10 * DRAFT.page_bytes)}, and 5 bytes of cache_memory are left: .*"
    ):
        plan.cut([DRAFT])
    with pytest.raises(
        ResourceError, match=r"name the draft model when the target is loaded, .* or raise cache_memory"
    ):
        plan.cut([DRAFT, LOCAL])
    assert plan.used == 10 * TARGET.page_bytes  # nothing is held by what was refused
    assert plan.cut([]) == []


def test_what_is_given_back_can_be_had_again() -> None:
    plan = budget(TARGET, DRAFT, memory=10 * (TARGET.page_bytes + DRAFT.page_bytes))
    target = plan.cut([TARGET])
    for _ in range(3):
        pools = plan.cut([DRAFT])
        with pytest.raises(ResourceError):
            plan.cut([DRAFT])
        plan.give_back(pools)
        assert plan.used == target[0].pages * TARGET.page_bytes


GROUPS = st.builds(
    CacheGroup,
    st.just("any"),
    st.integers(1, 4),
    st.integers(1, 2),
    st.sampled_from([4, 8]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.none() | st.integers(1, 300),
)


@trials(60)
@given(
    target=st.lists(GROUPS, min_size=1, max_size=3),
    draft=st.lists(GROUPS, max_size=2),
    memory=st.integers(1 << 12, 1 << 21),
    seqs=st.integers(1, 5),
    length=st.integers(1, 700),
    rows=st.integers(1, 600),
)
def test_what_was_planned_for_always_fits(
    target: list[CacheGroup], draft: list[CacheGroup], memory: int, seqs: int, length: int, rows: int
) -> None:
    per_page = sum(group.page_bytes for group in [*target, *draft])
    if memory < per_page:
        with pytest.raises(ResourceError):
            budget(*target, *draft, memory=memory, seqs=seqs, length=length, rows=rows)
        return
    plan = budget(*target, *draft, memory=memory, seqs=seqs, length=length, rows=rows)
    pools = [*plan.cut(target), *plan.cut(draft)]
    assert plan.used == sum(pool.slab.keys.nbytes + pool.slab.values.nbytes for pool in pools) <= memory
    whole = min(memory // per_page, seqs * -(-(length + MAX_NODES) // PAGE))
    assert all(1 <= pool.pages <= whole for pool in pools)
    assert {pool.pages for pool in pools if pool.group.window is None} <= {whole}


SHORT = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
LAYERS = {"method": "draft_model", "draft_layers": 1, "num_speculative_tokens": 3, "adaptive": False}
HEAD = {"random": True, "num_speculative_tokens": 3, "adaptive": False}


@pytest.fixture(scope="module")
def tight(model_folder: Path) -> LLM:
    """Eight sequences of 1,024 tokens want more than there is, so the target takes all of it."""
    return LLM(str(model_folder), speculation=False, threads=2, max_num_seqs=8, cache_memory=1 << 18)


@pytest.mark.parametrize("method", ["draft_model", "auto"])
def test_a_request_with_a_draft_model_of_its_own_needs_room_that_is_left(tight: LLM, method: str) -> None:
    """Refused with both numbers, again and again, and the engine is as good as before."""
    plain = tight.generate("wind and road", SHORT).token_ids
    left = (1 << 18) - sum(pool.pages * pool.group.page_bytes for pool in tight.engine.pools)
    for _ in range(3):
        with pytest.raises(
            ResourceError, match=rf"takes [\d.]+ [KM]iB, and {amount(left)} of cache_memory are left: name the"
        ):
            tight.generate("wind and road", SHORT, speculation={**LAYERS, "method": method})
        assert tight.engine.idle
        assert tight.roster.bytes == 0
        assert tight.generate("wind and road", SHORT).token_ids == plain
    assert tight.generate("wind and road", SHORT, speculation="ngram").token_ids == plain


def test_named_at_the_start_it_is_planned_for(tight: LLM, model_folder: Path) -> None:
    llm = LLM(str(model_folder), speculation=LAYERS, threads=2, max_num_seqs=8, cache_memory=1 << 18)
    answer = llm.generate("wind and road", SHORT)
    assert answer.token_ids == tight.generate("wind and road", SHORT).token_ids
    assert answer.record.drafted > 0
    assert llm.engine.pools[0].pages < tight.engine.pools[0].pages
    with pytest.raises(ResourceError, match="cache_memory are left"):
        llm.generate("wind and road", SHORT, speculation={**LAYERS, "draft_layers": 2})


def test_forgetting_gives_the_room_of_one_drafter_to_the_next(model_folder: Path) -> None:
    llm = LLM(str(model_folder), speculation=LAYERS, threads=2, max_num_seqs=8, cache_memory=1 << 18)
    plain = llm.generate("wind and road", SHORT, speculation=False).token_ids
    used = llm.roster.bytes
    assert used > 0
    for tree in (1, 2, 3):
        gc.collect()
        llm.forget()
        assert llm.roster.bytes == 0
        assert llm.generate("wind and road", SHORT, speculation={"tree": tree}).token_ids == plain
        assert llm.roster.bytes == used


@pytest.mark.parametrize("named", [LAYERS, {**HEAD, "method": "eagle"}, {**HEAD, "method": "eagle3"}])
def test_drafters_of_one_model_share_its_pages(model_folder: Path, named: dict[str, Any]) -> None:
    """They are planned for once; chains, trees and drawn drafts run at the same time, and all goes back."""
    llm = LLM(str(model_folder), speculation=named, threads=2, max_num_seqs=8, cache_memory=1 << 18)
    plain = llm.generate("wind and road", SHORT, speculation=False).token_ids
    wishes = [named, {**named, "tree": "none"}, {**named, "tree": 2}, {**named, "rule": "recursive", "tree": 3}]
    drafters = [llm.roster.drafter(llm.speculation.parse(wish)) for wish in wishes]
    assert len({id(drafter) for drafter in drafters}) >= 3
    pools = [pool for shared in llm.roster._shared.values() for pool in shared.pools]
    assert len(pools) == 1
    used = llm.roster.bytes
    with llm.paused() as engine:
        running = [s for wish in wishes for s in llm.submit([1, 2, 3, 4], SHORT, speculation=wish)]
        while any(sequence.finish_reason is None for sequence in running):
            engine.step()
    assert all(sequence.record.drafted > 0 and not sequence.record.failed for sequence in running)
    assert llm.roster.bytes == used
    assert pools[0].free == pools[0].pages
    assert llm.generate("wind and road", SHORT, speculation=wishes[2]).token_ids == plain
    del drafters, running
    llm.forget()
    gc.collect()
    assert llm.roster._shared == {}
