"""An EAGLE-3 head to be trained: its form, its draft vocabulary, what it learns, and the files that come of it."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 - options are checked by their types
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch

from paceline.errors import OptionError
from paceline.heads.head import Head, Provenance
from paceline.heads.make import FLAGS, random_head
from paceline.heads.manifest import Manifest
from paceline.heads.write import write_eagle3
from paceline.options import choice
from paceline.train.eagle import EagleObjective
from paceline.train.examples import coverage, ranked_ids
from paceline.train.judge import Against, Judge

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.targets.load import Loaded
    from paceline.train.examples import Example
    from paceline.train.shared import Shared


Layout = Literal["safeailab", "speculators"]


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """What an EAGLE-3 head looks like, and how it learns.

    Attributes:
        columns: the size of its vocabulary, the most frequent ids of the answers.
        kv_heads: its key heads; unless said one for each query head, for all of what it knows of the last token goes
            through its values.
        intermediate: the width of its MLP; unless said the target's.
        features: the layers of the target whose inputs it reads; unless said 2, n // 2 and n - 3 of n.
        fc_norm: a norm for each of these (EAGLE-3.1).
        norm_output: its next state is its normed output (EAGLE-3.1).
        norm_before_residual: its residual is the normed state.
        depth: how many tokens in a row it learns to draft; beyond them it drafts badly.
        keep: of the drafts of one depth the share that learns at the next.
        sampled: how many columns a step looks at beside those of its own tokens, half of them the most frequent, the
            others drawn; 0 is all.
        against: what its guesses are compared with: the target's whole distribution, or the tokens of the answers.
        layout: in which its files are written: safeailab or speculators.
    """

    columns: int = 8192
    kv_heads: int | None = None
    intermediate: int | None = None
    features: Sequence[int] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    depth: int = 3
    keep: float = 0.5
    sampled: int = 2048
    against: str = "distribution"
    layout: str = "safeailab"

    def __post_init__(self) -> None:
        choice("against", self.against, get_args(Against))
        choice("layout", self.layout, get_args(Layout))
        if not 1 <= self.depth <= 7:
            raise OptionError(f"depth is 1 to 7, not {self.depth}.")
        if not 0 < self.keep <= 1:
            raise OptionError(f"keep is a share above 0 and at most 1, not {self.keep}.")
        if self.sampled < 0 or self.columns < 1:
            raise OptionError("columns is at least 1, and sampled at least 0.")

    @property
    def flags(self) -> list[str]:
        """Those of `heads.make.FLAGS` that are on."""
        return [name for name in FLAGS if getattr(self, name, False)]


class Eagle3:
    """A head that learns, with what its files say beside its weights.

    Attributes:
        objective: what the loop trains.
        coverage: the share of the answers' tokens that its vocabulary has.
    """

    kind = "eagle3"

    def __init__(
        self, options: Eagle3Options, target: Loaded, shared: Shared, examples: Sequence[Example], seed: int
    ) -> None:
        self._options, self._target = options, target
        ranked = ranked_ids(examples, shared.usable)[: options.columns]
        ids = sorted(ranked)
        self.coverage = coverage(examples, ids)
        self._length = max(len(example.tokens) for example in examples)
        self._head = new_eagle3(options, shared, ids, seed)
        places = {token: column for column, token in enumerate(ids)}
        judge = Judge(
            shared,
            torch.tensor(ids),
            cast("Against", options.against),
            ranked=torch.tensor([places[token] for token in ranked]),
            sampled=options.sampled,
        )
        self.objective = EagleObjective(self._head, shared, judge, steps=options.depth, keep=options.keep)

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self._options)}

    @property
    def summary(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.objective.network.parameters())
        return (
            f"an EAGLE-3 head of {parameters / 1e6:.1f} M parameters; its {len(self.objective.target_ids):,} ids cover "
            f"{self.coverage:.1%} of the answers' tokens"
        )

    def export(self, folder: Path, training: dict[str, Any]) -> None:
        """Write the head as it is now, in bfloat16; ``training`` is for its manifest.

        Raises:
            ResourceError: it cannot be written; what was there stays.
        """
        tensors = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in self.objective.network.tensors().items()
        }
        parts = self._target.tokenizer
        manifest = Manifest(
            self._target.name,
            parts.digest,
            parts.template_digest,
            self.objective.layers[:-1],
            self._length,
            {**training, "draft_vocabulary": {"ids": len(self.objective.target_ids), "coverage": self.coverage}},
        )
        head = replace(
            self._head, tensors=tensors, provenance=Provenance("trained", None, self._target.name), manifest=manifest
        )
        write_eagle3(head, folder, cast("Layout", self._options.layout))


def new_eagle3(options: Eagle3Options, shared: Shared, ids: Sequence[int], seed: int) -> Head:
    """A head to begin with: random layers; the product that gives logits and the norm before it are the target's."""
    spec = shared.spec
    head = random_head(
        "eagle3",
        replace(spec, kv_heads=options.kv_heads or spec.heads),
        seed,
        target_ids=ids,
        features=options.features,
        flags=options.flags,
        intermediate=options.intermediate,
    )
    known = {"head": shared.head[head.target_ids].clone(), "norm": shared.norm.clone()}
    return replace(head, tensors={**head.tensors, **known})
