"""A training from its beginning, or from where it was stopped, to its end: steps, evaluations, checkpoints, the log."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003 - a flag is made of this type
from typing import TYPE_CHECKING, Any

from paceline.errors import DrafterError, OptionError
from paceline.journal import append, whole_lines
from paceline.replacing import replaced
from paceline.train import checkpoint, split
from paceline.train.loop import Progress
from paceline.train.provenance import check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.train.evaluate import Evaluation, Evaluator
    from paceline.train.features import Features
    from paceline.train.loop import Training
    from paceline.train.objective import Measured

_WARM = 3  # steps before one is taken apart


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a training goes on and when it stops.

    Attributes:
        evaluations: how many there are on the way; with the one at the end one more.
        patience: stop after so many evaluations in a row that were no better; 0 trains to the end.
        save_seconds: how much of a training a kill may cost.
        log_steps: how many steps are told of in one line of the log.
        rows: tokens of one step, prompts and answers together.
        drafts: how many tokens a simulated draft has.
        keep_features: bytes of the target's states that are kept for the next epoch (8 GiB is 8 * 2**30 in Python, 8G
            as a flag); beyond them the target runs again.
    """

    evaluations: int = 20
    patience: int = 5
    save_seconds: float = 120.0
    log_steps: int = 20
    rows: int = 1024
    drafts: int = 5
    keep_features: int = 4 << 30

    def __post_init__(self) -> None:
        bounds = {"evaluations": 0, "patience": 0, "log_steps": 1, "rows": 1, "drafts": 1, "keep_features": 0}
        for name, least in bounds.items():
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, not {getattr(self, name)}.")


@dataclass
class Standing:
    """What a training has come to.

    Attributes:
        score: of the best evaluation so far.
        best: after how many steps that was.
        worse: how many evaluations came after it.
        seconds: what all steps took.
    """

    score: float = 0.0
    best: int = 0
    worse: int = 0
    seconds: float = 0.0


@dataclass
class Run:
    """One training and its files.

    Attributes:
        folder: of the checkpoint and the log.
        settings: what must be as it was for the training to go on.
        provenance: where it comes from, for whoever reads the checkpoint.
        export: writes the drafter's files, with the evaluation by which it is the best so far.
        tell: is told of what a reader wants to know.
        advance: is told how many steps are done, of how many.
    """

    training: Training
    evaluator: Evaluator
    features: Features
    folder: Path
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    running: Running
    export: Callable[[Evaluation], None]
    tell: Callable[[str], None]
    advance: Callable[[int, int], None]
    standing: Standing = field(default_factory=Standing)

    @property
    def path(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """A line of JSON for some steps, and one for each evaluation."""
        return self.folder / "log.jsonl"

    def go(self) -> Standing:
        """Train to the end, or until it becomes no better.

        Raises:
            DrafterError: the loss is no number any more; the last checkpoint and the best drafter's files stay.
            OptionError: the folder holds a training of other settings.
            ResourceError: something cannot be written; the last checkpoint stays.
        """
        self._resume()
        training, patience = self.training, self.running.patience
        seen: list[Measured] = []
        begun = saved = time.monotonic()
        tokens = training.tokens
        while training.taken < training.steps and not (patience and self.standing.worse >= patience):
            if training.taken == _WARM:
                self._take_apart()
            else:
                seen.append(self._step())
            evaluated = self._due() and self._evaluate()
            now = time.monotonic()
            if seen and (len(seen) >= self.running.log_steps or evaluated):
                self.standing.seconds += now - begun
                self._note(Progress.of(training.taken, seen), (training.tokens - tokens) / (now - begun))
                seen, begun, tokens = [], time.monotonic(), training.tokens
            if evaluated or now - saved >= self.running.save_seconds:
                self._save()
                saved = time.monotonic()
            self.advance(training.taken, training.steps)
        return self.standing

    def _step(self) -> Measured:
        try:
            return self.training.step()
        except DrafterError as error:
            append(self.log, {"kind": "diverged", "step": self.training.taken + 1})
            kept = f"the checkpoint {self.path} is of before" if self.path.exists() else "no checkpoint was written yet"
            raise DrafterError(f"{str(error).rstrip('.')}; {kept}.") from error

    def _due(self) -> bool:
        """Whether the last step ends one of the parts that are evaluated."""
        parts, taken, steps = self.running.evaluations + 1, self.training.taken, self.training.steps
        return taken * parts // steps > (taken - 1) * parts // steps

    def _evaluate(self) -> bool:
        with self.training.averaged():
            found = self.evaluator(self.training.objective)
            better = found.score > self.standing.score
            if better:
                self.export(found)
        if better:
            self.standing.score, self.standing.best, self.standing.worse = found.score, self.training.taken, 0
        else:
            self.standing.worse += 1
        append(self.log, {"kind": "evaluation", **self._where(), **asdict(found)})
        each = ", ".join(f"tau {groups['all']:.3f} {drawn}" for drawn, groups in found.tau.items())
        self.tell(f"step {self.training.taken} of {self.training.steps}, {self.training.tokens:,} tokens: {each}")
        return True

    def _take_apart(self) -> None:
        shares = split.measured(self._step, lambda: self.features.seconds)
        append(self.log, {"kind": "split", **self._where(), **asdict(shares)})
        self.tell(
            f"where the time goes: target {shares.target:.0%}, matrix products of the drafter {shares.products:.0%}, "
            f"the rest {shares.rest:.0%}"
        )

    def _note(self, progress: Progress, speed: float) -> None:
        noted = {"loss": progress.loss, "accuracy": progress.accuracy, "tokens_per_second": speed}
        append(self.log, {"kind": "steps", **self._where(), **noted})

    def _where(self) -> dict[str, int]:
        return {"step": self.training.taken, "tokens": self.training.tokens}

    def _save(self) -> None:
        notes = {"settings": self.settings, "provenance": self.provenance, "standing": asdict(self.standing)}
        checkpoint.save(self.path, self.training.state(), notes)

    def _resume(self) -> None:
        if not self.path.exists():
            self.log.unlink(missing_ok=True)
            return
        state, notes = checkpoint.load(self.path)
        check_same(self.path, notes["settings"], self.settings)
        self.training.restore(state)
        self.standing = Standing(**notes["standing"])
        if self.log.exists():
            kept = [line for line in whole_lines(self.log) if json.loads(line)["step"] <= self.training.taken]
            with replaced(self.log) as (partial,):
                partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.tell(f"going on after step {self.training.taken} of {self.training.steps}")
