"""Answers of the target to prompts that have none, by its own engine, many at a time, written down as they come."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import OptionError, RequestError
from paceline.journal import append, whole_lines
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.completion import Completion
    from paceline.llm import LLM
    from paceline.train.data import Text


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How answers are asked for.

    Attributes:
        temperature: of every second of the prompts that do not name their own; the others are answered greedily.
        top_p: where the temperature is above 0.
        max_tokens: of an answer.
        seed: of sampled answers.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 224
    seed: int = 0

    def sampling(self, text: Text, place: int) -> Sampling:
        """The settings of the prompt at ``place``; its noise is a function of the seed and its text."""
        temperature = self.temperature * (place % 2) if text.temperature is None else text.temperature
        return Sampling(
            temperature=temperature,
            top_p=self.top_p if temperature else 1.0,
            max_tokens=self.max_tokens,
            seed=(self.seed + int(text.key, 16)) % 2**63,
        )


def answer(
    llm: LLM, texts: Sequence[Text], path: Path, asking: Asking, template: str, advance: Callable[[int, int], None]
) -> list[Text]:
    """The texts with answers: those of ``path``, an earlier run's, and those that are given now and added to it.

    A prompt that the model refuses, as it is too long, is left out.

    Args:
        path: a JSONL file as `read_texts` reads it.
        template: a digest of the template and the model, which the file's lines must have.
        advance: is told how many are done, of how many.

    Raises:
        OptionError: the file was made under another template or by another model, or is none of ours.
        ResourceError: it cannot be written.
    """
    found = _known(path, template)
    waiting = [(place, text) for place, text in enumerate(texts) if text.key not in found]
    advance(len(texts) - len(waiting), len(texts))
    with ThreadPoolExecutor(2 * llm.options.max_num_seqs) as pool:
        asked = {pool.submit(_ask, llm, text, asking.sampling(text, place)): text for place, text in waiting}
        try:
            for done, future in enumerate(as_completed(asked), len(texts) - len(waiting) + 1):
                text, (sampling, completion) = asked[future], future.result()
                entry = _entry(text, sampling, completion, template)
                append(path, entry)
                found[text.key] = entry
                advance(done, len(texts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [_answered(text, found[text.key]) for text in texts if found[text.key]["answer"] is not None]


def _ask(llm: LLM, text: Text, sampling: Sampling) -> tuple[Sampling, Completion | None]:
    try:
        return sampling, llm.chat(list(text.messages), sampling, speculation=False)
    except RequestError:
        return sampling, None


def _entry(text: Text, sampling: Sampling, completion: Completion | None, template: str) -> dict[str, Any]:
    return {
        "key": text.key,
        "messages": list(text.messages),
        "answer": None if completion is None else completion.text,
        "answer_ids": None if completion is None else completion.token_ids,
        "finish_reason": None if completion is None else completion.finish_reason,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "category": text.category,
        "template": template,
    }


def _answered(text: Text, entry: dict[str, Any]) -> Text:
    return replace(
        text,
        answer=entry["answer"],
        answer_ids=tuple(entry["answer_ids"]),
        finished=entry["finish_reason"] == "stop",
        temperature=entry["temperature"],
        template=entry["template"],
    )


def _known(path: Path, template: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(whole_lines(path) if path.exists() else (), 1):
        try:
            entry = json.loads(line)
            key, given = entry["key"], entry["template"]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path}, line {number}: no answer that paceline has written ({error!r}).") from error
        if given != template:
            raise OptionError(
                f"{path}, line {number}: that answer was given by another model or under another chat template; name "
                "another file for those of this one."
            )
        found[key] = entry
    return found
