"""What is shown while a model is fetched and converted."""

from __future__ import annotations

import io
import sys
from queue import Queue
from typing import TYPE_CHECKING

from paceline.targets.progress import Lines, shown, watched

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_at_once_and_then_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 1.0, 9.0, 11.0, 11.0, 12.0, 25.0, 25.0])
    lines = Lines("fetching it (8 MB)", lambda: next(seconds))
    assert capsys.readouterr().err == "fetching it (8 MB)\n"
    for done in (1, 2, 3, 4, 6):
        lines(done, 8)
    assert capsys.readouterr().err == "fetching it (8 MB): 38%\nfetching it (8 MB): 75%\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with shown("fetching it", True) as advance:
        advance(1, 2)
    assert "fetching it" in terminal.getvalue()
    assert "50%" in terminal.getvalue()


def test_where_nobody_wants_it_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("fetching it", False) as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_folder_is_watched_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.targets.progress._LOOKS", 0.001)
    (tmp_path / "before").write_bytes(b"12345")
    (tmp_path / "deep").mkdir()
    seen: Queue[tuple[int, int]] = Queue()
    with watched(tmp_path, 100, lambda done, total: seen.put((done, total))):
        for size, path, expected in ((60, tmp_path / "part", 60), (100, tmp_path / "deep" / "whole", 100)):
            path.write_bytes(b"x" * size)
            while seen.get(timeout=10) != (expected, 100):
                pass
    while not seen.empty():
        assert seen.get() == (100, 100)  # never more than the whole
