"""What the verbs that run a model share: its flags, its loading, its answers as JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import Group, memory
from paceline.llm import LLM
from paceline.options import Speculation
from paceline.sampling import Sampling
from paceline.settings import EngineOptions
from paceline.targets.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.completion import Completion
    from paceline.draw import Logprob
    from paceline.text import Tokenizer

ENGINE = Group("Model", EngineOptions, {"threads": "--threads -t"}, {"cache_memory": memory})
SAMPLING = Group("Sampling", Sampling)
DRAFTING = Group("Speculation", Speculation, {"enabled": None, "model": "--draft-model"})

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="smollm2-135m, a Hugging Face repository id, a folder, or a GGUF file.",
        rich_help_panel="Model",
        show_default=DEFAULT_MODEL,
    ),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Plain decoding.", rich_help_panel="Speculation")]
Written = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        "--speculative-config",
        help="All options of speculation as one JSON object, or a method's name.",
        rich_help_panel="Speculation",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result, no remarks.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback when something fails.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def open_model(model: str, engine: dict[str, Any], speculation: Any = True, *, quiet: bool = False) -> LLM:
    """Load a model with the options that were given; what was chosen goes to standard error."""
    llm = LLM(model, **engine, speculation=speculation, progress=not quiet)
    if not quiet:
        tell(*llm.notes)
    return llm


def tell(*lines: str) -> None:
    """Progress and remarks, which leave standard output to the result."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


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
