"""The command line with broken input, output and folders: one sentence, the documented exit code, no traceback."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.table import Table

import paceline.cli.model
from paceline.cli import main
from paceline.cli.tables import show
from paceline.errors import ResourceError
from paceline.folders import make_folder
from tests.scripted import ANSWER, Script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline import LLM

NOT_UTF8 = b"half a \xff\xfe text"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    model = Script()
    monkeypatch.setattr(paceline.cli.model, "LLM", model)
    return model


def paceline_with(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[bytes]:
    """The command line in a process of its own."""
    code = "import sys; from paceline.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], check=False, timeout=60, **streams)


@pytest.mark.parametrize("way", ["argument", "input", "chat"])
def test_bytes_that_are_no_text(
    way: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paceline.cli.model, "LLM", lambda model, **options: llm)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(NOT_UTF8 + b"\n"), encoding="utf-8"))
    arguments = {"argument": ["generate", os.fsdecode(NOT_UTF8)], "input": ["generate"], "chat": ["chat"]}[way]
    assert main([*arguments, "-q", "--max-tokens", "2"]) == (0 if way == "chat" else 1)
    out, err = capsys.readouterr()
    assert "not UTF-8" in err
    assert "should not happen" not in err
    assert out == ""


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_closed_streams(name: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, None)
    assert main(["generate", "x"]) == 0
    assert script.calls


def test_a_closed_input_is_an_empty_prompt(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "-q"]) == 1
    assert "empty" in capsys.readouterr().err


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("arguments", [["generate", "-q", "x"], ["generate", "-q", "--json", "x"], ["env", "--json"]])
def test_a_full_disk_is_named(
    arguments: list[str], script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(arguments) == 1
    assert capsys.readouterr().err == f"paceline: the output: {os.strerror(errno.ENOSPC)}.\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["env"]])
def test_a_reader_that_leaves_is_no_news(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = paceline_with(arguments, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""


class Left(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_table_that_nobody_reads_ends_as_anything_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Left())
    with pytest.raises(BrokenPipeError):
        show(Table("a"))


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to(path)])
def test_a_cache_folder_that_cannot_be(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "cache")
    with pytest.raises(ResourceError, match="PACELINE_CACHE"):
        make_folder(tmp_path / "cache" / "packed")


def test_an_error_of_a_file_is_told_with_its_name(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(step: int) -> None:
        raise PermissionError(13, "Permission denied", "/some/file")

    script.at = fail
    assert main(["generate", "-q", "x"]) == 1
    assert capsys.readouterr().err == "paceline: /some/file: Permission denied.\n"


def test_a_prompt_as_argument_leaves_the_input_alone(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("not this"))
    assert main(["generate", "-q", "this"]) == 0
    assert script.tokenizer.decode(script.calls[0][0]) == "this"
    assert sys.stdin.read() == "not this"
    assert script.answer == ANSWER


def test_the_module_ends_with_the_code_of_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "genrate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "generate" in done.stderr
