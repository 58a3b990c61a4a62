"""Lookahead decoding: the target itself guesses ahead by Jacobi iteration, and the n-grams that it thereby writes are
kept as guesses for the tokens to come.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv 2402.02057).

The window has W columns of N - 1 levels. Level 0 of column 0 is the root; the token of level r in column i is a guess
for r + i places behind it. In the paper's mask such a token sees the root, level 0 of the columns up to its own, and
the lower levels of its own column. That is a tree, node for node::

    root ------ c1 ------ c2 ------ ...    level 0, one node a column
      |          |         |
    level 1   level 1   level 1            of columns 0, 1, 2, ...
      |          |         |
     ...        ...       ...              up to level N - 2

so each row sees exactly its ancestors, and its path has the length that its place asks for. The guesses, the tails of
at most G n-grams that began with the root's token, are chains of N - 1 tokens below the root. A row is a function of
its path, so where two paths begin alike their nodes are one: at most (W + G)(N - 1) of them, the root counted.

What the target says after the last level of a column completes an n-gram of N tokens, which goes into the pool; it
becomes the column's last level and the oldest one goes (one Jacobi iteration). At first the window is level 0 alone,
W + N - 2 columns of random tokens of the prompt; each of the first N - 2 iterations adds a level and lets the first
column go. The window moves one place a step, however many tokens were accepted, as in the authors' program.

Nodes of the window are hardly ever accepted and say so by their survival, so that whoever cuts the tree to a budget
cuts the window first. Only whole columns are proposed; those that find no room stand still until it is their turn, and
lookahead learns less in proportion.
"""

from __future__ import annotations

import random
from copy import deepcopy
from typing import TYPE_CHECKING

from paceline.drafters import Method, Needs, Outcome, View
from paceline.errors import DrafterError
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.drafters import Surroundings
    from paceline.options import Speculation

_HIT = 0.3  # how often the newest guess begins right; older ones in proportion to their rank
_LONGER = 0.6  # and how often it then goes on so
_WINDOW = 1e-6  # below all guesses


class _Branches:
    """A tree whose branches may begin alike."""

    def __init__(self, root: int, most: int) -> None:
        self.tree = TokenTree.root(root)
        self._most = most
        self._nodes: dict[tuple[int, int], int] = {}

    def missing(self, path: Sequence[int]) -> int:
        """How many nodes a path needs that are not there yet."""
        node: int | None = 0
        for place, token in enumerate(path):
            node = self._nodes.get((node, token)) if node is not None else None
            if node is None:
                return len(path) - place
        return 0

    def fits(self, path: Sequence[int]) -> bool:
        return len(self.tree) + self.missing(path) <= self._most

    def add(self, path: Sequence[int], survival: Sequence[float], origin: str) -> None:
        """Add a path below the root as far as there is room."""
        node = 0
        for token, chance in zip(path, survival, strict=True):
            known = self._nodes.get((node, token))
            if known is None:
                if len(self.tree) >= self._most:
                    return
                known = self.tree.add(node, token, min(chance, self.tree.survival[node]), origin)
                self._nodes[node, token] = known
            node = known


class _Window:
    """The trajectories of one sequence and the n-grams that they have written.

    Attributes:
        columns: for each column its tokens from level 0 up; that of column 0 is the root.
        pool: for a token the tails of n-grams that began with it, those written last at the end.
        turn: the column that comes first where there is no room for all.
    """

    __slots__ = ("columns", "pool", "turn")

    def __init__(self, columns: list[list[int]]) -> None:
        self.columns = columns
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.turn = 0

    def order(self) -> list[int]:
        """The columns, those whose turn it is first."""
        return [*range(self.turn, len(self.columns)), *range(self.turn)]

    def paths(self) -> list[tuple[int, ...]]:
        """For each column the tokens below the root up to its last level."""
        paths, base = [], list[int]()
        for place, column in enumerate(self.columns):
            if place:
                base.append(column[0])
            paths.append((*base, *column[1:]))
        return paths


class LookaheadDrafter:
    """Trees of a window that iterates and of the n-grams that it found; nothing outlives its request."""

    name = "lookahead"
    needs = Needs(top_k=1, cost="lookup")

    def __init__(self, window: int = 7, level: int = 5, guesses: int = 7) -> None:
        """Look ahead with W = ``window`` columns, n-grams of N = ``level`` tokens and G = ``guesses`` of them a step.

        Raises:
            DrafterError: a number is too small, or together they make a tree of more than :data:`MAX_NODES` nodes.
        """
        if window < 1 or level < 2 or guesses < 1:
            raise DrafterError(
                "lookahead needs a window and guesses of at least 1 and n-grams of at least 2, "
                f"not {window}, {guesses} and {level}."
            )
        nodes = (window + guesses) * (level - 1)
        if nodes > MAX_NODES:
            raise DrafterError(
                f"lookahead with window {window}, n-grams of {level} and {guesses} guesses makes trees of {nodes} "
                f"nodes, the root counted, but a token tree has at most {MAX_NODES}; lower one of the three."
            )
        self._width = window
        self._levels = level - 1
        self._guesses = guesses
        self._windows: dict[int, _Window] = {}

    def start(self, view: View, valid: int) -> None:
        dice = random.Random(0)
        first = [[dice.choice(view.tokens)] for _ in range(self._width + self._levels - 2)]
        self._windows[view.id] = _Window([[view.tokens[-1]], *first])

    def fork(self, parent: int, child: View) -> None:
        self._windows[child.id] = deepcopy(self._windows[parent])

    def rewind(self, sequence: int, length: int) -> None:
        """Nothing to do: what the target guessed stays a guess."""

    def release(self, sequence: int) -> None:
        self._windows.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """What is kept belongs to no place of the sequence."""
        return 0

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _tree(self, view: View, budget: int) -> TokenTree:
        root, window = view.tokens[-1], self._windows[view.id]
        branches = _Branches(root, min(budget + 1, MAX_NODES))
        for rank, tail in enumerate(reversed(window.pool.get(root, [])), 1):
            branches.add(tail, [_HIT / rank * _LONGER**depth for depth in range(len(tail))], self.name)
        paths = window.paths()
        for place in window.order():
            if branches.fits(paths[place]):
                branches.add(paths[place], [_WINDOW] * len(paths[place]), self.name)
        return branches.tree

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take the target's own next token after each column; pieces of a prompt have no scored rows."""
        for outcome in outcomes:
            if outcome.scored:
                best = {path: ids[0] for path, ids in outcome.scored}
                self._iterate(self._windows[outcome.id], outcome.rows[0], best)

    def _iterate(self, window: _Window, root: int, best: Mapping[tuple[int, ...], int]) -> None:
        """One Jacobi iteration of the columns whose last level was scored."""
        columns = window.columns
        columns[0][0] = root
        found = [best.get(path) for path in window.paths()]
        filling = len(columns) > self._width
        for place, token in enumerate(found):
            column = columns[place]
            if token is None or (filling and not place):
                continue
            if len(column) == self._levels:
                self._keep(window.pool, column[0], (*column[1:], token))
                del column[0]
            column.append(token)
        moved = [place for place in window.order() if found[place] is not None]
        window.turn = (moved[-1] + 1 if moved else window.turn) % len(columns)
        if filling and any(moved):
            del columns[0]
            window.turn = max(0, window.turn - 1)

    def _keep(self, pool: dict[int, list[tuple[int, ...]]], first: int, tail: tuple[int, ...]) -> None:
        """Note an n-gram as the latest of its first token; the oldest goes where there are too many."""
        tails = pool.setdefault(first, [])
        if tail in tails:
            tails.remove(tail)
        elif len(tails) == self._guesses:
            del tails[0]
        tails.append(tail)


def _make(speculation: Speculation, around: Surroundings) -> LookaheadDrafter:
    return LookaheadDrafter(speculation.lookahead_window, speculation.lookahead_ngram, speculation.lookahead_guesses)


METHOD = Method(_make, options=("lookahead_window", "lookahead_ngram", "lookahead_guesses"))
