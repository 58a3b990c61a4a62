"""What is chosen once, when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from paceline.amount import WRITTEN
from paceline.bounds import Bounds
from paceline.errors import OptionError
from paceline.options import choice, flag, integer, number
from paceline.targets.linear import Format

CacheFormat = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of everything that loads a model.

    Attributes:
        device: only "cpu" in this version.
        dtype: number format of the weights, the head included: int8 (unless said otherwise), bf16 or fp32.
        kv_dtype: number format of the cache, bf16 or fp32; unless said fp32 for fp32 weights, else bf16.
        threads: how many compute; unless said as many as the physical cores that the process may use.
        max_model_len: the longest sequence in tokens, for the target and a draft model alike; unless said the model's
            own.
        max_num_seqs: how many sequences run at once; the others wait.
        max_num_batched_tokens: how many rows one pass takes: pieces of prompts, and for every other sequence its next
            token and its drafts; at least as many as sequences run at once.
        enable_prefix_caching: whether requests that begin alike share what is computed for the beginning; false keeps
            nothing of a request that has ended.
        max_waiting: how many requests may be there beyond those that run at once; one more is refused. Unless said any
            number.
        max_wait_seconds: how long a request may wait for its first turn before it is refused; unless said any time.
        max_total_tokens: how many tokens the requests that are there may grow to together, prompts included; what goes
            beyond is refused. Unless said any number.
        cache_memory: bytes for keys and values (2 GiB is 2 * 2**30 in Python, 2G as a flag); unless said what they can
            use, at most a quarter of the free memory.
        pacer_trace: a file for what is drafted and what that takes, one line of JSON for each step.

    Raises:
        OptionError: a value out of range.
    """

    device: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    max_waiting: int | None = None
    max_wait_seconds: float | None = None
    max_total_tokens: int | None = None
    cache_memory: int | None = None
    pacer_trace: str | None = None

    @property
    def bounds(self) -> Bounds:
        """Over which requests are refused."""
        return Bounds(self.max_waiting, self.max_wait_seconds, self.max_total_tokens)

    def __post_init__(self) -> None:
        if self.device not in (None, "cpu"):
            raise OptionError(f"device {self.device!r} is not part of this version; paceline runs on the 'cpu'.")
        for name, known in (("dtype", get_args(Format)), ("kv_dtype", get_args(CacheFormat))):
            if getattr(self, name) is not None:
                choice(name, getattr(self, name), known)
        integer("max_num_seqs", self.max_num_seqs, 1)
        integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        flag("enable_prefix_caching", self.enable_prefix_caching)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, and max_num_seqs is {self.max_num_seqs}: a "
                "pass takes a row at least for each sequence that runs; raise the one or lower the other."
            )
        if isinstance(self.cache_memory, str):
            raise OptionError(f"cache_memory is a number of bytes, not {self.cache_memory!r}: {WRITTEN}.")
        whole = {"threads": (1, 256), "max_waiting": (0, None)}
        for name in ("threads", "max_model_len", "cache_memory", "max_waiting", "max_total_tokens"):
            value = getattr(self, name)
            if value is not None:
                integer(name, value, *whole.get(name, (1, None)))
        if self.max_wait_seconds is not None:
            number("max_wait_seconds", self.max_wait_seconds, 0.0)
