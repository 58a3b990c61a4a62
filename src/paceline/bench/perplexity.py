"""What a number format costs in quality: perplexity of prompts, and of the target's own fp32 answers."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.bench.runner import Runner
    from paceline.llm import LLM
    from paceline.prompts import Prompt

REFERENCE = "fp32"
PROMPTS, ANSWERS = "prompts", "answers"


def write_answers(llm: LLM, prompts: Sequence[Prompt], runner: Runner, max_tokens: int) -> list[str]:
    """The greedy answers to all turns, each after the answers before it, as a conversation.

    Args:
        llm: the target in fp32.
        runner: keeps the answers.
        max_tokens: of each answer.
    """
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    texts = []
    for prompt in prompts:
        messages: list[dict[str, str]] = []
        for place, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            take = partial(_answer, llm, list(messages), sampling)
            text = runner.cell({"answer": prompt.id, "turn": place}, take)["text"]
            messages.append({"role": "assistant", "content": text})
            texts.append(text)
    return texts


def _answer(llm: LLM, messages: list[dict[str, str]], sampling: Sampling) -> dict[str, Any]:
    return {"text": llm.chat(messages, sampling, speculation=False).text}


def score(llm: LLM, texts: Mapping[str, Sequence[str]], runner: Runner) -> dict[str, dict[str, float]]:
    """For each kind of text its perplexity, each text taken alone and raw; a first token is not scored.

    Args:
        texts: by kind, :data:`PROMPTS` and :data:`ANSWERS`.
        runner: keeps the sum of each text.

    Returns:
        By kind, and for ``all``: ``tokens`` scored, and ``perplexity``, exp of the mean over all of them.
    """
    sums: dict[str, list[dict[str, Any]]] = {
        kind: [
            runner.cell({"kind": kind, "text": place}, partial(_sum, llm, text)) for place, text in enumerate(members)
        ]
        for kind, members in texts.items()
    }
    sums["all"] = [cell for cells in list(sums.values()) for cell in cells]
    return {kind: perplexity(cells) for kind, cells in sums.items()}


def perplexity(cells: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Perplexity of texts from the ``sum`` of their negative log-probabilities and their ``tokens``."""
    total, tokens = 0.0, 0
    for cell in cells:
        total += cell["sum"]
        tokens += int(cell["tokens"])
    return {"tokens": tokens, "perplexity": math.exp(total / tokens) if tokens else math.nan}


def ratios(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """For each format and kind of text its perplexity over that of :data:`REFERENCE`."""
    exact = found[REFERENCE]
    return {
        name: {kind: figures["perplexity"] / exact[kind]["perplexity"] for kind, figures in kinds.items()}
        for name, kinds in found.items()
    }


def _sum(llm: LLM, text: str) -> dict[str, Any]:
    ids = llm.tokenizer.encode(text)[: llm.max_model_len]
    if len(ids) < 2:
        return {"sum": 0.0, "tokens": 0}
    wanted = Sampling(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    scored = llm.generate(ids, wanted, speculation=False).prompt_logprobs[1:]
    return {"sum": -math.fsum(entry.logprob for entry in scored), "tokens": len(scored)}
