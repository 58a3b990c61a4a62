"""Where a trained drafter comes from: what a checkpoint is compared with, and what the files tell."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from paceline.bench.environment import environment
from paceline.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.targets.load import Loaded


def of_target(target: Loaded) -> dict[str, str | None]:
    """What a drafter is trained for: the model, and how it reads texts."""
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": target.dtype,
        "tokenizer": target.tokenizer.digest,
        "template": target.tokenizer.template_digest,
    }


def answers_digest(target: Loaded) -> str:
    """A digest of all that an answer depends on beside its prompt and its settings."""
    return hashlib.sha256(json.dumps(of_target(target), sort_keys=True).encode()).hexdigest()[:16]


def of_run(command: Sequence[str]) -> dict[str, Any]:
    """By what it was trained: the command, versions, machine, date."""
    found = environment()
    kept = ("machine", "system", "versions", "commit", "kernels")
    return {
        "command": list(command),
        **{name: found[name] for name in kept},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def check_same(path: object, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with a training of other settings.

    Raises:
        OptionError: saying which differ.
    """
    wanted = json.loads(json.dumps(wanted))
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise OptionError(
            f"{path} is of a training with {name} {_short(found.get(name))}, and now it is {_short(wanted.get(name))}: "
            "train into another folder, or remove this one to begin anew."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
