"""Under load: arrivals, figures against values worked out by hand, and real requests to a tiny model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from paceline import AsyncLLM, RequestError
from paceline.bench.arrivals import Closed, Poisson
from paceline.bench.latency import Limits, Timeline, figures, summary
from paceline.bench.load import LoadBench, follow, serve
from paceline.bench.load_plot import plot
from paceline.bench.run import parse_method
from paceline.bench.runner import Runner
from paceline.cli import main
from paceline.completion import Chunk, Completion
from paceline.errors import OptionError, ResourceError
from paceline.record import SpeculationRecord
from paceline.sampling import Sampling
from tests.bench_models import model_folder, prompts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from paceline.bench.arrivals import Arrivals

__all__ = ["model_folder"]

ENVIRONMENT = {"code": "c", "machine": "m"}
METHODS = ["ngram:num_speculative_tokens=4,adaptive=false", "draft_layers=2,num_speculative_tokens=3,adaptive=false"]
SAMPLING = Sampling(temperature=0.0, seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> AsyncLLM:
    return AsyncLLM(str(model_folder), speculation=False, threads=2, max_num_seqs=3, cache_memory=1 << 24)


def runner(path: Path | None = None) -> Runner:
    return Runner(path, ENVIRONMENT, {}, lambda line: None)


# Arrivals


def test_arrivals_are_deterministic_and_those_of_a_poisson_process() -> None:
    times = Poisson(4.0).times(20_001, seed=3)
    assert times == Poisson(4.0).times(20_001, seed=3)
    assert times != Poisson(4.0).times(20_001, seed=4)
    assert Poisson(2.0).times(5, seed=3) == pytest.approx([2 * time for time in times[:5]])
    assert times[0] == 0.0
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert min(gaps) > 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    # of an exponential gap the share above its mean is 1 / e, and gaps do not depend on each other
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)
    both = sum(one > 0.25 and two > 0.25 for one, two in pairwise(gaps)) / len(gaps)
    assert both == pytest.approx(0.3679**2, abs=0.015)
    assert Poisson(1.0).times(0) == []


def test_a_closed_loop_has_as_many_requests_under_way_as_users() -> None:
    under_way, most, sent = 0, 0, []

    async def send(place: int, due: float) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        sent.append(place)
        for _ in range(1 + place % 3):
            await asyncio.sleep(0)
        under_way -= 1

    asyncio.run(Closed(3).drive(10, send))
    assert sent == list(range(10))
    assert most == 3
    asyncio.run(Closed(20).drive(10, send))
    assert most == 10


def test_open_arrivals_are_due_when_the_seed_says_however_long_answers_take() -> None:
    due: dict[int, float] = {}
    never = asyncio.Event()

    async def send(place: int, at: float) -> None:
        due[place] = at
        if len(due) == 6:
            never.set()
        await never.wait()  # none ends before all have arrived

    asyncio.run(asyncio.wait_for(Poisson(1000.0).drive(6, send, seed=5, clock=lambda: 50.0), 60))
    expected = Poisson(1000.0).times(6, seed=5)
    assert [due[place] - 50.0 for place in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("pattern", [Closed(2), Poisson(1000.0)])
def test_the_first_error_ends_all_and_is_the_one_that_is_raised(pattern: Arrivals) -> None:
    ended = []

    async def send(place: int, due: float) -> None:
        if place == 1:
            raise RequestError("no")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(place)

    with pytest.raises(RequestError, match="no"):
        asyncio.run(asyncio.wait_for(pattern.drive(2, send), 60))
    assert ended == [0]


def test_no_user_and_no_rate_are_refused() -> None:
    with pytest.raises(OptionError, match="users is 0"):
        Closed(0)
    with pytest.raises(OptionError, match="rate is 0"):
        Poisson(0.0)
    with pytest.raises(OptionError, match="finite number"):
        Poisson(float("inf"))


# Figures


def record(steps: int, drafted: int, accepted: int) -> dict[str, Any]:
    made = SpeculationRecord("ngram", 0, "bits", steps=steps, drafted=drafted, reached=[steps], accepted_at=[accepted])
    return made.as_dict()


def request(name: str, timeline: Timeline, digest: str = "d", accepted: int = 0) -> dict[str, Any]:
    return {"id": name, "timeline": asdict(timeline), "digest": digest, "record": record(4, 2 * accepted, accepted)}


def cell(seconds: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": seconds, "requests": list(requests)}


SLOW = Timeline(1.0, [1.5, 2.0, 3.0, 3.5], [1, 1, 1, 1], 3.5)
FAST = Timeline(1.0, [1.25, 1.5, 2.0], [1, 2, 1], 2.25)
SHORT = Timeline(0.0, [0.5], [1], 0.5)


def test_a_timeline_has_the_figures_of_the_definitions() -> None:
    assert (FAST.tokens, FAST.ttft, FAST.tpot, FAST.itl, FAST.e2el) == (4, 0.25, 0.25, [0.25, 0.5], 1.25)
    assert (SHORT.tokens, SHORT.tpot, SHORT.itl) == (1, None, [])


def test_percentiles_lie_between_values() -> None:
    assert summary([]) is None
    assert summary([3.0]) == {"mean": 3.0, "p50": 3.0, "p95": 3.0, "p99": 3.0}
    found = summary([float(value) for value in range(100, -1, -1)])
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0})
    assert summary([0.0, 10.0]) == pytest.approx({"mean": 5.0, "p50": 5.0, "p95": 9.5, "p99": 9.9})


def test_goodput_counts_what_keeps_to_every_limit() -> None:
    assert not Limits().given
    assert Limits(ttft=250.0, tpot=250.0).met(FAST)
    assert not Limits(ttft=249.0).met(FAST)
    assert not Limits(ttft=250.0, tpot=249.0).met(FAST)
    assert Limits(tpot=0.0).met(SHORT), "one token takes no time after the first"
    both = [cell(4.0, request("a", SLOW), request("b", FAST))]
    assert figures(both, both, Limits())["request_goodput"] is None
    assert figures(both, both, Limits(ttft=300.0))["request_goodput"]["median"] == 0.25
    assert figures(both, both, Limits(ttft=500.0))["request_goodput"]["median"] == 0.5


def test_figures_are_the_ones_of_the_definitions() -> None:
    plain = [cell(4.0, request("a", SLOW), request("b", SHORT))] * 2
    other = [
        cell(2.5, request("a", FAST, accepted=1), request("b", SHORT)),
        cell(2.0, request("a", FAST, accepted=1), request("b", SHORT)),
    ]
    found = figures(plain, other, Limits())
    assert (found["requests"], found["tokens"], found["refused"], found["differing"]) == (2, 5, 0, 0)
    assert found["output_throughput"] == {"median": 2.25, "low": 2.0, "high": 2.5}
    assert found["request_throughput"] == {"median": 0.9, "low": 0.8, "high": 1.0}
    assert found["ttft_ms"]["mean"] == 375.0
    assert found["tpot_ms"] == {"mean": 250.0, "p50": 250.0, "p95": 250.0, "p99": 250.0}
    assert found["itl_ms"]["mean"] == 375.0
    assert found["e2el_ms"]["p50"] == pytest.approx(875.0)
    assert found["speedup"]["output_throughput"] == {"median": 1.8, "low": 1.6, "high": 2.0}
    # time per token: (2.0 / 3) / (0.75 / 3), of the one request that has one
    assert found["speedup"]["tpot"]["ratio"] == pytest.approx(8 / 3)
    assert found["speedup"]["tpot"]["interval"] == pytest.approx((8 / 3, 8 / 3))
    assert found["speedup"]["ttft"]["ratio"] == pytest.approx(1.0 / 0.75)
    low, high = found["speedup"]["e2el"]["interval"]
    assert (low, high) == pytest.approx((1.0, 2.0)), "a resample may have either request alone"
    assert found["speedup"]["e2el"]["ratio"] == pytest.approx(3.0 / 1.75)
    assert (found["drafted"], found["accepted"], found["mean_accepted_length"]) == (4, 2, 1 + 2 / 16)


def test_refused_requests_are_counted_and_have_no_figures() -> None:
    plain = [cell(4.0, request("a", SLOW), request("b", SHORT))]
    refused = [cell(2.0, request("a", FAST, digest="e"), {"id": "b", "refused": "full"})]
    found = figures(plain, refused, Limits(ttft=1e6))
    assert (found["refused"], found["differing"]) == (1, 1)
    assert found["request_goodput"]["median"] == found["request_throughput"]["median"] == 0.5
    assert found["speedup"]["e2el"]["ratio"] == 2.0
    nothing = [cell(2.0, {"id": "a", "refused": "full"}, {"id": "b", "refused": "full"})]
    found = figures(nothing, nothing, Limits())
    assert found["ttft_ms"] is found["speedup"]["ttft"] is found["speedup"]["output_throughput"] is None


# Serving


def answer(ids: Sequence[int]) -> Completion:
    made = SpeculationRecord("ngram", 0, "bits")
    return Completion("", list(ids), "length", None, [], None, made, [])


async def chunks(parts: Iterable[list[int]]) -> AsyncIterator[Chunk]:
    every: list[int] = []
    for part in parts:
        every += part
        yield Chunk("", part, [], [], None, SpeculationRecord("ngram", 0, "bits"))
    yield Chunk("", [], [], [], answer(every), SpeculationRecord("ngram", 0, "bits"))


def test_a_stream_is_followed_by_the_clock_of_its_consumer() -> None:
    ticks = iter([3.0, 4.0, 6.0, 7.0, 8.0])
    found = asyncio.run(follow(chunks([[1], [2, 3], [4]]), 2.0, 1.0, lambda: next(ticks)))
    assert Timeline(**found["timeline"]) == Timeline(1.0, [2.0, 3.0, 5.0], [1, 2, 1], 7.0)


def test_every_request_is_served_with_the_same_tokens_by_each_method(llm: AsyncLLM, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    arrivals: list[Arrivals] = [Closed(1), Closed(6), Poisson(400.0)]  # six users, and room for three
    methods = [parse_method(text, {}) for text in METHODS]
    runs = [
        LoadBench(llm, prompts(6), methods, arrivals, cells, sampling=sampling, rounds=rounds, limits=Limits(1e9, 1e9))
        for cells, sampling, rounds in [(runner(path), SAMPLING, 2), (runner(), replace(SAMPLING, temperature=0.9), 1)]
    ]
    for bench in runs:
        report = bench.report()
        assert [(pattern["kind"], pattern["level"]) for pattern in report["arrivals"]] == [
            ("users", 1),
            ("users", 6),
            ("rate", 400.0),
        ]
        for pattern in report["arrivals"]:
            assert list(pattern["methods"]) == ["plain", *METHODS]
            for found in pattern["methods"].values():
                assert (found["requests"], found["tokens"], found["refused"]) == (6, 72, 0)
                assert found["differing"] == 0
                assert found["request_goodput"] == found["request_throughput"]
            assert pattern["methods"]["plain"]["drafted"] == 0
            assert pattern["methods"][METHODS[1]]["drafted"] > 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2 * 3 * 3
    digests = {tuple(served["digest"] for served in line["result"]["requests"]) for line in lines}
    assert len(digests) == 1
    assert len({line["cell"]["method"] for line in lines[::3]}) == 3, "each method is the first one now and then"
    # the same arrival times for every method, others in another round
    due = [
        [served["timeline"]["due"] for served in line["result"]["requests"]] for line in lines if "rate" in line["cell"]
    ]
    for place, times in enumerate(due):
        offsets = Poisson(400.0).times(6, seed=7 + place // 3)
        assert [time - times[0] for time in times] == pytest.approx(offsets)


def test_a_measurement_goes_on_where_it_stopped(llm: AsyncLLM, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    methods = [parse_method(METHODS[0], {})]

    def bench(cells: Runner) -> dict[str, Any]:
        return LoadBench(llm, prompts(2), methods, [Closed(2)], cells, sampling=SAMPLING, rounds=2).report()

    first = bench(runner(path))
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    again = runner(path)
    assert json.dumps(bench(again)) == json.dumps(first)
    assert (again.taken, again.found) == (0, 4)
    path.write_text("".join(lines[:3]) + lines[3][:20])
    cut = runner(path)
    bench(cut)
    assert (cut.taken, cut.found) == (1, 3)


def test_what_was_learned_is_forgotten_before_every_cell(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    forget, stream = llm.forget, llm.stream

    async def note() -> None:
        order.append("forget")
        await forget()

    def ask(*given: Any, **wishes: Any) -> Any:
        order.append("stream")
        return stream(*given, **wishes)

    monkeypatch.setattr(llm, "forget", note)
    monkeypatch.setattr(llm, "stream", ask)
    methods = [parse_method(METHODS[0], {})]
    LoadBench(llm, prompts(2), methods, [Closed(1)], runner(), sampling=SAMPLING, rounds=1).report()
    assert order == ["forget", "stream", "stream"] * 2


def test_a_request_over_the_bounds_is_refused_and_the_others_go_on(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, asked = llm.stream, []

    def ask(*given: Any, **wishes: Any) -> Any:
        asked.append(given)
        if len(asked) == 2:
            raise ResourceError("too much at once")
        return stream(*given, **wishes)

    monkeypatch.setattr(llm, "stream", ask)
    bench = LoadBench(llm, prompts(3), [], [Closed(3)], runner(), sampling=SAMPLING, rounds=1)
    found = asyncio.run(serve(llm, bench.orders, parse_method("plain", {}).speculation, Closed(3)))
    assert [served.get("refused") for served in found["requests"]] == [None, "too much at once", None]


def test_bad_input_is_refused_before_anything_is_measured(llm: AsyncLLM) -> None:
    method = parse_method("ngram", {})
    with pytest.raises(OptionError, match="named twice"):
        LoadBench(llm, prompts(1), [method, method], [Closed(1)], runner(), sampling=SAMPLING)
    with pytest.raises(OptionError, match="4 users need as many prompts"):
        LoadBench(llm, prompts(3), [method], [Closed(4)], runner(), sampling=SAMPLING)


# The command


def test_the_load_verb(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"question_id": p.id, "category": p.category, "turns": list(p.turns)} for p in prompts(6)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    options = ["bench", "load", "-m", str(model_folder), "--prompts", str(questions), "--threads", "2"]
    options += ["--users", "1,4", "--rate", "200", "--max-tokens", "6", "--rounds", "1", "--num-prompts", "4"]
    options += ["--output", str(tmp_path / "cells.jsonl")]
    long = "draft_model:draft_layers=2,adaptive=false,num_speculative_tokens=7,tree=none,vocabulary=same"
    options += ["--method", "ngram", "--method", long, "--temperature", "0.8"]
    figure = tmp_path / "load.svg"
    assert main([*options, "--ttft-limit", "1e6", "--tpot-limit", "1e6", "--plot", str(figure)]) == 0
    captured = capsys.readouterr()
    for text in ("1 user", "4 users", "200 per s", "good/s", "first token"):
        assert text in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    assert "…" not in captured.out
    assert figure.read_bytes().count(b"time to first token, p95, ms") == 2
    before = (tmp_path / "cells.jsonl").read_text()
    assert main([*options, "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert (tmp_path / "cells.jsonl").read_text() == before, "limits need no new cells"
    assert report["prompts"] == 4
    assert [pattern["level"] for pattern in report["arrivals"]] == [1, 4, 200]
    again = tmp_path / "again.svg"
    plot(report, again)
    plot(report, figure)
    assert again.read_bytes() == figure.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "--rate has 0; each must be a finite number above 0"),
        (["--rate", "often"], "--rate takes numbers"),
        (["--users", "0"], "--users has 0"),
        (["--prompts", "none.jsonl"], "cannot be read"),
        (["--plot", "figure.unknown"], "no plot becomes of figure.unknown"),
        (["--method", "magic"], "unknown"),
    ],
)
def test_wrong_options_are_said_at_once(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "load", "-m", str(tmp_path / "missing"), *options]) == 2
    assert message in capsys.readouterr().err
