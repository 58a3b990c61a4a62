"""From the options of a request to the drafter that serves it. A new method is one more entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.recycling import WIDTH, RecyclingDrafter
from paceline.drafters.runs import BREADTH
from paceline.drafters.suffix import SuffixDrafter
from paceline.errors import DrafterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.drafters import Drafter
    from paceline.options import Speculation
    from paceline.pages import CacheGroup, PagePool
    from paceline.targets import Target


@dataclass(frozen=True)
class Surroundings:
    """What a drafter may be made from.

    Attributes:
        target: the model that verifies.
        prefix: ``prefix(n)`` is the target's own first n layers with its norm and head, weights shared.
        draft_model: loads a model by name, checked against the target's vocabulary.
        pools: cuts page pools for the groups that a drafter declares.
        max_model_len: the longest sequence, in tokens.
    """

    target: Target
    prefix: Callable[[int], Target]
    draft_model: Callable[[str], Target]
    pools: Callable[[Sequence[CacheGroup]], list[PagePool]]
    max_model_len: int


@dataclass(frozen=True)
class _Method:
    """How a drafter is made, and from which options."""

    make: Callable[[Speculation, Surroundings], Drafter]
    options: tuple[str, ...]


def create(speculation: Speculation, around: Surroundings) -> Drafter:
    """The drafter that ``speculation`` asks for.

    Raises:
        DrafterError: it does not fit the target.
        ModelError: the draft model cannot be loaded.
    """
    return _METHODS[speculation.method].make(speculation, around)


def recipe(speculation: Speculation) -> tuple[object, ...]:
    """What the drafter that ``speculation`` asks for is made from: requests whose recipes are equal share it."""
    method = _METHODS[speculation.method]
    return (method.make, *(getattr(speculation, option) for option in method.options))


def _ngram(speculation: Speculation, around: Surroundings) -> Drafter:
    return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)


def _draft_model(speculation: Speculation, around: Surroundings) -> Drafter:
    if speculation.draft_layers is not None:
        model = around.prefix(speculation.draft_layers)
    elif speculation.model is not None:
        model = around.draft_model(speculation.model)
    else:
        raise DrafterError("method 'draft_model' needs model or draft_layers.")
    return DraftModelDrafter(model, around.pools(model.groups), around.max_model_len)


def _suffix(speculation: Speculation, around: Surroundings) -> Drafter:
    return SuffixDrafter(
        depth=speculation.suffix_decoding_max_tree_depth,
        texts=speculation.suffix_decoding_max_cached_requests,
        factor=speculation.suffix_decoding_max_spec_factor,
        least=speculation.suffix_decoding_min_token_prob,
        width=_width(speculation, BREADTH),
    )


def _recycling(speculation: Speculation, around: Surroundings) -> Drafter:
    return RecyclingDrafter(around.target.vocab_size, width=_width(speculation, WIDTH))


def _width(speculation: Speculation, most: int) -> int:
    """The most children of a node, for a method that can draft trees of any width."""
    if isinstance(speculation.tree, int):
        return min(speculation.tree, most)
    return 1 if speculation.tree == "none" else most


_NGRAM = _Method(_ngram, ("prompt_lookup_min", "prompt_lookup_max"))
_METHODS = {
    "auto": _NGRAM,
    "ngram": _NGRAM,
    "draft_model": _Method(_draft_model, ("model", "draft_layers")),
    "suffix": _Method(
        _suffix,
        (
            "tree",
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
    ),
    "recycling": _Method(_recycling, ("tree",)),
}
