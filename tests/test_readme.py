"""What the README shows is what a reader gets: its program, its commands, the flags that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import VERBS, main
from tests.scripted import Script, script

if TYPE_CHECKING:
    import pytest

__all__ = ["script"]

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_program_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    place = next(place for place, (language, _) in enumerate(BLOCKS) if language == "python")
    exec(compile(BLOCKS[place][1], "README.md", "exec"), {})
    printed, shown = capsys.readouterr().out.splitlines(), BLOCKS[place + 1][1].splitlines()
    length = shown.index("bits") - 1
    assert float(printed.pop(length)) >= 1.0, "how far to draft is measured, so no more is certain"
    assert float(shown.pop(length)) > 1.5
    assert printed == shown


def test_the_asynchronous_program_goes_on_likewise(capsys: pytest.CaptureFixture[str]) -> None:
    _, program = (block for language, block in BLOCKS if language == "python")
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out == " Wednesday, Thursday, Friday, Saturday, Sunday"


def test_the_commands_are_commands(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [shlex.split(line) for _, block in BLOCKS for line in block.splitlines() if line.startswith("paceline ")]
    assert lines
    for line in lines:
        assert line[1] in VERBS
        if line[1] == "generate":
            assert main(line[1:]) == 0
            assert "identical:            yes" in capsys.readouterr().out


def test_flags_that_are_named_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    known: set[str] = set()
    for verb in (["generate"], ["verify"], ["bench", "run"], ["bench", "rewrite"]):
        assert main([*verb, "--help"]) == 0
        known |= set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert named - known <= {"--no-deps"}, "which is pip's"
    assert {"--prediction", "--prediction-file", "--cache-memory"} <= named
