"""``paceline generate`` with a scripted model: flags, results, exit codes, comparisons, interrupts."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline.cli.model
from paceline.cli import main
from paceline.cli.report import Run, details, summary
from paceline.completion import Completion
from paceline.record import SpeculationRecord
from paceline.sampling import Sampling
from tests.scripted import ANSWER, Script, feed, interrupt, script

__all__ = ["script"]


def test_generate_prints_the_text(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Is it?"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert "model: scripted" in err
    assert "19 tokens" in err
    assert "12 of 18 drafted tokens accepted" in err
    assert script.tokenizer.decode(script.calls[0][0]) == "Is it?"


def test_quiet_is_quiet(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-q", "x"]) == 0
    assert capsys.readouterr() == (ANSWER + "\n", "")
    assert script.made["progress"] is False


def test_flags_reach_the_model_and_the_sampling(script: Script) -> None:
    arguments = (
        "generate x -m some/model --dtype bf16 --kv-dtype fp32 -t 2 --max-model-len 64 --max-num-seqs 3"
        " --cache-memory 2M --temperature 0.5 --top-k 3 --logit-bias 1=-5 --logit-bias 2=1.5,3=2 --stop a --stop b"
        " --stop-token-ids 4,5 --stop-token-ids 6 --ignore-eos --no-skip-special-tokens --seed 11 --max-tokens 4"
        " --draft-layers 6 --num-speculative-tokens 3 --no-adaptive --tree 2"
    )
    assert main(arguments.split()) == 0
    speculation = {"draft_layers": 6, "num_speculative_tokens": 3, "adaptive": False, "tree": 2}
    assert script.made == {
        "model": "some/model",
        "dtype": "bf16",
        "kv_dtype": "fp32",
        "threads": 2,
        "max_model_len": 64,
        "max_num_seqs": 3,
        "cache_memory": 2 * 1024**2,
        "speculation": speculation,
        "progress": True,
    }
    sampling = script.calls[0][1]
    assert sampling == Sampling(
        temperature=0.5,
        top_k=3,
        logit_bias={1: -5.0, 2: 1.5, 3: 2.0},
        stop=["a", "b"],
        stop_token_ids=[4, 5, 6],
        ignore_eos=True,
        skip_special_tokens=False,
        seed=11,
        max_tokens=4,
    )


def test_without_flags_the_model_decides(script: Script) -> None:
    script.default_sampling = Sampling(temperature=0.25, top_p=0.5)
    assert main(["generate", "x", "--top-p", "0.75"]) == 0
    assert script.calls[0][1] == Sampling(temperature=0.25, top_p=0.75)
    assert script.made == {"model": "smollm2-135m", "speculation": True, "progress": True}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], True),
        (["--no-speculation"], False),
        (["--method", "ngram"], {"method": "ngram"}),
        (["--draft-model", "small"], {"model": "small"}),
        (["--speculation", "off"], {"method": "off"}),
        (["--speculation", "ngram"], {"method": "ngram"}),
        (["--speculation", "false"], {"enabled": False}),
        (["--speculative-config", '{"method": "ngram", "tree": "none"}'], {"method": "ngram", "tree": "none"}),
        (["--speculation", '{"method": "suffix"}', "--tree", "3"], {"method": "suffix", "tree": 3}),
    ],
)
def test_ways_to_ask_for_speculation(script: Script, arguments: list[str], expected: Any) -> None:
    assert main(["generate", "x", *arguments]) == 0
    assert script.made["speculation"] == expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--temprature", "1"], "--temperature"),
        (["--temperature", "-1"], "paceline: --temperature is -1"),
        (["--temperature", "hot"], "'--temperature'"),
        (["--stop", ""], "paceline: --stop holds an empty text"),
        (["--bad-words", ""], "paceline: --bad-words holds an empty text"),
        (["--n", "0"], "paceline: --n is 0"),
        (["--seed", "-1"], "paceline: --seed is -1"),
        (["--logprobs", "-1"], "paceline: --logprobs is -1"),
        (["--rule", "mine"], "paceline: --rule 'mine' is unknown"),
        (["--tree", "0"], "paceline: --tree is 0"),
        (["--tree", "lost.json"], "paceline: --tree names 'lost.json', which cannot be read"),
        (["--method", "ngram", "--tree", "3"], "paceline: --method 'ngram' drafts chains, and --tree is 3;"),
        (["--random"], "paceline: --random is for methods that have a head (eagle, eagle3, medusa), and"),
        (["--method", "eagle", "--random", "--draft-model", "a"], "paceline: --random and --draft-model exclude each"),
        (["--method", "ngram", "--draft-model", "a"], "paceline: --draft-model is given, and --method 'ngram'"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--method", "draft_model"], "--draft-layers ..."),
        (["--logit-bias", "5"], "as in --logit-bias 11=-5"),
        (["--stop-token-ids", "a"], "as in --stop-token-ids 1,2"),
        (["--cache-memory", "lots"], "as in 512M"),
        (["--method", "ngrm"], "ngram"),
        (["--method", "hydra"], "not part of this version"),
        (["--speculation", "{"], "JSON"),
        (["--speculation", "[1]"], "JSON object"),
        (["--speculation", '{"metod": "ngram"}'], "'method'"),
        (["--speculation", '{"method": "ngram"}', "--method", "auto"], "--speculation has method"),
        (["--no-speculation", "--method", "ngram"], "excludes"),
        (["--no-speculation", "--compare"], "--compare needs speculation"),
        (["--draft-model", "a", "--draft-layers", "2"], "exclude"),
        (["more", "words"], "unexpected"),
    ],
)
def test_wrong_usage_is_one_sentence_and_2(
    script: Script, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
    assert not script.calls


def test_the_prompt_may_come_from_standard_input(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["-"]):
        feed(monkeypatch, "two\nlines\n\n")
        assert main(["generate", *arguments]) == 0
        assert script.tokenizer.decode(script.calls[-1][0]) == "two\nlines\n"


def test_a_terminal_is_no_prompt(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate"]) == 2
    assert "a prompt is missing" in capsys.readouterr().err


def test_chat_puts_the_prompt_into_the_template(script: Script) -> None:
    assert main(["generate", "--chat", "Hi"]) == 0
    assert script.tokenizer.decode(script.calls[0][0]) == "<user>Hi"


def test_json_is_one_object(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--json", "--origins", "-q"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["text"] == ANSWER
    assert script.tokenizer.decode(shown["token_ids"]) == ANSWER
    assert (shown["finish_reason"], shown["prompt_tokens"], shown["completion_tokens"]) == ("length", 1, 19)
    assert shown["speculation"]["method"] == "ngram"
    assert len(shown["speculation"]["origins"]) == 19
    assert shown["logprobs"] is None


def test_several_answers(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--n", "2", "--json", "-q"]) == 0
    assert [c["text"] for c in json.loads(capsys.readouterr().out)["completions"]] == [ANSWER] * 2
    assert main(["generate", "x", "--n", "2", "-q"]) == 0
    assert capsys.readouterr().out == f"[0] {ANSWER}\n\n[1] {ANSWER}\n"


def test_compare_runs_both_and_reports(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--compare", "--top-k", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(ANSWER + "\n")
    for line in ("plain:", "with ngram:", "speed-up:", "drafted:", "accepted:", "mean accepted length:"):
        assert f"\n{line}" in out
    assert "1: 6/6, 2: 6/6, 3: 0/6" in out
    assert "verify 3.50 s (100%)" in out
    assert out.endswith("identical:            yes\n")
    (_, fast, on), (_, plain, off) = script.calls[-2:]
    assert (on, off) == ({}, False)
    assert (fast.seed, plain.seed) == (None, 7)
    assert plain.top_k == 5


def test_compare_as_json(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--compare", "--json", "-q"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["comparison"]["identical"] is True
    assert shown["comparison"]["speedup"] > 0
    assert shown["plain"]["token_ids"] == shown["token_ids"]
    assert shown["plain"]["speculation"]["method"] == "none"


def test_a_difference_is_a_failure(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.plain_answer = ANSWER.replace("no", "NO")
    assert main(["generate", "x", "--compare"]) == 1
    assert capsys.readouterr().out.endswith("no\n")


def test_an_interrupt_keeps_what_was_produced(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.at = interrupt
    assert main(["generate", "x", "-q"]) == 130
    assert capsys.readouterr() == (ANSWER[:4] + "\n", "")
    assert main(["generate", "x", "-q", "--json", "--logprobs", "0"]) == 130
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["finish_reason"], shown["completion_tokens"]) == (ANSWER[:4], "abort", 4)
    assert (shown["speculation"]["steps"], shown["speculation"]["accepted"]) == (1, 2)
    assert [entry["token_id"] for entry in shown["logprobs"]] == shown["token_ids"]
    script.at = lambda step: None
    assert main(["generate", "x", "-q", "--json", "--logprobs", "0"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == shown.keys()


def test_an_interrupt_keeps_what_each_of_several_answers_has(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.at = interrupt
    assert main(["generate", "x", "-q", "--n", "2"]) == 130
    assert capsys.readouterr() == (f"[0] {ANSWER[:4]}\n\n[1] {ANSWER[:4]}\n", "")
    assert main(["generate", "x", "-q", "--n", "2", "--json"]) == 130
    completions = json.loads(capsys.readouterr().out)["completions"]
    assert [(c["text"], c["finish_reason"]) for c in completions] == [(ANSWER[:4], "abort")] * 2


def test_an_interrupted_comparison_has_what_was_run(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.at = interrupt
    assert main(["generate", "x", "-q", "--compare", "--json"]) == 130
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["plain"], shown["comparison"]) == (ANSWER[:4], None, None)
    script.at = lambda step: interrupt(step) if len(script.calls) == 3 else None
    assert main(["generate", "x", "-q", "--compare", "--json"]) == 130
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["plain"]["text"], shown["comparison"]) == (ANSWER, ANSWER[:2], None)


def test_an_interrupt_waits_for_the_step(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    def twice(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    script.at = twice
    assert main(["generate", "x", "-q"]) == 130
    assert capsys.readouterr().out == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not script.running


def test_an_interrupt_while_loading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(model: str, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paceline.cli.model, "LLM", load)
    assert main(["generate", "-q", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_colours_are_for_terminals(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    script.answer = "yes, \x1b[2J\t"
    assert main(["generate", "x"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("y\x1b[32me\x1b[0m\x1b[32ms\x1b[0m,")
    assert "\x1b[2J" not in out
    assert "\t" in out
    assert "green: ngram" in err
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["generate", "x"]) == 0
    assert capsys.readouterr().out == script.answer + "\n"


def test_a_prediction_is_a_text_or_in_a_file(script: Script, tmp_path: Path) -> None:
    (tmp_path / "draft.txt").write_text("in a file\n")
    for given in (
        ["--prediction", "as it stands, " * 500],
        ["--prediction", "@dataclass"],
        ["--prediction", "no/such/file.txt"],
        ["--prediction-file", str(tmp_path / "draft.txt")],
    ):
        assert main(["generate", "x", "-q", *given]) == 0
    expected = ["as it stands, " * 500, "@dataclass", "no/such/file.txt", "in a file\n"]
    assert [request["prediction"] for request in script.requests] == expected


@pytest.mark.parametrize(
    ("lacking", "sentence"),
    [
        ("prediction", "it drafts from --prediction, and none was given"),
        ("constraint", "it drafts from constraint=..., which only Python can give, and none was given"),
    ],
)
def test_what_a_method_lacks_is_spoken_of_as_it_can_be_given(lacking: str, sentence: str) -> None:
    record = SpeculationRecord("x", 1, "bits", steps=1, lacking=lacking)
    run = Run([Completion("", [], "stop", None, [], None, record, [])], 0, 0.0)
    assert summary(run) == f"0 tokens · speed unknown · x: nothing drafted ({sentence})"
    assert details(run.record())[0] == f"drafted:              0 tokens ({sentence})"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--prediction-file", "drafft.txt"], "'drafft.txt' cannot be read (No such file or directory): name a file"),
        (["--prediction-file", "."], "'.' cannot be read (Is a directory): name a file"),
        (["--prediction-file", "bytes"], "'bytes' cannot be read (it is not UTF-8 text): name a file"),
        (["--prediction", "draft.txt"], "'draft.txt' is a file: take --prediction-file to read it."),
        (["--prediction", "a", "--prediction-file", "draft.txt"], "exclude each other; leave one of them out."),
    ],
)
def test_a_prediction_that_is_not_there_is_an_error(
    script: Script,
    given: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("draft.txt").write_text("in a file\n")
    Path("bytes").write_bytes(b"\xff\xfe")
    assert main(["generate", "x", "-q", *given]) == 2
    assert not script.made
    assert sentence in capsys.readouterr().err
