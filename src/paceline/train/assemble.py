"""All that a training of any kind is made of, put together."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from paceline.train.evaluate import Evaluator
from paceline.train.features import Features
from paceline.train.loop import Training
from paceline.train.pack import Reader
from paceline.train.provenance import of_run, of_target
from paceline.train.run import Run, Running
from paceline.train.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.targets.load import Loaded
    from paceline.train.evaluate import Evaluation
    from paceline.train.examples import Example
    from paceline.train.objective import Objective
    from paceline.train.recipe import Recipe
    from paceline.train.texts import Material


class Trainee(Protocol):
    """A drafter that learns, whatever its kind."""

    @property
    def objective(self) -> Objective:
        """What the loop trains."""

    @property
    def settings(self) -> dict[str, Any]:
        """Its kind and its options: what must be as it was for a training to go on."""

    @property
    def summary(self) -> str:
        """What it is, in a line."""

    def export(self, folder: Path, training: dict[str, Any]) -> None:
        """Write its files as it is now; ``training`` says how that came about."""


def assemble(
    make: Callable[[Loaded, Shared, Sequence[Example], int], Trainee],
    target: Loaded,
    material: Material,
    recipe: Recipe,
    running: Running,
    folder: Path,
    *,
    command: Sequence[str],
    tell: Callable[[str], None],
    advance: Callable[[int, int], None],
) -> Run:
    """A training that is ready to go.

    Args:
        make: the drafter, from the target, its unpacked weights, the examples and a seed.
        folder: of the drafter's files; checkpoint and log are in ``training`` below it.
        command: by which it was started.

    Raises:
        OptionError: there is nothing to train on.
        DrafterError: the drafter's options do not fit the target.
    """
    shared = Shared.of(target.decoder)
    trainee = make(target, shared, material.examples, recipe.seed)
    objective = trainee.objective
    features = Features(target.decoder, objective.layers, running.keep_features)
    reader = Reader(material.examples, features, running.rows, recipe.seed)
    training = Training(objective, reader, recipe)
    evaluator = Evaluator(material.held, features, shared, running.drafts, recipe.seed)
    settings = {
        **of_target(target),
        **trainee.settings,
        "recipe": asdict(recipe),
        "rows": running.rows,
        "examples": len(material.examples),
        "data": material.digests,
    }
    provenance = of_run(command)

    def export(found: Evaluation) -> None:
        trained = {"steps": training.taken, "of_steps": training.steps, "tokens": training.tokens, **asdict(found)}
        trainee.export(folder, {**provenance, **settings, **trained})

    tell(trainee.summary)
    counted = sum(example.counted for example in material.examples)
    tell(f"{len(material.examples):,} texts of {counted:,} answer tokens, {len(material.held)} held out")
    return Run(training, evaluator, features, folder / "training", settings, provenance, running, export, tell, advance)
