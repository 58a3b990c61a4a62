"""What a request says about its tokens: ``Sampling``.

The rules that change logits and the functions that draw are re-exported here, for one import of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.draw import Filter, Logprob, processed
from paceline.errors import OptionError
from paceline.kernels.sample import argmax, draw, logprobs
from paceline.noise import Purpose, noise_key
from paceline.options import flag, integer, named_options, number
from paceline.rules import Counts, LogitRules, bad_word_ids

__all__ = [
    "Counts",
    "Filter",
    "LogitRules",
    "Logprob",
    "Purpose",
    "Sampling",
    "SamplingParams",
    "argmax",
    "bad_word_ids",
    "draw",
    "logprobs",
    "noise_key",
    "processed",
]

MAX_TEMPERATURE = 100.0
MAX_CHOICES = 128


@named_options
@dataclass(frozen=True, kw_only=True)
class Sampling(Filter):
    """How the tokens of a request are chosen and when they end; every argument is given by name.

    Attributes:
        temperature: 0 (the most likely token) to 100.
        top_k: how many tokens to choose from; 0 and -1 are off.
        top_p: the share of the mass to choose from, 0 (the most likely token) to 1 (off).
        min_p: the least probability, as a share of the highest, 0 (off) to 1.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, multiplied
            where negative (arXiv 1909.05858, section 4.1); 0.01 to 100, 1 is off.
        presence_penalty: subtracted from logits of tokens in the output, -2 to 2.
        frequency_penalty: subtracted for each time that the token is in the output, -2 to 2.
        logit_bias: added to the logits of these ids, -100 to 100.
        bad_words: texts that are never completed.
        allowed_token_ids: the only ids that may be chosen.
        min_tokens: neither end-of-text nor ``stop_token_ids`` before so many tokens.
        max_tokens: at most so many tokens, 256 unless said; in Python None is up to the context; 0 only with
            ``prompt_logprobs``.
        stop: texts that end the output and are cut from it.
        stop_token_ids: ids that end the output, besides the model's own.
        ignore_eos: the model's own end-of-text ids do not end the output.
        seed: 0 to 2**63 - 1; unless said it is drawn, and the record shows it.
        n: how many outputs, 1 to 128, each with noise of its own.
        logprobs: report each token with so many of the most likely ones; 0 is the token alone.
        prompt_logprobs: the same for the tokens of the prompt.
        logprobs_mode: "raw" logits of the model, or "processed" by everything above.
        include_stop_str_in_output: leave the stop text in the output.
        skip_special_tokens: leave special tokens out of the text.
        given: the names that were written, the rest being defaults.

    Raises:
        OptionError: an unknown name (with the nearest right one), a wrong type, or a value out of range.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._set("temperature", number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        self._set("top_k", max(0, integer("top_k", self.top_k, -1)))
        self._set("top_p", number("top_p", self.top_p, 0.0, 1.0))
        self._set("min_p", number("min_p", self.min_p, 0.0, 1.0))
        self._check_penalties()
        self._check_tokens()
        self._check_ends()
        self._check_reports()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_penalties(self) -> None:
        self._set("repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, number(name, getattr(self, name), -2.0, 2.0))

    def _check_tokens(self) -> None:
        if self.logit_bias is None or not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"logit_bias maps token ids to numbers, unlike {self.logit_bias!r}.")
        pairs = [(_token("logit_bias", i), v) for i, v in self.logit_bias.items()]
        self._set("logit_bias", {i: number(f"logit_bias of token {i}", v, -100.0, 100.0) for i, v in pairs})
        self._set("bad_words", _texts("bad_words", self.bad_words))
        self._set("stop_token_ids", _tokens("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _tokens("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise OptionError("allowed_token_ids is empty, which leaves no token; leave it out to allow all.")
            self._set("allowed_token_ids", allowed)

    def _check_ends(self) -> None:
        integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 0)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise OptionError("max_tokens is 0; without prompt_logprobs it must be at least 1.")
            if self.min_tokens > self.max_tokens:
                raise OptionError(f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}.")
        self._set("stop", _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        flag("ignore_eos", self.ignore_eos)

    def _check_reports(self) -> None:
        if self.seed is not None:
            integer("seed", self.seed, 0, 2**63 - 1)
        integer("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 0)
        if self.logprobs_mode not in ("raw", "processed"):
            raise OptionError(f"logprobs_mode is 'raw' or 'processed', not {self.logprobs_mode!r}.")
        flag("include_stop_str_in_output", self.include_stop_str_in_output)
        flag("skip_special_tokens", self.skip_special_tokens)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts, always as a tuple."""
        return tuple(self.stop)

    def replace(self, **changes: Any) -> Sampling:
        """These settings with some changed."""
        kept = {name: getattr(self, name) for name in self.given}
        return type(self)(**{**kept, **changes})

    def over(self, defaults: Sampling) -> Sampling:
        """These settings, and those of ``defaults`` for every name that was not written here."""
        return defaults.replace(**{name: getattr(self, name) for name in self.given})

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Sampling:
        """The settings of a model's generation_config.json; what it does not name keeps its default.

        Raises:
            OptionError: the file asks for something that changes the text and is not supported, or for a
                value out of range.
        """
        for name, off in UNSUPPORTED_GENERATION.items():
            if config.get(name) not in (None, *off):
                raise OptionError(
                    f"the model's generation_config asks for {name}={config[name]!r}, "
                    "which is not supported; give Sampling settings of your own."
                )
        options = {ours: config[theirs] for theirs, ours in GENERATION.items() if config.get(theirs) is not None}
        if config.get("do_sample") is False:
            options["temperature"] = 0.0
        return cls(**options)


SamplingParams = Sampling

GENERATION: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names of a Hugging Face generation_config and ours."""

UNSUPPORTED_GENERATION: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": ({},),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1.0,),
}
"""Settings of a generation_config that would change the text, with the values that do not."""


def _token(name: str, value: object) -> int:
    """A token id; JSON's keys are texts of digits."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return integer(f"a token id in {name}", value, 0)


def _tokens(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise OptionError(f"{name} is a list of token ids, not {values!r}.")
    return tuple(dict.fromkeys(_token(name, value) for value in values))


def _texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise OptionError(f"{name} is a list of texts, not {values!r}.")
    for value in values:
        if not isinstance(value, str):
            raise OptionError(f"{name} holds {value!r}, which is not a text.")
        if not value:
            raise OptionError(f"{name} holds an empty text, which would match everywhere: give one that is not.")
    return tuple(dict.fromkeys(values))
