"""Options that are checked by name and value, and the one spelling of speculation."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline import methods
from paceline.errors import OptionError
from paceline.shape import TreeShape
from paceline.tree import MAX_NODES

T = TypeVar("T")

SpeculationLike = Mapping[str, Any] | str | bool | None
"""What a user may write where speculation is asked for; :meth:`Speculation.parse` reads it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` for the known name closest to ``name``, or nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def reject_unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first name of ``given`` that is not in ``known``.

    Args:
        kind: what the names belong to, as it reads in "NAME is not an option of KIND".

    Raises:
        OptionError: with the nearest right name.
    """
    names = list(known)
    for name in given:
        if name not in names:
            raise OptionError(f"{name!r} is not an option of {kind}{nearest(str(name), names)}")


def named_options(cls: type[T]) -> type[T]:
    """Let a dataclass refuse positional and unknown arguments (OptionError), and remember which were given.

    The class declares ``given: frozenset[str]``, a field that is not an argument; it holds the names that the
    caller wrote.
    """
    create: Callable[..., None] = cls.__init__
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]

    @functools.wraps(create)
    def checked(self: T, *values: object, **given: object) -> None:
        if values:
            raise OptionError(f"options of {cls.__name__} are given by name, as in {names[0]}=...")
        reject_unknown(cls.__name__, given, names)
        object.__setattr__(self, "given", frozenset(given))
        create(self, **given)

    cls.__init__ = checked  # type: ignore[assignment,method-assign]
    return cls


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """``value`` as an integer within bounds, both included.

    Raises:
        OptionError: another type (a bool too), or outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} is a whole number, not {value!r}.")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise OptionError(f"{name} is {value}; it must be {bounds}.")
    return value


def number(name: str, value: object, low: float, high: float = math.inf) -> float:
    """``value`` as a finite float within bounds, both included.

    Raises:
        OptionError: another type (a bool too), NaN, infinite, or outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{name} is a number, not {value!r}.")
    if not (low <= value <= high and abs(value) < math.inf):
        bounds = f"a finite number, at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        raise OptionError(f"{name} is {value}; it must be {bounds}.")
    return float(value)


def flag(name: str, value: object) -> bool:
    """``value`` as a bool.

    Raises:
        OptionError: another type.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{name} is true or false, not {value!r}.")
    return value


def choice(name: str, value: object, ours: Collection[str], others: Collection[str] = ()) -> None:
    """Refuse a value that is not one of ``ours``; ``others`` are known, and not part of this version.

    Raises:
        OptionError: with all that may be chosen.
    """
    if value in ours:
        return
    choices = ", ".join(ours)
    if value in others or (isinstance(value, str) and value.endswith("_mtp")):
        raise OptionError(f"{name} {value!r} is not part of this version; choose from {choices}.")
    raise OptionError(f"{name} {value!r} is unknown; choose from {choices}.")


OTHER_METHODS = (
    *("hydra", "mtp", "mlp_speculator", "dflash", "dspark", "pard", "ngram_gpu", "custom_class"),
    "extract_hidden_states",
)
RULES = ("coupled", "ratio", "block", "recursive", "traversal", "typical")
OTHER_RULES = ("strict",)
_FIXED = 5  # drafts of a step where neither their number is given nor the pacer asked
VOCABULARIES = ("auto", "same", "intersection", "retokenized")
CHAIN_RULES = ("ratio", "block")
OFF = ("off", "none", "plain")
ALIAS = "num_draft_tokens"

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "acceptance_method": (None, "rejection_sampler"),
    "attention_backend": (None,),
    "code_revision": (None,),
    "disable_by_batch_size": (None,),
    "disable_eagle_block_drop": (False,),
    "disable_log_stats": (None, False),
    "disable_logprobs": (None, False),
    "disable_mqa_scorer": (None, False),
    "disable_padded_drafter_batch": (False,),
    "draft_load_config": (None,),
    "draft_sample_method": (None,),
    "draft_tensor_parallel_size": (None, 1),
    "dspark_draft_topk": (None,),
    "enable_adaptive_verification": (False,),
    "enforce_eager": (None, True),
    "index_share_for_mtp_iteration": (None,),
    "kv_cache_dtype": (None, "auto"),
    "max_model_len": (None,),
    "moe_backend": (None,),
    "num_speculative_tokens_per_batch_size": (None,),
    "parallel_drafting": (False,),
    "posterior_alpha": (None,),
    "posterior_threshold": (None,),
    "quantization": (None,),
    "rejection_sample_method": (None, "standard", "strict"),
    "revision": (None,),
    "speculative_token_tree": (None,),
    "synthetic_acceptance_length": (None,),
    "synthetic_acceptance_rates": (None,),
    "tensor_parallel_size": (None, 1),
    "use_heterogeneous_vocab": (False,),
    "use_local_argmax_reduction": (False,),
}
"""vLLM's further keys of ``speculative_config``, each with the values that change nothing here."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How to speculate; the same keys in Python, in flags, in files and in requests.

    Attributes:
        enabled: False is plain decoding.
        method: "auto", or one of :func:`paceline.methods.names`.
        model: the draft model or the checkpoint of a head: a name, a hub id, a folder or a file.
        num_speculative_tokens: the most drafted tokens of one sequence and step, all nodes of a tree counted, 1 to 63;
            where it is not ``adaptive`` their fixed number. 0 is plain decoding. Left out there are as many as pay, and
            where it is not ``adaptive`` 5, or those of the tree that a file holds.
        adaptive: draft fewer, or none, where it does not pay. Under a rule other than "coupled" a seed that is given
            fixes their number too, for there the tokens depend on it.
        rule: how drafts are accepted. "coupled" keeps every token as it is without speculation. "ratio" and "block"
            (chains), "recursive" and "traversal" (trees) keep the target's distribution, for drafts that are drawn from
            probabilities. "typical" is lossy.
        tree: "auto" (the method's own best), "none" (a chain), a width, or a file that holds a tree.
        draft_layers: how many of the target's own first layers are its draft model.
        vocabulary: how a draft model of another tokenizer is understood: "intersection" (the tokens that both have),
            "retokenized" (its text, in the target's tokens), "auto" (the better of them), "same" (not at all).
        random: take a head of random weights in the place of a trained one; for tests.
        prompt_lookup_min: the shortest n-gram that is looked up.
        prompt_lookup_max: the longest.
        suffix_decoding_max_tree_depth: the longest run of tokens that "suffix" counts, what it drafts included.
        suffix_decoding_max_cached_requests: how many earlier answers it looks in, beside the request itself; 0 is none.
        suffix_decoding_max_spec_factor: the most tokens that it drafts for each token that matched.
        suffix_decoding_min_token_prob: the least probability of what it drafts, by its own counts.
        lookahead_window: how many columns the window of "lookahead" has (the paper's W).
        lookahead_ngram: how many tokens its n-grams have, one more than the window has levels (N).
        lookahead_guesses: how many n-grams it keeps for a token, and drafts after it (G).
    """

    enabled: bool = True
    method: str = "auto"
    model: str | None = None
    num_speculative_tokens: int | None = None
    adaptive: bool = True
    rule: str = "coupled"
    tree: str | int = "auto"
    draft_layers: int | None = None
    vocabulary: str = "auto"
    random: bool = False
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 64
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    lookahead_window: int = 7
    lookahead_ngram: int = 5
    lookahead_guesses: int = 7

    def __post_init__(self) -> None:
        flag("enabled", self.enabled)
        flag("adaptive", self.adaptive)
        choice("method", self.method, ("auto", *methods.names()), OTHER_METHODS)
        choice("rule", self.rule, RULES, OTHER_RULES)
        choice("vocabulary", self.vocabulary, VOCABULARIES)
        flag("random", self.random)
        self._check_numbers()
        self._check_draft()
        self._check_tree()

    def _check_numbers(self) -> None:
        drafts = self.num_speculative_tokens
        if drafts is not None and integer("num_speculative_tokens", drafts, 0) >= MAX_NODES:
            raise OptionError(f"num_speculative_tokens is {drafts}; a token tree has room for {MAX_NODES - 1} at most.")
        integer("prompt_lookup_min", self.prompt_lookup_min, 1)
        integer("prompt_lookup_max", self.prompt_lookup_max, 1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            low, high = self.prompt_lookup_min, self.prompt_lookup_max
            raise OptionError(f"prompt_lookup_min is {low}, above prompt_lookup_max, {high}.")
        integer("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, 1024)
        integer("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0)
        number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)
        integer("lookahead_window", self.lookahead_window, 1)
        integer("lookahead_ngram", self.lookahead_ngram, 2)
        integer("lookahead_guesses", self.lookahead_guesses, 1)
        if drafts == 0:
            object.__setattr__(self, "enabled", False)

    def _check_draft(self) -> None:
        if self.model is not None and (not isinstance(self.model, str) or not self.model.strip()):
            raise OptionError(f"model names a draft model by a text, not {self.model!r}.")
        if self.draft_layers is not None:
            integer("draft_layers", self.draft_layers, 1)
        if self.model is not None and self.draft_layers is not None:
            raise OptionError("model and draft_layers exclude each other; leave one of them out.")

    def _check_tree(self) -> None:
        if not isinstance(self.tree, str):
            integer("tree", self.tree, 1, MAX_NODES - 1)
        _ = self.shape

    @functools.cached_property
    def shape(self) -> TreeShape | None:
        """The tree that a file gives, None where ``tree`` names none. It is read when the options are made, and never
        again: requests run on with what they were checked with."""
        return TreeShape.of(self.tree)

    def ceiling(self, paced: bool) -> int:
        """The most drafted tokens of one sequence and step, whether or not it is decided in each step what pays."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if paced:
            return MAX_NODES - 1
        return _FIXED if self.shape is None else len(self.shape) - 1

    @property
    def named(self) -> bool:
        """Whether a draft model is named."""
        return self.model is not None or self.draft_layers is not None

    def width(self, most: int) -> int:
        """The most children of a node, for a method that can draft trees of any width up to ``most``."""
        if isinstance(self.tree, int):
            return min(self.tree, most)
        return 1 if self.tree == "none" or self.rule in CHAIN_RULES else most

    @classmethod
    def off(cls) -> Speculation:
        """Plain decoding."""
        return cls(enabled=False)

    @classmethod
    def parse(cls, value: SpeculationLike | Speculation, base: Speculation | None = None) -> Speculation:
        """Read what a user wrote.

        Args:
            value: None, False or "off" is plain decoding; True is speculation as ``base`` has it; a text is a
                method; a mapping gives keys, and those that it leaves out are ``base``'s, so an empty one
                changes nothing.
            base: what an engine was set up with, when a call overrides it; by default ``Speculation()``.

        Raises:
            OptionError: an unknown key (with the nearest right one), a value out of range, a method, rule or
                setting that this version lacks, or two options that exclude each other.
        """
        base = cls() if base is None else base
        if isinstance(value, Speculation):
            return value
        if value is None or value is False or (isinstance(value, str) and value in OFF):
            return dataclasses.replace(base, enabled=False)
        if value is True:
            return dataclasses.replace(base, enabled=True)
        if isinstance(value, str):
            return cls._merge({"method": value}, base)
        if isinstance(value, Mapping):
            return cls._merge(value, base)
        raise OptionError(f"speculation is a mapping, a method's name, true, false or null, not {value!r}.")

    @classmethod
    def _merge(cls, given: Mapping[str, Any], base: Speculation) -> Speculation:
        own = [field.name for field in dataclasses.fields(cls)]
        reject_unknown("speculation", given, [*own, ALIAS, *NEUTRAL])
        for key, accepted in NEUTRAL.items():
            if key in given and given[key] not in accepted:
                raise OptionError(f"{key}={given[key]!r} is not supported; leave it out.")
        changes = {key: given[key] for key in own if key in given}
        if ALIAS in given:
            if changes.get("num_speculative_tokens", given[ALIAS]) != given[ALIAS]:
                raise OptionError(f"{ALIAS} is another name of num_speculative_tokens, and the two differ.")
            changes["num_speculative_tokens"] = given[ALIAS]
        if isinstance(changes.get("method"), str) and changes["method"] in OFF:
            changes.update(method=base.method, enabled=False)
        if changes:
            changes.setdefault("enabled", True)
        own_given = list(changes)
        _follow(changes, base)
        merged = dataclasses.replace(base, **changes)
        methods.check_given(own_given, merged)
        return merged


def _follow(changes: dict[str, Any], base: Speculation) -> None:
    """Let what was left out give way to what was written."""
    if changes.get("model") is not None:
        changes.setdefault("draft_layers", None)
    if changes.get("draft_layers") is not None:
        changes.setdefault("model", None)
    if changes.get("method", base.method) != base.method:
        changes.setdefault("model", None)
        changes.setdefault("draft_layers", None)
    elif changes.get("model") is not None or changes.get("draft_layers") is not None:
        changes.setdefault("method", "auto")
    low, high = changes.get("prompt_lookup_min"), changes.get("prompt_lookup_max")
    if isinstance(low, int) and high is None:
        changes["prompt_lookup_max"] = max(low, base.prompt_lookup_max)
    if isinstance(high, int) and low is None:
        changes["prompt_lookup_min"] = min(high, base.prompt_lookup_min)
