"""A chain is a tree of width 1: for every method that drafts both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.sampling import Sampling
from tests.bench_models import model_folder, tiny_llm

if TYPE_CHECKING:
    from paceline import LLM

__all__ = ["model_folder", "tiny_llm"]

METHODS: dict[str, dict[str, Any]] = {
    "suffix": {},
    "recycling": {},
    "cascade": {},
    "draft_model": {"draft_layers": 1},
    "medusa": {"random": True},
    "eagle": {"random": True},
    "eagle3": {"random": True},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_a_chain_is_a_tree_of_width_1(tiny_llm: LLM, method: str, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=5, max_tokens=48, ignore_eos=True)
    both = []
    for tree in ("none", 1):
        tiny_llm.forget()
        speculation = {"method": method, "tree": tree, "num_speculative_tokens": 4, "adaptive": False}
        answer = tiny_llm.generate("over and over and over", sampling, speculation={**METHODS[method], **speculation})
        record = answer.record
        both.append((answer.token_ids, record.steps, record.drafted, record.accepted_at, record.reached))
    assert both[0] == both[1]
    assert both[0][2] > 0
