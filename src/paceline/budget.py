"""One rule for all drafts of a step: verify one more node if its survival is worth more than the time that it adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cost import Load, StepCost
    from paceline.habits import Habit
    from paceline.tree import TokenTree


@dataclass(slots=True)
class Draft:
    """What is drafted for one sequence in one step.

    Attributes:
        sequence: its number.
        ceiling: the most nodes.
        tree: what was drafted so far, weighed by :meth:`Pacer.weigh`.
        context: tokens that have keys.
        parts: who drafted what: the nodes from the first number up to, without, the second.
    """

    sequence: int
    ceiling: int
    tree: TokenTree
    context: int = 0
    parts: list[tuple[Habit, int, int]] = field(default_factory=list)


Node = tuple[float, float, float, float, int, int, int]
"""A node that may be verified: what it is worth beside its own price, its survival, its price in seconds, its rows, the
draft that it belongs to, the pass that would draft it (0: it is there, -1: none of its own), its place in its tree."""

WORTH = itemgetter(0)


def offered(cost: StepCost, drafts: Sequence[Draft], rate: float) -> list[Node]:
    """The nodes that are there already, the best first."""
    nodes: list[Node] = []
    for place, draft in enumerate(drafts):
        seen = cost.of_context(1, draft.context)
        price, survival = rate * seen, draft.tree.survival
        nodes += [(price - survival[n], survival[n], seen, 1.0, place, 0, n) for n in range(1, len(survival))]
    nodes.sort(key=WORTH)
    return nodes


def spend(
    cost: StepCost, load: Load, nodes: Sequence[Node], passes: Sequence[float] = ()
) -> tuple[int, float, list[float]]:
    """How many of the nodes, the best first, bring the most expected tokens a second; how many those are; and what the
    step takes without any and with one row more each.

    The time of prompts' pieces is not held against the drafts beside them.

    Args:
        passes: seconds of a drafter's pass for 0, 1, 2, ... sequences.
    """
    line = cost.line(load, ceil(sum([node[3] for node in nodes])))
    more = cost(load.without_pieces()) - line[0] if load.pieces else 0.0
    tokens, rows = float(load.decodes), 0.0
    drafting: dict[int, int] = {}
    chosen, best_rate = 0, tokens / (line[0] + more)
    for count, (_, gain, seconds, size, _, deep, _) in enumerate(nodes, 1):
        tokens += gain
        rows += size
        more += seconds
        if deep > 0:
            others = drafting.get(deep, 0)
            drafting[deep] = others + 1
            more += passes[others + 1] - passes[others]
        rate = tokens / (line[int(rows)] + more)
        if rate > best_rate:
            chosen, best_rate = count, rate
    return chosen, best_rate, line


def covered(tree: TokenTree) -> list[float]:
    """For each depth the chance that what follows is in the tree so far."""
    shares = [1.0]
    for depth, survival in zip(tree.depths(), tree.survival, strict=True):
        if depth == len(shares):
            shares.append(0.0)
        if depth:
            shares[depth] = min(1.0, shares[depth] + survival)
    return shares
