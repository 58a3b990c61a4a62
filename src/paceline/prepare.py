"""From what a caller says to requests that can be queued."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor

from paceline import methods
from paceline.chat import ChatTemplate
from paceline.errors import ContextLengthError, OptionError, RequestError
from paceline.options import Speculation
from paceline.request import Request
from paceline.rules import LogitRules, bad_word_ids
from paceline.sampling import Sampling
from paceline.text import Detokenizer, Tokenizer
from paceline.wishes import Wishes, check, reject_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.constraint import Constraint
    from paceline.drafters import Drafter
    from paceline.engine import Engine
    from paceline.request import Sequence as Running
    from paceline.targets.load import Loaded

_SCORED_PIECE = 64  # rows of a prompt in one pass where each of them is scored: a row of logits is large


@dataclass(frozen=True)
class Prepared:
    """A request that was found good: the first of its choices, and the rules of all."""

    request: Request
    rules: LogitRules
    tokenizer: Tokenizer

    @property
    def choices(self) -> int:
        """How many answers are wanted."""
        return self.request.sampling.n

    def sequence(self, engine: Engine, choice: int, drafter: Drafter | None, leader: Running | None) -> Running:
        """Queue one choice, after the first one with that as its leader; errors are those of :meth:`Engine.add`."""
        request, sampling = replace(self.request, choice=choice), self.request.sampling
        text = Detokenizer(
            self.tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stops,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            context=request.prompt,
        )
        return engine.add(request, self.rules, text, drafter, leader)


Settings: TypeAlias = "Sampling | Sequence[Sampling] | None"
"""For all prompts, for each of them, or those that the model comes with."""


def add_all(engine: Engine, each: Iterable[tuple[Prepared, Drafter | None]]) -> list[Running]:
    """Queue all choices of all requests in an engine, or none if one is refused; errors are those of its ``add``."""
    added: list[Running] = []
    try:
        for prepared, drafter in each:
            for choice in range(prepared.choices):
                added.append(prepared.sequence(engine, choice, drafter, added[-choice] if choice else None))
    except BaseException:
        for running in added:
            engine.cancel(running)
        raise
    return added


class Preparer:
    """Checks and completes what is asked of one model.

    Args:
        loaded: the model.
        speculation: how to draft where a request says nothing of it.
        max_batch_tokens: how many rows of a prompt one pass takes at most.
    """

    def __init__(self, loaded: Loaded, speculation: Speculation, max_batch_tokens: int) -> None:
        self.tokenizer = Tokenizer.from_parts(loaded.tokenizer)
        self.template = ChatTemplate.from_parts(loaded.tokenizer)
        self._loaded = loaded
        self._speculation = speculation
        self._max_model_len = loaded.decoder.max_positions
        self._max_batch_tokens = max_batch_tokens

    @property
    def default_sampling(self) -> Sampling:
        """The settings that the model comes with.

        Raises:
            OptionError: they are not to be had here.
        """
        return Sampling.from_generation_config(self._loaded.tokenizer.generation_config)

    def prompts(self, prompts: Any, sampling: Settings, wishes: Wishes) -> tuple[list[Prepared], bool]:
        """The requests of ``generate``, and whether there was one prompt, not in a list."""
        each, single = _prompts(prompts)
        settings = self._each_sampling(sampling, len(each))
        ids = [self._encode(prompt) for prompt in each]
        return [self._request(prompt, own, wishes) for prompt, own in zip(ids, settings, strict=True)], single

    def conversations(
        self, messages: Any, sampling: Settings, wishes: Mapping[str, Any]
    ) -> tuple[list[Prepared], bool]:
        """The requests of ``chat``, and whether there was one conversation, not in a list."""
        each, single = _conversations(messages)
        own = cast("Wishes", {name: wish for name, wish in wishes.items() if name in Wishes.__annotations__})
        template = {name: wish for name, wish in wishes.items() if name not in own}
        reject_settings(template)
        self.template.check(template, Wishes.__annotations__)
        prompts = [self.chat_ids(conversation, **template) for conversation in each]
        settings = self._each_sampling(sampling, len(prompts))
        return [self._request(prompt, its, own) for prompt, its in zip(prompts, settings, strict=True)], single

    def one(self, call: str, prompt: Any, sampling: Sampling | None, wishes: Wishes) -> Prepared:
        """The request of a call that takes one prompt.

        Raises:
            RequestError: it is a list of prompts.
        """
        settings = self._sampling(sampling)
        if _is_nested(prompt):
            raise RequestError(
                f"{call} takes one prompt, a text or a list of token ids, not a list of prompts: "
                f"call {call} for each, or generate for all."
            )
        return self._request(self._encode(prompt), settings, wishes)

    def chat_ids(self, messages: Any, **template: Any) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer."""
        return self.tokenizer.encode(self.template.render(messages, **template), add_special_tokens=False)

    def _each_sampling(self, sampling: Settings, prompts: int) -> list[Sampling]:
        """The settings of each of so many prompts.

        Raises:
            OptionError: a list of settings is not as long as that of prompts.
        """
        if not isinstance(sampling, list | tuple):
            return [self._sampling(cast("Sampling | None", sampling))] * prompts
        if len(sampling) != prompts:
            raise OptionError(f"{len(sampling)} settings for {prompts} prompts: give one for each, or one for all.")
        return [self._sampling(own) for own in sampling]

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

    def _request(self, prompt: list[int], sampling: Sampling, wishes: Wishes) -> Prepared:
        """Whatever can be refused without a drafter is refused here."""
        self._check_length(prompt, sampling)
        check(wishes)
        spec = Speculation.parse(wishes.get("speculation", {}), self._speculation)
        methods.check(spec)
        wanted = self._max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        rules = self._rules(sampling, prompt, wishes.get("constraint"))
        request = Request(
            prompt=tuple(prompt),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            choice=0,
            stop_ids=rules.stop_ids,
            limit=min(wanted, self._max_model_len),
            speculation=spec,
            piece_limit=_SCORED_PIECE if sampling.prompt_logprobs is not None else self._max_batch_tokens,
            origins=wishes.get("origins", False),
            cache_salt=wishes.get("cache_salt"),
            prediction=tuple(self._prediction(wishes.get("prediction"))),
            constraint=wishes.get("constraint"),
            priority=wishes.get("priority", 0),
        )
        return Prepared(request, rules, self.tokenizer)

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
        if len(prompt) + answer > self._max_model_len:
            limit = self._loaded.spec.max_positions
            raise ContextLengthError(
                f"the context is {self._max_model_len} tokens and the prompt has {len(prompt)}"
                + ", and the answer needs room" * (len(prompt) == self._max_model_len)
                + ": shorten it"
                + f", or raise max_model_len, to {limit} at most" * (len(prompt) + answer <= limit)
                + "."
            )

    def _rules(self, sampling: Sampling, prompt: list[int], constraint: Constraint | None) -> LogitRules:
        words = bad_word_ids(sampling.bad_words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        return LogitRules(sampling, prompt, self._loaded.decoder.vocab_size, self.tokenizer.eos_ids, words, constraint)


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
