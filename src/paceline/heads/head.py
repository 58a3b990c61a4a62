"""A head as it is read, made or trained: what it computes, its tensors, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.heads.spec import TARGET_IDS, HeadSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paceline.heads.manifest import Manifest


@dataclass(frozen=True)
class Provenance:
    """Where a head comes from.

    Attributes:
        dialect: the published layout of its files: "medusa", "medusa (vllm)", "eagle", "eagle3", "eagle3
            (speculators)"; "random" or "trained" where it comes from no file.
        path: the file or folder; None where it comes from no file.
        target: the model that it was trained for, as its file calls it, if it does.
    """

    dialect: str
    path: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class Head:
    """A drafting head.

    Attributes:
        spec: what it computes.
        tensors: its tensors by canonical name (see `heads/spec.py`), as they are stored (float32, bfloat16, float16).
        provenance: where it comes from.
        config: for EAGLE the configuration of its layers in Hugging Face's spelling, from which the writers take
            what `spec` holds only as numbers (rotary scaling).
        notes: what was assumed or is worth a line.
        manifest: what it was trained for; None where nothing says so.
    """

    spec: HeadSpec
    tensors: Mapping[str, Tensor]
    provenance: Provenance
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    manifest: Manifest | None = None

    @property
    def target_ids(self) -> Tensor:
        """int64 [draft_vocab_size]: the target's id of each column."""
        found = self.tensors.get(TARGET_IDS)
        return torch.arange(self.spec.draft_vocab_size) if found is None else found
