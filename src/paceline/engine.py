"""The loop. Every forward pass verifies token trees and takes in pieces of prompts; there is no other way through."""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch

from paceline.batch import Rows
from paceline.drafters import Outcome, View
from paceline.errors import DrafterError, PacelineError
from paceline.pacer import Pacer
from paceline.record import Origin, Seconds, SpeculationRecord
from paceline.request import Sequence
from paceline.scheduler import Scheduler
from paceline.tree import TokenTree
from paceline.verify import Chooser, Verdict, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import Drafter
    from paceline.pages import PagePool
    from paceline.request import Request
    from paceline.sampling import LogitRules
    from paceline.scheduler import Piece, Plan
    from paceline.targets import Scores, Target
    from paceline.text import Detokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Decode:
    """One sequence's part of a pass: its tree, of at most ``budget`` drafted nodes."""

    sequence: Sequence
    tree: TokenTree
    budget: int


@dataclass
class _Pass:
    """What a forward pass did, until the host takes it over."""

    sequences: list[Sequence]
    decodes: list[tuple[_Decode, Verdict]] = field(default_factory=list)
    firsts: list[tuple[Piece, Verdict]] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)


class Engine:
    """Runs any number of sequences on one target.

    Args:
        target: scores the rows.
        pools: a page pool for each of the target's cache groups, in order.
        max_num_seqs: how many sequences run at once; the others wait.
        max_batch_tokens: how many rows of prompts and roots one pass takes.
        max_model_len: the longest sequence in tokens.
        pacer: decides how far to draft.
        lag: how many passes the host runs behind; the tokens are the same for any.
        clock: seconds, for the pacer and the records.
    """

    def __init__(
        self,
        target: Target,
        pools: Seq[PagePool],
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        pacer: Pacer | None = None,
        lag: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.pools = tuple(pools)
        self.scheduler = Scheduler(pools, max_num_seqs, max_batch_tokens, max_model_len, lag)
        self.pacer = pacer or Pacer()
        self.verifier = Verifier()
        self.clock = clock
        self._lag = lag
        self._slabs = [pool.slab for pool in self.pools]
        self._passes: deque[_Pass] = deque()
        self._stepping = False
        self._left: list[tuple[Sequence, str]] = []
        self._ids = count()

    def add(self, request: Request, rules: LogitRules, text: Detokenizer, drafter: Drafter | None = None) -> Sequence:
        """Queue a request.

        Raises:
            ResourceError: the whole cache is too small for it.
        """
        tokens = list(request.prompt)
        sequence = Sequence(
            id=next(self._ids),
            request=request,
            text=text,
            choose=Chooser(request, rules, tokens),
            record=SpeculationRecord(
                drafter.name if drafter else "none",
                request.seed,
                self.verifier.lossless,
                origins=[] if request.origins else None,
            ),
            drafter=drafter,
            tokens=tokens,
            delivered=len(tokens),
        )
        self.scheduler.add(sequence)
        self.pacer.start(sequence.id)
        if drafter is not None:
            try:
                drafter.start(self._view(sequence), 0)
            except Exception:
                log.exception("the drafter %s failed to start; the request goes on without it", drafter.name)
                self._part(sequence)
            except BaseException as error:
                self._fail(sequence, error)
                raise
        return sequence

    def cancel(self, sequence: Sequence, reason: str = "abort") -> None:
        """End a sequence and free all that it holds: now, or where a step is in the middle of it, with that step."""
        if self._stepping:
            self._left.append((sequence, reason))
        elif sequence.finish_reason is None:
            self._finish(sequence, reason)

    @property
    def idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting or self._passes)

    def step(self) -> list[Sequence]:
        """Plan, propose, verify, commit; returns the sequences that the host has news of.

        A request whose rules leave no token, or whose logits are no numbers, ends alone, with its ``error``. What the
        target raises is raised: such a step leaves what it worked on half committed, so every running sequence has
        then ended with that ``error``.
        """
        try:
            self._stepping = True
            return self._step()
        except BaseException as error:
            for sequence in list(self.scheduler.running):
                self._fail(sequence, error)
            raise
        finally:
            self._stepping = False
            while self._left:
                self.cancel(*self._left.pop())

    def _step(self) -> list[Sequence]:
        started = self.clock()
        plan = self.scheduler.plan()
        if plan:
            with _one_torch_thread():
                decodes = self._propose(plan)
            proposed = self.clock()
            scores = self._forward(decodes, plan.pieces)
            scored = self.clock()
            with _one_torch_thread():
                done = self._accept(decodes, plan.pieces, scores)
                accepted = self.clock()
                self._observe(done, plan.pieces, scores)
            self._pace(done, plan, proposed - started, scored - proposed, accepted - scored)
            self._passes.append(done)
            done.seconds.other = self.clock() - accepted
        behind = self._lag if plan else 0
        news: dict[int, Sequence] = {}
        while len(self._passes) > behind:
            for sequence in self._deliver(self._passes.popleft()):
                news[sequence.id] = sequence
        return list(news.values())

    def _propose(self, plan: Plan) -> list[_Decode]:
        """A tree for each decoding sequence: the root alone unless drafting pays."""
        ceilings = [
            min(room, sequence.request.speculation.num_speculative_tokens) if sequence.drafter else 0
            for sequence, room in plan.decodes
        ]
        sequences = [sequence for sequence, _ in plan.decodes]
        budgets = self._budgets(sequences, ceilings, not plan.pieces)
        trees = {sequence.id: TokenTree.root(sequence.tokens[-1]) for sequence in sequences}
        asked: dict[int, list[tuple[Sequence, int]]] = {}
        for sequence, budget in zip(sequences, budgets, strict=True):
            if budget:
                sequence.record.asked += 1
                asked.setdefault(id(sequence.drafter), []).append((sequence, budget))
        for group in asked.values():
            trees.update(self._ask(group))
        decodes = [_Decode(s, trees[s.id], budget) for s, budget in zip(sequences, budgets, strict=True)]
        for decode in decodes:
            decode.sequence.in_flight += decode.budget + 1
        return decodes

    def _budgets(self, sequences: Seq[Sequence], ceilings: Seq[int], measured: bool) -> list[int]:
        paced: list[tuple[int, str, int]] = []
        beside = 0
        for sequence, ceiling in zip(sequences, ceilings, strict=True):
            if sequence.drafter and sequence.request.speculation.adaptive:
                paced.append((sequence.id, sequence.drafter.name, ceiling))
            else:
                beside += 1 + ceiling
        budgets = self.pacer.budgets(paced, beside, measured)
        chosen = {wish[0]: budget for wish, budget in zip(paced, budgets, strict=True)}
        return [chosen.get(s.id, ceiling) for s, ceiling in zip(sequences, ceilings, strict=True)]

    def _ask(self, group: Seq[tuple[Sequence, int]]) -> dict[int, TokenTree]:
        """One drafter's trees, cut to their budgets; what cannot be verified is left out with a line in the log."""
        drafter = group[0][0].drafter
        assert drafter is not None
        started, asked = self.clock(), sum(budget for _, budget in group)
        try:
            trees = drafter.propose([self._view(s) for s, _ in group], [budget for _, budget in group])
            if len(trees) != len(group):
                raise DrafterError(f"{len(trees)} token trees were proposed for {len(group)} sequences.")
        except Exception:
            log.exception("the drafter %s failed; this step goes on without it", drafter.name)
            self.pacer.learn_draft(drafter.name, asked, 0, self.clock() - started)
            self._restart(drafter, [sequence for sequence, _ in group])
            return {}
        usable: dict[int, TokenTree] = {}
        for (sequence, budget), tree in zip(group, trees, strict=True):
            try:
                tree.check(self.target.vocab_size)
                if tree.tokens[0] != sequence.tokens[-1]:
                    raise DrafterError("the root of a token tree is the last committed token.")
                usable[sequence.id] = self.pacer.select(tree, budget)
            except Exception as error:
                log.warning("a token tree of the drafter %s is left out: %s", drafter.name, error)
        given = sum(len(tree) - 1 for tree in usable.values())
        self.pacer.learn_draft(drafter.name, asked, given, self.clock() - started)
        return usable

    def _forward(self, decodes: Seq[_Decode], pieces: Seq[Piece]) -> Scores:
        for decode in decodes:
            sequence = decode.sequence
            self.scheduler.reserve(sequence, sequence.delivered - 1, sequence.reach)
        for piece in pieces:
            self.scheduler.reserve(piece.sequence, piece.start, piece.start + piece.rows)
            piece.sequence.planned += piece.rows
            piece.sequence.in_flight += piece.ends_prompt
        rows = Rows()
        for decode in decodes:
            rows.tree(decode.tree, decode.sequence.filled, decode.sequence.tables)
        for piece in pieces:
            tokens = piece.sequence.tokens[piece.start : piece.start + piece.rows]
            rows.piece(tokens, piece.start, piece.sequence.tables, piece.scored)
        layers = {layer for d in decodes for layer in _features(d.sequence)}
        layers |= {layer for p in pieces for layer in _features(p.sequence)}
        return self.target.forward(rows.batch(), self._slabs, sorted(layers))

    def _accept(self, decodes: Seq[_Decode], pieces: Seq[Piece], scores: Scores) -> _Pass:
        """Judge every tree and commit what is accepted; a piece of a prompt is accepted by force."""
        done = _Pass([*(decode.sequence for decode in decodes), *(piece.sequence for piece in pieces)])
        row = 0
        for decode in decodes:
            sequence, nodes = decode.sequence, len(decode.tree)
            verdict = self._judge(sequence, decode.tree, scores.logits[row : row + nodes])
            row += nodes
            done.decodes.append((decode, verdict))
            if sequence.error is not None:
                continue
            for table in sequence.tables:
                table.commit(sequence.filled, verdict.path)
            sequence.filled += len(verdict.path)
            sequence.tokens += verdict.tokens
        for piece in pieces:
            sequence, scored = piece.sequence, piece.scored
            logits = scores.logits[row : row + scored]
            row += scored
            sequence.filled += piece.rows
            verdict = self._judge_piece(piece, logits)
            if piece.ends_prompt or sequence.error is not None:
                done.firsts.append((piece, verdict))
            if sequence.error is None:
                sequence.tokens += verdict.tokens
        return done

    def _judge(self, sequence: Sequence, tree: TokenTree, logits: Tensor) -> Verdict:
        """What is accepted of a tree. A sequence of which nothing can be said ends here, and its neighbours go on."""
        try:
            return self.verifier.accept(sequence, tree, logits)
        except PacelineError as error:
            self._fail(sequence, error)
            return Verdict.nothing()

    def _judge_piece(self, piece: Piece, logits: Tensor) -> Verdict:
        """Score what is asked for of a prompt, and draw the token behind its end where one may follow."""
        sequence = piece.sequence
        if sequence.request.sampling.prompt_logprobs is not None:
            try:
                sequence.score_prompt(piece, logits)
            except PacelineError as error:
                self._fail(sequence, error)
                return Verdict.nothing()
        if piece.ends_prompt and sequence.request.limit > sequence.prompt_length:
            return self._judge(sequence, TokenTree.root(sequence.tokens[-1]), logits[piece.scored - 1 :])
        return Verdict.nothing()

    def _observe(self, done: _Pass, pieces: Seq[Piece], scores: Scores) -> None:
        """Tell every drafter what was committed."""
        heard: dict[int, tuple[Drafter, list[Sequence], list[Outcome]]] = {}

        def tell(sequence: Sequence, drafter: Drafter, outcome: Outcome) -> None:
            _, sequences, outcomes = heard.setdefault(id(drafter), (drafter, [], []))
            sequences.append(sequence)
            outcomes.append(outcome)

        row = 0
        for decode, verdict in done.decodes:
            sequence = decode.sequence
            if sequence.drafter is not None:
                rows = [row + node for node in verdict.path]
                outcome = Outcome(
                    id=sequence.id,
                    start=sequence.filled - len(rows),
                    rows=[decode.tree.tokens[node] for node in verdict.path],
                    accepted=len(rows) - 1,
                    token=verdict.tokens[-1],
                    features={layer: scores.features[layer][rows] for layer in _features(sequence)},
                    scored=_scored(sequence, decode.tree, scores, row),
                )
                tell(sequence, sequence.drafter, outcome)
            row += len(decode.tree)
        for piece in pieces:
            sequence = piece.sequence
            if sequence.drafter is not None:
                end = piece.start + piece.rows
                outcome = Outcome(
                    id=sequence.id,
                    start=piece.start,
                    rows=sequence.tokens[piece.start : end],
                    accepted=0,
                    token=sequence.tokens[end] if end < len(sequence.tokens) else None,
                    features={layer: scores.features[layer][row : row + piece.rows] for layer in _features(sequence)},
                )
                tell(sequence, sequence.drafter, outcome)
            row += piece.rows
        for drafter, sequences, outcomes in heard.values():
            try:
                drafter.observe(outcomes)
            except Exception:
                log.exception("the drafter %s failed to observe; it starts again from nothing", drafter.name)
                self._restart(drafter, sequences)

    def _restart(self, drafter: Drafter, sequences: Seq[Sequence]) -> None:
        """Rewind a drafter after an exception. One that fails again is left out for the rest of the request, and so
        is one that lives on features: those of the tokens so far are gone."""
        for sequence in sequences:
            try:
                drafter.rewind(sequence.id, 0)
            except Exception:
                log.exception("the drafter %s failed to rewind; the request goes on without it", drafter.name)
                self._part(sequence)
            else:
                if drafter.needs.features:
                    self._part(sequence)

    def _part(self, sequence: Sequence) -> None:
        """Decode a sequence without its drafter from here on."""
        self._release(sequence)
        sequence.drafter = None
        sequence.record.failed = True

    def _release(self, sequence: Sequence) -> None:
        drafter = sequence.drafter
        if drafter is not None:
            try:
                drafter.release(sequence.id)
            except Exception:
                log.exception("the drafter %s failed to release a sequence", drafter.name)

    def _pace(self, done: _Pass, plan: Plan, draft: float, verify: float, sample: float) -> None:
        done.seconds = Seconds(draft, verify, sample)
        if not plan.pieces:
            self.pacer.learn_step(sum(len(d.tree) for d, _ in done.decodes), verify + sample)
        for decode, verdict in done.decodes:
            if decode.sequence.error is not None:
                continue
            self.pacer.learn_outcome(decode.sequence.id, len(verdict.path) - 1, verdict.missed)

    def _deliver(self, done: _Pass) -> list[Sequence]:
        """Take over what a pass committed: text, stop rules, records, all cut at one and the same token."""
        news = []
        for sequence in done.sequences:
            if sequence.finish_reason is None:
                sequence.record.seconds.add(done.seconds, 1 / len(done.sequences))
        for decode, verdict in done.decodes:
            sequence = decode.sequence
            sequence.in_flight -= decode.budget + 1
            if sequence.finish_reason is None:
                emitted = self._emit(sequence, decode.tree, verdict, sequence.record.steps + 1)
                accepted = min(len(verdict.path) - 1, emitted)
                missed = verdict.missed and emitted > accepted
                sequence.record.judge(len(decode.tree) - 1, accepted, missed)
                news.append(sequence)
            elif sequence.error is not None:
                news.append(sequence)
        for piece, verdict in done.firsts:
            sequence = piece.sequence
            sequence.in_flight -= 1
            if sequence.finish_reason is None:
                self._emit(sequence, TokenTree.root(sequence.request.prompt[-1]), verdict, 0)
                if sequence.delivered >= sequence.request.limit and sequence.finish_reason is None:
                    self._finish(sequence, "length")
                news.append(sequence)
            elif sequence.error is not None:
                news.append(sequence)
        return news

    def _emit(self, sequence: Sequence, tree: TokenTree, verdict: Verdict, step: int) -> int:
        """Emit a verdict's tokens one by one until one of them ends the answer; returns how many were emitted."""
        origins = sequence.record.origins
        for place, token in enumerate(verdict.tokens):
            reason = sequence.take(token)
            if verdict.logprobs:
                sequence.logprobs.append(verdict.logprobs[place])
            drafted = place + 1 < len(verdict.path)
            sequence.sources.append(tree.origin[verdict.path[place + 1]] if drafted else "target")
            if origins is not None:
                probability = verdict.probabilities[place] if verdict.probabilities else None
                origins.append(Origin(sequence.sources[-1], step, place + 1 if drafted else 0, probability))
            if reason is not None:
                self._finish(sequence, reason)
                return place + 1
        return len(verdict.tokens)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        sequence.text.finish()
        del sequence.tokens[sequence.delivered :]
        self.scheduler.remove(sequence)
        self.pacer.release(sequence.id)
        self._release(sequence)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """End a sequence for what it, or the step, has met; it may be half ended already."""
        sequence.error = error
        self._finish(sequence, sequence.finish_reason or "abort")
        sequence.drafter = None

    def _view(self, sequence: Sequence) -> View:
        return View(sequence.id, sequence.tokens, sequence.choose, sequence.request.cache_salt)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep torch to one thread: over a row of logits its own threads cost more than they bring, and when they wait
    they take the cores from the kernels' threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _features(sequence: Sequence) -> tuple[int, ...]:
    return sequence.drafter.needs.features if sequence.drafter else ()


def _scored(sequence: Sequence, tree: TokenTree, scores: Scores, row: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """Each scored row's path below the root and its best ids, where the drafter declares top-k."""
    top = sequence.drafter.needs.top_k if sequence.drafter else 0
    if not top:
        return []
    best = scores.logits[row : row + len(tree)].topk(top).indices
    return [(tuple(tree.tokens[n] for n in tree.path(node)[1:]), best[node]) for node in range(len(tree))]
