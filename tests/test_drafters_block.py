"""A drafter of another kind: a model of its own fills a block of masks in one pass, its rows all seeing each other.

The protocol carries it: its batch sets ``visible`` freely, and its cost is a block.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from paceline import drafting
from paceline.batch import Batch
from paceline.drafters import Needs, Outcome, View
from paceline.pages import PagePool, PageTable
from paceline.targets.toy import ToyTarget
from paceline.tree import MAX_NODES, TokenTree
from tests.toys import VOCAB, ToyRun, alone, path_rule, same

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.pages import Slab
    from paceline.targets import Scores

RULE = path_rule(VOCAB, seed=81)
MASK = 300  # an id that no target emits
BLOCK = 8
PROMPT = list(b"side by side")


class BlockModel(ToyTarget):
    """Its row i of a block sees the committed tokens, and in the block all the masks, its own and the later ones too.

    What it is asked for is kept, so that the test can see that every row really read the whole block.
    """

    def __init__(self, answers: Mapping[int, Seq[int]], right: float) -> None:
        super().__init__(self._guess, VOCAB, 256)
        self.answers = answers
        self.dice = random.Random(3)
        self.right = right
        self.seen: list[list[int]] = []
        self.passes = 0
        self.asked = -1

    def forward(self, batch: Batch, slabs: Seq[Slab], features: Seq[int] = ()) -> Scores:
        self.passes += 1
        self.asked = -1
        return super().forward(batch, slabs, features)

    def _guess(self, path: list[int]) -> Tensor:
        """A block's rows come in order, so that the n-th call for one block is for its n-th row."""
        self.seen.append(path)
        known = [token for token in path if token != MASK]
        self.asked = self.asked + 1 if self.asked < BLOCK - 1 else 0
        answer = self.answers[known[0]]
        place = len(known) + self.asked
        if place >= len(answer) or self.dice.random() > self.right:
            return RULE([MASK, self.asked])
        return torch.nn.functional.one_hot(torch.tensor(answer[place]), VOCAB).float() * 50


@dataclass
class _Held:
    table: PageTable
    filled: int = 0


@dataclass
class BlockDrafter:
    """Commits the tokens so far and the block of masks in one pass; its cache keeps only committed rows."""

    model: BlockModel
    pool: PagePool
    name: str = "block"
    needs: Needs = field(default_factory=lambda: Needs(cost="block"))
    held: dict[int, _Held] = field(default_factory=dict)

    def start(self, view: View, valid: int) -> None:
        self.held[view.id] = _Held(PageTable(self.pool, 256 + MAX_NODES))

    def fork(self, parent: int, child: View) -> None:
        held = self.held[parent]
        self.held[child.id] = _Held(held.table.fork(held.filled), held.filled)

    def rewind(self, sequence: int, length: int) -> None:
        self.held[sequence].filled = min(self.held[sequence].filled, length)

    def release(self, sequence: int) -> None:
        held = self.held.pop(sequence, None)
        if held is not None:
            held.table.free()

    def length(self, sequence: int) -> int:
        return self.held[sequence].filled

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            assert self.held[outcome.id].filled <= outcome.start + len(outcome.rows)

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        # A block has one size, so that one pass serves all; the engine cuts what a budget does not allow.
        logits = self.model.forward(self._batch(views), [self.pool.slab]).logits
        trees = []
        for place, view in enumerate(views):
            self.held[view.id].filled = len(view.tokens)
            drafts: list[int] = []
            for row in logits[place * BLOCK : (place + 1) * BLOCK]:
                drafts += view.draw(row[None], [drafts])[0].tokens
            survival = [0.8**depth for depth in range(1, BLOCK + 1)]
            trees.append(TokenTree.chain(view.tokens[-1], drafts, survival, self.name))
        return trees

    def _batch(self, views: Seq[View]) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        storage: list[int] = []
        context: list[int] = []
        visible: list[int] = []
        score: list[int] = []
        tables: list[Tensor] = []
        for view in views:
            held, known = self.held[view.id], len(view.tokens)
            held.table.reserve(known + BLOCK)
            ids += [*view.tokens[held.filled :], *([MASK] * BLOCK)]
            positions += range(held.filled, known + BLOCK)
            storage += range(held.filled, known + BLOCK)
            context += [*range(held.filled + 1, known + 1), *([known] * BLOCK)]
            visible += [*([0] * (known - held.filled)), *([(1 << BLOCK) - 1] * BLOCK)]
            score += range(len(ids) - BLOCK, len(ids))
            starts.append(len(ids))
            tables.append(held.table.tensor)
        return Batch(
            ids=torch.tensor(ids),
            positions=torch.tensor(positions, dtype=torch.int32),
            starts=torch.tensor(starts, dtype=torch.int32),
            storage=torch.tensor(storage, dtype=torch.int32),
            context=torch.tensor(context, dtype=torch.int32),
            visible=torch.tensor(visible),
            tables=(torch.stack(tables),),
            score=torch.tensor(score),
        )


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("budget", [3, BLOCK, 20])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_block_is_drafted_in_one_pass_and_changes_nothing(budget: int, right: float, lag: int) -> None:
    prompts = [[n, *PROMPT] for n in range(3)]
    expected = [alone(RULE, p, seed=n, temperature=0.9, max_tokens=37) for n, p in enumerate(prompts)]
    answers = {n: [*p, *e.output] for n, (p, e) in enumerate(zip(prompts, expected, strict=True))}
    model = BlockModel(answers, right)
    drafter = BlockDrafter(model, PagePool(model.groups[0], 64))
    run = ToyRun(RULE, lag=lag)
    sequences = [
        run.add(
            p,
            drafter,
            seed=n,
            temperature=0.9,
            max_tokens=37,
            speculation={"num_speculative_tokens": budget},
        )
        for n, p in enumerate(prompts)
    ]
    while not run.engine.idle:
        run.engine.step()
        run.check()
        drafter.pool.check([held.table for held in drafter.held.values()])
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
        record = sequence.record
        assert record.method == "block"
        if right == 1.0:
            assert record.accepted == record.drafted
        if right == 0.7:
            assert 0 < record.accepted < record.drafted
        if right == 1.0 and budget >= BLOCK and not lag:
            assert record.steps == -(-36 // (BLOCK + 1))
    # Every row of a block read all the masks of the block, its own and the later ones, and one pass did all blocks.
    assert all(path.count(MASK) == BLOCK for path in model.seen)
    assert all(path[-BLOCK:] == [MASK] * BLOCK for path in model.seen)
    assert model.passes < sum(s.record.steps for s in sequences)
    assert drafter.pool.free == drafter.pool.pages
    assert not drafter.held
    run.check_empty()


def test_a_fork_of_a_block_drafter_goes_on_as_its_parent() -> None:
    expected = alone(RULE, PROMPT)
    model = BlockModel({PROMPT[0]: [*PROMPT, *expected.output]}, 1.0)
    drafter = BlockDrafter(model, PagePool(model.groups[0], 16))
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, drafter)
    run.engine.step()
    run.engine.step()
    view = drafting.view(sequence)
    twin = View(99, view.tokens, view.draw)
    drafter.fork(sequence.id, twin)
    first, second = drafter.propose([view, twin], [5, 5])
    assert first.tokens == second.tokens
    drafter.release(99)
    run.engine.cancel(sequence)
    assert drafter.pool.free == drafter.pool.pages
