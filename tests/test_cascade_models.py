"""The cascade on tiny models: what auto means, heads and first layers as its learned member, and its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline import LLM, Sampling
from paceline.drafters.cascade import LOOKUPS, CascadeDrafter
from paceline.errors import OptionError
from paceline.heads.make import random_head
from paceline.heads.write import write_eagle, write_eagle3, write_medusa
from paceline.kernels import PacelineWarning
from tests.bench_models import model_folder, tiny_llm

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["model_folder", "tiny_llm"]

SHORT = ["row of riders, row of riders", "who leads", "wind on the hill, and the wheel in front, and the wind"]
FIXED = {"num_speculative_tokens": 9, "adaptive": False}


def texts(llm: LLM, temperature: float = 0.7, **options: Any) -> list[list[int]]:
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
    return [answer.token_ids for answer in llm.generate(SHORT, sampling, **options)]


def origins(llm: LLM, **options: Any) -> set[str]:
    answers = llm.generate(SHORT * 2, Sampling(temperature=0.0, max_tokens=24, ignore_eos=True), **options)
    return {answer.record.method for answer in answers}


def test_auto_is_the_cascade(tiny_llm: LLM) -> None:
    plain = texts(tiny_llm)
    assert texts(tiny_llm, speculation={"method": "auto", **FIXED}) == plain
    assert texts(tiny_llm, speculation={"method": "cascade"}) == plain
    for method in ("auto", "cascade"):
        assert origins(tiny_llm, speculation={"method": method, **FIXED}) == {"cascade"}
    drafter = tiny_llm.roster.drafter(tiny_llm.speculation.parse({"method": "auto"}))
    assert isinstance(drafter, CascadeDrafter)
    assert [member.name for member in drafter._members] == list(LOOKUPS)
    assert drafter is tiny_llm.roster.drafter(tiny_llm.speculation.parse("cascade"))


WRITERS: dict[str, Any] = {"medusa": write_medusa, "eagle": write_eagle, "eagle3": write_eagle3}
MORE: dict[str, dict[str, Any]] = {"medusa": {"head": "each"}, "eagle": {}, "eagle3": {"features": (0, 1, 2)}}


def written(kind: Any, llm: LLM, folder: Path) -> str:
    WRITERS[kind](random_head(kind, llm.loaded.spec, seed=5, **MORE[kind]), folder)
    return str(folder)


@pytest.mark.parametrize("method", ["auto", "cascade"])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_it_drafts_with_the_head_that_is_named(tiny_llm: LLM, tmp_path: Path, kind: str, method: str) -> None:
    speculation = {"method": method, "model": written(kind, tiny_llm, tmp_path), **FIXED}
    plain = texts(tiny_llm)
    with pytest.warns(PacelineWarning, match="guesses only .* of 32 tokens"):
        assert texts(tiny_llm, speculation=speculation) == plain
    drafter = tiny_llm.roster.drafter(tiny_llm.speculation.parse(speculation))
    assert isinstance(drafter, CascadeDrafter)
    assert drafter._members[-1].name == kind
    assert drafter.needs.features == drafter._members[-1].needs.features != ()


@pytest.mark.parametrize("tree", ["auto", "none", 3])
def test_it_drafts_with_the_first_layers(tiny_llm: LLM, tree: str | int) -> None:
    for temperature in (0.0, 0.7):
        plain = texts(tiny_llm, temperature)
        speculation = {"method": "auto", "draft_layers": 1, "tree": tree, **FIXED}
        assert texts(tiny_llm, temperature, speculation=speculation) == plain
    drafter = tiny_llm.roster.drafter(tiny_llm.speculation.parse(speculation))
    assert isinstance(drafter, CascadeDrafter)
    assert drafter._members[-1].name == "draft_model"
    tiny_llm.forget()


def test_random_weights_are_for_the_method_that_has_a_head(tiny_llm: LLM, tmp_path: Path) -> None:
    """Nothing is accepted and then ignored."""
    with pytest.raises(OptionError, match="random is for methods that have a head"):
        texts(tiny_llm, speculation={"random": True})
    head = written("eagle", tiny_llm, tmp_path)
    with pytest.raises(OptionError, match="random and model exclude each other"):
        texts(tiny_llm, speculation={"method": "eagle", "random": True, "model": head})


@pytest.mark.parametrize("method", ["eagle", "auto"])
def test_a_head_named_at_the_start_is_planned_for(
    tiny_llm: LLM, model_folder: Path, tmp_path: Path, method: str
) -> None:
    """Its cache is cut from the same budget, as many tokens as the target's, and its weights are told."""
    big = random_head("eagle", tiny_llm.loaded.spec, intermediate=60_000)
    write_eagle(big, tmp_path)
    memory = 1 << 19
    with pytest.warns(PacelineWarning, match="guesses only"):
        llm = LLM(
            str(model_folder),
            speculation={"method": method, "model": str(tmp_path), **FIXED},
            threads=2,
            max_num_seqs=4,
            cache_memory=memory,
        )
    alone_ = LLM(str(model_folder), speculation=False, threads=2, max_num_seqs=4, cache_memory=memory)
    (pool,) = (pool for shared in llm.roster._shared.values() for pool in shared.pools)
    assert {target.pages for target in llm.engine.pools} == {pool.pages}
    assert pool.pages < alone_.engine.pools[0].pages
    assert pool.pages * (pool.group.page_bytes + sum(g.page_bytes for g in llm.loaded.decoder.groups)) <= memory
    own = int(llm.notes[0].rpartition("drafter ")[2].removesuffix(" MiB").replace(",", ""))
    assert own == round(llm.roster.bytes / 2**20) > 5
    assert alone_.notes[0].endswith("drafter 0 MiB")
    assert texts(llm) == texts(alone_)
