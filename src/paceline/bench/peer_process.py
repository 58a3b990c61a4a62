"""An engine in a process of its own: started, asked, ended."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.bench.peer_worker import ENGINES
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORKER = Path(__file__).with_name("peer_worker.py")


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
