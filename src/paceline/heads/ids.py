"""Reduced vocabularies: which target id each column of a head stands for, from what the files say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import WeightsError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_INTEGERS = (torch.int64, torch.int32)


def read_ids(path: Path, d2t: Tensor | None, t2d: Tensor | None, columns: int, vocab_size: int) -> Tensor | None:
    """The target id of each column, int64 [columns]; None where column i is id i.

    Args:
        d2t: integers [columns]: the id of column i less i, as all published heads store it. Where t2d contradicts
            that and agrees with d2t read as the ids themselves, these are taken.
        t2d: bool [vocab_size]: which ids have a column.

    Raises:
        WeightsError: they are missing, misshapen, out of range, repeat an id, or contradict each other.
    """
    if d2t is None:
        _check_whole(path, t2d, columns, vocab_size)
        return None
    _check_integers(path, "d2t", d2t, columns)
    offsets = d2t.to(torch.int64)
    ids = torch.arange(columns) + offsets
    if t2d is not None:
        _check_mask(path, t2d, vocab_size)
        if not _agree(ids, t2d) and _agree(offsets, t2d):
            ids = offsets
        elif _valid(ids, vocab_size) and not _agree(ids, t2d):
            raise WeightsError(f"{path}: d2t and t2d contradict each other about which ids the head has.")
    return _plain(check_ids(path, "d2t", ids, vocab_size), columns == vocab_size)


def check_ids(path: Path, name: str, ids: Tensor, vocab_size: int) -> Tensor:
    """The ids themselves, int64.

    Raises:
        WeightsError: one is out of range, or there twice.
    """
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise WeightsError(
            f"{path}: {name} maps a column to the id {low if low < 0 else high}, but ids are 0 to {vocab_size - 1}."
        )
    values, counts = torch.unique(ids, return_counts=True)
    if values.numel() != ids.numel():
        raise WeightsError(f"{path}: {name} maps {int(counts.max())} columns to the id {int(values[counts.argmax()])}.")
    return ids.to(torch.int64)


def read_token_map(path: Path, token_map: Tensor, columns: int, vocab_size: int) -> Tensor:
    """vLLM's `token_map`: integers [columns], the ids themselves.

    Raises:
        WeightsError: it is misshapen, out of range, or repeats an id.
    """
    _check_integers(path, "token_map", token_map, columns)
    return check_ids(path, "token_map", token_map, vocab_size)


def offsets_of(ids: Tensor) -> Tensor:
    """`d2t` as it is published: the id of each column less the column, int64."""
    return ids - torch.arange(ids.numel())


def mask_of(ids: Tensor, vocab_size: int) -> Tensor:
    """`t2d` as it is published: whether each target id has a column, bool [vocab_size]."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return mask


def _check_whole(path: Path, t2d: Tensor | None, columns: int, vocab_size: int) -> None:
    if columns != vocab_size:
        raise WeightsError(
            f"{path}: the head has {columns} columns for {vocab_size} ids, but no d2t that says which is which."
        )
    if t2d is not None:
        _check_mask(path, t2d, vocab_size)
        if not bool(t2d.all()):
            raise WeightsError(f"{path}: t2d leaves ids out, but there is no d2t, and the head has a column for each.")


def _check_integers(path: Path, name: str, tensor: Tensor, size: int) -> None:
    if tensor.dtype not in _INTEGERS or tuple(tensor.shape) != (size,):
        raise WeightsError(f"{path}: {name} must hold {size} integers, but it is {tensor.dtype} {list(tensor.shape)}.")


def _check_mask(path: Path, t2d: Tensor, vocab_size: int) -> None:
    if t2d.dtype != torch.bool or tuple(t2d.shape) != (vocab_size,):
        raise WeightsError(
            f"{path}: t2d must say for each of {vocab_size} ids whether it has a column, "
            f"but it is {t2d.dtype} {list(t2d.shape)}."
        )


def _valid(ids: Tensor, vocab_size: int) -> bool:
    return bool(((ids >= 0) & (ids < vocab_size)).all()) and len(torch.unique(ids)) == ids.numel()


def _agree(ids: Tensor, t2d: Tensor) -> bool:
    return _valid(ids, t2d.numel()) and torch.equal(mask_of(ids, t2d.numel()), t2d)


def _plain(ids: Tensor, whole: bool) -> Tensor | None:
    """None where there is nothing to map."""
    return None if whole and torch.equal(ids, torch.arange(ids.numel())) else ids
