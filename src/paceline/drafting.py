"""Asking drafters and telling them; whatever one of them does wrong costs its drafts and nothing else."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from paceline.acceptance.rule import drafted
from paceline.drafters import Outcome, View
from paceline.errors import DrafterError
from paceline.kernels import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from paceline.drafters import Drafter
    from paceline.pacer import Pacer
    from paceline.plan import Piece
    from paceline.request import Sequence
    from paceline.targets import Scores
    from paceline.tree import TokenTree
    from paceline.verify import Verdict

log = logging.getLogger(__name__)


def view(sequence: Sequence) -> View:
    """What a drafter may see of a sequence."""
    request = sequence.request
    return View(
        id=sequence.id,
        tokens=sequence.tokens,
        draw=sequence.choose.draft,
        dropping=sequence.choose.dropping,
        cache_salt=request.cache_salt,
        prompt_length=sequence.prompt_length,
        prediction=request.prediction,
        constraint=request.constraint,
    )


def features(sequence: Sequence) -> tuple[int, ...]:
    """The layers whose input the sequence's drafter wants."""
    return sequence.drafter.needs.features if sequence.drafter else ()


class Drafting:
    """Stands between the engine and the drafters of its sequences.

    Args:
        vocab_size: ids below it may be drafted.
        pacer: learns what drafters take and give.
        clock: seconds.
    """

    def __init__(self, vocab_size: int, pacer: Pacer, clock: Callable[[], float]) -> None:
        self._vocab_size = vocab_size
        self._pacer = pacer
        self._clock = clock

    def start(self, sequence: Sequence, valid: int) -> int:
        """Introduce a sequence to its drafter, ``valid`` rows of which others have computed.

        Returns:
            How many of them may be left out: all, but for a drafter that lives on features, which knows best.
        """
        drafter = sequence.drafter
        if drafter is None:
            return valid
        if not _done(drafter, "start", lambda: drafter.start(view(sequence), valid)):
            self._part(sequence)
            return valid
        return self._known(drafter, sequence, valid)

    def fork(self, parent: Sequence, child: Sequence, valid: int) -> int:
        """Introduce a sequence that begins as another does, for ``valid`` rows; returns what :meth:`start` does."""
        drafter = child.drafter
        if drafter is None or drafter is not parent.drafter:
            return self.start(child, valid)

        def fork() -> None:
            drafter.fork(parent.id, view(child))
            drafter.rewind(child.id, valid)

        if not _done(drafter, "fork a sequence", fork):
            self.release(child)
            return self.start(child, valid)
        return self._known(drafter, child, valid)

    def _known(self, drafter: Drafter, sequence: Sequence, valid: int) -> int:
        """How many of ``valid`` rows need not be computed for a drafter's sake."""
        known = [0]
        if valid and drafter.needs.features:
            _done(drafter, "say how long its state is", lambda: known.append(drafter.length(sequence.id)))
            return min(valid, known[-1])
        return valid

    def release(self, sequence: Sequence) -> None:
        """Take leave of a sequence."""
        drafter = sequence.drafter
        if drafter is not None:
            _done(drafter, "release a sequence", lambda: drafter.release(sequence.id))

    def propose(self, wishes: Iterable[tuple[Sequence, int]]) -> dict[int, TokenTree]:
        """Trees by sequence, at most so many nodes drafted for each; none where nothing usable came."""
        groups: dict[int, list[tuple[Sequence, int]]] = {}
        for sequence, budget in wishes:
            if budget:
                sequence.record.asked += 1
                groups.setdefault(id(sequence.drafter), []).append((sequence, budget))
        trees: dict[int, TokenTree] = {}
        for group in groups.values():
            trees.update(self._ask(group))
        return trees

    def _ask(self, group: Seq[tuple[Sequence, int]]) -> dict[int, TokenTree]:
        """One drafter's trees; what cannot be verified is left out with a line in the log."""
        drafter = group[0][0].drafter
        assert drafter is not None
        started, asked = self._clock(), sum(budget for _, budget in group)
        proposed: list[TokenTree] = []

        def propose() -> None:
            proposed[:] = drafter.propose([view(s) for s, _ in group], [budget for _, budget in group])
            if len(proposed) != len(group):
                raise DrafterError(f"{len(proposed)} token trees were proposed for {len(group)} sequences.")

        if not _done(drafter, "propose", propose):
            proposed.clear()
            self._restart(drafter, [sequence for sequence, _ in group])
        usable = {
            sequence.id: tree
            for (sequence, budget), tree in zip(group, proposed, strict=False)
            if _done(drafter, "propose a tree that can be verified", partial(self._check, sequence, tree, budget))
        }
        given = sum(len(tree) - 1 for tree in usable.values())
        self._pacer.learn_draft(drafter.name, asked, given, self._clock() - started)
        return usable

    def _check(self, sequence: Sequence, tree: TokenTree, budget: int) -> None:
        """
        Raises:
            DrafterError: the tree cannot be verified, or is too large where nothing that was drawn may be dropped.
        """
        tree.check(self._vocab_size)
        if tree.tokens[0] != sequence.tokens[-1]:
            raise DrafterError("the root of a token tree is the last committed token.")
        rule = sequence.choose.rule
        if len(tree) > budget + 1 and sequence.choose.dropping is None:
            raise DrafterError(f"{len(tree) - 1} nodes were drawn where {budget} were asked for.")
        if rule is not None and rule.sampled:
            tree.check_drawn(self._vocab_size)
            if not rule.trees:
                drafted(tree)

    def observe(
        self, trees: Iterable[tuple[Sequence, TokenTree, Verdict]], pieces: Iterable[Piece], scores: Scores
    ) -> None:
        """Tell every drafter what a pass committed, the rows of trees first and those of prompts behind them."""
        heard: dict[int, tuple[Drafter, list[Sequence], list[Outcome]]] = {}
        row = 0

        def tell(sequence: Sequence, outcome: Outcome) -> None:
            drafter = sequence.drafter
            assert drafter is not None
            _, sequences, outcomes = heard.setdefault(id(drafter), (drafter, [], []))
            sequences.append(sequence)
            outcomes.append(outcome)

        for sequence, tree, verdict in trees:
            if sequence.drafter is not None:
                tell(sequence, _of_tree(sequence, tree, verdict, scores, row))
            row += len(tree)
        for piece in pieces:
            if piece.sequence.drafter is not None:
                tell(piece.sequence, _of_piece(piece, scores, row))
            row += piece.rows
        for drafter, sequences, outcomes in heard.values():
            if not _done(drafter, "observe", partial(drafter.observe, outcomes)):
                self._restart(drafter, sequences)

    def _restart(self, drafter: Drafter, sequences: Seq[Sequence]) -> None:
        """Rewind a drafter after an exception. One that fails again is left out for the rest of the request, and so
        is one that lives on features: those of the tokens so far are gone."""
        for sequence in sequences:
            if not _done(drafter, "rewind", partial(drafter.rewind, sequence.id, 0)) or drafter.needs.features:
                self._part(sequence)

    def _part(self, sequence: Sequence) -> None:
        """Decode a sequence without its drafter from here on."""
        self.release(sequence)
        sequence.drafter = None
        sequence.record.failed = True


def _done(drafter: Drafter, what: str, call: Callable[[], None]) -> bool:
    """Whether a drafter did what it was called for. A drafter is anybody's code and may raise anything: that is one
    entry in the log with its traceback, and costs no request more than its drafts."""
    try:
        call()
    except Exception:
        log.exception("the drafter %s failed to %s", drafter.name, what)
        return False
    return True


def _of_tree(sequence: Sequence, tree: TokenTree, verdict: Verdict, scores: Scores, row: int) -> Outcome:
    rows = [row + node for node in verdict.path]
    return Outcome(
        id=sequence.id,
        start=sequence.filled - len(rows),
        rows=[tree.tokens[node] for node in verdict.path],
        accepted=len(rows) - 1,
        token=verdict.tokens[-1],
        features={layer: scores.features[layer][rows] for layer in features(sequence)},
        scored=_scored(sequence, tree, scores, row),
    )


def _of_piece(piece: Piece, scores: Scores, row: int) -> Outcome:
    sequence, end = piece.sequence, piece.start + piece.rows
    return Outcome(
        id=sequence.id,
        start=piece.start,
        rows=sequence.tokens[piece.start : end],
        accepted=0,
        token=sequence.tokens[end] if end < len(sequence.tokens) else None,
        features={layer: scores.features[layer][row : row + piece.rows] for layer in features(sequence)},
    )


def _scored(sequence: Sequence, tree: TokenTree, scores: Scores, row: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Each scored row's path below the root and its best ids, where the drafter declares top-k."""
    top = sequence.drafter.needs.top_k if sequence.drafter else 0
    if not top:
        return []
    best: list[list[int]] = sample.top(scores.logits[row : row + len(tree)], top).tolist()
    return [(tuple(tree.tokens[n] for n in tree.path(node)[1:]), best[node]) for node in range(len(tree))]
