"""From the options of a request to the drafter that serves it. A new method is one more entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
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


def create(speculation: Speculation, around: Surroundings) -> Drafter:
    """The drafter that ``speculation`` asks for.

    Raises:
        DrafterError: it does not fit the target.
        ModelError: the draft model cannot be loaded.
    """
    return _METHODS[speculation.method](speculation, around)


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


_METHODS: dict[str, Callable[[Speculation, Surroundings], Drafter]] = {
    "auto": _ngram,
    "ngram": _ngram,
    "draft_model": _draft_model,
}
