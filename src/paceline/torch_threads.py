"""Torch's number of threads, which the whole process has in common."""

from __future__ import annotations

import threading

import torch


class OneTorchThread:
    """Keeps torch to one thread while anybody asks for it, and gives back what was set before.

    Over a row of logits torch's own threads cost more than they bring, and when they wait they take the cores from the
    kernels' threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._holders:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
            self._holders += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                torch.set_num_threads(self._before)


ONE_TORCH_THREAD = OneTorchThread()
"""The one for all engines of the process, as torch has one number for all of them."""
