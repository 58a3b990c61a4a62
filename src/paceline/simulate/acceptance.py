"""What is accepted of drafts in the course of requests: curves drawn from a seed, about as they have been measured.

Everything is drawn beforehand for every place of every answer, so that all ways of drafting meet the same luck:
``runs`` says how many drafts from there would be accepted if there were enough of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal["head", "lookup"]

DEPTHS = 12
"""The longest chain that is drafted."""

_SHORTEST, _TYPICAL, _LONGEST = 32, 250, 1024  # tokens of an answer
_SPREAD = 0.7
_CHANGES = 0.4  # the share of requests that turn to something else in the middle

# A head: log-odds of acceptance.
_OF_REQUEST = 0.35  # standard deviations: how much requests of a family differ,
_OF_PLACE = 0.9  # and places within one
_ALIKE = 0.9  # how much a place is like the one before it
_FADE = 0.05  # what each further depth takes away
_BLUR = 0.6  # how far a head's own estimates are off, each by itself
_BOAST = 0.2  # and all together

# A lookup.
_MATCH = 2  # tokens that must agree before anything is looked up


@dataclass(frozen=True)
class Family:
    """A kind of text.

    Attributes:
        name: what it is.
        share: of all requests, and of what they turn to.
        level: log-odds that a head's draft is accepted.
        copied: the chance that a token begins a stretch which repeats what stands before.
        stretch: mean tokens of such a stretch.
        chance: the chance of a match that means nothing.
    """

    name: str
    share: float
    level: float
    copied: float
    stretch: float
    chance: float


FAMILIES = (
    Family("chat", 0.30, 0.86, 0.064, 8, 0.10),
    Family("code", 0.25, 1.36, 0.146, 10, 0.20),
    Family("math", 0.10, 1.19, 0.102, 8, 0.20),
    Family("summarization", 0.10, 0.65, 0.198, 10, 0.15),
    Family("editing", 0.05, 1.19, 0.161, 30, 0.20),
    Family("translation", 0.10, 0.13, 0.038, 5, 0.05),
    Family("far", 0.10, -1.12, 0.017, 5, 0.15),
)
"""Chosen so that mean accepted lengths are about those which were measured independently of public EAGLE-3 heads with 7
drafts a step (chat 2.85, code 3.55, math 3.3, summarization 2.6, translation 2.1; far less than their papers'), and of
n-gram lookup with 8 (1.35, 1.9, 1.55, 2.1, 1.12, editing 3.4). ``far`` is what neither knows: rare code, rare
languages, random words (1.4 and 1.06)."""

FAR = tuple(family for family in FAMILIES if family.name == "far")
"""Nothing but that."""


@dataclass(frozen=True)
class Stream:
    """What one user after another request meets; [users, places] each.

    Attributes:
        runs: how many drafts in a row would be accepted from here.
        given: how many the drafter can give.
        claims: float32 [users, places, DEPTHS], the drafter's own estimate that so many are accepted.
        left: tokens of the answer from here on, the next one counted.
        done: tokens of the answer so far.
    """

    runs: NDArray[np.int64]
    given: NDArray[np.int64]
    claims: NDArray[np.float32]
    left: NDArray[np.int64]
    done: NDArray[np.int64]

    @property
    def places(self) -> int:
        return int(self.runs.shape[1])


def draw(kind: Kind, users: int, places: int, seed: int, families: tuple[Family, ...] = FAMILIES) -> Stream:
    """Streams of requests for so many users, of so many tokens each.

    Args:
        kind: what drafts.
        families: what requests are drawn from.
    """
    rng = np.random.default_rng([seed, users, places])
    texts, left, done, own = _requests(users, places, rng, families)
    make = _of_head if kind == "head" else _of_lookup
    runs, given, claims = make(texts, own, rng, families)
    return Stream(runs, given, claims, left, done)


def _requests(
    users: int, places: int, rng: np.random.Generator, families: tuple[Family, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """For each place the family of its text, the tokens left and done of its request, and the request's own odds."""
    shares = np.array([family.share for family in families])
    texts, left, done = (np.zeros((users, places), np.int64) for _ in range(3))
    own = np.zeros((users, places))
    for user in range(users):
        start = 0
        while start < places:
            length = int(np.clip(rng.lognormal(np.log(_TYPICAL), _SPREAD), _SHORTEST, _LONGEST))
            span = slice(start, min(start + length, places))
            size = span.stop - start
            turn = int(rng.integers(length)) if rng.random() < _CHANGES else length
            kinds = rng.choice(len(families), 2, p=shares / shares.sum())
            offsets = rng.normal(0.0, _OF_REQUEST, 2)
            late = np.arange(size) >= turn
            texts[user, span], own[user, span] = kinds[late.astype(int)], offsets[late.astype(int)]
            done[user, span] = np.arange(size)
            left[user, span] = size - np.arange(size)
            start += size
    return texts, left, done, own


_Drawn = tuple["NDArray[np.int64]", "NDArray[np.int64]", "NDArray[np.float32]"]


def _of_head(
    texts: NDArray[np.int64], own: NDArray[np.float64], rng: np.random.Generator, families: tuple[Family, ...]
) -> _Drawn:
    """A head drafts always; a place's odds are its family's, its request's and its own, which is like the last one."""
    users, places = texts.shape
    levels = np.array([family.level for family in families])
    news = rng.normal(0.0, _OF_PLACE, (users, places))
    odds = np.empty((users, places))
    place = news[:, 0]
    for now in range(places):
        place = _ALIKE * place + np.sqrt(1 - _ALIKE**2) * news[:, now]
        odds[:, now] = place
    odds += levels[texts] + own
    deep = (odds[..., None] - _FADE * np.arange(DEPTHS)).astype(np.float32)
    right = rng.random(deep.shape, np.float32) < _chance(deep)
    claimed = _chance(deep + np.float32(_BOAST) + np.float32(_BLUR) * rng.standard_normal(deep.shape, np.float32))
    return _in_a_row(right), np.full((users, places), DEPTHS), np.cumprod(claimed, axis=-1)


def _of_lookup(
    texts: NDArray[np.int64], own: NDArray[np.float64], rng: np.random.Generator, families: tuple[Family, ...]
) -> _Drawn:
    """A lookup drafts while something is copied, once some tokens have agreed, and for one step more; and by chance."""
    users, places = texts.shape
    copied, stretch, chance = (
        np.array([getattr(family, name) for family in families])[texts] for name in ("copied", "stretch", "chance")
    )
    luck = rng.random((users, places))
    copying = np.zeros((users, places), bool)
    ages = np.zeros((users, places), np.int64)
    on, age = np.zeros(users, bool), np.zeros(users, np.int64)
    for now in range(places):
        ages[:, now] = age
        on = np.where(on, luck[:, now] >= 1 / stretch[:, now], luck[:, now] < copied[:, now] * np.exp(own[:, now]))
        copying[:, now] = on
        age = np.where(on, age + 1, 0)
    runs = np.zeros((users, places), np.int64)
    run = np.zeros(users, np.int64)
    for now in reversed(range(places)):
        run = np.where(copying[:, now], np.minimum(run + 1, DEPTHS), 0)
        runs[:, now] = run
    by_chance = rng.random((users, places)) < chance
    matched = np.where(ages >= _MATCH, ages, np.where(by_chance, rng.integers(1, 4, (users, places)), 0))
    given = np.where(matched > 0, DEPTHS, 0)
    each = ((matched + 1) / (matched + 2)).astype(np.float32)
    return runs, given, each[..., None] ** np.arange(1, DEPTHS + 1, dtype=np.float32)


def _chance(odds: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(1 / (1 + np.exp(-odds)), dtype=np.float32)


def _in_a_row(right: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many from the first on."""
    runs: NDArray[np.int64] = np.cumprod(right, axis=-1, dtype=np.int64).sum(axis=-1)
    return runs
