"""What runs forward passes: the C kernels, or without them their torch reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.kernels import REFERENCE, library
from paceline.kernels.native import NativeRuntime
from paceline.kernels.reference import ReferenceRuntime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.kernels.plan import Plan
    from paceline.pages import Slab
    from paceline.targets import Scores


class Runtime(Protocol):
    """Runs the passes of one model."""

    def forward(
        self,
        batch: Batch,
        slabs: Sequence[Slab],
        features: Sequence[int],
        seconds: Tensor | None,
        beside: Tensor | None = None,
    ) -> Scores:
        """One pass, see `Decoder.forward`; ``beside`` is float32 [R, hidden], what a draft head reads beside the
        embeddings of its rows."""


def make_runtime(plan: Plan, path: str, threads: int) -> tuple[str, Runtime]:
    """The name of the path that is taken, and what runs on it.

    Args:
        path: the instruction set; "" is the best that the processor has, "torch reference" the plain form.

    Raises:
        KernelError: the processor lacks the path, or the threads cannot be started.
    """
    found = None if path == REFERENCE else library()
    if found is None:
        return REFERENCE, ReferenceRuntime(plan)
    return found.path_name(path), NativeRuntime(found, path, threads, plan)
