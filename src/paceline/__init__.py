"""Lossless speculative decoding: the target's own tokens, bit for bit, and sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.completion import Chunk, Completion
    from paceline.errors import (
        ClosedError,
        ContextLengthError,
        DrafterError,
        HubError,
        KernelError,
        ModelError,
        OptionError,
        OverloadedError,
        PacelineError,
        RequestError,
        ResourceError,
        TokenizerError,
        UnsupportedModelError,
        WeightsError,
    )
    from paceline.llm import LLM
    from paceline.options import Speculation
    from paceline.record import SpeculationRecord
    from paceline.sampling import Sampling, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Chunk": "completion",
    "Completion": "completion",
    "Sampling": "sampling",
    "SamplingParams": "sampling",
    "Speculation": "options",
    "SpeculationRecord": "record",
}
"""Where public names live, errors left out: one is imported when it is first used, so that `paceline --help` needs no
torch."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "ClosedError",
    "Completion",
    "ContextLengthError",
    "DrafterError",
    "HubError",
    "KernelError",
    "ModelError",
    "OptionError",
    "OverloadedError",
    "PacelineError",
    "RequestError",
    "ResourceError",
    "Sampling",
    "SamplingParams",
    "Speculation",
    "SpeculationRecord",
    "TokenizerError",
    "UnsupportedModelError",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_HOMES.get(name, 'errors')}"), name)
