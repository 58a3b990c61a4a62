"""The Python interface: load a model once, then generate, chat and stream."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from paceline.chat import ChatTemplate
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine import Engine
from paceline.errors import ContextLengthError, DrafterError, OptionError, RequestError, ResourceError
from paceline.options import Speculation, reject_unknown
from paceline.pages import PAGE, PagePool, pages_for
from paceline.request import Request
from paceline.sampling import LogitRules, Sampling
from paceline.targets.load import load
from paceline.text import Detokenizer, Tokenizer
from paceline.tree import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.draw import Logprob
    from paceline.drafters import Drafter
    from paceline.options import SpeculationLike
    from paceline.pages import CacheGroup
    from paceline.record import SpeculationRecord
    from paceline.request import Sequence as Running
    from paceline.targets.load import Loaded

_MAX_NUM_SEQS = 16
_MAX_BATCH_TOKENS = 512
_CACHE_SHARE = 4  # the cache takes at most this part of the free memory

Prompt = "str | Sequence[int]"


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: without the stop token and, unless asked for, without the stop string.
        token_ids: the emitted tokens, the stop token included.
        finish_reason: "stop", "length" or "abort".
        logprobs: one entry a token, where asked for.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: one entry a prompt token, None for the first, where asked for.
        record: what speculation did.
        offsets: for each token the length of the text after it.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[Logprob] | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprob | None] | None
    record: SpeculationRecord
    offsets: list[int]


@dataclass(frozen=True)
class Chunk:
    """What one step adds to a streamed answer; the last one carries the whole completion."""

    text: str
    token_ids: list[int]
    completion: Completion | None


class LLM:
    """A model, ready to generate.

    Args:
        model: ``smollm2-135m``, a Hugging Face repository id, a local folder, or a GGUF file.
        device: only "cpu" in this version.
        dtype: number format of the weights: "int8" (the default on a CPU), "bf16" or "fp32".
        kv_dtype: number format of the cache: "bf16" or "fp32".
        threads: by default the physical cores that the process may use.
        max_model_len: the longest sequence, in tokens; by default the model's own context.
        max_num_seqs: how many sequences run at once.
        cache_memory: bytes for keys and values; by default at most a quarter of the free memory.
        speculation: how to draft; None, False or "off" is plain decoding.
        speculative_config: another name of ``speculation``.

    Raises:
        ModelError: the model cannot be loaded.
        OptionError: an option is unknown, out of range, or excludes another.
        ResourceError: memory or disk does not suffice.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        device: str | None = None,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = _MAX_NUM_SEQS,
        cache_memory: int | None = None,
        speculation: SpeculationLike | Speculation = True,
        progress: bool = False,
        **others: Any,
    ) -> None:
        if "speculative_config" in others:
            speculation = others.pop("speculative_config")
        reject_unknown("LLM", others, _OPTIONS)
        if device not in (None, "cpu"):
            raise OptionError(f"device {device!r} is not part of this version: paceline runs on the cpu.")
        if max_num_seqs < 1:
            raise OptionError(f"max_num_seqs is {max_num_seqs}; it must be at least 1.")
        self.speculation = Speculation.parse(speculation)
        self._progress = progress
        self._loaded = load(
            model,
            dtype=dtype or "auto",
            kv_dtype=kv_dtype or "auto",
            threads=threads,
            max_model_len=max_model_len,
            progress=progress,
        )
        self.tokenizer = Tokenizer.from_parts(self._loaded.tokenizer)
        self._template = ChatTemplate.from_parts(self._loaded.tokenizer)
        self.max_model_len = self._loaded.decoder.max_positions
        self._drafters: dict[tuple[object, ...], Drafter] = {}
        self._draft_models: dict[tuple[object, ...], Loaded] = {}
        self._engine = self._start(max_num_seqs, cache_memory)

    @property
    def notes(self) -> list[str]:
        """What was chosen at the start, and what weights and cache take; one line each."""
        return [*self._loaded.notes, self._cache_note()]

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        speculation: SpeculationLike | Speculation = True,
        origins: bool = False,
    ) -> Any:
        """Complete one prompt or a list of them, each a text or a list of token ids.

        Returns:
            One :class:`Completion`, or a list of them in the order of the prompts; for ``sampling.n`` above 1 a
            list of n in place of each.

        Raises:
            RequestError: a prompt is empty, too long, or holds ids out of range.
            OptionError: the speculation asked for is not to be had.
        """
        single = isinstance(prompts, str) or bool(prompts) and isinstance(prompts[0], int)
        each = [prompts] if single or not prompts else list(prompts)
        if not prompts and not isinstance(prompts, str):
            each = [()]
        answers = self._run([self._encode(prompt) for prompt in each], sampling, speculation, origins)
        return answers[0] if single else answers

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | None = None,
        *,
        speculation: SpeculationLike | Speculation = True,
        origins: bool = False,
        **template: Any,
    ) -> Any:
        """Answer one conversation or a list of them; see :meth:`generate` for the rest.

        ``template`` goes to the chat template, as in ``enable_thinking=False``.
        """
        single = not messages or hasattr(messages[0], "keys")
        each = [messages] if single else list(messages)
        prompts = [self.chat_ids(conversation, **template) for conversation in each]  # type: ignore[arg-type]
        answers = self._run(prompts, sampling, speculation, origins)
        return answers[0] if single else answers

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer."""
        return self.tokenizer.encode(self._template.render(messages, **template), add_special_tokens=False)

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        speculation: SpeculationLike | Speculation = True,
        origins: bool = False,
    ) -> Iterator[Chunk]:
        """Complete one prompt step by step. Leaving the iterator stops the request and frees all that it holds.

        Raises:
            OptionError: ``sampling.n`` is above 1.
            RequestError: as for :meth:`generate`.
        """
        sampling = self._sampling(sampling)
        if sampling.n != 1:
            raise OptionError(f"a stream has one answer; n is {sampling.n}.")
        (running,) = self._add(self._encode(prompt), sampling, speculation, origins)
        return self._follow(running)

    def _follow(self, running: Running) -> Iterator[Chunk]:
        given = 0
        try:
            while running.finish_reason is None:
                self._engine.step()
                tokens = running.output[given:]
                given += len(tokens)
                done = running.finish_reason is not None
                if tokens or done:
                    yield Chunk(running.text.delta(), tokens, self._completion(running) if done else None)
        finally:
            self._engine.cancel(running)

    def _run(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling | None,
        speculation: SpeculationLike | Speculation,
        origins: bool,
    ) -> list[Any]:
        sampling = self._sampling(sampling)
        groups: list[list[Running]] = []
        try:
            for prompt in prompts:
                groups.append(self._add(prompt, sampling, speculation, origins))
            while any(running.finish_reason is None for group in groups for running in group):
                self._engine.step()
        finally:
            for group in groups:
                for running in group:
                    self._engine.cancel(running)
        answers = [[self._completion(running) for running in group] for group in groups]
        return answers if sampling.n > 1 else [answer for (answer,) in answers]

    def _sampling(self, sampling: Sampling | None) -> Sampling:
        """The settings asked for, or without any those that the model comes with."""
        if sampling is not None:
            return sampling
        return Sampling.from_generation_config(self._loaded.tokenizer.generation_config)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
            self.tokenizer.check(ids)
        return ids

    def _add(
        self, prompt: list[int], sampling: Sampling, speculation: SpeculationLike | Speculation, origins: bool
    ) -> list[Running]:
        """Queue the choices of one prompt, after every check that can fail."""
        self._check_length(prompt, sampling)
        spec = Speculation.parse(speculation, self.speculation)
        drafter = self._drafter(spec) if spec.enabled else None
        wanted = self.max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(self.tokenizer.eos_ids)
        )
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        rules = self._rules(sampling, prompt)
        added = []
        for choice in range(sampling.n):
            request = Request(
                prompt=tuple(prompt),
                sampling=sampling,
                seed=seed,
                choice=choice,
                stop_ids=stop_ids,
                limit=min(wanted, self.max_model_len),
                speculation=spec,
                piece_limit=_PIECE_SCORED if sampling.prompt_logprobs is not None else _MAX_BATCH_TOKENS,
                origins=origins,
            )
            added.append(self._engine.add(request, rules, self._detokenizer(request), drafter))
        return added

    def _check_length(self, prompt: list[int], sampling: Sampling) -> None:
        """
        Raises:
            RequestError: the prompt is empty.
            ContextLengthError: it leaves no room for a token.
        """
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token.")
        room = self.max_model_len - (sampling.max_tokens != 0)
        if len(prompt) > room:
            raise ContextLengthError(
                f"this model's context is {self.max_model_len} tokens and the prompt has {len(prompt)}: "
                "shorten it, or raise max_model_len if the model allows."
            )
