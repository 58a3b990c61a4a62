"""What the verbs that run a model share: its flags, and how it is loaded with them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli.flags import Group, memory
from paceline.cli.output import plain_warnings, tell
from paceline.llm import LLM
from paceline.options import Speculation
from paceline.sampling import Sampling
from paceline.settings import EngineOptions
from paceline.targets.hub import known

ENGINE = Group("Model", EngineOptions, {"threads": "--threads -t"}, {"cache_memory": memory})
SAMPLING = Group("Sampling", Sampling)
DRAFTING = Group("Speculation", Speculation, {"enabled": None, "model": "--draft-model"})

MODEL_HELP = "smollm2-135m, a Hugging Face repository id, a folder, or a GGUF file."

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=MODEL_HELP,
        rich_help_panel="Model",
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
    default = known(model)
    if default is not None and not default.path.exists() and not quiet:
        tell(f"fetching {model}, 98 MB, and converting it, once")
    with plain_warnings():
        llm = LLM(model, **engine, speculation=speculation, progress=not quiet)
    if not quiet:
        tell(*llm.notes)
    return llm
