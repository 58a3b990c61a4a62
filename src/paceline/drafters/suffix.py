"""Suffix decoding: what followed the latest tokens before, here or in earlier answers, is likely to follow again.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). Unlike prompt lookup it counts: of all runs with which
the text ends, it follows the one whose continuation promises the most accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from paceline.drafters import Method, Needs, Outcome, Surroundings, View
from paceline.drafters._runs import BREADTH, Runs, chain
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.drafters._runs import State
    from paceline.options import Speculation

_STATES = 2**17  # of earlier answers, about 350 bytes each


class _Generation:
    """Answers of about the same age, by isolation key."""

    def __init__(self) -> None:
        self.runs: dict[str | None, Runs] = {}
        self.texts = 0
        self.size = 0


class Answers:
    """Earlier answers, each found under its isolation key alone. Where there are too many the older half goes.

    Args:
        depth: the longest run that is counted, in tokens.
        texts: how many answers are kept, of all keys together.
        states: how many states they may take together. An answer counts with the most that it can take, and one that
            takes more than half of them is not kept.
    """

    def __init__(self, depth: int, texts: int, states: int = _STATES) -> None:
        self._depth = depth
        self._texts = texts
        self._states = states
        self._young = _Generation()
        self._old = _Generation()

    @property
    def size(self) -> int:
        """How many states there are."""
        return self._young.size + self._old.size

    @property
    def texts(self) -> int:
        return self._young.texts + self._old.texts

    def find(self, key: str | None) -> list[Runs]:
        """What is kept of a key, the younger part first."""
        return [runs for age in (self._young, self._old) if (runs := age.runs.get(key)) is not None]

    def add(self, key: str | None, text: Sequence[int]) -> None:
        """Keep an answer."""
        most = 2 * len(text) + 1
        if most > self._states // 2 or not self._texts:
            return
        if self._young.size + most > self._states // 2 or self._young.texts >= max(1, self._texts // 2):
            self._old, self._young = self._young, _Generation()
            if self._old.texts >= self._texts:  # of one answer there is no half
                self._old = _Generation()
        young = self._young
        if key not in young.runs:
            young.runs[key] = Runs(self._depth)
            young.size += 1
        runs = young.runs[key]
        young.size -= runs.size
        runs.add(text)
        young.size += runs.size
        young.texts += 1


@dataclass(slots=True)
class _Match:
    """The longest end of a sequence, as of ``covered`` tokens, that occurs in ``texts`` earlier answers."""

    runs: Runs
    texts: int
    covered: int
    state: State
    length: int = 0


@dataclass(slots=True)
class _State:
    """A sequence: its own runs, and what its end matches in earlier answers."""

    view: View
    own: Runs
    matches: list[_Match] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Way:
    """After a match of ``length`` tokens at most ``bound`` may be drafted; the order is that of trying."""

    bound: int
    length: int
    state: State


@dataclass(slots=True)
class _Draft:
    """Nodes below the root, likeliest first; a parent is an index into the nodes, the root's being 0."""

    tokens: list[int]
    parents: list[int]
    survival: list[float]

    def trust(self, length: int) -> None:
        """Temper the shares of counts by how long the run is that was followed: after n tokens in common the next is
        too in about n of n + 1 cases, and each that comes true makes the run longer."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        self.survival = [
            chance * length / (length + depth) for chance, depth in zip(self.survival, depths[1:], strict=True)
        ]


class SuffixDrafter:
    """Chains or trees out of the sequence's own past and of earlier answers, with no model at all."""

    name = "suffix"

    def __init__(
        self,
        *,
        depth: int = 64,
        texts: int = 10_000,
        factor: float = 1.0,
        least: float = 0.1,
        width: int = BREADTH,
        states: int = _STATES,
    ) -> None:
        """Draft at most ``factor`` tokens for each token of the run that is followed.

        Args:
            depth: the longest run that is counted, what is drafted included; at least 2.
            texts: how many earlier answers are kept; 0 is none.
            factor: the most drafted tokens for each token that matched.
            least: the least probability of a drafted token and all before it.
            width: the most children of a node; 1 is a chain.
            states: how many states the earlier answers may take.
        """
        self.needs = Needs(cost="lookup", ended=self._keep)
        self._depth = depth
        self._factor = factor
        self._least = least
        self._width = width
        self._answers = Answers(depth, texts, states)
        self._states: dict[int, _State] = {}

    def start(self, view: View, valid: int) -> None:
        self._states[view.id] = _State(view, Runs(self._depth))

    def fork(self, parent: int, child: View) -> None:
        self._states[child.id] = _State(child, Runs(self._depth))

    def rewind(self, sequence: int, length: int) -> None:
        state = self._states[sequence]
        if length < state.own.length:
            state.own = Runs(self._depth)
        state.matches = []

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def _keep(self, view: View) -> None:
        """Keep the answer of a request that has ended."""
        if len(view.tokens) > view.prompt_length:
            self._answers.add(view.cache_salt, view.tokens[view.prompt_length :])

    def length(self, sequence: int) -> int:
        return self._states[sequence].own.length

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take in what was committed, so that a long prompt is known before its first token is drafted."""
        for outcome in outcomes:
            own = self._states[outcome.id].own
            if outcome.start <= own.length:
                for token in outcome.rows[own.length - outcome.start :]:
                    own.push(token)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _tree(self, view: View, budget: int) -> TokenTree:
        state = self._states[view.id]
        state.view = view
        draft = self._best(state, budget) if budget else None
        if draft is None:
            return TokenTree.root(view.tokens[-1])
        drafted = len(draft.tokens)
        return TokenTree(
            [view.tokens[-1], *draft.tokens],
            [-1, *draft.parents],
            [1.0, *draft.survival],
            ["target", *[self.name] * drafted],
        )

    def _best(self, state: _State, budget: int) -> _Draft | None:
        """The draft that promises the most accepted tokens; of equally good ones the longest match's."""
        for token in state.view.tokens[state.own.length :]:
            state.own.push(token)
        ways = self._ways(state.own.ends[0], self._depth, budget)
        for match in self._matches(state):
            ways += self._ways(match.state, match.length, budget)
        ways.sort(key=lambda way: (way.bound, way.length), reverse=True)
        best, score = None, (0.0, 0)
        for way in ways:
            if (way.bound, way.length) <= score:
                break
            draft = self._draft(way.state, way.bound)
            if (promise := (sum(draft.survival), way.length)) > score:
                best, score = draft, promise
        if best is not None:
            best.trust(score[1])
        return best

    def _ways(self, longest: State, matched: int, budget: int) -> list[_Way]:
        """Every match that was followed by something, with the length of which most may be drafted.

        The lengths of one state were followed at the same places by the same, so that one of them stands for all.
        """
        ways = []
        for state in chain(longest):
            if state.link is not None and state.followed:
                length = min(matched, state.length, self._depth - 1)
                while length - 1 > state.link.length and self._bound(length - 1, budget) > self._bound(length, budget):
                    length -= 1
                if length > state.link.length:
                    ways.append(_Way(self._bound(length, budget), length, state))
        return ways

    def _bound(self, length: int, budget: int) -> int:
        return min(budget, int(self._factor * length), self._depth - length)

    def _matches(self, state: _State) -> list[_Match]:
        """Find the end of the sequence in the earlier answers of its key."""
        tokens = state.view.tokens
        known = {id(match.runs): match for match in state.matches}
        state.matches = []
        for runs in self._answers.find(state.view.cache_salt):
            match = known.get(id(runs))
            if match is None or match.texts != runs.texts:
                match = _Match(runs, runs.texts, max(0, len(tokens) - self._depth), runs.root)
            for token in tokens[match.covered :]:
                match.state, match.length = runs.follow(match.state, match.length, token)
            match.covered = len(tokens)
            state.matches.append(match)
        return state.matches

    def _draft(self, state: State, budget: int) -> _Draft:
        """The ``budget`` likeliest nodes of what followed a run, best first."""
        draft = _Draft([], [], [])
        waiting: list[tuple[float, int, int, int, State]] = []
        parent, chance, order = 0, 1.0, 0
        while len(draft.tokens) < budget:
            for token, share, longer in state.continuations(self._width):
                if chance * share >= self._least:
                    heappush(waiting, (-chance * share, order, parent, token, longer))
                    order += 1
            if not waiting:
                break
            negative, _, parent, token, state = heappop(waiting)
            chance = -negative
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.survival.append(chance)
            parent = len(draft.tokens)
        return draft


def _make(speculation: Speculation, around: Surroundings) -> SuffixDrafter:
    return SuffixDrafter(
        depth=speculation.suffix_decoding_max_tree_depth,
        texts=speculation.suffix_decoding_max_cached_requests,
        factor=speculation.suffix_decoding_max_spec_factor,
        least=speculation.suffix_decoding_min_token_prob,
        width=speculation.width(BREADTH),
    )


METHOD = Method(
    _make,
    options=(
        "tree",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    trees=True,
)
