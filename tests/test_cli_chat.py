"""``paceline chat`` with a scripted model: commands, interrupts, a full context."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from paceline.cli import main
from paceline.cli.paint import Painter
from tests.scripted import ANSWER, Script, feed, interrupt, script

if TYPE_CHECKING:
    import pytest

__all__ = ["script"]


STATS = (
    r"last answer:          19 tokens · [\d.]+ tokens/s · ngram: 12 of 18 drafted tokens accepted, 3.00 tokens a step",
    r"all answers:          19 tokens · [\d.]+ tokens/s · ngram: 12 of 18 drafted tokens accepted, 3.00 tokens a step",
    r"drafted:              18 tokens",
    r"accepted:             12 tokens \(67%\)",
    r"mean accepted length: 3.00 tokens a step",
    r"by position:          1: 6/6, 2: 6/6, 3: 0/6 \(accepted/judged\)",
    r"where the time went:  draft 0.00 s \(0%\), verify 3.50 s \(100%\), .*",
)


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    feed(monkeypatch, "".join(line + "\n" for line in lines))
    return main(["chat", "-q", "--system", "Be brief."])


def test_chat_remembers(script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "Hi", "", "Again") == 0
    assert capsys.readouterr().out == f"{ANSWER}\n{ANSWER}\n"
    prompts = [script.tokenizer.decode(ids) for ids, _, _ in script.calls]
    assert prompts[0] == "<system>Be brief.<user>Hi"
    assert prompts[1] == f"<system>Be brief.<user>Hi<assistant>{ANSWER}<user>Again"
    assert script.calls[0][1].max_tokens is None


def test_chat_commands(script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "/stats", "Hi", "/stats", "/clear", "/what now", "New") == 0
    err = capsys.readouterr().err
    assert "no answer yet" in err
    for stated in STATS:
        assert re.search(f"^{stated}$", err, re.MULTILINE), stated
    assert "/what is no command; there are /clear, /stats, /help" in err
    assert script.tokenizer.decode(script.calls[1][0]) == "<system>Be brief.<user>New"


def test_colours_are_explained_once(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    legend = "colours of drafted tokens: green: ngram; without colour: the model's own"
    feed(monkeypatch, "Hi\nAgain\n")
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\x1b[32m") == 22  # a letter each
    assert err.splitlines().count(legend) == 1
    assert talk(monkeypatch, "Hi") == 0
    assert "colours" not in capsys.readouterr().err, "nor where only the answer is wanted"
    monkeypatch.setenv("NO_COLOR", "1")
    feed(monkeypatch, "Hi\n")
    assert main(["chat"]) == 0
    assert "colours" not in capsys.readouterr().err


def test_a_drafter_keeps_its_colour() -> None:
    painter = Painter(["suffix"])
    assert (painter.colour("ngram"), painter.colour("suffix")) == ("cyan", "green")
    assert painter.legend() == "colours of drafted tokens: green: suffix, cyan: ngram; without colour: the model's own"


def test_chat_goes_on_after_an_interrupted_answer(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.at = lambda step: signal.raise_signal(signal.SIGINT) if step == 1 and len(script.calls) == 1 else None
    assert talk(monkeypatch, "Hi", "On") == 0
    assert capsys.readouterr().out == f"{ANSWER[:4]}\n{ANSWER}\n"
    assert script.tokenizer.decode(script.calls[1][0]).endswith(f"<assistant>{ANSWER[:4]}<user>On")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_chat_help_lists_the_commands(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "/help") == 0
    err = capsys.readouterr().err
    assert all(line in err for line in ("/clear  forget", "/stats  show", "/help   list", "Ctrl-D"))


def test_stats_of_an_interrupted_answer_are_its_own(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.at = lambda step: interrupt(step) if len(script.calls) == 2 else None
    assert talk(monkeypatch, "Hi", "On", "/stats") == 0
    err = capsys.readouterr().err
    assert "last answer:          4 tokens" in err
    assert "all answers:          23 tokens" in err


def test_an_interrupt_at_the_prompt_says_how_to_leave(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str | type[BaseException]] = [KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt, "Never"]

    def read(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("paceline.cli.chat._prompt", lambda: "> ")
    assert main(["chat", "-q"]) == 130
    assert lines == ["Never"]
    assert capsys.readouterr().err.splitlines() == ["Ctrl-C again, or Ctrl-D, ends the program."] * 2


def test_a_second_interrupt_ends_the_chat(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    script.at = twice
    assert talk(monkeypatch, "Hi", "On") == 130
    assert len(script.calls) == 1


def test_a_full_context_does_not_end_the_chat(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.room = 60
    assert talk(monkeypatch, "Hi", "long " * 10, "/clear", "Hi") == 0
    assert "the context is full. Or /clear" in capsys.readouterr().err
    assert script.tokenizer.decode(script.calls[-1][0]) == "<system>Be brief.<user>Hi"


def test_chat_without_template_fails_at_once(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.template = False
    assert talk(monkeypatch, "Hi") == 1
    assert "no chat template" in capsys.readouterr().err
    feed(monkeypatch, "Hi\n")
    assert main(["chat", "--n", "2"]) == 2
