"""Measuring beside other engines: the processes' protocol, the order of the turns, the figures."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from paceline.bench.peer_process import Worker, parse_peer, start
from paceline.bench.peer_worker import timed
from paceline.bench.peers import Beside, Work, cut, digest, figures
from paceline.bench.runner import Runner
from paceline.cli import bench, main
from paceline.errors import OptionError, PacelineError
from tests.bench_models import model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["model_folder"]

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
    with pytest.raises(PacelineError, match=r"paceline ended with exit code 1: .*missing\.gguf"):
        start("paceline", sys.executable, str(tmp_path / "missing.gguf"), 1)


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


def test_the_digest_tells_prompts_apart() -> None:
    assert digest([[1, 2], [3]]) == digest([[1, 2], [3]])
    assert len({digest(prompts) for prompts in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2]])}) == 4


@pytest.mark.parametrize(
    "text", ["", "llama.cpp", "llama.cpp=python", "llama.cpp=python,", "llama.cpp=,model", "a=b,c"]
)
def test_an_engine_is_written_in_three_parts(text: str) -> None:
    assert parse_peer("llama.cpp=/a/python,/b/model,q.gguf") == ("llama.cpp", "/a/python", "/b/model,q.gguf")
    with pytest.raises(OptionError, match=r"KIND=PYTHON,MODEL|no engine known here; there are paceline, transformers"):
        parse_peer(text)


def test_every_engine_is_warmed_up_three_times_a_work() -> None:
    calls: list[str] = []
    engines = [Counting("a", [1], calls), Counting("b", [1], calls)]
    Beside(engines, {PREFILL: [[1] * 6], DECODE: [[1] * 3]}, silent_runner(), repeats=1).warm_up()
    assert calls == ["a"] * 6 + ["b"] * 6


def test_engines_take_turns_and_each_begins_in_turn() -> None:
    calls: list[str] = []
    engines = [Counting(name, [1], calls) for name in "abc"]
    rows = {PREFILL: [[1] * 6, [2] * 6], DECODE: [[3] * 3]}
    cells = Beside(engines, rows, silent_runner(), repeats=2, pause=0).measure()
    assert "".join(calls) == "abcbcacababcbcacab"
    assert [cell["prompt"] for cell in cells[PREFILL]] == [0, 1, 0, 1]
    assert [cell["ids"]["b"] for cell in cells[DECODE]] == [[4, 5, 6, 7, 8]] * 2


def test_a_measurement_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls: list[str] = []
    engines = [Counting(name, [1, 2, 3], calls) for name in "ab"]
    rows = {DECODE: [[1] * 3, [2] * 3]}
    first = Beside(engines, rows, silent_runner(tmp_path / "cells.jsonl"), repeats=1, pause=0).measure()
    again = Beside(engines, rows, silent_runner(tmp_path / "cells.jsonl"), repeats=2, pause=0).measure()
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


def test_the_command_runs_engines_side_by_side(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "Beside", partial(Beside, pause=0))
    sizes = ["--prefill", "40", "--context", "20", "--max-tokens", "8", "--count", "3", "--repeats", "2", "-t", "1"]
    peer = f"transformers={sys.executable},{model_folder}"
    arguments = ["bench", "peers", "-m", str(model_folder), "--peer", peer, *sizes, "-q", "-o", str(tmp_path / "cells")]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    order = [(work, peer) for work in ("prefill", "decode") for peer in ("paceline", "transformers")]
    assert [(figure["work"], figure["peer"]) for figure in report["figures"]] == order
    assert [figure["agrees"] for figure in report["figures"][:3]] == [None, None, 8]
    assert all(figure["seconds"]["low"] > 0 and figure["speed"] > 0 for figure in report["figures"])
    assert report["settings"]["engines"]["transformers"].startswith(version("transformers"))
    cells = [json.loads(line) for line in (tmp_path / "cells").read_text().splitlines()]
    assert len(cells) == 2 * 3 * 2
    assert all(len(cell["result"]["ids"]["transformers"]) in (0, 8) for cell in cells)
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "decode: 8 tokens after 20" in out
    line = [line for line in out.splitlines() if "transformers" in line][-1]
    assert f"{report['figures'][3]['ratio']:.2f} x" in line


def test_no_engine_is_given_twice(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--peer", "llama.cpp=a,b"] * 2
    assert main(["bench", "peers", "-m", str(model_folder), *twice]) == 2
    assert "each kind of engine once" in capsys.readouterr().err
