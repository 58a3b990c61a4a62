"""What happened to one request: the one source of every statistic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Lossless = Literal["bits", "distribution", "none"]


@dataclass(slots=True)
class Seconds:
    """Where a request's time went, its share of every step it was in."""

    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0

    def add(self, part: Seconds, share: float) -> None:
        self.draft += part.draft * share
        self.verify += part.verify * share
        self.sample += part.sample * share
        self.other += part.other * share

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.sample + self.other


@dataclass(slots=True)
class Origin:
    """Where one emitted token came from: a drafter's name or "target", the step, and the depth in its tree.

    Steps count from 1; the token that the prompt's pass gives has step 0, which is none. The depth of a token that
    the target added is 0.
    """

    origin: str
    step: int
    depth: int
    probability: float | None = None


@dataclass(slots=True)
class SpeculationRecord:
    """Counts of one request; everything else is derived from them.

    ``reached[d]`` counts the steps in which a draft at depth d + 1 was judged: all drafts before it on the path
    were accepted, and there was at least one; ``accepted_at[d]`` counts those in which it was accepted. ``asked``
    counts the steps in which the drafter was asked at all, ``failed`` says that it was left out for good, ``lacking``
    which wish it drafts from, where the request does without, ``cached_tokens`` how many tokens of the prompt others
    had computed, and ``preemptions`` counts how often the request had to give its pages to others. ``collapsed`` counts
    how often acceptance broke down, and ``fallen`` says that it has not recovered. ``drafters`` holds the pacer's
    decisions and last estimates, by drafter: how often it was asked, the nodes that it offered and those that were
    kept, what asking it was worth in tokens, and how likely its drafts survive up to each depth.
    """

    method: str
    seed: int
    lossless: Lossless
    steps: int = 0
    asked: int = 0
    failed: bool = False
    lacking: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    collapsed: int = 0
    fallen: bool = False
    drafters: dict[str, dict[str, Any]] = field(default_factory=dict)
    reached: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    origins: list[Origin] | None = None

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted / steps, the target's own token counted; None without steps."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def disabled_reason(self) -> str | None:
        """Why nothing was drafted, or nothing more; None where drafting went on, or was not asked for."""
        if self.failed:
            return "the drafter failed"
        if self.fallen:
            return "acceptance collapsed"
        if self.method == "none" or self.drafted or not self.steps:
            return None
        if self.lacking:
            return f"it drafts from {self.lacking}=..., and none was given"
        return "no match" if self.asked else "it does not pay"

    def judge(self, drafted: int, accepted: int, missed: bool) -> None:
        """Count one step: ``accepted`` drafts in a row, then one that was judged and ``missed``, or none offered."""
        self.steps += 1
        self.drafted += drafted
        while len(self.reached) < accepted + missed:
            self.reached.append(0)
            self.accepted_at.append(0)
        for depth in range(accepted):
            self.reached[depth] += 1
            self.accepted_at[depth] += 1
        if missed:
            self.reached[accepted] += 1

    def copy(self) -> SpeculationRecord:
        """What it says now, whatever is counted later."""
        return replace(
            self,
            reached=self.reached[:],
            accepted_at=self.accepted_at[:],
            seconds=replace(self.seconds),
            origins=None if self.origins is None else self.origins[:],
        )

    def as_dict(self) -> dict[str, Any]:
        """The record under the keys that it has everywhere."""
        shown: dict[str, Any] = {
            "method": self.method,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_position": [
                {"accepted": a, "reached": r} for a, r in zip(self.accepted_at, self.reached, strict=True)
            ],
            "mean_accepted_length": self.mean_accepted_length,
            "seconds": asdict(self.seconds),
            "lossless": self.lossless,
            "disabled_reason": self.disabled_reason,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "collapsed": self.collapsed,
            "drafters": self.drafters,
            "seed": self.seed,
        }
        if self.origins is not None:
            shown["origins"] = [asdict(origin) for origin in self.origins]
        return shown


def add_up(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts, times and mean of several records under the same keys; the mean is over all their steps together."""
    steps, drafted, accepted = (sum(r[key] for r in records) for key in ("steps", "drafted", "accepted"))
    depth = max((len(r["accepted_by_position"]) for r in records), default=0)
    positions = [
        {
            key: sum(r["accepted_by_position"][d][key] for r in records if d < len(r["accepted_by_position"]))
            for key in ("accepted", "reached")
        }
        for d in range(depth)
    ]
    return {
        "method": records[0]["method"] if records else None,
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "accepted_by_position": positions,
        "mean_accepted_length": 1 + accepted / steps if steps else None,
        "seconds": {part: sum(r["seconds"][part] for r in records) for part in ("draft", "verify", "sample", "other")},
        "collapsed": sum(r.get("collapsed", 0) for r in records),
        "disabled_reason": next((r["disabled_reason"] for r in records if r["disabled_reason"]), None),
    }
