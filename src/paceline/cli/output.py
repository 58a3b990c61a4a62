"""Results on standard output as JSON, remarks on standard error."""

from __future__ import annotations

import json
import math
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.completion import Completion
    from paceline.draw import Logprob
    from paceline.text import Tokenizer


def tell(*lines: str) -> None:
    """Progress and remarks, which leave standard output to the result."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Say what is warned of in one sentence, without the line of code that warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            tell(*(f"paceline: {warning.message}" for warning in caught))


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line."""
    print(json.dumps(value, ensure_ascii=False))


def as_object(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """A completion as the object that --json prints."""
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion.logprobs, tokenizer),
        "prompt_token_ids": completion.prompt_token_ids,
        "prompt_logprobs": _logprobs(completion.prompt_logprobs, tokenizer),
        "prompt_tokens": len(completion.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "speculation": completion.record.as_dict(),
    }


def _logprobs(entries: Sequence[Logprob | None] | None, tokenizer: Tokenizer) -> list[Any] | None:
    if entries is None:
        return None
    return [
        entry
        and {
            **_logprob(entry.token, entry.logprob, tokenizer),
            "rank": entry.rank,
            "top": [_logprob(token, logprob, tokenizer) for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _logprob(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    # JSON has no infinity
    number = logprob if math.isfinite(logprob) else None
    return {"token_id": token, "token": tokenizer.token_text(token), "logprob": number}
