"""In which ways requests are run to see that no token differs: one line for each way to draft."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.bench.run import parse_method
from paceline.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHES = (1, 8)
TEMPERATURES = (0.0, 0.8)
SHARE = 5
"""Where lots are drawn, each prompt is run in at least one combination of so many."""


@dataclass(frozen=True)
class Way:
    """One way to draft.

    Attributes:
        name: what it is called in cells and tables; the same for the same weights, wherever they lie.
        options: of speculation, as `bench run` takes them; {short} and {layers} stand for the numbers of layers of a
            short draft model and of the target. None is the oracle alone, which knows the answer and swaps half of
            its tokens for wrong ones.
        judge: what proves something. "both": enough drafts accepted and enough rejected, the oracle helping out where
            it must; "accepted": enough drafts, and every one accepted; "rejected": enough rejected, for a drafter that
            is next to never right; "none": nothing is drafted.
        request: "predicted" requests come with their answer, some of its tokens wrong; "constrained" ones may answer
            only what the free answer is, or is with a few tokens swapped.
    """

    name: str
    options: str | None
    judge: Literal["both", "accepted", "rejected", "none"] = "both"
    request: Literal["free", "predicted", "constrained"] = "free"


WAYS = (
    Way("plain", "plain", judge="none"),
    Way("ngram", "ngram"),
    Way("draft_layers", "draft_model:draft_layers={short}"),
    Way("self", "draft_model:draft_layers={layers}", judge="accepted"),
    Way("oracle", None),
    Way("suffix", "suffix:tree=none"),
    Way("suffix tree", "suffix"),
    Way("recycling", "recycling:tree=none"),
    Way("recycling tree", "recycling"),
    Way("lookahead", "lookahead"),
    Way("prediction", "prediction", request="predicted"),
    Way("grammar", "grammar", request="constrained"),
    Way("draft_layers tree", "draft_model:draft_layers={short},tree=2"),
    Way("medusa", "medusa:random=true,tree=none"),
    Way("medusa tree", "medusa:random=true"),
    Way("eagle", "eagle:random=true,tree=none"),
    Way("eagle tree", "eagle:random=true"),
    Way("eagle3", "eagle3:random=true,tree=none"),
    Way("eagle3 tree", "eagle3:random=true"),
    Way("cascade", "cascade", request="predicted"),
    Way("cascade of chains", "cascade:tree=none", request="predicted"),
)
"""What is verified unless said otherwise; the first five are those of the first measurement."""


def chosen_ways(names: Sequence[str] | None, every: Sequence[Way] = WAYS) -> tuple[Way, ...]:
    """The ways that are named: of ``every``, or written as for `bench run`; all of ``every`` for None.

    Raises:
        OptionError: one of them is neither, or is named twice.
    """
    if names is None:
        return tuple(every)
    known = {way.name: way for way in every}
    found = tuple(known.get(name) or Way(parse_method(name, {}).name, name) for name in names)
    if len({way.name for way in found}) < len(found):
        raise OptionError("a method is named twice; give each once.")
    return found


@dataclass(frozen=True)
class Combination:
    """One way to run a request.

    Attributes:
        way: how drafts are made.
        batch: how many requests run at a time.
        temperature: 0, or one at which tokens are drawn, with a seed.
    """

    way: Way
    batch: int
    temperature: float


def combinations(ways: Sequence[Way]) -> list[Combination]:
    """Every way, alone and several at a time, greedy and drawn."""
    return [Combination(*each) for each in itertools.product(ways, BATCHES, TEMPERATURES)]


def draws(ways: Sequence[Way]) -> int:
    """In how many combinations a prompt is run where lots are drawn: what a deck of all of them is dealt out by."""
    deck = len(combinations(ways))
    return next(hand for hand in range(1, deck + 1) if deck % hand == 0 and SHARE * hand >= deck)


def deal(whole: Sequence[Combination], prompts: int, hand: int | None, seed: int = 0) -> list[list[Combination]]:
    """For each prompt the combinations that it is run in: all, or ``hand`` different ones by lot.

    The lots are dealt from shuffled decks of all combinations, so each comes as often as any other, give or take one.
    """
    if hand is None:
        return [list(whole)] * prompts
    lot = random.Random(seed)
    hands: list[list[Combination]] = []
    while len(hands) < prompts:
        deck = list(whole)
        lot.shuffle(deck)
        hands += [deck[at : at + hand] for at in range(0, len(deck) - hand + 1, hand)]
    return hands[:prompts]
