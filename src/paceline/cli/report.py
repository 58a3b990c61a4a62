"""Figures of requests as lines of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.record import add_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.completion import Completion


_WISHES = {"prediction=...": "--prediction", "constraint=...": "constraint=..., which only Python can give"}
"""What a request may lack, as the command line speaks of it."""


@dataclass(frozen=True)
class Run:
    """One request that was run.

    Attributes:
        completions: the answers, one unless n is larger.
        tokens: those that came in ``seconds``: all but what the first step gave.
        seconds: from the first token to the last.
        interrupted: whether somebody broke it off.
    """

    completions: Sequence[Completion]
    tokens: int
    seconds: float
    interrupted: bool = False

    @property
    def speed(self) -> float | None:
        """Tokens per second; None where there were too few to tell."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    def record(self) -> dict[str, Any]:
        """The speculation records of all answers, added up."""
        return add_up([completion.record.as_dict() for completion in self.completions])


def summary(run: Run) -> str:
    """One line: how many tokens, how fast, and what drafting brought."""
    record = run.record()
    tokens = sum(len(completion.token_ids) for completion in run.completions)
    parts = [f"{tokens} tokens", _speed(run.speed)]
    if record["drafted"]:
        parts.append(
            f"{record['method']}: {record['accepted']} of {record['drafted']} drafted tokens accepted, "
            f"{record['mean_accepted_length']:.2f} tokens a step"
        )
    elif record["method"] != "none":
        reason = _reason(record)
        parts.append(f"{record['method']}: nothing drafted" + (f" ({reason})" if reason else ""))
    return " · ".join(parts)


def promised(run: Run) -> bool:
    """Whether the tokens are to be those of plain decoding."""
    return all(completion.record.lossless == "bits" for completion in run.completions)


def comparison(plain: Run, fast: Run, identical: bool) -> list[str]:
    """The lines that --compare prints."""
    record, ratio = fast.record(), speedup(plain, fast)
    return [
        line("plain", _speed(plain.speed)),
        line(f"with {record['method']}", _speed(fast.speed)),
        line("speed-up", "unknown" if ratio is None else f"{ratio:.2f} x"),
        *details(record),
        line("identical", "yes" if identical else "no" if promised(fast) else "no, nor does this rule promise it"),
    ]


def details(record: Mapping[str, Any]) -> list[str]:
    """What drafting brought, by position, and where the time went."""
    mean, reason = record["mean_accepted_length"], _reason(record)
    depths = by_depth(record["accepted_by_position"])
    return [
        line("drafted", f"{record['drafted']} tokens" + (f" ({reason})" if reason else "")),
        line("accepted", f"{record['accepted']} tokens" + _share(record["accepted"], record["drafted"])),
        line("mean accepted length", "none" if mean is None else f"{mean:.2f} tokens a step"),
        line("by position", f"{depths} (accepted/judged)" if depths else "none judged"),
        line("where the time went", _shares(record["seconds"])),
    ]


def line(name: str, value: str) -> str:
    """A figure behind its name."""
    return f"{name + ':':<22}{value}"


def speedup(plain: Run, fast: Run) -> float | None:
    """How many times sooner the same tokens came."""
    if plain.speed is None or fast.speed is None:
        return None
    return fast.speed / plain.speed


def _speed(speed: float | None) -> str:
    return "speed unknown" if speed is None else f"{speed:.1f} tokens/s"


def by_depth(positions: Sequence[Mapping[str, int]]) -> str:
    """For each depth how many drafts were accepted of those that were reached."""
    return ", ".join(
        f"{depth}: {at['accepted']}/{at['reached']}" for depth, at in enumerate(positions, 1) if at["reached"]
    )


def _reason(record: Mapping[str, Any]) -> str:
    reason = record["disabled_reason"] or ""
    for wish, spoken in _WISHES.items():
        reason = reason.replace(wish, spoken)
    return reason


def _share(part: int, whole: int) -> str:
    return f" ({part / whole:.0%})" if whole else ""


def _shares(seconds: Mapping[str, float]) -> str:
    whole = sum(seconds.values())
    if not whole:
        return "nowhere"
    return ", ".join(f"{part} {spent:.2f} s ({spent / whole:.0%})" for part, spent in seconds.items())
