"""Many tasks share a model: the tokens of each are its own, leaving frees everything, and nobody harms another."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from paceline import AsyncLLM, ClosedError, OptionError, RequestError, Sampling
from tests.bench_models import model_folder, tiny_llm
from tests.test_loop import WAIT, Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from paceline import LLM, Completion

__all__ = ["model_folder", "tiny_llm"]

PROMPT = "wheel to wheel, "
LONG = Sampling(temperature=0.0, max_tokens=300, ignore_eos=True)
FIXED = {"num_speculative_tokens": 4, "adaptive": False}
WISHES: list[dict[str, Any]] = [
    {"speculation": False},
    {"speculation": {"method": "ngram", **FIXED}},
    {"speculation": {"method": "cascade", **FIXED}},
    {"speculation": {"method": "draft_model", "draft_layers": 1, **FIXED}},
]
SETTINGS = [
    Sampling(temperature=0.0, max_tokens=30, ignore_eos=True),
    Sampling(temperature=0.9, seed=4, max_tokens=21, ignore_eos=True),
    Sampling(temperature=0.7, top_p=0.9, seed=5, max_tokens=17, n=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def shared(model_folder: Path) -> AsyncLLM:
    return AsyncLLM(str(model_folder), speculation=False, threads=2, max_num_seqs=4, cache_memory=1 << 24)


@pytest.fixture
def model(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """Whatever a test did, nothing is held afterwards."""
    target = shared.engine.target
    yield shared
    shared.engine.target = target
    empty(shared)


def empty(model: AsyncLLM) -> None:
    with model.paused() as engine:
        assert engine.idle
        for pool in engine.pools:
            pool.check([])
            assert pool.free == pool.pages
    assert not model.loop._listeners


def run(task: Coroutine[Any, Any, Any]) -> Any:
    """Run a task in an event loop of its own, and not for ever."""
    return asyncio.run(asyncio.wait_for(task, 60))


def tokens(found: Any) -> Any:
    return [tokens(each) for each in found] if isinstance(found, list) else found.token_ids


async def streamed(model: AsyncLLM, prompt: str, sampling: Sampling, **wishes: Any) -> Any:
    """The completions of a stream, once its chunks have been found to be theirs."""
    ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    ends: dict[int, Completion] = {}
    async for chunk in model.stream(prompt, sampling, **wishes):
        assert chunk.choice not in ends
        ids.setdefault(chunk.choice, []).extend(chunk.token_ids)
        texts[chunk.choice] = texts.get(chunk.choice, "") + chunk.text
        assert len(chunk.token_ids) == len(chunk.offsets) == len(chunk.origins)
        if chunk.completion is not None:
            ends[chunk.choice] = chunk.completion
    found = [ends[choice] for choice in range(sampling.n)]
    assert [completion.token_ids for completion in found] == [ids[choice] for choice in range(sampling.n)]
    assert [completion.text for completion in found] == [texts[choice] for choice in range(sampling.n)]
    return found if sampling.n > 1 else found[0]


def test_many_tasks_have_the_tokens_that_they_have_alone(model: AsyncLLM, tiny_llm: LLM) -> None:
    cases = [(f"{PROMPT}{n}", SETTINGS[n % 3], WISHES[n % 4]) for n in range(24)]
    expected = [tokens(tiny_llm.generate(prompt, sampling, speculation=False)) for prompt, sampling, _ in cases]

    async def together() -> list[Any]:
        tasks = []
        for place, (prompt, sampling, wishes) in enumerate(cases):
            call = partial(streamed, model) if place % 2 else model.generate
            tasks.append(asyncio.create_task(call(prompt, sampling, **wishes)))
            await asyncio.sleep(0.002 * (place % 3))
        return list(await asyncio.gather(*tasks))

    assert [tokens(found) for found in run(together())] == expected


def test_lists_and_conversations(model: AsyncLLM, tiny_llm: LLM) -> None:
    prompts = [f"{PROMPT}{n}" for n in range(6)]
    talk = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for sampling in SETTINGS:
        expected = tiny_llm.generate(prompts, sampling), tiny_llm.chat(talk, sampling), tiny_llm.chat(talk[0], sampling)

        async def both(sampling: Sampling = sampling) -> Any:
            many = model.generate(prompts, sampling), model.chat(talk, sampling), model.chat(talk[0], sampling)
            return await asyncio.gather(*many)

        assert tokens(run(both())) == tokens(list(expected))


def test_event_loops_of_several_threads_share_it(model: AsyncLLM, tiny_llm: LLM) -> None:
    sampling = SETTINGS[0]
    expected = {n: tiny_llm.generate(f"{PROMPT}{n}", sampling).token_ids for n in range(9)}
    found: dict[int, list[int]] = {}

    async def work(first: int) -> None:
        async def one(n: int) -> None:
            found[n] = (await streamed(model, f"{PROMPT}{n}", sampling, **WISHES[n % 4])).token_ids

        await asyncio.gather(*(one(n) for n in range(first, 9, 3)))

    threads = [threading.Thread(target=lambda n=n: run(work(n))) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected
    gc.collect()
    assert not model._alarms


CALLS: dict[str, Callable[[AsyncLLM, str], Coroutine[Any, Any, Any]]] = {
    "generate": lambda model, prompt: model.generate([prompt, PROMPT], LONG.replace(n=2)),
    "chat": lambda model, prompt: model.chat([{"role": "user", "content": prompt}], LONG),
    "stream": lambda model, prompt: streamed(model, prompt, LONG, **WISHES[1]),
}


@pytest.mark.parametrize("number", [1, 2, 3, 9])
@pytest.mark.parametrize("call", CALLS)
def test_a_cancelled_task_frees_all_with_the_current_step(model: AsyncLLM, call: str, number: int) -> None:
    """In the pieces of a prompt, of which there are two, and while decoding."""
    gate = Gate(model.engine, number)

    async def cancelled() -> None:
        task = asyncio.create_task(CALLS[call](model, PROMPT * 50))
        assert await asyncio.to_thread(gate.reached.wait, WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        empty(model)

    run(cancelled())
    assert gate.passes == number


@pytest.mark.parametrize("call", CALLS)
def test_a_task_that_is_cancelled_while_its_request_waits(model: AsyncLLM, call: str) -> None:
    async def cancelled() -> None:
        gate = Gate(model.engine, 5)
        running = [asyncio.create_task(model.generate(PROMPT, LONG.replace(max_tokens=40))) for _ in range(4)]
        assert await asyncio.to_thread(gate.reached.wait, WAIT)
        task = asyncio.create_task(CALLS[call](model, PROMPT))
        await asyncio.sleep(0)
        task.cancel()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        answers = await asyncio.gather(*running)
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        assert {answer.finish_reason for answer in answers} == {"length"}

    run(cancelled())


def test_a_stream_can_be_left_in_every_way(model: AsyncLLM) -> None:
    async def leave() -> None:
        async for _ in model.stream(PROMPT, LONG):
            break
        empty(model)
        stream = model.stream(PROMPT, LONG)
        await anext(stream)
        await stream.aclose()
        empty(model)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        async with model.stream(PROMPT, LONG) as stream:
            async for _ in stream:
                break
        empty(model)
        with suppress(ZeroDivisionError):
            async for _ in model.stream(PROMPT, LONG):
                raise ZeroDivisionError
        empty(model)
        dropped = model.stream(PROMPT, LONG)
        await anext(dropped)
        del dropped
        empty(model)
        model.stream(PROMPT, LONG)
        await model.stream(PROMPT, LONG).aclose()

    run(leave())


def test_a_task_cancelled_between_two_chunks(model: AsyncLLM) -> None:
    async def slow(reading: asyncio.Event) -> None:
        async for _ in model.stream(PROMPT, LONG):
            reading.set()
            await asyncio.sleep(60)

    async def cancelled() -> None:
        reading = asyncio.Event()
        task = asyncio.create_task(slow(reading))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        empty(model)

    run(cancelled())


@pytest.mark.parametrize("early", [True, False])
def test_cancelling_a_stream_gives_what_it_came_to(model: AsyncLLM, early: bool) -> None:
    async def cancelled() -> None:
        whole = (await model.generate(PROMPT, LONG)).token_ids
        gate = Gate(model.engine, 5)
        stream, seen = model.stream(PROMPT, LONG), []
        if not early:
            seen.append(await anext(stream))
            assert await asyncio.to_thread(gate.reached.wait, WAIT)
        stream.cancel()
        gate.open.set()
        seen += [chunk async for chunk in stream]
        completion = seen[-1].completion
        assert completion is not None
        assert completion.finish_reason == "abort"
        assert completion.token_ids == [token for chunk in seen for token in chunk.token_ids]
        assert completion.token_ids == whole[: len(completion.token_ids)]
        assert len(completion.token_ids) <= 1 if early else len(completion.token_ids) == 5

    run(cancelled())


def test_whoever_stops_reading_keeps_one_chunk_and_nobody_up(model: AsyncLLM, tiny_llm: LLM) -> None:
    async def stop() -> None:
        expected = tiny_llm.generate(PROMPT, LONG)
        gate = Gate(model.engine, 5)
        stream = model.stream(PROMPT, LONG, origins=True)
        first = await anext(stream)
        gate.open.set()
        assert tokens(await model.generate(PROMPT, SETTINGS[0])) == expected.token_ids[:30]
        while model.loop._listeners:
            assert len(stream._flow._chunks) <= 1
            await asyncio.sleep(0.005)
        rest = [chunk async for chunk in stream]
        assert len(rest) == 1
        assert first.token_ids + rest[0].token_ids == expected.token_ids
        assert first.text + rest[0].text == expected.text
        assert first.offsets + rest[0].offsets == expected.offsets
        assert rest[0].completion is not None
        assert rest[0].completion.record.origins is not None
        assert len(rest[0].completion.record.origins) == 300

    run(stop())


def test_the_record_of_a_chunk_stands_still(model: AsyncLLM) -> None:
    async def follow() -> None:
        stream = model.stream(PROMPT, LONG, **WISHES[1])
        chunks = [chunk async for chunk in stream]
        steps = [chunk.record.as_dict()["steps"] for chunk in chunks]
        assert steps == sorted(steps)
        assert steps[0] < steps[-1]

    run(follow())


def test_bad_requests_are_refused_before_they_begin(model: AsyncLLM) -> None:
    async def refused() -> None:
        with pytest.raises(RequestError, match="empty"):
            await model.generate("")
        with pytest.raises(RequestError, match="empty"):
            model.stream("")
        with pytest.raises(OptionError, match="did you mean 'cache_salt'"):
            await model.chat([{"role": "user", "content": PROMPT}], cache_sal="x")
        with pytest.raises(OptionError, match="layers"):
            await model.generate(PROMPT, speculation={"method": "draft_model", "draft_layers": 99})

    run(refused())


NO_TOKEN = Sampling(allowed_token_ids=[32], bad_words=["AA"], max_tokens=9)  # the ids of A, and of A twice


def test_what_breaks_a_request_off_is_raised_to_its_caller_alone(model: AsyncLLM) -> None:
    async def broken() -> None:
        neighbour = asyncio.create_task(model.generate(PROMPT, LONG))
        for call in (model.generate([PROMPT, PROMPT], NO_TOKEN), streamed(model, PROMPT, NO_TOKEN)):
            with pytest.raises(RequestError, match="no token"):
                await call
        assert (await neighbour).finish_reason == "length"

    run(broken())


def test_what_breaks_a_step_off_is_raised_to_all_that_ran(model: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, passes = model.engine.target.forward, 0

    def fail(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 8:
            raise MemoryError("no memory is left")
        return forward(*given)

    async def broken() -> None:
        whole = (await model.generate(PROMPT, LONG)).token_ids
        monkeypatch.setattr(model.engine.target, "forward", fail)
        seen: list[int] = []

        async def read() -> None:
            async for chunk in model.stream(PROMPT, LONG):
                seen.extend(chunk.token_ids)

        found = await asyncio.gather(read(), model.generate(PROMPT, LONG), return_exceptions=True)
        assert [type(error) for error in found] == [MemoryError] * 2
        assert 5 <= len(seen) <= 7
        assert seen == whole[: len(seen)]
        assert (await model.generate(PROMPT, LONG)).token_ids == whole

    run(broken())


def test_a_stream_whose_event_loop_was_closed_ends(model: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    streams: list[Any] = []

    async def leave() -> None:
        streams.append(model.stream(PROMPT, LONG))
        await anext(streams[0])
        await model.stream(PROMPT, LONG).aclose()

    here = asyncio.new_event_loop()
    here.run_until_complete(leave())
    with model.paused():
        here.close()
        streams[0]._flow.take()
    assert run(model.generate(PROMPT, LONG)).finish_reason == "length"
    empty(model)
    del streams[0]


def test_a_drafter_is_made_beside_what_runs(model: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As loading a draft model may take minutes."""
    made, going_on = model.roster._made, threading.Event()
    loaders: list[int] = []

    def slow(speculation: Any) -> Any:
        loaders.append(threading.get_ident())
        assert going_on.wait(60)
        return made(speculation)

    async def beside() -> None:
        await model.forget()
        monkeypatch.setattr(model.roster, "_made", slow)
        waiting = asyncio.create_task(model.generate(PROMPT, SETTINGS[0], **WISHES[3]))
        following = asyncio.create_task(streamed(model, PROMPT, SETTINGS[0], **WISHES[3]))
        while not loaders:
            await asyncio.sleep(0.001)
        plain = await streamed(model, PROMPT, SETTINGS[0])
        assert not waiting.done()
        going_on.set()
        assert tokens(list(await asyncio.gather(waiting, following))) == [plain.token_ids] * 2
        assert len(loaders) == 1
        assert loaders[0] not in (threading.get_ident(), model.loop._thread.ident)

    run(beside())


def test_a_task_cancelled_while_its_drafter_is_made(model: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, going_on, began = model.roster._made, threading.Event(), threading.Event()

    def slow(speculation: Any) -> Any:
        began.set()
        assert going_on.wait(60)
        return made(speculation)

    async def cancelled() -> None:
        await model.forget()
        monkeypatch.setattr(model.roster, "_made", slow)
        for call in (model.generate(PROMPT, LONG, **WISHES[3]), streamed(model, PROMPT, LONG, **WISHES[3])):
            task = asyncio.create_task(call)
            assert await asyncio.to_thread(began.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            empty(model)
        going_on.set()

    run(cancelled())


def test_forgetting_waits_for_nobody(model: AsyncLLM) -> None:
    async def forget() -> None:
        await model.forget()
        gate = Gate(model.engine, 3)
        stream = model.stream(PROMPT, LONG)
        await anext(stream)
        forgetting = asyncio.create_task(model.forget())
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(RequestError, match="while no request is running"):
            await forgetting
        await stream.aclose()
        await model.forget()

    run(forget())


def test_closing_ends_what_runs(model_folder: Path) -> None:
    async def close() -> None:
        async with AsyncLLM(str(model_folder), speculation=False, threads=1, cache_memory=1 << 24) as own:
            gate = Gate(own.engine, 3)
            stream = own.stream(PROMPT, LONG)
            first = await anext(stream)
            task = asyncio.create_task(own.generate(PROMPT, LONG))
            await asyncio.sleep(0)
            own.loop.stop()
            gate.open.set()
        rest = [chunk async for chunk in stream]
        assert rest[-1].completion is not None
        assert rest[-1].completion.finish_reason == "abort"
        assert len(rest[-1].completion.token_ids) >= len(first.token_ids)
        assert (await task).finish_reason == "abort"
        for call in (own.generate(PROMPT), streamed(own, PROMPT, LONG), own.forget()):
            with pytest.raises(ClosedError, match="was closed"):
                await call
        await own.close()
        assert own.engine.idle

    run(close())


def test_dropped_it_ends_its_thread_and_is_kept_by_its_streams(model_folder: Path) -> None:
    async def drop() -> None:
        own: Any = AsyncLLM(str(model_folder), speculation=False, threads=1, cache_memory=1 << 24)
        thread = own.loop._thread
        stream = own.stream(PROMPT, SETTINGS[0])
        chunks = [await anext(stream)]
        del own
        gc.collect()
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].completion is not None
        assert chunks[-1].completion.finish_reason == "length"
        del stream
        gc.collect()
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()

    run(drop())
