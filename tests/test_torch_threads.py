"""Torch's threads are given back when the last engine is done with its logits, whatever the order."""

from __future__ import annotations

import torch

from paceline.torch_threads import OneTorchThread


def test_the_number_comes_back_when_the_last_holder_leaves() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one = OneTorchThread()
        one.__enter__()
        one.__enter__()
        assert torch.get_num_threads() == 1
        one.__exit__(None, None, None)
        assert torch.get_num_threads() == 1, "another engine is in the middle of a step"
        one.__exit__(None, None, None)
        assert torch.get_num_threads() == 2
        try:
            with one:
                raise RuntimeError
        except RuntimeError:
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
