"""A draft model on a toy target, and how its books are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.pages import PagePool
from tests.toys import VOCAB, StrictTarget, ToyRun, path_rule

if TYPE_CHECKING:
    from paceline.bridges import Bridge
    from paceline.request import Sequence
    from paceline.shape import TreeShape
    from paceline.targets import Target

RULE = path_rule(VOCAB, seed=71)
OTHER = path_rule(VOCAB, seed=72)
PROMPT = list(b"the one behind saves a third")


def half_right(path: list[int]) -> Any:
    """The target's own logits at every second place, roughly, another table's at the others."""
    return RULE(path) if sum(path) % 2 else OTHER(path)


class Draft:
    """A draft model with a cache of its own, whose books are checked after every step."""

    def __init__(
        self,
        model: Target,
        pages: int = 64,
        max_model_len: int = 256,
        vocabularies: Bridge | None = None,
        tree: int | TreeShape = 1,
    ) -> None:
        self.model = model
        self.pools = [PagePool(group, pages) for group in model.groups]
        self.drafter = DraftModelDrafter(model, self.pools, max_model_len, vocabularies, tree)

    def check(self, sequences: list[Sequence]) -> None:
        states = self.drafter._states
        for place, pool in enumerate(self.pools):
            pool.check([state.tables[place] for state in states.values()])
        running = {s.id: s for s in sequences if s.finish_reason is None}
        assert set(states) == set(running)
        for number, state in states.items():
            # Between steps nothing is pending, and what has keys are committed tokens, the last one never among them.
            assert state.held == []
            tokens, ids = running[number].tokens, state.reading.ids
            assert state.filled < len(tokens) if ids is tokens else state.filled <= len(ids)
            assert self.drafter.length(number) <= len(tokens)
            if isinstance(self.model, StrictTarget) and self.model.groups[0].window is None:
                assert self.held(number, state.filled) == list(ids[: state.filled])

    def held(self, number: int, rows: int) -> list[int]:
        """The tokens that the toy's cache holds for a sequence."""
        table, slab = self.drafter._states[number].tables[0].tensor, self.pools[0].slab
        return [int(slab.keys[int(table[row // 16]), 0, 0, 0, row % 16]) for row in range(rows)]

    def check_empty(self) -> None:
        assert not self.drafter._states
        assert [pool.free for pool in self.pools] == [pool.pages for pool in self.pools]


def ride(run: ToyRun, draft: Draft, sequences: list[Sequence]) -> None:
    while any(sequence.finish_reason is None for sequence in sequences):
        run.engine.step()
        run.check()
        draft.check(sequences)
    run.check_empty()
    draft.check_empty()
