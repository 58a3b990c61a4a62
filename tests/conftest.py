"""What several test files share: the default model, loaded once."""

from __future__ import annotations

import pytest

from paceline import LLM


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The default model in int8; tests that change its state leave it idle."""
    return LLM(max_model_len=2048, max_num_seqs=8)
