"""What a call may say of a request beside its prompt and its sampling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.constraint import Constraint
from paceline.errors import OptionError
from paceline.options import flag, integer, reject_unknown
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from paceline.options import Speculation, SpeculationLike


_PRIORITIES = 2**31


class Wishes(TypedDict, total=False):
    """The keyword arguments of ``generate``, ``chat``, ``stream`` and ``submit``.

    Attributes:
        speculation: what to change of the engine's own; None, False or "off" is plain decoding.
        origins: whether the record notes for every token where it came from.
        cache_salt: what is learned from this request, or computed for it, serves requests of the same key alone, so
            that no text of others shows in their timing.
        prediction: a text, or its ids, that the answer will mostly repeat; the methods "prediction" and "cascade"
            draft from it.
        constraint: what the output must satisfy.
        priority: requests of a lower number come first, and give way last; 0 unless said.
    """

    speculation: SpeculationLike | Speculation
    origins: bool
    cache_salt: str | None
    prediction: str | Sequence[int] | None
    constraint: Constraint | None
    priority: int


def reject_settings(names: Iterable[str]) -> None:
    """Refuse settings of sampling, which are given together.

    Raises:
        OptionError: saying how.
    """
    settings = {field.name for field in fields(Sampling) if field.init}
    for name in names:
        if name in settings:
            raise OptionError(f"{name} is a setting of sampling: give it as Sampling({name}=...).")


def check(wishes: Mapping[str, Any]) -> None:
    """
    Raises:
        OptionError: an unknown name, or a value of another type.
    """
    reject_settings(wishes)
    reject_unknown("a request", wishes, Wishes.__annotations__)
    flag("origins", wishes.get("origins", False))
    integer("priority", wishes.get("priority", 0), -_PRIORITIES, _PRIORITIES)
    if not isinstance(wishes.get("cache_salt"), str | None):
        raise OptionError(f"cache_salt is a text, not {wishes['cache_salt']!r}.")
    prediction = wishes.get("prediction")
    if not isinstance(prediction, str | Sequence | None) or isinstance(prediction, bytes | bytearray):
        raise OptionError(f"prediction is a text or a list of token ids, not {prediction!r}.")
    if not isinstance(wishes.get("constraint"), Constraint | None):
        raise OptionError(
            "constraint has the methods initial, advance, allowed and forced of paceline.constraint.Constraint; "
            f"{type(wishes['constraint']).__name__} lacks them."
        )
