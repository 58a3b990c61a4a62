"""What ``LLM`` and ``AsyncLLM`` have in common: a loaded model, and its engine on a thread of its own."""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from paceline import methods
from paceline.cache import CacheBudget
from paceline.engine import Engine
from paceline.errors import OptionError, RequestError
from paceline.loop import Loop
from paceline.options import Speculation, reject_unknown
from paceline.pages import PAGE
from paceline.prepare import Preparer, add_all
from paceline.roster import DraftModels, Roster
from paceline.settings import EngineOptions
from paceline.targets.load import Loaded, load
from paceline.trace import Trace
from paceline.warm_up import recall, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.drafters import Drafter
    from paceline.options import SpeculationLike
    from paceline.prepare import Prepared
    from paceline.request import Sequence as Running
    from paceline.sampling import Sampling
    from paceline.wishes import Wishes


class Front:
    """A model, ready to generate; its engine runs on a thread of its own, which ends with this object.

    Attributes:
        loop: the thread.
        engine: belongs to it; :meth:`paused` gives it to another.
        roster: makes the drafters, on any thread.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        speculation: SpeculationLike | Speculation = True,
        progress: bool = False,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: ``smollm2-135m``, a Hugging Face repository id, a local folder, or a GGUF file.
            speculation: how to draft; None, False or "off" is plain decoding.
            speculative_config: another name of ``speculation``.
            progress: show progress bars on standard error.
            options: the fields of :class:`~paceline.settings.EngineOptions`: device, dtype, kv_dtype, threads,
                max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, max_waiting,
                max_wait_seconds, max_total_tokens, cache_memory, pacer_trace.

        Raises:
            ModelError: the model cannot be loaded.
            OptionError: an option is unknown, out of range, or excludes another.
            ResourceError: memory or disk does not suffice.
            DrafterError: the draft model does not fit the target.
        """
        if "speculative_config" in options:
            if speculation is not True:
                raise OptionError("speculation and speculative_config are two names of one option; give one of them.")
            speculation = options.pop("speculative_config")
        names = [field.name for field in fields(EngineOptions)]
        reject_unknown("LLM", options, [*names, "speculation", "speculative_config", "progress"])
        if not isinstance(model, str | os.PathLike):
            raise OptionError(f"model is a name, a folder or a file, not {model!r}.")
        self.options = EngineOptions(**options)
        self.speculation = Speculation.parse(speculation)
        methods.check(self.speculation)
        loads = partial(_load, self.options, progress)
        self.loaded = loads(os.fspath(model), self.options.max_model_len)
        self.max_model_len = self.loaded.decoder.max_positions
        models = DraftModels(self.loaded, partial(loads, max_model_len=None))
        groups = methods.groups(self.speculation, models) if self.speculation.enabled else ()
        budget = CacheBudget(
            [*self.loaded.decoder.groups, *groups],  # its own drafter's cache is planned with the target's
            self.options.cache_memory,
            self.options.max_num_seqs,
            self.max_model_len,
            self.options.max_num_batched_tokens,
        )
        self.engine = Engine(
            self.loaded.decoder,
            budget.cut(self.loaded.decoder.groups),
            max_num_seqs=self.options.max_num_seqs,
            max_batch_tokens=self.options.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            model=f"{self.loaded.fingerprint} {self.loaded.dtype} {self.loaded.decoder.groups[0].dtype}",
            prefix_caching=self.options.enable_prefix_caching,
            bounds=self.options.bounds,
        )
        self.roster = Roster(models, budget, self.max_model_len)
        if self.speculation.enabled:
            self.roster.drafter(self.speculation)
        if self.options.pacer_trace is not None:
            self.engine.drafting.trace = Trace(Path(self.options.pacer_trace))
        self.preparer = Preparer(self.loaded, self.speculation, self.options.max_num_batched_tokens)
        self.tokenizer = self.preparer.tokenizer
        self._by_hand: list[Running] = []
        recall(self)
        self.loop = Loop(self.engine)
        weakref.finalize(self, self.loop.stop).atexit = False

    @property
    def notes(self) -> list[str]:
        """What was chosen at the start, and what weights, cache and drafter take; one line each."""
        decoder = self.loaded.decoder
        cache = sum(pool.pages * pool.group.page_bytes for pool in self.engine.pools)
        tokens = max(pool.pages for pool in self.engine.pools) * PAGE
        chosen = (
            f"{self.loaded.name}: {self.loaded.dtype} on the cpu ({decoder.path}), {decoder.threads} threads, context "
            f"{self.max_model_len:,}; weights {_mib(self.loaded.weight_bytes)}, cache {_mib(cache)} for "
            f"{tokens:,} tokens in {str(self.engine.pools[0].group.dtype).removeprefix('torch.')}, "
            f"drafter {_mib(self.roster.bytes)}"
        )
        guesses = (
            "the drafting head has random weights, for tests: next to none of its drafts will be right; name a trained "
            "one with model=..."
        )
        return [chosen, *[guesses] * (self.speculation.enabled and self.speculation.random), *self.loaded.notes]

    @property
    def default_sampling(self) -> Sampling:
        """The settings that the model comes with."""
        return self.preparer.default_sampling

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer; errors as for ``chat``."""
        return self.preparer.chat_ids(messages, **template)

    def calibrate(self) -> None:
        """Measure what steps and drafts cost on this machine, unless that was done at an earlier start.

        It takes some seconds, for which servers and measurements have the time before their first request. Without it
        the costs are learned while running.

        Raises:
            RequestError: requests are still running.
            ResourceError: the result cannot be kept.
        """
        with self.paused() as engine:
            if recall(self):
                return
            if not engine.idle:
                raise RequestError("costs can be measured only while no request is running.")
            warm_up(self)

    @contextmanager
    def paused(self) -> Iterator[Engine]:
        """Give the calling thread the engine until the block ends, to step it by hand or to look at it.

        What was given to :meth:`submit` and has not ended by then is cancelled.

        Raises:
            ClosedError: the model was closed, or the process was forked.
        """
        before = len(self._by_hand)
        with self.loop.paused() as engine:
            try:
                yield engine
            finally:
                for running in self._by_hand[before:]:
                    engine.cancel(running)
                del self._by_hand[before:]

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        drafter: Drafter | None = None,
        **wishes: Unpack[Wishes],
    ) -> list[Running]:
        """Queue one prompt in an engine that is :meth:`paused`; its ``n`` answers grow with every step made by hand.

        Args:
            drafter: proposes in place of the one that ``speculation`` names.

        Raises:
            RequestError: as for ``generate``; or the engine is not paused by this thread.
        """
        prepared = self.preparer.one("submit", prompt, sampling, wishes)
        if not self.loop.held():
            raise RequestError("submit is for an engine that is stepped by hand: with llm.paused() as engine.")
        if drafter is None or not prepared.request.speculation.enabled:
            drafter = self._drafter(prepared)
        added = add_all(self.engine, [(prepared, drafter)])
        self._by_hand += added
        return added

    def _drafter(self, prepared: Prepared) -> Drafter | None:
        """The drafter that a request asks for; made here, on the calling thread, where there is none yet."""
        speculation = prepared.request.speculation
        return self.roster.drafter(speculation) if speculation.enabled else None

    def _forget(self) -> None:
        if not self.engine.idle:
            raise RequestError("what drafters learn can be forgotten only while no request is running.")
        self.roster.forget()
        self.engine.forget()


def _load(options: EngineOptions, progress: bool, model: str, max_model_len: int | None) -> Loaded:
    return load(
        model,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        threads=options.threads,
        max_model_len=max_model_len,
        progress=progress,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
