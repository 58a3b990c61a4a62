"""The Python interface: load a model once, then generate, chat and stream."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from torch import Tensor

from paceline import methods
from paceline.cache import CacheBudget
from paceline.chat import ChatTemplate
from paceline.completion import Chunk, Completion
from paceline.engine import Engine
from paceline.errors import ContextLengthError, OptionError, RequestError
from paceline.options import Speculation, reject_unknown
from paceline.pages import PAGE
from paceline.request import Request
from paceline.roster import DraftModels, Roster
from paceline.rules import LogitRules, bad_word_ids
from paceline.sampling import Sampling
from paceline.settings import EngineOptions
from paceline.targets.load import load
from paceline.text import Detokenizer, Tokenizer
from paceline.turns import Turns
from paceline.wishes import Wishes, check, reject_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.constraint import Constraint
    from paceline.drafters import Drafter
    from paceline.options import SpeculationLike
    from paceline.pages import CacheGroup
    from paceline.request import Sequence as Running
    from paceline.targets.load import Loaded

_SCORED_PIECE = 64  # rows of a prompt in one pass where each of them is scored: a row of logits is large


class LLM:
    """A model, ready to generate. Threads may share it: their requests ride together.

    Args:
        model: ``smollm2-135m``, a Hugging Face repository id, a local folder, or a GGUF file.
        speculation: how to draft; None, False or "off" is plain decoding.
        speculative_config: another name of ``speculation``.
        progress: show progress bars on standard error.
        options: the fields of :class:`~paceline.settings.EngineOptions`: device, dtype, kv_dtype, threads,
            max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, max_waiting, max_wait_seconds,
            max_total_tokens, cache_memory.

    Raises:
        ModelError: the model cannot be loaded.
        OptionError: an option is unknown, out of range, or excludes another.
        ResourceError: memory or disk does not suffice.
        DrafterError: the draft model does not fit the target.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
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
        if not isinstance(model, str | os.PathLike):
            raise OptionError(f"model is a name, a folder or a file, not {model!r}.")
        self.options = EngineOptions(**options)
        self.speculation = Speculation.parse(speculation)
        methods.check(self.speculation)
        self._progress = progress
        self.loaded = self._load(os.fspath(model), self.options.max_model_len)
        self.tokenizer = Tokenizer.from_parts(self.loaded.tokenizer)
        self.max_model_len = self.loaded.decoder.max_positions
        self._template = ChatTemplate.from_parts(self.loaded.tokenizer)
        self._turns = Turns()
        models = DraftModels(self.loaded, lambda name: self._load(name, None))
        budget = CacheBudget(
            [*self.loaded.decoder.groups, *self._draft_groups(models)],
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

    def _load(self, model: str, max_model_len: int | None) -> Loaded:
        return load(
            model,
            dtype=self.options.dtype,
            kv_dtype=self.options.kv_dtype,
            threads=self.options.threads,
            max_model_len=max_model_len,
            progress=self._progress,
        )

    def _draft_groups(self, models: DraftModels) -> Sequence[CacheGroup]:
        """The cache groups of the engine's own drafter, so that its cache is planned with the target's."""
        return methods.groups(self.speculation, models) if self.speculation.enabled else ()

    def forget(self) -> None:
        """Forget what was learned from earlier requests: the drafters' state, the pacer's estimates, and what is
        computed of their prompts and answers.

        Raises:
            RequestError: requests are still running.
        """
        with self._turns:
            if not self.engine.idle:
                raise RequestError("what drafters learn can be forgotten only while no request is running.")
            self.roster.forget()
            self.engine.forget()

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
        return Sampling.from_generation_config(self.loaded.tokenizer.generation_config)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        **wishes: Unpack[Wishes],
    ) -> Any:
        """Complete one prompt or a list of them, each a text or a list of token ids.

        Args:
            wishes: the fields of :class:`~paceline.wishes.Wishes`.

        Returns:
            One :class:`Completion`, or a list of them in the order of the prompts; for ``sampling.n`` above 1 a
            list of n in place of each.

        Raises:
            RequestError: a prompt is empty, too long, no text, or holds ids out of range; there is no prompt at all,
                for an empty list may be an empty prompt; or the rules of ``sampling`` leave no token to go on with.
            OptionError: the speculation asked for is not to be had.
            ModelError: the model's logits are not numbers.
        """
        each, single = _prompts(prompts)
        answers = self._run([self._encode(prompt) for prompt in each], sampling, wishes)
        return answers[0] if single else answers

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | None = None,
        **wishes: Any,
    ) -> Any:
        """Answer one conversation or a list of them; see :meth:`generate` for the rest.

        What is no wish goes to the chat template, as in ``enable_thinking=False``.

        Raises:
            RequestError: as for :meth:`generate`; or the messages are no conversation, or none, or not one that the
                model's template takes.
            OptionError: as for :meth:`generate`; or the template does not read what is no wish.
        """
        each, single = _conversations(messages)
        template = {name: wishes.pop(name) for name in [*wishes] if name not in Wishes.__annotations__}
        reject_settings(template)
        self._template.check(template, Wishes.__annotations__)
        prompts = [self.chat_ids(conversation, **template) for conversation in each]
        answers = self._run(prompts, sampling, cast("Wishes", wishes))
        return answers[0] if single else answers

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer; errors as for :meth:`chat`."""
        return self.tokenizer.encode(self._template.render(messages, **template), add_special_tokens=False)

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        **wishes: Unpack[Wishes],
    ) -> Iterator[Chunk]:
        """Complete one prompt step by step. Leaving the iterator stops the request and frees all that it holds.

        Raises:
            OptionError: ``sampling.n`` is above 1, or the speculation asked for is not to be had.
            RequestError: as for :meth:`generate`.
        """
        sampling = self._sampling(sampling)
        if sampling.n != 1:
            raise OptionError(f"a stream has one answer; n is {sampling.n}.")
        return self._follow(*self._request(self._encode_one("stream", prompt), sampling, wishes))

    def _follow(self, request: Request, rules: LogitRules) -> Iterator[Chunk]:
        """Queue the request when the first chunk is asked for, so that a stream never begun holds nothing."""
        (running,) = self._add(request, rules)
        given, going = 0, True
        try:
            while going:
                with self._turns:
                    going = self.step([running])
                    chunk = Chunk.of(running, given)
                given += len(chunk.token_ids)
                if chunk.token_ids or not going:
                    yield chunk
        finally:
            self.cancel([running])

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        drafter: Drafter | None = None,
        **wishes: Unpack[Wishes],
    ) -> list[Running]:
        """Queue one prompt; its ``n`` answers grow with every :meth:`step`.

        Args:
            drafter: proposes in place of the one that ``speculation`` names.

        Raises:
            RequestError: as for :meth:`generate`.
        """
        return self._add(*self._request(self._encode_one("submit", prompt), self._sampling(sampling), wishes), drafter)

    def _run(self, prompts: Sequence[list[int]], sampling: Sampling | None, wishes: Wishes) -> list[Any]:
        sampling = self._sampling(sampling)
        groups: list[list[Running]] = []
        try:
            for prompt in prompts:
                groups.append(self._add(*self._request(prompt, sampling, wishes)))
            every = [running for group in groups for running in group]
            going = bool(every)
            while going:
                going = self.step(every)
        finally:
            self.cancel([running for group in groups for running in group])
        answers = [[Completion.of(running) for running in group] for group in groups]
        return answers if sampling.n > 1 else [answer for (answer,) in answers]

    def step(self, every: Sequence[Running]) -> bool:
        """Go one step on, unless another caller has brought ``every`` one to its end; returns whether any goes on.

        Raises what broke one of them off.
        """
        with self._turns:
            if any(running.finish_reason is None for running in every):
                self.engine.step()
        for running in every:
            if running.error is not None:
                raise running.error
        return any(running.finish_reason is None for running in every)

    def cancel(self, every: Sequence[Running]) -> None:
        """End what :meth:`submit` gave and free all that it holds; what has ended already stays as it is."""
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

    def _encode_one(self, call: str, prompt: Any) -> list[int]:
        """
        Raises:
            RequestError: it is a list of prompts.
        """
        if _is_nested(prompt):
            raise RequestError(
                f"{call} takes one prompt, a text or a list of token ids, not a list of prompts: "
                f"call {call} for each, or generate for all."
            )
        return self._encode(prompt)

    def _request(self, prompt: list[int], sampling: Sampling, wishes: Wishes) -> tuple[Request, LogitRules]:
        """The first choice of one prompt, and the rules of all; whatever can be refused without a drafter is."""
        self._check_length(prompt, sampling)
        check(wishes)
        spec = Speculation.parse(wishes.get("speculation", {}), self.speculation)
        methods.check(spec)
        wanted = self.max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        rules = self._rules(sampling, prompt, wishes.get("constraint"))
        request = Request(
            prompt=tuple(prompt),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            choice=0,
            stop_ids=rules.stop_ids,
            limit=min(wanted, self.max_model_len),
            speculation=spec,
            piece_limit=_SCORED_PIECE if sampling.prompt_logprobs is not None else self.options.max_num_batched_tokens,
            origins=wishes.get("origins", False),
            cache_salt=wishes.get("cache_salt"),
            prediction=tuple(self._prediction(wishes.get("prediction"))),
            constraint=wishes.get("constraint"),
            priority=wishes.get("priority", 0),
        )
        return request, rules

    def _add(self, request: Request, rules: LogitRules, drafter: Drafter | None = None) -> list[Running]:
        """Queue all choices of a request."""
        added: list[Running] = []
        with self._turns:
            if not request.speculation.enabled:
                drafter = None
            elif drafter is None:
                drafter = self.roster.drafter(request.speculation)
            try:
                for choice in range(request.sampling.n):
                    one = replace(request, choice=choice)
                    leader = added[0] if added else None
                    added.append(self.engine.add(one, rules, self._detokenizer(one), drafter, leader))
            except BaseException:
                self.cancel(added)
                raise
        return added

    def _prediction(self, prediction: str | Sequence[int] | None) -> list[int]:
        if isinstance(prediction, str):
            return self.tokenizer.encode(prediction, add_special_tokens=False)
        if _is_nested(prediction):
            raise RequestError(
                "prediction is one text or one list of token ids, for all prompts of a call, not a list of "
                "predictions: call once for each."
            )
        return self.tokenizer.check(prediction) if prediction else []

    def _check_length(self, prompt: list[int], sampling: Sampling) -> None:
        """
        Raises:
            RequestError: the prompt is empty.
            ContextLengthError: it leaves no room for a token.
        """
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token.")
        answer = sampling.max_tokens != 0
        if len(prompt) + answer > self.max_model_len:
            limit = self.loaded.spec.max_positions
            raise ContextLengthError(
                f"the context is {self.max_model_len} tokens and the prompt has {len(prompt)}"
                + ", and the answer needs room" * (len(prompt) == self.max_model_len)
                + ": shorten it"
                + f", or raise max_model_len, to {limit} at most" * (len(prompt) + answer <= limit)
                + "."
            )

    def _rules(self, sampling: Sampling, prompt: list[int], constraint: Constraint | None) -> LogitRules:
        words = bad_word_ids(sampling.bad_words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        return LogitRules(sampling, prompt, self.loaded.decoder.vocab_size, self.tokenizer.eos_ids, words, constraint)

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
    return (each, False) if _is_nested(each) else ([each], True)


def _conversations(messages: Any) -> tuple[list[Any], bool]:
    """The same of conversations; what is neither is left to the template to refuse."""
    several = isinstance(messages, list | tuple) and bool(messages) and not isinstance(messages[0], str | Mapping)
    return (list(messages), False) if several else ([messages], True)


def _is_nested(value: Any) -> bool:
    """Whether this is a list of texts or lists."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Iterable)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
