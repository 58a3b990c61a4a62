"""What a trained head was made for and how, in a file of its own beside its weights: published layouts name the target,
and nothing by which another fine-tune, tokenizer or chat template could be told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import WeightsError
from paceline.targets.json_files import read_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST = "paceline.json"
"""The file's name."""

_KINDS: dict[str, tuple[type, ...]] = {
    "target": (str,),
    "tokenizer": (str,),
    "template": (str, type(None)),
    "layers": (list,),
    "trained_length": (int,),
    "training": (dict,),
}


@dataclass(frozen=True)
class Manifest:
    """What a head was trained for.

    Attributes:
        target: the target's name.
        tokenizer: `TokenizerParts.digest` of its tokenizer.
        template: `TokenizerParts.template_digest` of its chat template; None where it has none.
        layers: the layers of the target whose inputs the head reads, in order.
        trained_length: tokens of the longest text that it was trained on.
        training: how it was trained: command, versions, digest of the data, seed, and whatever else JSON can say.
    """

    target: str
    tokenizer: str
    template: str | None
    layers: tuple[int, ...]
    trained_length: int
    training: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The content of its file."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in ``folder``; None where there is none, as beside heads of others.

    Raises:
        WeightsError: it is none: naming the first key that is missing, unknown, or of another type.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    fields = read_object(path, WeightsError)
    for key in [*_KINDS, *fields]:
        if key not in fields or key not in _KINDS or type(fields[key]) not in _KINDS[key]:
            raise WeightsError(f"{path} is no manifest of a head, look at its key '{key}'; fetch the head again.")
    if not all(type(layer) is int for layer in fields["layers"]) or fields["trained_length"] < 1:
        raise WeightsError(f"{path}: layers are whole numbers, and trained_length at least 1; fetch the head again.")
    return Manifest(**{**fields, "layers": tuple(fields["layers"])})
