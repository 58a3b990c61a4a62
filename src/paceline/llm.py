"""The Python interface: load a model once, then generate, chat and stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import psutil
from torch import Tensor

from paceline.chat import ChatTemplate
from paceline.completion import Chunk, Completion
from paceline.drafters.methods import Surroundings, create, recipe
from paceline.engine import Engine
from paceline.errors import ContextLengthError, DrafterError, OptionError, RequestError, ResourceError
from paceline.options import Speculation, reject_unknown
from paceline.pacer import Pacer
from paceline.pages import PAGE, PagePool, pages_for
from paceline.request import Request
from paceline.rules import LogitRules, bad_word_ids
from paceline.sampling import Sampling
from paceline.settings import EngineOptions
from paceline.targets.load import load
from paceline.targets.vocabulary import compare_vocabularies
from paceline.text import Detokenizer, Tokenizer
from paceline.tree import MAX_NODES
from paceline.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.drafters import Drafter
    from paceline.options import SpeculationLike
    from paceline.pages import CacheGroup
    from paceline.request import Sequence as Running
    from paceline.targets.decoder import Decoder
    from paceline.targets.load import Loaded

_MAX_BATCH_TOKENS = 512
_SCORED_PIECE = 64  # rows of a prompt in one pass where each of them is scored: a row of logits is large
_AS_SET_UP: Mapping[str, Any] = {}  # what a call says that says nothing: it drafts as the engine was set up to
_CACHE_SHARE = 4  # the cache takes at most this part of the free memory


class LLM:
    """A model, ready to generate. Threads may share it: their requests ride together.

    Args:
        model: ``smollm2-135m``, a Hugging Face repository id, a local folder, or a GGUF file.
        speculation: how to draft; None, False or "off" is plain decoding.
        speculative_config: another name of ``speculation``.
        progress: show progress bars on standard error.
        options: the fields of :class:`~paceline.settings.EngineOptions`: device, dtype, kv_dtype, threads,
            max_model_len, max_num_seqs, cache_memory.

    Raises:
        ModelError: the model cannot be loaded.
        OptionError: an option is unknown, out of range, or excludes another.
        ResourceError: memory or disk does not suffice.
        DrafterError: the draft model does not fit the target.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        speculation: SpeculationLike | Speculation = True,
        progress: bool = False,
        **options: Any,
    ) -> None:
        if "speculative_config" in options:
            if speculation is not True:
                raise OptionError("speculation and speculative_config are two names of one option; give one of them.")
            speculation = options.pop("speculative_config")
        names = [field.name for field in fields(EngineOptions)]
        reject_unknown("LLM", options, [*names, "speculation", "speculative_config", "progress"])
        self.options = EngineOptions(**options)
        self.speculation = Speculation.parse(speculation)
        self._progress = progress
        self.loaded = self._load(model, self.options.max_model_len)
        self.tokenizer = Tokenizer.from_parts(self.loaded.tokenizer)
        self.max_model_len = self.loaded.decoder.max_positions
        self._template = ChatTemplate.from_parts(self.loaded.tokenizer)
        self._draft_models: dict[str | int, Decoder] = {}
        self._draft_pools: list[PagePool] = []
        self._draft_bytes = 0
        self._drafters: dict[tuple[object, ...], Drafter] = {}
        self._turns = Turns()
        self._pages = self._cache_pages()
        self.engine = Engine(
            self.loaded.decoder,
            self._pools(self.loaded.decoder.groups),
            max_num_seqs=self.options.max_num_seqs,
            max_batch_tokens=_MAX_BATCH_TOKENS,
            max_model_len=self.max_model_len,
        )
        if self.speculation.enabled:
            self.drafter(self.speculation)

    def _load(self, model: str, max_model_len: int | None) -> Loaded:
        return load(
            model,
            dtype=self.options.dtype,
            kv_dtype=self.options.kv_dtype,
            threads=self.options.threads,
            max_model_len=max_model_len,
            progress=self._progress,
        )

    def _cache_pages(self) -> int:
        """How many pages of 16 tokens the budget holds, the cache of the engine's own draft model counted."""
        free = psutil.virtual_memory().available
        memory = free // _CACHE_SHARE if self.options.cache_memory is None else self.options.cache_memory
        if memory > free:
            raise ResourceError(f"cache_memory is {memory} bytes, and {free} bytes are free: lower it.")
        groups = list(self.loaded.decoder.groups)
        if self.speculation.enabled and self.speculation.draft_layers is not None:
            groups += self._prefix(self.speculation.draft_layers).groups
        elif self.speculation.enabled and self.speculation.model is not None:
            groups += self._draft_model(self.speculation.model).groups
        per_page = sum(group.page_bytes for group in groups)
        if memory < per_page:
            raise ResourceError(
                f"{PAGE} tokens of cache take {per_page} bytes, and {memory} bytes are allowed: raise cache_memory."
            )
        most = self.options.max_num_seqs * pages_for(self.max_model_len + MAX_NODES)
        return int(min(memory // per_page, most))

    def _pools(self, groups: Sequence[CacheGroup]) -> list[PagePool]:
        """Page pools of the chosen size for all of ``groups``."""
        windowed = pages_for(max(_MAX_BATCH_TOKENS, MAX_NODES)) + 2
        return [
            PagePool(
                group,
                self._pages
                if group.window is None
                else min(self._pages, self.options.max_num_seqs * (pages_for(group.window) + windowed)),
            )
            for group in groups
        ]

    def _add_pools(self, groups: Sequence[CacheGroup]) -> list[PagePool]:
        """Page pools for a drafter's own groups."""
        pools = self._pools(groups)
        self._draft_pools += pools
        return pools

    def _prefix(self, layers: int) -> Decoder:
        """The target's own first layers, made once; weights are shared."""
        if layers not in self._draft_models:
            self._draft_models[layers] = self.loaded.decoder.prefix(layers)
        return self._draft_models[layers]

    def _draft_model(self, name: str) -> Decoder:
        """Load a draft model once, in the target's number format, and check that it speaks the same tokens."""
        if name not in self._draft_models:
            loaded = self._load(name, None)
            differences = compare_vocabularies(self.loaded.tokenizer, loaded.tokenizer)
            if differences:
                raise DrafterError(
                    f"{name} cannot draft for {self.loaded.name}: {differences[0].rstrip('.')}; "
                    "`paceline inspect` shows every check."
                )
            self._draft_bytes += loaded.weight_bytes
            self._draft_models[name] = loaded.decoder
        return self._draft_models[name]

    def drafter(self, speculation: Speculation) -> Drafter:
        """The drafter for these options, made once.

        Raises:
            DrafterError: it does not fit the target.
            ModelError: the draft model cannot be loaded.
        """
        key = recipe(speculation)
        if key not in self._drafters:
            around = Surroundings(
                target=self.loaded.decoder,
                prefix=self._prefix,
                draft_model=self._draft_model,
                pools=self._add_pools,
                max_model_len=self.max_model_len,
            )
            self._drafters[key] = create(speculation, around)
        return self._drafters[key]

    def forget(self) -> None:
        """Forget what was learned from earlier requests: the drafters' state and the pacer's estimates.

        Raises:
            RequestError: requests are still running.
        """
        with self._turns:
            if not self.engine.idle:
                raise RequestError("what drafters learn can be forgotten only while no request is running.")
            self._drafters.clear()
            self._draft_pools.clear()
            self.engine.pacer = Pacer()

    @property
    def notes(self) -> list[str]:
        """What was chosen at the start, and what weights, cache and drafter take; one line each."""
        decoder = self.loaded.decoder
        cache = sum(pool.pages * pool.group.page_bytes for pool in self.engine.pools)
        drafting = sum(pool.pages * pool.group.page_bytes for pool in self._draft_pools) + self._draft_bytes
        tokens = max(pool.pages for pool in self.engine.pools) * PAGE
        chosen = (
            f"{self.loaded.name}: {self.loaded.dtype} on the cpu ({decoder.path}), {decoder.threads} threads, context "
            f"{self.max_model_len:,}; weights {_mib(self.loaded.weight_bytes)}, cache {_mib(cache)} for "
            f"{tokens:,} tokens in {str(self.engine.pools[0].group.dtype).removeprefix('torch.')}, "
            f"drafter {_mib(drafting)}"
        )
        return [chosen, *self.loaded.notes]

    @property
    def default_sampling(self) -> Sampling:
        """The settings that the model comes with."""
        return Sampling.from_generation_config(self.loaded.tokenizer.generation_config)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        speculation: SpeculationLike | Speculation = _AS_SET_UP,
        origins: bool = False,
        cache_salt: str | None = None,
    ) -> Any:
        """Complete one prompt or a list of them, each a text or a list of token ids.

        Args:
            cache_salt: what drafters learn from these requests serves requests of the same key alone, so that no
                text of others shows in their timing.

        Returns:
            One :class:`Completion`, or a list of them in the order of the prompts; for ``sampling.n`` above 1 a
            list of n in place of each.

        Raises:
            RequestError: a prompt is empty, too long, no text, or holds ids out of range; or the rules of
                ``sampling`` leave no token to go on with.
            OptionError: the speculation asked for is not to be had.
            ModelError: the model's logits are not numbers.
        """
        each, single = _prompts(prompts)
        answers = self._run([self._encode(prompt) for prompt in each], sampling, speculation, origins, cache_salt)
        return answers[0] if single else answers

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | None = None,
        *,
        speculation: SpeculationLike | Speculation = _AS_SET_UP,
        origins: bool = False,
        cache_salt: str | None = None,
        **template: Any,
    ) -> Any:
        """Answer one conversation or a list of them; see :meth:`generate` for the rest.

        ``template`` goes to the chat template, as in ``enable_thinking=False``.
        """
        single = not messages or hasattr(messages[0], "keys")
        each = [messages] if single else list(messages)
        prompts = [self.chat_ids(conversation, **template) for conversation in each]  # type: ignore[arg-type]
        answers = self._run(prompts, sampling, speculation, origins, cache_salt)
        return answers[0] if single else answers

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer."""
        return self.tokenizer.encode(self._template.render(messages, **template), add_special_tokens=False)

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        speculation: SpeculationLike | Speculation = _AS_SET_UP,
        origins: bool = False,
        cache_salt: str | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt step by step. Leaving the iterator stops the request and frees all that it holds.

        Raises:
            OptionError: ``sampling.n`` is above 1.
            RequestError: as for :meth:`generate`.
        """
        sampling = self._sampling(sampling)
        if sampling.n != 1:
            raise OptionError(f"a stream has one answer; n is {sampling.n}.")
        ids = self._encode(prompt)
        self._check_length(ids, sampling)
        return self._follow(ids, sampling, Speculation.parse(speculation, self.speculation), origins, cache_salt)

    def _follow(
        self,
        prompt: list[int],
        sampling: Sampling,
        speculation: Speculation,
        origins: bool,
        cache_salt: str | None,
    ) -> Iterator[Chunk]:
        """Queue the request when the first chunk is asked for, so that a stream never begun holds nothing."""
        (running,) = self._add(prompt, sampling, speculation, origins, cache_salt)
        given, going = 0, True
        try:
            while going:
                with self._turns:
                    going = self._step([running])
                    chunk = Chunk.of(running, given)
                given += len(chunk.token_ids)
                if chunk.token_ids or not going:
                    yield chunk
        finally:
            self._cancel([running])

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        speculation: SpeculationLike | Speculation = _AS_SET_UP,
        drafter: Drafter | None = None,
        origins: bool = False,
        cache_salt: str | None = None,
    ) -> list[Running]:
        """Queue one prompt; its ``n`` answers grow with every step of ``engine``.

        Args:
            drafter: proposes in place of the one that ``speculation`` names.

        Raises:
            RequestError: as for :meth:`generate`.
        """
        return self._add(self._encode(prompt), self._sampling(sampling), speculation, origins, cache_salt, drafter)

    def _run(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling | None,
        speculation: SpeculationLike | Speculation,
        origins: bool,
        cache_salt: str | None,
    ) -> list[Any]:
        sampling = self._sampling(sampling)
        groups: list[list[Running]] = []
        try:
            for prompt in prompts:
                groups.append(self._add(prompt, sampling, speculation, origins, cache_salt))
            every = [running for group in groups for running in group]
            going = bool(every)
            while going:
                with self._turns:
                    going = self._step(every)
        finally:
            self._cancel([running for group in groups for running in group])
        answers = [[Completion.of(running) for running in group] for group in groups]
        return answers if sampling.n > 1 else [answer for (answer,) in answers]

    def _step(self, every: Sequence[Running]) -> bool:
        """Go one step on, unless another caller has brought ``every`` one to its end; returns whether any goes on.

        Raises what broke one of them off.
        """
        if any(running.finish_reason is None for running in every):
            self.engine.step()
        for running in every:
            if running.error is not None:
                raise running.error
        return any(running.finish_reason is None for running in every)

    def _cancel(self, every: Sequence[Running]) -> None:
        with self._turns:
            for running in every:
                self.engine.cancel(running)

    def _sampling(self, sampling: Sampling | None) -> Sampling:
        """The settings asked for, or without any those that the model comes with.

        Raises:
            OptionError: they are of another type.
        """
        if not isinstance(sampling, Sampling | None):
            raise OptionError(f"sampling is given as Sampling(temperature=...), not as {type(sampling).__name__}.")
        return sampling if sampling is not None and sampling.given else self.default_sampling

    def _encode(self, prompt: Any) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.check(prompt)

    def _add(
        self,
        prompt: list[int],
        sampling: Sampling,
        speculation: SpeculationLike | Speculation,
        origins: bool,
        cache_salt: str | None,
        drafter: Drafter | None = None,
    ) -> list[Running]:
        """Queue the choices of one prompt, after every check that can fail."""
        self._check_length(prompt, sampling)
        if not isinstance(cache_salt, str | None):
            raise OptionError(f"cache_salt is a text, not {cache_salt!r}.")
        spec = Speculation.parse(speculation, self.speculation)
        wanted = self.max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        rules = self._rules(sampling, prompt)
        first = Request(
            prompt=tuple(prompt),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            choice=0,
            stop_ids=rules.stop_ids,
            limit=min(wanted, self.max_model_len),
            speculation=spec,
            piece_limit=_SCORED_PIECE if sampling.prompt_logprobs is not None else _MAX_BATCH_TOKENS,
            origins=origins,
            cache_salt=cache_salt,
        )
        added: list[Running] = []
        with self._turns:
            if not spec.enabled:
                drafter = None
            elif drafter is None:
                drafter = self.drafter(spec)
            try:
                for choice in range(sampling.n):
                    request = replace(first, choice=choice)
                    added.append(self.engine.add(request, rules, self._detokenizer(request), drafter))
            except BaseException:
                self._cancel(added)
                raise
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

    def _rules(self, sampling: Sampling, prompt: list[int]) -> LogitRules:
        words = bad_word_ids(sampling.bad_words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        return LogitRules(sampling, prompt, self.loaded.decoder.vocab_size, self.tokenizer.eos_ids, words)

    def _detokenizer(self, request: Request) -> Detokenizer:
        sampling = request.sampling
        return Detokenizer(
            self.tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stops,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            context=request.prompt,
        )


def _prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts one by one, and whether there was only one, not in a list."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts], True
    each = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    if each and isinstance(each[0], Iterable):
        return each, False
    return [each], True


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
