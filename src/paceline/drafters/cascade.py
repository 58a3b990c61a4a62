"""Several drafters at once: exact matches first, learned ones where those are silent or weak, all in one tree."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline import methods
from paceline.drafters import Method, Needs
from paceline.heads.formats import head_kind
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.drafters import Drafter, Models, Outcome, Surroundings, View
    from paceline.options import Speculation
    from paceline.pages import CacheGroup

LOOKUPS = ("grammar", "prediction", "suffix", "recycling")
"""What costs next to nothing, the most reliable first: of a node that two of them propose the first is the origin."""

_WEAK = 0.5  # lookups that expect less of their likeliest next token leave the step to the learned drafter as well
_LEAST = MAX_NODES // 2  # nodes that lookups keep beside a learned drafter's, where both would not find room


class CascadeDrafter:
    """Trees merged from those of its members by common prefixes.

    A member sees every sequence from its start and hears of every pass, whether or not it was asked.
    """

    name = "cascade"

    def __init__(self, lookups: Sequence[Drafter], learned: Drafter | None = None) -> None:
        """Ask ``lookups`` in every step, and ``learned`` where they have little to say."""
        self._lookups = list(lookups)
        self._learned = learned
        self._members = [*lookups, *([] if learned is None else [learned])]
        self.needs = Needs(
            features=tuple(sorted({layer for member in self._members for layer in member.needs.features})),
            top_k=max((member.needs.top_k for member in self._members), default=0),
            cost="lookup" if learned is None else learned.needs.cost,
            ended=self._end,
            members=tuple(self._members),
        )

    def start(self, view: View, valid: int) -> None:
        for member in self._members:
            member.start(view, valid)

    def fork(self, parent: int, child: View) -> None:
        for member in self._members:
            member.fork(parent, child)

    def rewind(self, sequence: int, length: int) -> None:
        for member in self._members:
            member.rewind(sequence, length)

    def release(self, sequence: int) -> None:
        """Let go of a sequence in every member, also where one of them raises."""
        with ExitStack() as stack:
            for member in self._members:
                stack.callback(member.release, sequence)

    def _end(self, view: View) -> None:
        for member in self._members:
            if member.needs.ended is not None:
                member.needs.ended(view)

    def length(self, sequence: int) -> int:
        return min((member.length(sequence) for member in self._members), default=0)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for member in self._members:
            member.observe([_for(member, outcome) for outcome in outcomes])

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        """Where nobody paces its members, the learned one is asked where the others have little to say."""
        trees = [TokenTree.root(view.tokens[-1]) for view in views]
        for member in self._lookups:
            _merge(trees, member.propose(views, budgets))
        if self._learned is not None:
            weak = [place for place, tree in enumerate(trees) if _next(tree) < _WEAK]
            if weak:
                given = self._learned.propose([views[place] for place in weak], [budgets[place] for place in weak])
                for place, other in zip(weak, given, strict=True):
                    dropping = views[place].dropping
                    if dropping is not None:
                        trees[place] = trees[place].best(max(MAX_NODES + 1 - len(other), _LEAST), dropping)
                _merge([trees[place] for place in weak], given)
        return trees


def _for(member: Drafter, outcome: Outcome) -> Outcome:
    """What a member has declared of an outcome."""
    needs = member.needs
    return replace(
        outcome,
        features={layer: outcome.features[layer] for layer in needs.features},
        scored=[(path, ids[: needs.top_k]) for path, ids in outcome.scored] if needs.top_k else (),
    )


def _next(tree: TokenTree) -> float:
    """How likely the likeliest of the tokens after the root is."""
    chances = (chance for chance, parent in zip(tree.survival, tree.parents, strict=True) if parent == 0)
    return max(chances, default=0.0)


def _merge(trees: Sequence[TokenTree], others: Sequence[TokenTree]) -> None:
    for tree, other in zip(trees, others, strict=True):
        tree.merge(other)


def _make(speculation: Speculation, around: Surroundings) -> CascadeDrafter:
    lookups = [around.drafter(_options(speculation, name)) for name in LOOKUPS]
    method = _learned(speculation)
    learned = None if method is None else around.drafter(replace(speculation, method=method))
    return CascadeDrafter(lookups, learned)


def _learned(speculation: Speculation) -> str | None:
    """The method that drafts with the model that is named: what it is says its checkpoint."""
    if speculation.model is None:
        return None if speculation.draft_layers is None else "draft_model"
    return head_kind(speculation.model) or "draft_model"


def _groups(speculation: Speculation, models: Models) -> Sequence[CacheGroup]:
    method = _learned(speculation)
    return () if method is None else methods.groups(replace(speculation, method=method), models)


def _options(speculation: Speculation, name: str) -> Speculation:
    """The options of a member that drafts without a model; ``tree`` is for those that can."""
    tree = speculation.tree if methods.find(name).trees else "auto"
    return replace(speculation, method=name, model=None, draft_layers=None, random=False, tree=tree)


METHOD = Method(
    _make,
    _groups,
    options=(
        *("tree", "model", "draft_layers", "vocabulary", "rule"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
        *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    ),
    model="optional",
    trees=True,
)
