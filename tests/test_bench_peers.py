"""Measuring beside other engines: the processes' protocol, the order of the turns, the figures."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from paceline.bench import peers
from paceline.bench.peer_worker import timed
from paceline.bench.peers import Work, Worker, cut, figures, measure, table, warm_up, worker
from paceline.bench.runner import Runner
from paceline.errors import OptionError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

FAKE = """
import json, sys
print("loading", file=sys.stderr)
print(json.dumps({"version": "fake 1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = [asked["ids"][-1] + step + 1 for step in range(asked["count"])]
    print(json.dumps({"ids": ids, "first": len(asked["ids"]) / 8, "rest": len(ids) / 4}), flush=True)
"""
PREFILL, DECODE = Work("prefill", 6, 1), Work("decode", 3, 5)


def fake(script: str = FAKE) -> Worker:
    return Worker("fake", [sys.executable, "-c", script], threads=1)


class Counting:
    """An engine whose tokens count up from the prompt's last, and whose seconds are given."""

    version = "1"

    def __init__(self, name: str, seconds: Sequence[float], calls: list[str], wrong_at: int | None = None) -> None:
        self.name = name
        self._seconds = list(seconds)
        self._calls = calls
        self._wrong_at = wrong_at

    def prefill(self, ids: Sequence[int]) -> float:
        return self.decode(ids, 1)[1]

    def decode(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        self._calls.append(self.name)
        tokens = [ids[-1] + step + 1 for step in range(count)]
        if self._wrong_at is not None:
            tokens[self._wrong_at] += 1
        return tokens, self._seconds[(len(self._calls) - 1) % len(self._seconds)]


def silent_runner(path: Path | None = None) -> Runner:
    return Runner(path, {"code": "c", "machine": "m"}, {}, lambda line: None)


def test_a_process_answers_for_prompts_and_tokens() -> None:
    with closing(fake()) as peer:
        assert (peer.name, peer.version) == ("fake", "fake 1")
        assert peer.prefill([1, 2, 3, 4]) == 0.5
        assert peer.decode([1, 2], 3) == ([3, 4, 5], 0.75)
        assert peer.prefill([7]) == 0.125


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('no such model')", "fake ended with exit code 1: no such model"),
        ("", "fake ended with exit code 0: it said nothing"),
        ("print('hello')", "fake answered 'hello'"),
        ("print('[1]')", "fake answered"),
        ("print('{\"ready\": 1}')", "fake answered .*'version'"),
    ],
)
def test_a_process_that_does_not_start_is_told(script: str, message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        fake(script)


def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(PacelineError, match="fake cannot be started"):
        Worker("fake", ["/nonexistent/python"], threads=1)


def test_a_process_that_ends_or_decodes_too_little_is_told() -> None:
    short = fake(FAKE.replace('range(asked["count"])', "range(2)"))
    with closing(short) as peer, pytest.raises(PacelineError, match="decoded 2 tokens in place of 3"):
        peer.decode([1], 3)
    with closing(fake(FAKE.replace("    ids =", "    raise SystemExit('out of memory')\n    ids ="))) as peer:
        with pytest.raises(PacelineError, match="exit code 1: out of memory"):
            peer.decode([1], 3)
        with pytest.raises(PacelineError, match="exit code 1"):
            peer.prefill([1])


def test_the_real_worker_reports_what_it_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no engine known here; there are paceline, transformers"):
        worker("vllm", sys.executable, "model", 1)
    with pytest.raises(PacelineError, match=r"paceline ended with exit code 1: .*missing\.gguf"):
        worker("paceline", sys.executable, str(tmp_path / "missing.gguf"), 1)


def test_times_are_taken_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scripted:
        version = "1"

        def decode(self, ids: Sequence[int], count: int, seen: Callable[[int], None]) -> None:
            for step in range(count):
                seen(ids[0] + step)

    moments = iter([10.0, 10.5, 11.0, 13.0])
    monkeypatch.setattr("paceline.bench.peer_worker.perf_counter", lambda: next(moments))
    assert timed(Scripted(), [5, 6], 3) == {"ids": [5, 6, 7], "first": 0.5, "rest": 2.5}


def test_prompts_have_the_exact_length_and_differ() -> None:
    texts = ["abc", "defgh", "i"]

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    assert ["".join(map(chr, ids)) for ids in cut(texts, encode, 8, 3)] == ["abc\n\ndef", "defgh\n\ni", "i\n\nabc\n\n"]
    with pytest.raises(OptionError, match="do not make 4 of 8 tokens"):
        cut(texts, encode, 8, 4)
    with pytest.raises(OptionError, match="do not make 1 of 100 tokens"):
        cut(texts, encode, 100, 1)


def test_every_engine_is_warmed_up_three_times_a_work() -> None:
    calls: list[str] = []
    told: list[str] = []
    engines = [Counting("a", [1], calls), Counting("b", [1], calls)]
    warm_up(engines, {PREFILL: [[1] * 6], DECODE: [[1] * 3]}, told.append)
    assert calls == ["a"] * 6 + ["b"] * 6
    assert told == ["warming up a (1)", "warming up b (1)"]


def test_engines_take_turns_and_each_begins_in_turn() -> None:
    calls: list[str] = []
    engines = [Counting(name, [1], calls) for name in "abc"]
    rows = {PREFILL: [[1] * 6, [2] * 6], DECODE: [[3] * 3]}
    cells = measure(engines, rows, 2, silent_runner(), pause=0)
    assert "".join(calls) == "abcbcacababcbcacab"
    assert [cell["prompt"] for cell in cells[PREFILL]] == [0, 1, 0, 1]
    assert [cell["ids"]["b"] for cell in cells[DECODE]] == [[4, 5, 6, 7, 8]] * 2


def test_a_measurement_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls: list[str] = []
    engines = [Counting(name, [1, 2, 3], calls) for name in "ab"]
    rows = {DECODE: [[1] * 3, [2] * 3]}
    first = measure(engines, rows, 1, silent_runner(tmp_path / "cells.jsonl"), pause=0)
    again = measure(engines, rows, 2, silent_runner(tmp_path / "cells.jsonl"), pause=0)
    assert len(calls) == 8  # 4 before, 4 of the second repeat
    assert again[DECODE][:2] == first[DECODE]


def cell(prompt: int, mine: float, other: float, ids: dict[str, list[int]] | None = None) -> dict[str, Any]:
    return {"prompt": prompt, "seconds": {"mine": mine, "other": other}, "ids": ids or {"mine": [], "other": []}}


def test_figures_are_medians_by_prompt_and_ratios_of_their_sums() -> None:
    cells = [cell(0, 1, 2), cell(1, 3, 6.5), cell(0, 2, 3), cell(1, 3, 7), cell(0, 9, 2.5), cell(1, 3, 9)]
    mine, other = figures({PREFILL: cells}, ["mine", "other"])
    assert (mine.seconds.median, mine.seconds.low, mine.seconds.high) == (3, 1, 9)
    assert mine.speed == 6 / 3
    assert (mine.ratio, mine.interval) == (1, (1, 1))
    # medians: prompt 0 is 2 against 2.5, prompt 1 is 3 against 7
    assert other.ratio == pytest.approx(9.5 / 5)
    assert other.interval == pytest.approx((1.25, 7 / 3))
    assert other.agrees is None


def test_figures_say_how_far_the_texts_agree() -> None:
    cells = [
        cell(0, 1, 2, {"mine": [1, 2, 3, 4], "other": [1, 2, 3, 4]}),
        cell(1, 1, 2, {"mine": [1, 2, 3, 4], "other": [1, 2, 9, 4]}),
    ]
    mine, other = figures({DECODE: cells}, ["mine", "other"])
    assert (mine.agrees, other.agrees) == (4, 3)
    assert other.speed == 4 / 2
    lines = list(table([DECODE, PREFILL], [mine, other]))
    assert lines[0] == "decode: 5 tokens after 3, without the first"
    assert [line.split()[0] for line in lines[2:4]] == ["mine", "other"]
    assert lines[3].split()[1:] == ["2.0000", "2.0000", "2.0000", "2.0", "2.00", "2.00", "to", "2.00", "3.0"]
    assert len(lines) == 6


def test_the_command_reports_every_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def started(kind: str, python: str, model: str, threads: int) -> Worker:
        assert (python, model) == ((sys.executable, "tiny") if kind == "paceline" else ("PY", "M"))
        return Worker(kind, [sys.executable, "-c", FAKE], threads)

    monkeypatch.setattr(peers, "worker", started)
    monkeypatch.setattr(peers, "_rows", lambda model, path, count: {PREFILL: [[1] * 6], DECODE: [[2] * 3]})
    monkeypatch.setattr(peers, "_PAUSE", 0)
    arguments = ["--model", "tiny", "--peer", "llama.cpp=PY,M", "--repeats", "2", "--out", str(tmp_path / "cells")]
    with pytest.raises(SystemExit) as left:
        peers.main([*arguments, "--json"])
    assert left.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert [(f["work"], f["peer"], f["ratio"]) for f in report["figures"]] == [
        ("prefill", "paceline", 1),
        ("prefill", "llama.cpp", 1),
        ("decode", "paceline", 1),
        ("decode", "llama.cpp", 1),
    ]
    assert report["settings"]["versions"] == {"paceline": "fake 1", "llama.cpp": "fake 1"}
    assert len((tmp_path / "cells").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "transformers=python"], "KIND=PYTHON,MODEL"),
        (["--peer", "paceline=a,b"], "every engine can be given once"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        peers.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err
