"""LLM and the thread behind it: interrupts of whoever waits, streams of several answers, the end, forks."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline import LLM, Chunk, ClosedError, RequestError, Sampling
from tests.bench_models import model_folder, tiny_llm
from tests.test_loop import WAIT, Gate, forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["model_folder", "tiny_llm"]

PROMPT = "wheel to wheel, "
LONG = Sampling(temperature=0.0, max_tokens=300, ignore_eos=True)
SHORT = LONG.replace(max_tokens=12)
SEVERAL = Sampling(temperature=0.9, seed=3, n=3, max_tokens=20, ignore_eos=True)


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """Whatever a test did, nothing is held afterwards."""
    yield tiny_llm
    with tiny_llm.paused() as engine:
        assert engine.idle
        assert all(pool.free == pool.pages for pool in engine.pools)
    assert not tiny_llm.loop._listeners


def own(folder: Path) -> LLM:
    return LLM(str(folder), speculation=False, threads=1, cache_memory=1 << 24)


def interrupt_in(llm: LLM, number: int, patch: pytest.MonkeyPatch) -> None:
    """Let there be a Ctrl-C in the middle of a pass, which goes on when whoever waited has left."""
    forward, passes = llm.engine.target.forward, 0

    def interrupted(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == number:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            for _ in range(200):  # not for ever: one that comes just before a wait is noticed behind it
                if not llm.loop._commands.empty():
                    break
                threading.Event().wait(0.005)
        return forward(*given)

    patch.setattr(llm.engine.target, "forward", interrupted)


def test_a_stream_of_several_answers(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SEVERAL)
    chunks: dict[int, list[Chunk]] = {0: [], 1: [], 2: []}
    for chunk in llm.stream(PROMPT, SEVERAL):
        chunks[chunk.choice].append(chunk)
    for choice, own in chunks.items():
        assert [token for chunk in own for token in chunk.token_ids] == expected[choice].token_ids
        assert own[-1].completion is not None
        assert own[-1].completion.text == expected[choice].text == "".join(chunk.text for chunk in own)


@pytest.mark.parametrize("number", [1, 2, 30])
def test_what_an_interrupted_stream_had_come_to_can_be_read(
    llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = llm.generate(PROMPT, LONG).token_ids, list[Chunk]()
    stream = llm.stream(PROMPT, LONG)
    interrupt_in(llm, number, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        seen.extend(stream)
    seen += stream
    assert seen[-1].completion is not None
    assert seen[-1].completion.finish_reason == "abort"
    assert seen[-1].completion.token_ids == [token for chunk in seen for token in chunk.token_ids]
    assert seen[-1].completion.token_ids == whole[: len(seen[-1].completion.token_ids)]
    assert number <= len(seen[-1].completion.token_ids) < 300


def test_an_interrupt_harms_no_other_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = llm.generate(PROMPT, LONG).token_ids, []
    neighbour = threading.Thread(target=lambda: found.append(llm.generate(PROMPT, LONG)))
    interrupt_in(llm, 20, monkeypatch)
    neighbour.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 4, LONG)
    neighbour.join(WAIT)
    assert found[0].token_ids == expected


def test_submitting_is_for_a_paused_engine(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stepped by hand"):
        llm.submit(PROMPT, SHORT)
    expected = llm.generate(PROMPT, SHORT).token_ids
    with llm.paused() as engine:
        (running,) = llm.submit(PROMPT, SHORT)
        (left,) = llm.submit(PROMPT, LONG)
        with llm.paused():
            (inner,) = llm.submit(PROMPT, LONG)
        assert inner.finish_reason == "abort"
        while running.finish_reason is None:
            engine.step()
        for call in (lambda: llm.generate(PROMPT, SHORT), lambda: next(llm.stream(PROMPT, SHORT)), llm.close):
            with pytest.raises(RequestError, match="paused by this thread"):
                call()
        llm.forget() if engine.idle else None
    assert running.output == expected
    assert left.finish_reason == "abort"


def test_use_after_close(model_folder: Path) -> None:
    with own(model_folder) as llm:
        gate = Gate(llm.engine, 3)
        stream, begun = llm.stream(PROMPT, LONG), llm.stream(PROMPT, LONG)
        next(begun)
        assert gate.reached.wait(WAIT)
        answers: list[Any] = []
        running = threading.Thread(target=lambda: answers.append(llm.generate(PROMPT, LONG)))
        running.start()
        while llm.loop._commands.empty():
            running.join(0.001)
        llm.loop.stop()
        gate.open.set()
    running.join(WAIT)
    assert answers[0].finish_reason == "abort"
    last = [chunk.completion for chunk in begun][-1]
    assert last is not None
    assert last.finish_reason == "abort"
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT, SHORT),
        lambda: llm.chat([{"role": "user", "content": PROMPT}], SHORT),
        lambda: next(stream),
        lambda: llm.paused().__enter__(),
        llm.forget,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match=r"the model was closed: load it again\."):
            call()
    llm.close()


@pytest.mark.parametrize("used", [False, True])
def test_the_thread_ends_when_nobody_holds_the_model(model_folder: Path, used: bool) -> None:
    llm = own(model_folder)
    thread = llm.loop._thread
    if used:
        llm.generate([PROMPT, PROMPT], SEVERAL)
        next(llm.stream(PROMPT, LONG, speculation={"method": "cascade", "draft_layers": 1}))
    del llm
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_stream_keeps_its_model(model_folder: Path) -> None:
    chunks = list(own(model_folder).stream(PROMPT, SHORT))
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.finish_reason == "length"


def test_a_forked_child_is_told_to_load_it_again(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG.replace(max_tokens=900))
    next(stream)

    def child() -> int:
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate(PROMPT, SHORT),
            lambda: list(stream),
            lambda: next(llm.stream(PROMPT, SHORT)),
            llm.forget,
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="load it here as well"):
                call()
        stream.close()
        llm.close()
        return 0

    assert forked(child) == 0
    stream.close()


PROGRAM = """
import sys, threading
from paceline import LLM, Sampling
llm = LLM(sys.argv[1], speculation=False, threads=1, cache_memory=1 << 24)
stream = llm.stream("wheel", Sampling(temperature=0.0, max_tokens=900, ignore_eos=True))
next(stream)
threading.Thread(target=lambda: list(stream), daemon=True).start()
print("the end")
"""


def test_a_program_may_end_in_the_middle_of_everything(model_folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model_folder)], capture_output=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"the end\n", b"")


def test_torch_is_kept_to_one_thread_where_the_engine_runs_and_nowhere_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, before, seen = llm.engine.verifier.accept, torch.get_num_threads(), set[tuple[str, int]]()

    def note(*given: Any) -> Any:
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return accept(*given)

    monkeypatch.setattr(llm.engine.verifier, "accept", note)
    there = llm.loop.call(torch.get_num_threads).result(WAIT)
    llm.generate(PROMPT, SHORT)
    assert seen == {("paceline", 1)}
    assert torch.get_num_threads() == before
    assert llm.loop.call(torch.get_num_threads).result(WAIT) == there
