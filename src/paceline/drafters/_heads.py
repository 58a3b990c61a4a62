"""The head that a request names."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from paceline.errors import DrafterError
from paceline.heads.check import check_manifest
from paceline.heads.formats import read_head
from paceline.heads.make import random_head
from paceline.kernels import PacelineWarning

if TYPE_CHECKING:
    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.options import Speculation
    from paceline.targets.load import Loaded


def head_of(kind: HeadKind, speculation: Speculation, target: Loaded) -> Head:
    """The head of the method ``kind`` that ``model`` names, or one of random weights. A warning says so where it was
    trained under another chat template.

    Raises:
        DrafterError: it is for another method, or was trained for another tokenizer.
        HubError, WeightsError: it cannot be read.
    """
    if speculation.random:
        return random_head(kind, target.decoder.spec)
    head = read_head(str(speculation.model))
    if head.spec.kind != kind:
        raise DrafterError(f"{speculation.model} is a head for the method '{head.spec.kind}', not for '{kind}'.")
    for check in check_manifest(head.manifest, target.tokenizer) if head.manifest is not None else ():
        text = f"{speculation.model}: the target's {check.name} is {check.found}; {check.advice}."
        if not check.passed:
            raise DrafterError(text)
        if check.advice is not None:
            warnings.warn(text, PacelineWarning, stacklevel=2)
    return head
