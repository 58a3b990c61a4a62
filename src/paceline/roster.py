"""The drafters of one target, each made once, and the models that they draft with."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import Lock, RLock
from typing import TYPE_CHECKING, cast

from paceline import methods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.cache import CacheBudget
    from paceline.drafters import Drafter, W, Weighty
    from paceline.options import Speculation
    from paceline.pages import CacheGroup, PagePool
    from paceline.targets.decoder import Decoder
    from paceline.targets.load import Loaded


_KEPT = 16  # drafters of different options that are kept with what they have learned


class DraftModels:
    """Models that draft for one target, each loaded once.

    Args:
        target: the model that verifies.
        load: loads a model by name, in the target's number format.
    """

    def __init__(self, target: Loaded, load: Callable[[str], Loaded]) -> None:
        self.target = target
        self._load = load
        self._loaded: dict[str, Loaded] = {}
        self._kept: dict[tuple[object, ...], Weighty] = {}
        self._prefixes: dict[int, Decoder] = {}

    @property
    def weight_bytes(self) -> int:
        """What their weights take beside the target's."""
        return sum(own.weight_bytes for own in (*self._loaded.values(), *self._kept.values()))

    def kept(self, key: tuple[object, ...], make: Callable[[], W]) -> W:
        """What ``make`` made for ``key``, now or earlier; a key comes with one kind of thing."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast("W", self._kept[key])

    def draft_model(self, name: str) -> Loaded:
        """
        Raises:
            ModelError: it cannot be loaded.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def prefix(self, layers: int) -> Decoder:
        """The target's own first layers with its norm and head; weights are shared.

        Raises:
            OptionError: the target has no such number of layers.
        """
        if layers not in self._prefixes:
            self._prefixes[layers] = self.target.decoder.prefix(layers)
        return self._prefixes[layers]


@dataclass(slots=True)
class _Shared:
    """Pools, and how many drafters use them."""

    pools: list[PagePool]
    users: int = 0


class Roster:
    """Makes drafters, and is what they are made from (:class:`paceline.drafters.Surroundings`).

    Any thread may ask for one: it is made there, with all that is loaded for it, while engine and others go on. Whoever
    asks for another that has to be made waits.

    Args:
        models: what drafts.
        budget: memory for the keys and values of drafters.
        max_model_len: the longest sequence, in tokens.
    """

    def __init__(self, models: DraftModels, budget: CacheBudget, max_model_len: int) -> None:
        self.target = models.target
        self.max_model_len = max_model_len
        self._models = models
        self._budget = budget
        self._shared: dict[tuple[CacheGroup, ...], _Shared] = {}
        self._taken: list[tuple[CacheGroup, ...]] = []
        self._drafters: dict[tuple[object, ...], Drafter] = {}
        self._making = RLock()  # the drafter of a cascade is made while the cascade is
        self._looking = Lock()
        self._sharing = RLock()  # pools go back whenever a drafter is collected, also in the middle of taking some

    @property
    def bytes(self) -> int:
        """What the draft models and the caches of drafters take."""
        return self._models.weight_bytes + sum(pool.pages * pool.group.page_bytes for pool in self.lent)

    @property
    def lent(self) -> list[PagePool]:
        """The pools of the drafters' caches."""
        return [pool for shared in tuple(self._shared.values()) for pool in shared.pools]

    def has(self, speculation: Speculation) -> bool:
        """Whether there is a drafter for these options, so that :meth:`drafter` gives it at once."""
        return methods.recipe(speculation) in self._drafters

    def drafter(self, speculation: Speculation) -> Drafter:
        """The drafter for these options; those that were asked for last are kept.

        Raises:
            OptionError: method and draft model do not go together.
            DrafterError: it does not fit the target.
            ModelError: the draft model cannot be loaded.
            ResourceError: the cache has no room for it.
        """
        key = methods.recipe(speculation)
        drafter = self._known(key)
        if drafter is not None:
            return drafter
        with self._making:
            drafter = self._known(key) or self._made(speculation)
            with self._looking:
                self._drafters[key] = drafter
                while len(self._drafters) > _KEPT:
                    del self._drafters[next(iter(self._drafters))]
        return drafter

    def _known(self, key: tuple[object, ...]) -> Drafter | None:
        """The drafter of that recipe, which is from now on the one that was asked for last."""
        with self._looking:
            drafter = self._drafters.pop(key, None)
            if drafter is not None:
                self._drafters[key] = drafter
        return drafter

    def _made(self, speculation: Speculation) -> Drafter:
        """A new drafter. Its pools go back when the last who uses it is done, whether or not it is still kept."""
        outer, self._taken = self._taken, []
        try:
            drafter = methods.create(speculation, self)
        except BaseException:
            self._give_back(self._taken)
            raise
        else:
            weakref.finalize(drafter, self._give_back, self._taken).atexit = False
            return drafter
        finally:
            self._taken = outer

    def _give_back(self, taken: Sequence[tuple[CacheGroup, ...]]) -> None:
        with self._sharing:
            for groups in taken:
                self._shared[groups].users -= 1
                if not self._shared[groups].users:
                    self._budget.give_back(self._shared.pop(groups).pools)

    def forget(self) -> None:
        """Give up every drafter, with all that it has learned; models stay loaded."""
        with self._looking:
            self._drafters.clear()

    def prefix(self, layers: int) -> Decoder:
        return self._models.prefix(layers)

    def draft_model(self, name: str) -> Loaded:
        return self._models.draft_model(name)

    def kept(self, key: tuple[object, ...], make: Callable[[], W]) -> W:
        return self._models.kept(key, make)

    def pools(self, groups: Sequence[CacheGroup]) -> list[PagePool]:
        """Pools for a drafter's cache; those of equal groups share them, as a request has one drafter at a time."""
        key = tuple(groups)
        with self._sharing:
            if key not in self._shared:
                self._shared[key] = _Shared(self._budget.cut(groups))
            shared = self._shared[key]
            shared.users += 1
        self._taken.append(key)
        return shared.pools
