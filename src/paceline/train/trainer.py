"""From texts to a head, in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.heads.head import Provenance
from paceline.train.eagle import EagleObjective
from paceline.train.examples import frequent_ids
from paceline.train.features import Features
from paceline.train.judge import Judge
from paceline.train.loop import Progress, Training
from paceline.train.medusa import MedusaObjective
from paceline.train.pack import Reader
from paceline.train.shared import Shared
from paceline.train.start import new_head

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.targets.load import Loaded
    from paceline.train.examples import Example
    from paceline.train.judge import Against
    from paceline.train.recipe import Recipe


def train_head(
    kind: HeadKind,
    target: Loaded,
    examples: Sequence[Example],
    recipe: Recipe,
    *,
    columns: int = 8192,
    depth: int = 3,
    rows: int = 1024,
    against: Against = "tokens",
    report: Callable[[Progress], None] | None = None,
) -> Head:
    """Train a new head for ``target``, all in memory.

    Args:
        columns: the size of the draft vocabulary of EAGLE-3 and Medusa heads, at most all ids; EAGLE-1 and 2 draft
            with the target's own head.
        depth: how many tokens in a row it learns to draft; beyond them it drafts badly. Of Medusa the number of heads.
        rows: tokens of one training step.
        against: what its guesses are compared with: the tokens of the examples, or the target's distribution.
        report: called after each epoch.

    Raises:
        OptionError: there is nothing to train on.
        ContextLengthError: an example is longer than the target's context.
        DrafterError: the training has diverged.
    """
    decoder = target.decoder
    shared = Shared.of(decoder)
    ids = None if kind == "eagle" else frequent_ids(examples, min(columns, decoder.vocab_size), decoder.vocab_size)
    head = new_head(kind, shared, recipe.seed, ids=ids, heads=depth)
    judge = Judge(shared, head.target_ids, against)
    objective = (
        MedusaObjective(head, shared, judge) if kind == "medusa" else EagleObjective(head, shared, judge, steps=depth)
    )
    reader = Reader(examples, Features(decoder, objective.layers), rows, recipe.seed)
    training = Training(objective, reader, recipe)
    for epoch in range(round(recipe.epochs)):
        progress = Progress.of(epoch + 1, [training.step() for _ in reader.epoch(epoch)])
        if report is not None:
            report(progress)
        if recipe.enough is not None and min(progress.accuracy) >= recipe.enough:
            break
    with training.averaged():
        tensors = objective.network.tensors()
    return replace(head, tensors=tensors, provenance=Provenance("trained", None, target.name))
