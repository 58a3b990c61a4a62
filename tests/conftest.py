"""What several test files share: the default model, loaded once, and a journal for runs too long for one go."""

from __future__ import annotations

import hashlib
import json
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from paceline import LLM
from paceline.bench.environment import code, commit
from paceline.machine import machine

# The same examples in every run: what one machine passes another passes too.
settings.register_profile("fixed", derandomize=True, database=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The default model in int8; tests that change its state leave it idle."""
    return LLM(max_model_len=2048, max_num_seqs=8)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Let an interrupt be one, also where the tests were started in the background, with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, help="write each passed test here; leave out those that passed before")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--journal")
    if path is not None:
        config.pluginmanager.register(Journal(path))


class Journal:
    """A JSONL file of passed tests; one counts again only on the same code, tests and machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamps = {"code": code(), "tests": _digest(Path(__file__).parent), "machine": machine()}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._passed = {e["test"] for e in entries if all(e[key] == value for key, value in self._stamps.items())}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = [item for item in items if item.nodeid in self._passed]
        if known:
            config.hook.pytest_deselected(items=known)
            items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            session.exitstatus = pytest.ExitCode.OK  # all of them passed before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            entry = {"test": report.nodeid, "seconds": round(report.duration, 2), **self._stamps, "commit": commit()}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**entry, "date": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json", ".jsonl"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
