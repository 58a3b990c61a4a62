"""The demo: two requests through the command line, and its exit code."""

from __future__ import annotations

import pytest

from paceline import demo


@pytest.mark.parametrize(("codes", "code", "runs"), [([0, 0], 0, 2), ([1, 0], 1, 1), ([0, 1], 1, 2), ([130], 130, 1)])
def test_the_demo_ends_with_the_first_failure(
    codes: list[int], code: int, runs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def generate(arguments: list[str]) -> int:
        calls.append(arguments)
        return codes[len(calls) - 1]

    monkeypatch.setattr(demo, "paceline", generate)
    assert demo.main() == code
    assert len(calls) == runs
    out = capsys.readouterr().out
    assert (demo.SCENES[1].lesson in out) == (code == 0)
    for call in calls:
        assert call[0] == "generate"
        assert "--compare" in call
        assert call[-1] in out


@pytest.mark.long
def test_the_demo_runs_on_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert capsys.readouterr().out.count("identical:            yes") == 2
