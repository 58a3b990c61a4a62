"""The command line with a scripted model: flags, results, exit codes, interrupts."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import paceline.cli.model
from paceline import methods
from paceline.cli import VERBS, load, main
from paceline.cli.flags import describe, in_flags, memory
from paceline.cli.model import FLAGS
from paceline.draw import Logprob
from paceline.errors import ContextLengthError, OptionError, RequestError
from paceline.options import Speculation
from paceline.record import Origin, SpeculationRecord
from paceline.sampling import Sampling
from paceline.settings import EngineOptions
from paceline.text import Detokenizer, Tokenizer
from paceline.wishes import Wishes

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER = "yes, yes: ü\tand no"


def letters() -> Tokenizer:
    """Every byte is a token."""
    backend = Backend(
        models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@dataclasses.dataclass
class Script:
    """A model that always gives the same answer, three tokens a step where it speculates."""

    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: list[tuple[list[int], Sampling, Any]] = dataclasses.field(default_factory=list)
    answer: str = ANSWER
    plain_answer: str | None = None
    at: Callable[[int], None] = lambda step: None
    notes: tuple[str, ...] = ("model: scripted",)
    template: bool = True
    room: int = 10_000
    default_sampling: Sampling = dataclasses.field(default_factory=Sampling)
    running: list[Answer] = dataclasses.field(default_factory=list)
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = letters()

    def __call__(self, model: str, **made: Any) -> Script:
        self.made = {"model": model, **made}
        return self

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.template:
            raise RequestError("the model has no chat template.")
        return self.tokenizer.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def submit(
        self,
        ids: list[int],
        sampling: Sampling,
        speculation: Any = True,
        origins: bool = False,
        **request: Any,
    ) -> list[Answer]:
        if not ids:
            raise RequestError("the prompt is empty: give at least one token.")
        if len(ids) > self.room:
            raise ContextLengthError("the context is full.")
        self.calls.append((ids, sampling, speculation))
        self.requests.append(request)
        fast = Speculation.parse(speculation).enabled
        text = self.answer if fast or self.plain_answer is None else self.plain_answer
        tokens = self.tokenizer.encode(text)[: sampling.max_tokens]
        made = [Answer(self, ids, sampling, tokens, fast, origins) for _ in range(sampling.n)]
        self.running += made
        return made

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> None:
        """What warms a comparison up."""

    def step(self, every: list[Answer]) -> bool:
        self.at(max((one.steps for one in self.running), default=0))
        for one in list(self.running):
            one.go_on()
        return any(one.finish_reason is None for one in every)

    def cancel(self, every: list[Answer]) -> None:
        for one in every:
            if one in self.running:
                one.end("abort")


@dataclasses.dataclass(eq=False)
class Answer:
    """An answer of a script on its way: what the engine shows of a sequence."""

    script: Script
    prompt: list[int]
    sampling: Sampling
    tokens: list[int]
    fast: bool
    origins: bool
    steps: int = 0
    given: int = 0
    sources: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = dataclasses.field(default_factory=lambda: [None])
    finish_reason: str | None = None
    error: None = None

    def __post_init__(self) -> None:
        seed = 7 if self.sampling.seed is None else self.sampling.seed
        method = "ngram" if self.fast else "none"
        self.record = SpeculationRecord(method, seed, "bits", origins=[] if self.origins else None)
        self.text = Detokenizer(self.script.tokenizer)
        self.request = self  # of which the prompt and the sampling are asked for

    @property
    def output(self) -> list[int]:
        return self.tokens[: self.given]

    def go_on(self) -> None:
        new = self.tokens[self.given : self.given + (3 if self.fast and self.steps else 1)]
        for place, token in enumerate(new):
            self.text.push(token)
            self.sources.append("ngram" if place + 1 < len(new) else "target")
            self.logprobs.append(Logprob(token, -1.0, 1, ()))
            if self.record.origins is not None:
                self.record.origins.append(Origin(self.sources[-1], self.steps, 0))
        if self.steps:
            self.record.judge(len(new), len(new) - 1, True)
        self.given, self.steps = self.given + len(new), self.steps + 1
        self.record.seconds.verify += 0.5
        if self.given == len(self.tokens):
            self.end("length")

    def end(self, reason: str) -> None:
        self.finish_reason = reason
        self.text.finish()
        self.script.running.remove(self)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    model = Script()
    monkeypatch.setattr(paceline.cli.model, "LLM", model)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return model


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


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


def interrupt(step: int) -> None:
    if step == 1:
        signal.raise_signal(signal.SIGINT)


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
    assert "last:  19 tokens" in err
    assert "by position:          1: 6/6, 2: 6/6, 3: 0/6" in err
    assert "/what is no command; there are /clear, /stats, /help" in err
    assert script.tokenizer.decode(script.calls[1][0]) == "<system>Be brief.<user>New"


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
    assert "last:  4 tokens" in err
    assert "all:   23 tokens" in err


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


def test_a_prediction_is_a_text_or_in_a_file(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "draft.txt").write_text("in a file\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for prediction in ("as it stands, " * 500, str(tmp_path / "draft.txt")):
        assert main(["generate", "x", "-q", "--prediction", prediction]) == 0
    assert [request["prediction"] for request in script.requests] == ["as it stands, " * 500, "in a file\n"]
    assert main(["generate", "x", "-q", "--prediction", str(tmp_path / "bytes")]) == 2
    assert "cannot be read" in capsys.readouterr().err


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
