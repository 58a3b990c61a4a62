"""Drafting for many in a cache that may be too small for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from paceline.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def with_room(wanting: Sequence[T], reserve: Callable[[T], None], forget: Callable[[T], None]) -> list[T]:
    """Those of ``wanting`` for which ``reserve`` finds pages; the others go without in this step.

    Where no one finds any, all would wait for one another: then one after another gives up what it has, by ``forget``,
    from the last on, until there is room for one before it.
    """
    found = [one for one in wanting if _has_room(one, reserve)]
    for place in range(len(wanting) - 1, 0, -1):
        if found:
            break
        forget(wanting[place])
        found = [one for one in wanting[:place] if _has_room(one, reserve)]
    return found


def _has_room(one: T, reserve: Callable[[T], None]) -> bool:
    try:
        reserve(one)
    except ResourceError:
        return False
    return True
