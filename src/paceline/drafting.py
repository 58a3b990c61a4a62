"""Asking drafters and telling them; whatever one of them does wrong costs its drafts and nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.acceptance.rule import drafted
from paceline.budget import Draft
from paceline.cost import Load
from paceline.drafters import View
from paceline.errors import DrafterError
from paceline.outcomes import of_piece, of_tree
from paceline.tree import MAX_NODES, Dropping, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from paceline.drafters import Drafter, Outcome
    from paceline.pacer import Pacer
    from paceline.plan import Piece, Plan
    from paceline.price import Price
    from paceline.request import Sequence
    from paceline.targets import Scores
    from paceline.trace import Trace
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
        delivered=sequence.delivered,
    )


class Drafting:
    """Stands between the engine and the drafters of its sequences.

    Args:
        vocab_size: ids below it may be drafted.
        pacer: learns what drafters take and give.
        clock: seconds.

    Attributes:
        trace: where steps are written down, if anywhere.
    """

    def __init__(self, vocab_size: int, pacer: Pacer, clock: Callable[[], float]) -> None:
        self._vocab_size = vocab_size
        self._pacer = pacer
        self._clock = clock
        self.trace: Trace | None = None
        self._load = Load(0)

    def open(self, sequence: Sequence) -> None:
        """A request has come."""
        number = self._pacer.prices.of(sequence.drafter).number if sequence.drafter else -1
        self._pacer.start(sequence.id, sequence.request.cache_salt, number)

    def close(self, sequence: Sequence) -> None:
        """A request has ended: take leave of it, and note what was learned."""
        habits = self._pacer.release(sequence.id)
        if habits is not None:
            record = sequence.record
            record.collapsed, record.fallen, record.drafters = habits.collapsed, habits.low, habits.summary()
        drafter = sequence.drafter
        if drafter is not None and drafter.needs.ended is not None:
            _done(drafter, "learn from an answer", partial(drafter.needs.ended, view(sequence)))
        self.release(sequence)

    def start(self, sequence: Sequence, valid: int) -> int:
        """Introduce a sequence that is to run to its drafter, ``valid`` rows of which others have computed.

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
        """Take leave of a sequence that does not run any more."""
        drafter = sequence.drafter
        if drafter is not None:
            _done(drafter, "release a sequence", lambda: drafter.release(sequence.id))

    def propose(self, plan: Plan) -> list[TokenTree]:
        """A tree for each decoding sequence: the root alone unless drafting pays."""
        drafts = [_draft(sequence, room) for sequence, room in plan.decodes]
        sequences = [sequence for sequence, _ in plan.decodes]
        free: dict[int, list[int]] = {}
        fixed: dict[int, list[int]] = {}
        for place, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            if sequence.drafter is not None and draft.ceiling > 0:
                groups = free if sequence.request.paced else fixed
                groups.setdefault(id(sequence.drafter), []).append(place)
        for places in fixed.values():
            self._fixed([sequences[place] for place in places], [drafts[place] for place in places])
        load = _load(plan, drafts)
        for places in free.values():
            self._paced([sequences[place] for place in places], [drafts[place] for place in places], load)
        if free:
            self._select([draft for draft in drafts if draft.parts], _load(plan, drafts))
            load = _load(plan, drafts)
        self._load = load
        return [draft.tree for draft in drafts]

    def _select(self, drafts: Seq[Draft], load: Load) -> None:
        """Keep of trees what is worth its rows."""
        if not drafts:
            return
        selected = self._pacer.select(drafts, load, Dropping())
        if self.trace is not None:
            self.trace.chosen(drafts, selected)
        for draft, tree in zip(drafts, selected, strict=True):
            draft.tree = tree
            draft.parts.clear()

    def _fixed(self, sequences: Seq[Sequence], drafts: Seq[Draft]) -> None:
        """Draft as much as is allowed. What is measured may not decide what is verified here; it is weighed for what
        it teaches."""
        drafter = sequences[0].drafter
        assert drafter is not None
        trees = self._ask(drafter, sequences, [draft.ceiling for draft in drafts])
        for sequence, draft, tree in zip(sequences, drafts, trees, strict=True):
            sequence.record.asked += 1
            dropping = sequence.choose.dropping
            tree = tree if dropping is None else tree.best(draft.ceiling + 1, dropping)
            draft.tree = self._pacer.weigh(sequence.id, tree)

    def _paced(self, sequences: Seq[Sequence], drafts: Seq[Draft], load: Load) -> None:
        """Ask the members of a drafter one by one, each for what pays given what those before it said."""
        drafter = sequences[0].drafter
        assert drafter is not None
        asked: set[int] = set()
        for member in drafter.needs.members or (drafter,):
            price = self._pacer.prices.of(member)
            budgets = self._pacer.budgets(price, drafts, load)
            places = [place for place, budget in enumerate(budgets) if budget and sequences[place].drafter]
            if not places:
                continue
            asked.update(places)
            trees = self._ask(member, [sequences[place] for place in places], [budgets[place] for place in places])
            for place, tree in zip(places, trees, strict=True):
                self._add(sequences[place], drafts[place], price, tree)
        for place in asked:
            sequences[place].record.asked += 1

    def _add(self, sequence: Sequence, draft: Draft, price: Price, tree: TokenTree) -> None:
        """Put a member's tree to what is there."""
        dropping, before = sequence.choose.dropping, len(draft.tree)
        habit = self._pacer.habits(sequence.id).of(price)
        if dropping is None:  # nothing may be dropped, and only one drafter is asked
            habit.pays(len(tree) - 1, 0.0)
            draft.tree = self._pacer.weigh(sequence.id, tree)
            return
        if len(tree) > draft.ceiling + 1:
            tree = tree.best(draft.ceiling + 1, dropping)
        if before + len(tree) > MAX_NODES + 1:
            # Who drafted what of the nodes before is lost with their places, and so is one lesson.
            draft.tree = draft.tree.best(max(MAX_NODES + 1 - len(tree), MAX_NODES // 2), dropping)
            draft.parts.clear()
            before = 1
        if before == 1 and not draft.parts and len(draft.tree) == 1:
            draft.tree = tree
        else:
            draft.tree.merge(tree)
        draft.parts.append((habit, before, len(draft.tree)))
        draft.tree = self._pacer.weigh(sequence.id, draft.tree, before)

    def _ask(self, drafter: Drafter, sequences: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        """One drafter's trees; what cannot be verified is left out with a line in the log, and the root is there."""
        whole = sequences[0].drafter
        assert whole is not None
        started = self._clock()
        proposed: list[TokenTree] = []

        def propose() -> None:
            proposed[:] = drafter.propose([view(sequence) for sequence in sequences], budgets)
            if len(proposed) != len(sequences):
                raise DrafterError(f"{len(proposed)} token trees were proposed for {len(sequences)} sequences.")

        if not _done(whole, "propose", propose):
            proposed.clear()
            self._restart(whole, sequences)
        trees = [TokenTree.root(sequence.tokens[-1]) for sequence in sequences]
        for place, tree in enumerate(proposed):
            check = partial(self._check, sequences[place], tree, budgets[place])
            if _done(whole, "propose a tree that can be verified", check):
                trees[place] = tree
        asked = [(sequence.id, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        self._pacer.learn_draft(self._pacer.prices.of(drafter), asked, trees, self._clock() - started)
        return trees

    def learn(self, judged: Iterable[tuple[Sequence, Verdict]], seconds: float) -> None:
        """The step whose trees were proposed last took so long, drafting not counted, and gave these verdicts."""
        if self.trace is not None:
            self.trace.step(self._load, self._pacer.cost(self._load), seconds)
        self._pacer.learn_step(self._load, seconds)
        for sequence, verdict in judged:
            if verdict.error is None and sequence.finish_reason is None:
                self._pacer.learn_outcome(sequence.id, verdict.tokens)

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
            outcomes.append(replace(outcome, delivered=sequence.delivered))

        for sequence, tree, verdict in trees:
            if sequence.drafter is not None and verdict.error is None:
                tell(sequence, of_tree(sequence, tree, verdict, scores, row))
            row += len(tree)
        for piece in pieces:
            if piece.sequence.drafter is not None:
                tell(piece.sequence, of_piece(piece, scores, row))
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


def _draft(sequence: Sequence, room: int) -> Draft:
    """The root alone, where at most ``room`` nodes are allowed for."""
    ceiling = min(room, sequence.request.ceiling) if sequence.drafter is not None else 0
    return Draft(sequence.id, ceiling, TokenTree.root(sequence.tokens[-1]), sequence.filled)


def _load(plan: Plan, drafts: Seq[Draft]) -> Load:
    """What a pass has to do with these trees; of those that are still to be cut the roots alone."""
    rows = [1 if draft.parts else len(draft.tree) for draft in drafts]
    pieces = sum(piece.rows for piece in plan.pieces)
    read = sum(draft.context for draft in drafts) + sum(piece.start + piece.rows for piece in plan.pieces)
    seen = sum(draft.context * nodes for draft, nodes in zip(drafts, rows, strict=True))
    seen += sum(piece.rows * (piece.start + piece.rows // 2) for piece in plan.pieces)
    return Load(sum(rows), len(drafts), pieces, read, seen)
