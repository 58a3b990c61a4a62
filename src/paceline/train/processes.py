"""Several processes that train one drafter, as torchrun starts them: each takes packs of its own, their gradients are
averaged, and so all have the same weights, bit for bit."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

from paceline.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_PATIENCE = timedelta(days=30)  # the others wait while one has the target answer prompts; who ends is noticed at once


@dataclass(frozen=True)
class Processes:
    """Who takes part, as one of them sees it.

    Attributes:
        rank: the number of this one, from 0 on.
        count: how many there are.
        beside: how many of them this machine has, whose cores they share.
    """

    rank: int = 0
    count: int = 1
    beside: int = 1

    @property
    def chief(self) -> bool:
        """Whether this one writes the files and tells how far all have come."""
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over all processes in the place of each tensor; float32, of the same shapes everywhere.

        Raises:
            ResourceError: another process has ended.
        """
        if self.count == 1:
            return
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._reduce(joined)
        joined /= self.count
        parts = torch.split(joined, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum over all processes of each number; errors are those of `average`."""
        if self.count == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64)
        self._reduce(found)
        return found.tolist()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Let the chief run the block, and the others after it; errors are those of `average`."""
        if not self.chief:
            self.sums([0.0])
        yield
        if self.chief:
            self.sums([0.0])

    def _reduce(self, tensor: Tensor) -> None:
        try:
            distributed.all_reduce(tensor)
        except RuntimeError as error:  # what gloo raises, whatever became of its connections
            reason = str(error).splitlines()[0][:200]
            raise ResourceError(
                f"another process of this training has ended ({reason}); start all of them again."
            ) from error


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that torchrun has started; without it this one is alone.

    Raises:
        ResourceError: the others cannot be reached.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    try:
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise ResourceError(
            f"the other processes of this training cannot be reached ({error}): use torchrun."
        ) from error
    try:
        yield Processes(distributed.get_rank(), count, int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    finally:
        distributed.destroy_process_group()
