"""paceline beside other engines: plain greedy decoding and prompts, side by side in one run.

Every engine lives in a process of its own, under a Python of its own (`peer_worker.py`), and only one works at a
time: for every prompt and repeat all of them take their turn, each time beginning with another. All get the same
token ids. Run as ``python -m paceline.bench.peers --peer KIND=PYTHON,MODEL ...``.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from paceline.bench.environment import environment
from paceline.bench.peer_worker import ENGINES
from paceline.bench.runner import Runner
from paceline.bench.stats import Spread, ratio_interval
from paceline.errors import OptionError, PacelineError
from paceline.prompts import read_prompts, spread
from paceline.targets.hub import DEFAULT_MODEL
from paceline.targets.load import open_model
from paceline.text import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_WORKER = Path(__file__).with_name("peer_worker.py")
_WARM_UPS = 3
_WARM_UP_TOKENS = 16
_PAUSE = 0.2  # seconds in which the threads of the engine before go to sleep


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


WORKS = (Work("prefill", 1000, 1), Work("decode", 200, 128))


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


def worker(kind: str, python: str, model: str, threads: int) -> Worker:
    """An engine of `peer_worker.py`.

    Raises:
        OptionError: there is none of this kind.
        PacelineError: it does not start.
    """
    if kind not in ENGINES:
        raise OptionError(f"{kind!r} is no engine known here; there are {', '.join(ENGINES)}.")
    # -P: the folder of the script has modules that must not hide others of the same name.
    return Worker(kind, [python, "-P", str(_WORKER), kind, model, str(threads)], threads)


def cut(texts: Sequence[str], encode: Callable[[str], list[int]], length: int, count: int) -> list[list[int]]:
    """``count`` prompts of exactly ``length`` tokens: each begins with another text, and those after it follow.

    Raises:
        OptionError: the texts are too few or too short.
    """
    prompts = []
    for start in range(count):
        ids: list[int] = []
        for text in [*texts[start:], *texts[:start]] if start < len(texts) else []:
            ids += encode(text + "\n\n")
            if len(ids) >= length:
                break
        if len(ids) < length:
            raise OptionError(f"the prompts do not make {count} of {length} tokens: give more of them.")
        prompts.append(ids[:length])
    return prompts


def warm_up(
    peers: Sequence[Peer], prompts: Mapping[Work, Sequence[Sequence[int]]], tell: Callable[[str], None]
) -> None:
    """Let every engine do every work, shortened, three times."""
    for peer in peers:
        tell(f"warming up {peer.name} ({peer.version})")
        for work, ids in prompts.items():
            for _ in range(_WARM_UPS):
                peer.decode(ids[0], min(work.tokens, _WARM_UP_TOKENS))


def measure(
    peers: Sequence[Peer],
    prompts: Mapping[Work, Sequence[Sequence[int]]],
    repeats: int,
    runner: Runner,
    pause: float,
) -> dict[Work, list[dict[str, Any]]]:
    """Time every engine on every prompt, all of them in turn for each.

    Args:
        pause: seconds before each turn.

    Returns:
        For every work the cells in the order of prompts, then repeats: ``prompt``, and by engine ``seconds`` and
        ``ids`` (empty for a prefill).
    """
    cells: dict[Work, list[dict[str, Any]]] = {work: [] for work in prompts}
    turns = 0
    for repeat in range(repeats):
        for work, rows in prompts.items():
            for number, ids in enumerate(rows):
                first = turns % len(peers)
                order = [*peers[first:], *peers[:first]]
                turns += 1
                taken = runner.cell(
                    {"work": work.name, "prompt": number, "repeat": repeat},
                    partial(_turn, order, work, ids, pause),
                )
                cells[work].append({"prompt": number, **taken})
    return cells


def _turn(peers: Sequence[Peer], work: Work, ids: Sequence[int], pause: float) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    for peer in peers:
        time.sleep(pause)
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
    same = [_common(cell["ids"][name], cell["ids"][base]) for cell in cells]
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


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common beginning."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def table(works: Sequence[Work], found: Sequence[Figure]) -> Iterator[str]:
    """The figures as lines of text."""
    for work in works:
        yield str(work)
        yield f"  {'':<13}{'median s':>10}{'least':>9}{'most':>9}{'tokens/s':>10}{'ratio':>8}  95 % interval   agrees"
        for f in found:
            if f.work == work.name:
                agrees = "" if f.agrees is None else f"{f.agrees:9.1f}"
                yield (
                    f"  {f.peer:<13}{f.seconds.median:>10.4f}{f.seconds.low:>9.4f}{f.seconds.high:>9.4f}"
                    f"{f.speed:>10.1f}{f.ratio:>8.2f}  {f.interval[0]:6.2f} to {f.interval[1]:.2f}{agrees}"
                )


def compare(
    peer: Annotated[list[str], typer.Option(help="An engine, as KIND=PYTHON,MODEL; repeat it for more.")],
    model: Annotated[str, typer.Option(help="paceline's own model; the others must have the same.")] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every engine.")] = 2,
    prompts: Annotated[Path | None, typer.Option(help="A JSONL file of prompts; else those that are shipped.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="How often each.")] = 5,
    out: Annotated[Path | None, typer.Option(help="A JSONL file of the cells, to stop and go on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time paceline in int8 and other engines side by side: prompts of 1,000 tokens, and plain greedy decoding."""
    wanted = [("paceline", sys.executable, model), *map(_parse, peer)]
    names = [kind for kind, _, _ in wanted]
    if len(set(names)) < len(names):
        raise OptionError("every engine can be given once.")
    rows = _rows(model, prompts, count)
    settings = {
        "engines": wanted,
        "threads": threads,
        "works": [asdict(work) for work in rows],
        "prompts": hashlib.sha256(json.dumps(list(rows.values())).encode()).hexdigest()[:16],
    }
    with ExitStack() as stack:
        peers = [stack.enter_context(closing(worker(*each, threads))) for each in wanted]
        settings["versions"] = {each.name: each.version for each in peers}
        runner = Runner(out, environment(), settings, _tell)
        warm_up(peers, rows, _tell)
        found = figures(measure(peers, rows, repeats, runner, _PAUSE), names)
    if as_json:
        report = {"environment": runner.environment, "settings": settings, "figures": [asdict(f) for f in found]}
        print(json.dumps(report, indent=2))
    else:
        print(*table(list(rows), found), sep="\n")


def _parse(option: str) -> tuple[str, str, str]:
    kind, equals, rest = option.partition("=")
    python, comma, model = rest.partition(",")
    if not (equals and comma and python and model):
        raise OptionError(f"--peer takes KIND=PYTHON,MODEL, not {option!r}.")
    return kind, python, model


def _rows(model: str, path: Path | None, count: int) -> dict[Work, list[list[int]]]:
    texts = [prompt.turns[0] for prompt in spread(read_prompts(path), sys.maxsize)]
    tokenizer = Tokenizer.from_parts(open_model(model).tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return {work: cut(texts, encode, work.prompt, count) for work in WORKS}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison and exit: 0 done, 1 it failed, 2 it was called wrongly."""
    app = typer.Typer(add_completion=False)
    app.command()(compare)
    try:
        app(arguments, prog_name="python -m paceline.bench.peers")
    except PacelineError as error:
        _tell(f"paceline: {error}")
        raise SystemExit(2 if isinstance(error, OptionError) else 1) from None


if __name__ == "__main__":
    main()
