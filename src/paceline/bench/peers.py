"""paceline beside other engines: plain greedy decoding and prompts, side by side in one run.

Every engine lives in a process of its own, under a Python of its own (`peer_worker.py`), and only one works at a
time: for every prompt and repeat all of them take their turn, each time beginning with another. All get the same
token ids.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.bench.stats import Spread, ratio_interval
from paceline.bench.verify import first_difference
from paceline.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.bench.peer_process import Peer
    from paceline.bench.runner import Runner

_WARM_UPS = 3
_WARM_UP_TOKENS = 16
PAUSE = 0.2
"""Seconds in which the threads of the engine before go to sleep."""


@dataclass(frozen=True)
class Work:
    """What is timed.

    Attributes:
        name: what it is called.
        prompt: tokens of the prompt.
        tokens: tokens decoded after it; 1 times the prompt's pass up to the first token, more the rest of them.
    """

    name: str
    prompt: int
    tokens: int

    @property
    def timed(self) -> int:
        """How many tokens the seconds are for."""
        return self.prompt if self.tokens == 1 else self.tokens - 1

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"{self.name}: {self.prompt} tokens, to the first token after them"
        return f"{self.name}: {self.tokens} tokens after {self.prompt}, without the first"


def cut(texts: Sequence[str], encode: Callable[[str], list[int]], length: int, count: int) -> list[list[int]]:
    """``count`` prompts of exactly ``length`` tokens: each begins with another text, and those after it follow.

    Raises:
        OptionError: the texts are too few or too short.
    """
    prompts = []
    for first in range(min(count, len(texts))):
        ids: list[int] = []
        for text in [*texts[first:], *texts[:first]]:
            ids += encode(text + "\n\n")
            if len(ids) >= length:
                prompts.append(ids[:length])
                break
    if len(prompts) < count:
        raise OptionError(f"the prompts do not make {count} of {length} tokens: give more of them.")
    return prompts


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """What changes whenever the prompts do."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


class Beside:
    """Several engines in turn on the same prompts.

    Args:
        peers: the engines; the first is what the others are compared with.
        prompts: for each work the token ids of its prompts.
        cells: takes the cells or has them.
        repeats: how often each prompt is gone through.
        pause: seconds before each turn.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        prompts: Mapping[Work, Sequence[Sequence[int]]],
        cells: Runner,
        *,
        repeats: int,
        pause: float = PAUSE,
    ) -> None:
        self._peers = peers
        self._prompts = prompts
        self._cells = cells
        self._repeats = repeats
        self._pause = pause

    def warm_up(self) -> None:
        """Let every engine do every work, decoding fewer tokens, three times."""
        for peer in self._peers:
            for work, rows in self._prompts.items():
                for _ in range(_WARM_UPS):
                    peer.decode(rows[0], min(work.tokens, _WARM_UP_TOKENS))

    def report(self) -> dict[str, Any]:
        """Take what is missing, and sum up: ``environment``, ``settings``, ``works``, and their ``figures``."""
        found = figures(self.measure(), [peer.name for peer in self._peers])
        return {
            "environment": self._cells.environment,
            "settings": self._cells.settings,
            "works": {work.name: str(work) for work in self._prompts},
            "figures": [asdict(figure) for figure in found],
        }

    def measure(self) -> dict[Work, list[dict[str, Any]]]:
        """Time every engine on every prompt, all of them in turn for each.

        Returns:
            For every work the cells in the order of repeats, then prompts: ``prompt``, and by engine ``seconds`` and
            ``ids`` (empty for a prefill).
        """
        measured: dict[Work, list[dict[str, Any]]] = {work: [] for work in self._prompts}
        turn = 0
        for repeat in range(self._repeats):
            for work, rows in self._prompts.items():
                for number, ids in enumerate(rows):
                    name = {"work": work.name, "prompt": number, "repeat": repeat}
                    taken = self._cells.cell(name, partial(self._take, work, ids, turn))
                    measured[work].append({"prompt": number, **taken})
                    turn += 1
        return measured

    def _take(self, work: Work, ids: Sequence[int], turn: int) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        first = turn % len(self._peers)
        for peer in [*self._peers[first:], *self._peers[:first]]:
            time.sleep(self._pause)
            if work.tokens == 1:
                tokens[peer.name], seconds[peer.name] = [], peer.prefill(ids)
            else:
                tokens[peer.name], seconds[peer.name] = peer.decode(ids, work.tokens)
        return {"seconds": seconds, "ids": tokens}


@dataclass(frozen=True)
class Figure:
    """One engine at one work.

    Attributes:
        work, peer: which.
        seconds: of one prompt, over all prompts and repeats.
        speed: tokens per second, at the median.
        ratio: its seconds over those of the first engine, summed over the prompts' medians.
        interval: 95 % of that ratio, prompts drawn again.
        agrees: for how many tokens its text is that of the first engine, mean over the prompts; None for a prefill.
    """

    work: str
    peer: str
    seconds: Spread
    speed: float
    ratio: float
    interval: tuple[float, float]
    agrees: float | None


def figures(cells: Mapping[Work, Sequence[Mapping[str, Any]]], names: Sequence[str]) -> list[Figure]:
    """Sum up what was measured; the first of ``names`` is what the others are compared with."""
    return [_figure(work, taken, name, names[0]) for work, taken in cells.items() for name in names]


def _figure(work: Work, cells: Sequence[Mapping[str, Any]], name: str, base: str) -> Figure:
    seconds = [cell["seconds"][name] for cell in cells]
    own, other = _medians(cells, name), _medians(cells, base)
    same = [first_difference(cell["ids"][name], cell["ids"][base]) for cell in cells]
    return Figure(
        work=work.name,
        peer=name,
        seconds=Spread.of(seconds),
        speed=work.timed / statistics.median(seconds),
        ratio=sum(own) / sum(other),
        interval=ratio_interval(own, other),
        agrees=None if work.tokens == 1 else statistics.mean(same),
    )


def _medians(cells: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The median over the repeats of each prompt."""
    by_prompt: dict[int, list[float]] = {}
    for cell in cells:
        by_prompt.setdefault(cell["prompt"], []).append(cell["seconds"][name])
    return [statistics.median(values) for values in by_prompt.values()]
