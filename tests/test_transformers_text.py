"""The default model's greedy text in fp32 is that of transformers; a first difference must be a tie of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import LLM, Sampling
from paceline.prompts import read_prompts, spread
from paceline.targets.hub import locate

TIE = 1e-3


@pytest.fixture(scope="module")
def fp32() -> LLM:
    return LLM(dtype="fp32", max_model_len=2048, max_num_seqs=4)


@pytest.fixture(scope="module")
def reference() -> Any:
    import transformers

    path = locate("smollm2-135m").path
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


def compare(fp32: LLM, reference: Any, count: int, tokens: int) -> None:
    """Every token is the reference's own choice after the same text, up to the first that is not, which is a tie."""
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for prompt in spread(read_prompts(None), count):
        ids = fp32.chat_ids([{"role": "user", "content": prompt.turns[0]}])
        answer = fp32.generate(ids, sampling).token_ids
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([ids + answer[:-1]])).logits[0, len(ids) - 1 :]
        for row, ours in zip(logits, answer, strict=True):
            theirs = int(row.argmax())
            if ours != theirs:
                margin = float(row[theirs] - row[ours])
                assert margin < TIE, f"{prompt.id}: token {theirs} led {ours} by {margin}"
                break


def test_greedy_text_equals_that_of_transformers(fp32: LLM, reference: Any) -> None:
    compare(fp32, reference, 3, 24)


@pytest.mark.long
def test_greedy_text_equals_that_of_transformers_on_twenty_prompts(fp32: LLM, reference: Any) -> None:
    compare(fp32, reference, 20, 64)
