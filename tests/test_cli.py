"""The command line as a whole: help, verbs, failures, flags that all verbs share."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import paceline.cli.model
from paceline import methods
from paceline.cli import VERBS, load, main
from paceline.cli.flags import describe, in_flags, memory
from paceline.cli.model import FLAGS
from paceline.errors import OptionError
from paceline.options import Speculation
from paceline.sampling import Sampling
from paceline.settings import EngineOptions
from paceline.wishes import Wishes
from tests.scripted import Script, feed, script

__all__ = ["script"]


def test_help_needs_no_model_and_little_time() -> None:
    code = "import sys, paceline.cli; code = paceline.cli.main(['--help']); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    for verb in VERBS:
        assert verb in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert VERBS[verb].split(".")[0] in capsys.readouterr().out


@pytest.mark.parametrize("verb", [*([verb] for verb in VERBS), *(["bench", verb] for verb in load("bench").commands)])
def test_help_cuts_no_flag_on_a_narrow_screen(
    verb: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    found = load(verb[0])
    for parameter in (found.commands[verb[1]] if len(verb) > 1 else found).params:
        if parameter.param_type_name == "option":
            assert all(re.search(rf"{flag}(?![\w-])", out) for flag in [*parameter.opts, *parameter.secondary_opts])


def test_every_option_is_a_flag_with_help() -> None:
    for verb in ("generate", "chat"):
        flags = {name: p for p in load(verb).params for name in p.opts}
        for options in (Sampling, EngineOptions):
            for field in dataclasses.fields(options):
                if field.init:
                    flag = flags["--" + field.name.replace("_", "-")]
                    assert len(flag.help) > 10
        for name in ("--draft-model", "--num-speculative-tokens", "--adaptive", "--method", "--rule", "--tree"):
            assert len(flags[name].help) > 10
        for name in ("--draft-layers", "--prompt-lookup-min", "--no-speculation", "--speculative-config", "-m", "-t"):
            assert name in flags


def test_every_option_is_described_where_it_is_declared() -> None:
    for options in (Sampling, Speculation, EngineOptions):
        assert set(describe(options)) >= {field.name for field in dataclasses.fields(options)}


def test_unknown_verbs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    assert "generate" in capsys.readouterr().err


def test_failures_are_one_sentence_and_1(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", ""]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "paceline: the prompt is empty: give at least one token."
    script.template = False
    assert main(["generate", "--chat", "x"]) == 1
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "generate", ""], ["generate", "--debug", ""]])
def test_debug_shows_the_traceback(script: Script, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_unexpected_is_named_without_traceback(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(step: int) -> None:
        raise ZeroDivisionError("by nothing")

    script.at = fail
    assert main(["generate", "x"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: by nothing" in err
    assert "Traceback" not in err


def test_amounts_of_memory() -> None:
    amounts = {"1000": 1000, "1.5K": 1536, "2 GiB": 2 * 1024**3, "2gb": 2 * 1024**3}
    assert {text: memory("", text) for text in amounts} == amounts
    for wrong in ("", "-1", "2X", "G"):
        with pytest.raises(OptionError):
            memory("", wrong)


def test_the_environment_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"][0].isdigit()
    assert found["kernels"]["path"]
    assert found["memory"]["total"] > found["memory"]["free"] > 0
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for name in ("paceline", "processor", "kernels", "compiler", "cache folder", "memory"):
        assert f"{name}:" in out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {paceline.__version__}\n"
    assert version("paceline") == paceline.__version__


@pytest.mark.parametrize(
    ("sentence", "spoken"),
    [
        ("max_model_len is 9, but a has 8.", "--max-model-len is 9, but a has 8."),
        ("shorten it, or raise max_model_len if it allows.", "shorten it, or raise --max-model-len if it allows."),
        ("name one with model=..., or draft_layers=...", "name one with --draft-model ..., or --draft-layers ..."),
        ("model and draft_layers exclude each other.", "--draft-model and --draft-layers exclude each other."),
        ("method 'x' is unknown; did you mean 'ngram'?", "--method 'x' is unknown; did you mean 'ngram'?"),
        (
            "'max_token' is no option; did you mean 'max_tokens'?",
            "'max_token' is no option; did you mean 'max_tokens'?",
        ),
        ("the model has no seed; stop at n.", "the model has no seed; stop at n."),
        ("stop holds an empty text.", "--stop holds an empty text."),
        ("random and model exclude each other: a model.", "--random and --draft-model exclude each other: a model."),
        ("method 'x' drafts chains, and tree is 3.", "--method 'x' drafts chains, and --tree is 3."),
        ("the target and the model is not here.", "the target and the model is not here."),
        ("/some/max_tokens/seed=1 is missing.", "/some/max_tokens/seed=1 is missing."),
        ("adaptive is true or false.", "--adaptive is true or false."),
    ],
)
def test_options_are_spoken_of_as_flags(sentence: str, spoken: str) -> None:
    assert in_flags(sentence, FLAGS) == spoken


def test_a_key_of_isolation_reaches_the_request(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["generate", "x", "-q", "--cache-salt", "mine"]) == 0
    feed(monkeypatch, "Hi\n")
    assert main(["chat", "-q", "--cache-salt", "mine"]) == 0
    assert [request["cache_salt"] for request in script.requests] == ["mine", "mine"]


def test_every_method_can_be_asked_for_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert f"What drafts: auto, {', '.join(methods.names())}." in listed


def test_the_command_line_knows_no_method_by_name() -> None:
    for path in Path(paceline.cli.__file__).parent.glob("*.py"):
        for name in set(methods.names()) - Wishes.__annotations__.keys():
            assert f'"{name}"' not in path.read_text(), f"{path.name} names {name}"


def test_every_option_of_speculation_is_a_flag(script: Script) -> None:
    flags = {name for parameter in load("generate").params for name in parameter.opts}
    for field in dataclasses.fields(Speculation):
        if field.name not in ("enabled", "model"):
            assert "--" + field.name.replace("_", "-") in flags
