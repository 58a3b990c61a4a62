"""paceline beside other engines: plain greedy decoding and prompts, side by side in one run.

Every engine lives in a process of its own, under a Python of its own (`peer_worker.py`), and only one works at a
time: for every prompt and repeat all of them take their turn, each time beginning with another. All get the same
token ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.bench.peer_worker import ENGINES
from paceline.bench.stats import Spread, ratio_interval
from paceline.bench.verify import first_difference
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.bench.runner import Runner

_WORKER = Path(__file__).with_name("peer_worker.py")
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


class Peer(Protocol):
    """An engine that is measured."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds from a prompt to the first token after it."""

    def decode(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        """The ``count`` greedy tokens after a prompt, and the seconds from the first to the last of them."""


class Worker:
    """An engine in a process of its own.

    Args:
        name: what it is called.
        command: starts a process that speaks as `peer_worker.py` says.
        threads: how many the libraries in it may use.

    Raises:
        PacelineError: the process ends or answers otherwise, then or later.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )
        except OSError as error:
            self._log.close()
            raise PacelineError(f"{name} cannot be started: {error}.") from error
        try:
            self.version = str(self._answer("version"))
        except PacelineError:
            self.close()
            raise

    def prefill(self, ids: Sequence[int]) -> float:
        self._ask(ids, 1)
        return float(self._answer("first"))

    def decode(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        self._ask(ids, count)
        tokens, seconds = self._answer("ids", "rest")
        if len(tokens) != count:
            raise PacelineError(f"{self.name} decoded {len(tokens)} tokens in place of {count}.")
        return tokens, seconds

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _ask(self, ids: Sequence[int], count: int) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ids": list(ids), "count": count}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PacelineError(self._ended()) from None

    def _answer(self, *keys: str) -> Any:
        """The values of ``keys`` in the next answer, or the value of the only one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PacelineError(self._ended())
        try:
            answer = json.loads(line)
            values = [answer[key] for key in keys]
        except (ValueError, KeyError, TypeError) as error:
            raise PacelineError(f"{self.name} answered {line.strip()!r} ({error!r}).") from error
        return values[0] if len(keys) == 1 else values

    def _ended(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f"{self.name} ended with exit code {code}: {lines[-1] if lines else 'it said nothing'}"


def start(kind: str, python: str, model: str, threads: int) -> Worker:
    """Start an engine of `peer_worker.py`.

    Raises:
        PacelineError: it does not start.
    """
    # -P: the folder of the script has modules that must not hide others of the same name.
    return Worker(kind, [python, "-P", str(_WORKER), kind, model, str(threads)], threads)


def parse_peer(text: str) -> tuple[str, str, str]:
    """Kind, Python and model of an engine written as ``KIND=PYTHON,MODEL``.

    Raises:
        OptionError: it is written otherwise, or there is no engine of this kind.
    """
    kind, _, rest = text.partition("=")
    python, _, model = rest.partition(",")
    if not (python and model):
        raise OptionError(f"an engine is written KIND=PYTHON,MODEL, not {text!r}.")
    if kind not in ENGINES:
        raise OptionError(f"{kind!r} is no engine known here; there are {', '.join(ENGINES)}.")
    return kind, python, model


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
