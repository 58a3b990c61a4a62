"""The loop. Every forward pass verifies token trees and takes in pieces of prompts; there is no other way through."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from paceline.acceptance import RULES
from paceline.batch import Rows
from paceline.bounds import Bounds, Gate
from paceline.choose import Chooser
from paceline.drafting import Drafting
from paceline.errors import PacelineError
from paceline.outcomes import features
from paceline.pacer import Pacer
from paceline.prefix import Chain, PrefixIndex
from paceline.record import Origin, Seconds, SpeculationRecord
from paceline.request import Sequence
from paceline.scheduler import Scheduler
from paceline.torch_threads import ONE_TORCH_THREAD
from paceline.tree import TokenTree
from paceline.verify import Verdict, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import Drafter
    from paceline.pages import PagePool
    from paceline.plan import Piece, Plan
    from paceline.request import Request
    from paceline.sampling import LogitRules
    from paceline.targets import Scores, Target
    from paceline.text import Detokenizer


@dataclass(frozen=True)
class _Decode:
    """One sequence's part of a pass."""

    sequence: Sequence
    tree: TokenTree


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
        model: what tells this model, its weights and formats from any other; pages are shared within it alone.
        prefix_caching: whether requests that begin alike share what is computed for the beginning.
        bounds: over which requests are refused.
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
        model: str = "",
        prefix_caching: bool = True,
        bounds: Bounds | None = None,
        pacer: Pacer | None = None,
        lag: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.pools = tuple(pools)
        self.pacer = pacer or Pacer()
        self.verifier = Verifier()
        self.drafting = Drafting(target.vocab_size, self.pacer, clock)
        self.scheduler = Scheduler(
            pools,
            self.drafting,
            max_num_seqs,
            max_batch_tokens,
            max_model_len,
            lag,
            PrefixIndex(pools) if prefix_caching else None,
            Gate(bounds or Bounds(), max_num_seqs, clock),
        )
        self._model = model
        self.clock = clock
        self._lag = lag
        self._slabs = [pool.slab for pool in self.pools]
        self._passes: deque[_Pass] = deque()
        self._stepping = False
        self._left: list[tuple[Sequence, str]] = []
        self._ids = count()

    def add(
        self,
        request: Request,
        rules: LogitRules,
        text: Detokenizer,
        drafter: Drafter | None = None,
        leader: Sequence | None = None,
    ) -> Sequence:
        """Queue a request; ``leader`` is another one for the same prompt, which is computed once for both.

        Raises:
            ResourceError: the whole cache is too small for it.
            OverloadedError: too much is there already.
        """
        tokens = list(request.prompt)
        rule = RULES.get(request.rule)
        wish = drafter.needs.wish if drafter else None
        sequence = Sequence(
            id=next(self._ids),
            request=request,
            text=text,
            choose=Chooser(request, rules, tokens, rule),
            record=SpeculationRecord(
                drafter.name if drafter else "none",
                request.seed,
                rule.lossless if rule else "bits",
                origins=[] if request.origins else None,
                lacking=wish if wish and not getattr(request, wish) else None,
            ),
            drafter=drafter,
            chain=Chain.of(tokens, self._model, request.cache_salt),
            leader=leader if request.sampling.prompt_logprobs is None else None,
            tokens=tokens,
            delivered=len(tokens),
        )
        self.scheduler.add(sequence)
        try:
            self.drafting.open(sequence)
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

    def forget(self) -> None:
        """Forget what was measured, and computed of earlier requests that later ones could share."""
        self.pacer.forget()
        self.scheduler.forget()

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
            while self._passes:
                self._deliver(self._passes.popleft())
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
        news = {sequence.id: sequence for sequence in self._turn_away()}
        if plan:
            with ONE_TORCH_THREAD:
                decodes = self._propose(plan)
            proposed = self.clock()
            scores = self._forward(decodes, plan.pieces)
            scored = self.clock()
            with ONE_TORCH_THREAD:
                done = self._accept(decodes, plan.pieces, scores)
                accepted = self.clock()
                judged = ((decode.sequence, decode.tree, verdict) for decode, verdict in done.decodes)
                self.drafting.observe(judged, plan.pieces, scores)
                observed = self.clock()
            draft = proposed - started + observed - accepted
            done.seconds = Seconds(draft, scored - proposed, accepted - scored)
            self.drafting.learn(((d.sequence, verdict) for d, verdict in done.decodes), accepted - proposed)
            self._passes.append(done)
            done.seconds.other = self.clock() - observed
        behind = self._lag if plan else 0
        while len(self._passes) > behind:
            for sequence in self._deliver(self._passes.popleft()):
                news[sequence.id] = sequence
        return list(news.values())

    def _turn_away(self) -> list[Sequence]:
        """End those that have waited too long, and for whom there was no room now either."""
        late = self.scheduler.gate.late()
        for sequence, error in late:
            self._fail(sequence, error)
        return [sequence for sequence, _ in late]

    def _propose(self, plan: Plan) -> list[_Decode]:
        """A tree for each decoding sequence."""
        trees = self.drafting.propose(plan)
        decodes = [_Decode(sequence, tree) for (sequence, _), tree in zip(plan.decodes, trees, strict=True)]
        for decode in decodes:
            decode.sequence.in_flight += len(decode.tree)
        return decodes

    def _forward(self, decodes: Seq[_Decode], pieces: Seq[Piece]) -> Scores:
        for decode in decodes:
            sequence = decode.sequence
            self.scheduler.reserve(sequence, sequence.reach - 1)
        for piece in pieces:
            piece.sequence.planned += piece.rows
            piece.sequence.in_flight += piece.draws
        rows = Rows()
        for decode in decodes:
            rows.tree(decode.tree, decode.sequence.filled, decode.sequence.tables)
        for piece in pieces:
            tokens = piece.sequence.tokens[piece.start : piece.start + piece.rows]
            rows.piece(tokens, piece.start, piece.sequence.tables, piece.scored)
        layers = {layer for d in decodes for layer in features(d.sequence)}
        layers |= {layer for p in pieces for layer in features(p.sequence)}
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
            if piece.draws or verdict.error is not None:
                done.firsts.append((piece, verdict))
            sequence.tokens += verdict.tokens
        return done

    def _judge(self, sequence: Sequence, tree: TokenTree, logits: Tensor) -> Verdict:
        """What is accepted of a tree. A sequence of which nothing can be said ends with this pass, once those before
        it are delivered, and its neighbours go on."""
        try:
            return self.verifier.accept(sequence, tree, logits)
        except PacelineError as error:
            return Verdict.nothing(error)

    def _judge_piece(self, piece: Piece, logits: Tensor) -> Verdict:
        """Score what is asked for of a prompt, and draw the token behind its end where one may follow."""
        sequence = piece.sequence
        if piece.scored and sequence.request.sampling.prompt_logprobs is not None:
            try:
                sequence.score_prompt(piece.start + piece.rows - piece.scored, logits)
            except PacelineError as error:
                return Verdict.nothing(error)
        if piece.draws and sequence.request.limit > sequence.prompt_length:
            return self._judge(sequence, TokenTree.root(sequence.tokens[-1]), logits[-1:])
        return Verdict.nothing()

    def _deliver(self, done: _Pass) -> list[Sequence]:
        """Take over what a pass committed: text, stop rules, records, all cut at one and the same token."""
        news: list[Sequence] = []
        for sequence in done.sequences:
            if sequence.finish_reason is None:
                sequence.record.seconds.add(done.seconds, 1 / len(done.sequences))
        for decode, verdict in done.decodes:
            sequence = decode.sequence
            sequence.in_flight -= len(decode.tree)
            if verdict.error is not None:
                self._break_off(sequence, verdict.error, news)
            elif sequence.finish_reason is None:
                emitted = self._emit(sequence, decode.tree, verdict, sequence.record.steps + 1)
                accepted = min(len(verdict.path) - 1, emitted)
                missed = verdict.missed and emitted > accepted
                sequence.record.judge(len(decode.tree) - 1, accepted, missed)
                news.append(sequence)
        for piece, verdict in done.firsts:
            sequence = piece.sequence
            sequence.in_flight -= piece.draws
            if verdict.error is not None:
                self._break_off(sequence, verdict.error, news)
            elif sequence.finish_reason is None:
                self._emit(sequence, TokenTree.root(sequence.request.prompt[-1]), verdict, 0)
                if sequence.delivered >= sequence.request.limit and sequence.finish_reason is None:
                    self._finish(sequence, "length")
                news.append(sequence)
        return news

    def _break_off(self, sequence: Sequence, error: PacelineError, news: list[Sequence]) -> None:
        """End a sequence of which a pass could say nothing, unless it has ended before."""
        if sequence.finish_reason is None:
            self._fail(sequence, error)
            news.append(sequence)

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
        self.drafting.close(sequence)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """End a sequence for what it, or the step, has met; it may be half ended already."""
        sequence.error = error
        self._finish(sequence, sequence.finish_reason or "abort")
        sequence.drafter = None
