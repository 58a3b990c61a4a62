"""Exact enumeration with fractions: what a rule emits, over all drafts and all coins."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.acceptance import Coins, Outcome, Row, Rows
    from paceline.acceptance.rows import Number

T = TypeVar("T")
Tokens: TypeAlias = tuple[int, ...]
Mass: TypeAlias = dict[Tokens, Fraction]
Shape: TypeAlias = tuple[int, ...]
Accept: TypeAlias = "Callable[[TokenTree, Rows, Rows, Coins], Outcome]"
Draw: TypeAlias = "Callable[[Dice, Model, Tokens, int], list[int]]"
PICKED = -7


def fractions(*weights: int | str) -> Row:
    """A row of the given weights over their sum."""
    parts = [Fraction(weight) for weight in weights]
    return np.array([part / sum(parts) for part in parts], dtype=object)


class Model:
    """A table: the row after a prefix, random fractions made when first asked for.

    ``zeros`` is the share of tokens that are impossible; prefixes of a length in ``like`` have another model's rows.
    """

    def __init__(
        self, seed: int, vocab: int, zeros: float = 0.0, like: Model | None = None, lengths: Sequence[int] = ()
    ) -> None:
        self.vocab = vocab
        self._seed, self._zeros, self._like, self._lengths = seed, zeros, like, lengths
        self._rows: dict[Tokens, Row] = {}

    def __call__(self, prefix: Tokens) -> Row:
        if prefix not in self._rows:
            self._rows[prefix] = self._row(prefix)
        return self._rows[prefix]

    def _row(self, prefix: Tokens) -> Row:
        if self._like is not None and len(prefix) in self._lengths:
            return self._like(prefix)
        dice = random.Random(f"{self._seed} {prefix}")
        weights = [dice.randint(1, 9) if dice.random() >= self._zeros else 0 for _ in range(self.vocab)]
        return fractions(*weights) if any(weights) else self._row((*prefix, -1))


class Same(Model):
    """The same row everywhere."""

    def __init__(self, *weights: int | str) -> None:
        super().__init__(0, len(weights))
        self._only = fractions(*weights)

    def __call__(self, prefix: Tokens) -> Row:
        return self._only


class Dice:
    """Follows a script of choices, then takes the first possible one and notes what else there was.

    It is the coins of a rule as well. The last pick is not branched over: its weights are kept.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self._taken: list[int] = []
        self.others: list[list[int]] = []
        self.weight = Fraction(1)
        self.weights: Row = np.array([], dtype=object)

    def choose(self, weights: Sequence[Number] | Row) -> int:
        assert all(isinstance(weight, int | Fraction) and weight >= 0 for weight in weights)
        assert sum(weights) == 1
        possible = [i for i, weight in enumerate(weights) if weight]
        if len(self._taken) < len(self._script):
            choice = self._script[len(self._taken)]
        else:
            choice = possible[0]
            self.others.extend([*self._taken, other] for other in possible[1:])
        self._taken.append(choice)
        self.weight *= Fraction(weights[choice])
        return choice

    def accept(self, node: int, chance: Number) -> bool:
        return self.choose([1 - chance, chance]) == 1

    def pick(self, weights: Row) -> int:
        self.weights = weights
        return PICKED


def outcomes(run: Callable[[Dice], T]) -> Iterator[tuple[Dice, T]]:
    """Run for every outcome of its choices; ``dice.weight`` is the probability of each."""
    pending: list[list[int]] = [[]]
    while pending:
        dice = Dice(pending.pop())
        result = run(dice)
        yield dice, result
        pending.extend(dice.others)


@dataclass(frozen=True)
class Draft:
    """A tree, its prefixes node by node, and the probability with which it is drawn."""

    weight: Fraction
    tree: TokenTree
    prefixes: list[Tokens]


def in_order(dice: Dice, q: Model, prefix: Tokens, count: int) -> list[int]:
    """Draw without replacement, in order, as many as are possible."""
    left, drawn = q(prefix), list[int]()
    while len(drawn) < count and any(left):
        drawn.append(dice.choose(left / left.sum()))
        left = np.array([0 if i in drawn else weight for i, weight in enumerate(left)], dtype=object)
    return drawn


def drafts(shape: Shape, q: Model, draw: Draw = in_order) -> list[Draft]:
    """All drafts of a shape (the parent of each node); where fewer tokens are drawn the nodes are left out."""

    def run(dice: Dice) -> tuple[TokenTree, list[Tokens]]:
        tree, place = TokenTree.root(0), {0: 0}
        prefixes: list[Tokens] = [()]
        for node in range(len(shape)):
            if node not in place:
                continue
            children = [child for child, parent in enumerate(shape) if parent == node]
            if not children:
                continue
            prefix = prefixes[place[node]]
            for child, token in zip(children, draw(dice, q, prefix, len(children)), strict=False):
                place[child] = tree.add(place[node], token, 1.0, "exact")
                prefixes.append((*prefix, token))
        return tree, prefixes

    return [Draft(dice.weight, *result) for dice, result in outcomes(run)]


def emitted(accept: Accept, made: Sequence[Draft], p: Model, q: Model) -> tuple[Mass, Fraction]:
    """The probability of every (accepted tokens, extra token), and the expected number of accepted ones."""
    mass: Mass = defaultdict(Fraction)
    accepted = Fraction(0)
    for draft in made:
        target, drafter = ([model(prefix) for prefix in draft.prefixes] for model in (p, q))
        run: Any = lambda dice: accept(draft.tree, target, drafter, dice)  # noqa: B023, E731
        for dice, outcome in outcomes(run):
            assert outcome.token == PICKED
            assert outcome.path == draft.tree.path(outcome.path[-1])
            weight = draft.weight * dice.weight
            accepted += weight * (len(outcome.path) - 1)
            total = dice.weights.sum()
            for token, share in enumerate(dice.weights):
                mass[*draft.prefixes[outcome.path[-1]], token] += weight * share / total
    return mass, accepted


def extended(mass: Mass, p: Model, length: int) -> Mass:
    """Continue what is shorter than ``length`` as the target would."""
    by_length = [{t: m for t, m in mass.items() if len(t) == n} for n in range(length + 1)]
    for short, longer in pairwise(by_length):
        for tokens, weight in short.items():
            for token, share in enumerate(p(tokens)):
                longer[*tokens, token] = longer.get((*tokens, token), Fraction(0)) + weight * share
    return by_length[length]


def distance(mass: Mass, p: Model, length: int) -> Fraction:
    """Total variation between what was emitted, continued to ``length``, and the target."""
    ours, theirs = extended(mass, p, length), extended({(): Fraction(1)}, p, length)
    answers = list(product(range(p.vocab), repeat=length))
    assert sum(ours.values()) == sum(theirs.values()) == 1
    return sum((abs(ours.get(a, Fraction(0)) - theirs[a]) for a in answers), Fraction(0)) / 2


def depth(shape: Shape) -> int:
    return max(TokenTree([0] * len(shape), list(shape)).depths())


def shapes(nodes: int, vocab: int) -> list[Shape]:
    """All ordered trees of so many nodes, the root counted, of which none has more than ``vocab`` children."""
    grown: list[Shape] = [(-1,)]
    for node in range(1, nodes):
        grown = [(*s, parent) for s in grown for parent in range(max(0, s[-1]), node) if s.count(parent) < vocab]
    return grown


def chain(length: int) -> Shape:
    return tuple(range(-1, length))


def below(row: Row, token: int) -> Fraction:
    """The mass of the tokens before ``token``."""
    return sum(row[:token], Fraction(0))
