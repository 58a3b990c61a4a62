"""The one way to a published head: whatever its files call things, they are known by their content."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.errors import DrafterError, PacelineError, WeightsError
from paceline.heads import read_medusa
from paceline.heads.files import open_files, peek
from paceline.heads.manifest import MANIFEST, read_manifest
from paceline.heads.read_eagle import eagle_kind, read_eagle
from paceline.heads.spec import EagleSpec
from paceline.targets.hub import known

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from paceline.heads.files import Files
    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.heads.manifest import Manifest

# Tensors by which drafters are known that are not supported.
_OTHERS = (
    (re.compile(r"markov_head\."), "DSpark"),
    (re.compile(r"(.*\.)?kv_(a|b)_proj"), "EAGLE with latent attention (MLA)"),
    (re.compile(r"mask_hidden$"), "P-EAGLE"),
    (re.compile(r"(model\.)?mtp\."), "MTP"),
    (re.compile(r"emb\.\d+\.weight"), "MLP speculator"),
)
_OTHER_KEYS = (("dflash_config", "DFlash"), ("n_predict", "MLP speculator"), ("num_depths", "P-EAGLE"))


def read_head(name: str) -> Head:
    """Read a published head.

    Args:
        name: a folder, one file of weights (with its `config.json` beside it), or a repository `owner/name`.

    Raises:
        HubError: nothing is there, or it cannot be fetched.
        WeightsError: a file is broken, or a tensor missing, surplus, misshapen, not finite, or in contradiction; or
            its manifest is.
        DrafterError: it is no head, or one of a kind that is not supported.
    """
    files = open_files(name)
    reader = _reader(files)
    try:
        head = reader(files)
    except PacelineError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # anything may stand anywhere in it
        raise WeightsError(
            f"{files.path}: the configuration makes no sense ({error}); fetch the head again."
        ) from error
    return replace(head, manifest=_manifest(head, files.path))


def _manifest(head: Head, path: Path) -> Manifest | None:
    manifest = read_manifest(path if path.is_dir() else path.parent)
    said = head.spec.features if isinstance(head.spec, EagleSpec) else None
    if manifest is not None and said and said != manifest.layers:
        raise WeightsError(
            f"{path}: its configuration reads the states before layers {list(said)}, its manifest {MANIFEST} before "
            f"{list(manifest.layers)}; fetch the head again."
        )
    return manifest


def is_head(name: str) -> bool:
    """Whether `name` is a drafting head, supported or not, and not a whole model: the default one, a GGUF file, or
    what else lies in a folder, a file of weights or a repository.

    Raises:
        HubError: nothing is there, or it cannot be fetched.
        WeightsError: a file is broken.
    """
    if known(name) is not None or name.endswith(".gguf"):
        return False
    config, names = peek(name)
    return _known(names) is not None or _other(names, config) is not None


def head_kind(name: str) -> HeadKind | None:
    """The method that the head `name` is for; None where it is a whole model. Weights are not read.

    Raises:
        HubError: nothing is there, or it cannot be fetched.
        WeightsError: a file is broken.
        DrafterError: it is a head of a kind that is not supported.
    """
    if not is_head(name):
        return None
    config, names = peek(name)
    other = _other(names, config)
    if other is not None:
        raise DrafterError(f"{name} is a drafter of the kind {other}, which is not supported.")
    return eagle_kind(names) if _known(names) is read_eagle else "medusa"


def _reader(files: Files) -> Callable[[Files], Head]:
    other = _other(files.tensors, files.config)
    if other is not None:
        raise DrafterError(f"{files.path} is a drafter of the kind {other}, which is not supported.")
    found = _known(files.tensors)
    if found is None:
        raise DrafterError(f"{files.path} is no drafting head: no tensor of Medusa's or EAGLE's is in it.")
    return found


def _known(names: Collection[str]) -> Callable[[Files], Head] | None:
    if read_medusa.is_original(names):
        return read_medusa.read_original
    if read_medusa.is_vllm(names):
        return read_medusa.read_vllm
    if any(name in names for name in ("fc.weight", "model.fc.weight", "midlayer.hidden_norm.weight")):
        return read_eagle
    return None


def _other(names: Collection[str], config: Mapping[str, Any]) -> str | None:
    for key, kind in _OTHER_KEYS:
        if config.get(key):
            return kind
    for name in names:
        for pattern, kind in _OTHERS:
            if pattern.match(name):
                return kind
    return None
