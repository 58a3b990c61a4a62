"""Whether a head drafts as a trained one does: a few of its tokens against the target's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = 32
FLOOR = 0.2  # trained heads guess the next token right in 40 to 80 % of all places, of 32 hardly ever in fewer than 7
CAUSES = (
    "prompts in another chat template than it was trained on",
    "layer ids that are off by one",
    "another fine-tune of the target",
    "a quantized target where it was trained on the original",
    "a norm that its configuration does not mention",
)


@dataclass(frozen=True)
class Agreement:
    """How many of `total` tokens that a head drafted first were the target's own; `warning` where too few were."""

    agreed: int
    total: int
    warning: str | None

    @property
    def share(self) -> float:
        """agreed / total; 0 where nothing was compared."""
        return self.agreed / self.total if self.total else 0.0


def agreement(drafted: Sequence[int], wanted: Sequence[int], name: str, floor: float = FLOOR) -> Agreement:
    """Compare a head's first guesses with the tokens that the target emitted at the same places.

    Args:
        drafted: the likeliest token by the head at each place, the target's own tokens before it given.
        wanted: the target's token at each of these places, as many.
        name: what the head is called in the warning.
        floor: the share below which something is wrong.

    Raises:
        ValueError: the two are not equally long.
    """
    agreed = sum(a == b for a, b in zip(drafted, wanted, strict=True))
    total = len(wanted)
    if not total or agreed >= floor * total:
        return Agreement(agreed, total, None)
    warning = (
        f"the head {name} guesses only {agreed} of {total} tokens as its target does, fewer than a trained head would "
        f"({floor:.0%}): the output stays exact, but drafting with it will hardly pay. Usual causes: "
        f"{'; '.join(CAUSES)}."
    )
    return Agreement(agreed, total, warning)
