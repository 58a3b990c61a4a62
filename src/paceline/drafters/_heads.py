"""The head that a request names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import DrafterError
from paceline.heads.formats import read_head
from paceline.heads.make import random_head

if TYPE_CHECKING:
    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.options import Speculation
    from paceline.targets.decoder import Decoder


def head_of(kind: HeadKind, speculation: Speculation, target: Decoder) -> Head:
    """The head of the method ``kind`` that ``model`` names, or one of random weights.

    Raises:
        DrafterError: it is for another method.
        HubError, WeightsError: it cannot be read.
    """
    if speculation.random:
        return random_head(kind, target.spec)
    head = read_head(str(speculation.model))
    if head.spec.kind != kind:
        raise DrafterError(f"{speculation.model} is a head for the method '{head.spec.kind}', not for '{kind}'.")
    return head
