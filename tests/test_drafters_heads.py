"""Learned heads as a user names them: a checkpoint, or random weights; and what is said of one that does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from paceline.errors import DrafterError
from paceline.heads.make import HeadKind, random_head
from paceline.heads.write import write_eagle, write_eagle3, write_medusa
from paceline.kernels import PacelineWarning
from paceline.llm import LLM
from paceline.sampling import Sampling
from tests.bench_models import model_folder, tiny_llm

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["model_folder", "tiny_llm"]

WRITERS: dict[str, Any] = {"medusa": write_medusa, "eagle": write_eagle, "eagle3": write_eagle3}
MORE: dict[str, dict[str, Any]] = {"medusa": {"head": "each"}, "eagle": {}, "eagle3": {"features": (0, 1, 2)}}
KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
PROMPTS = ["row of riders", "who leads", "wind on the hill, and the wheel in front"]


def texts(llm: LLM, **options: Any) -> list[list[int]]:
    sampling = Sampling(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    answers = llm.generate(PROMPTS, sampling, **options)
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("tree", ["auto", "none", 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_random_weights_changes_no_token(tiny_llm: LLM, kind: HeadKind, tree: str | int) -> None:
    plain = texts(tiny_llm)
    speculation = {"method": kind, "random": True, "tree": tree, "num_speculative_tokens": 6, "adaptive": False}
    assert texts(tiny_llm, speculation=speculation) == plain


@pytest.mark.parametrize("random", [True, False])
def test_a_head_of_random_weights_is_remarked_on(model_folder: Path, random: bool) -> None:
    speculation = {"method": "eagle", "random": True} if random else "ngram"
    llm = LLM(str(model_folder), speculation=speculation, threads=2, max_num_seqs=2, cache_memory=1 << 24)
    assert any("random weights, for tests" in note and "model=..." in note for note in llm.notes) == random


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_named_as_a_model_is(tiny_llm: LLM, tmp_path: Path, kind: HeadKind) -> None:
    """One of random weights works, and is remarked on."""
    WRITERS[kind](random_head(kind, tiny_llm.loaded.spec, seed=5, **MORE[kind]), tmp_path)
    speculation = {"method": kind, "model": str(tmp_path), "num_speculative_tokens": 6, "adaptive": False}
    plain = texts(tiny_llm)
    with pytest.warns(PacelineWarning, match="guesses only .* of 32 tokens"):
        drafted = texts(tiny_llm, speculation=speculation)
    assert drafted == plain
    tiny_llm.forget()
    assert texts(tiny_llm, speculation=speculation) == plain, "and not remarked on again: it is still loaded"


@pytest.mark.parametrize(("kind", "wanted"), [("medusa", "eagle"), ("eagle", "eagle3"), ("eagle3", "medusa")])
def test_a_head_of_another_method_is_refused(tiny_llm: LLM, tmp_path: Path, kind: HeadKind, wanted: str) -> None:
    WRITERS[kind](random_head(kind, tiny_llm.loaded.spec, **MORE[kind]), tmp_path)
    with pytest.raises(DrafterError, match=f"for the method '{kind}', not for '{wanted}'"):
        texts(tiny_llm, speculation={"method": wanted, "model": str(tmp_path)})
