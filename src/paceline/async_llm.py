"""The Python interface for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakValueDictionary

from paceline.calls import Call, Following
from paceline.completion import Chunk
from paceline.front import Front

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from paceline.drafters import Drafter
    from paceline.prepare import Prepared
    from paceline.sampling import Sampling
    from paceline.wishes import Wishes


class AsyncLLM(Front):
    """A model, ready to generate, for any number of tasks, of any event loops; their requests ride together.

    Its constructor is :class:`~paceline.front.Front`'s, and takes as long as loading does. Cancelling a task cancels
    what it waits for, and frees all of it before the next step.
    """

    async def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        **wishes: Unpack[Wishes],
    ) -> Any:
        """Complete one prompt or a list of them; see :meth:`LLM.generate <paceline.llm.LLM.generate>`."""
        return await self._run(*self.preparer.prompts(prompts, sampling, wishes))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        **wishes: Any,
    ) -> Any:
        """Answer one conversation or a list of them; see :meth:`LLM.chat <paceline.llm.LLM.chat>`."""
        return await self._run(*self.preparer.conversations(messages, sampling, wishes))

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        **wishes: Unpack[Wishes],
    ) -> AsyncStream:
        """Complete one prompt step by step; see :meth:`LLM.stream <paceline.llm.LLM.stream>`.

        Refuses at once what can be refused, and begins with the first chunk.
        """
        return AsyncStream(self, self.preparer.one("stream", prompt, sampling, wishes))

    async def forget(self) -> None:
        """Forget what was learned from earlier requests; see :meth:`LLM.forget <paceline.llm.LLM.forget>`."""
        await asyncio.wrap_future(self.loop.call(self._forget))

    async def close(self) -> None:
        """End the engine's thread. Requests that run end with the finish reason "abort", later ones are refused."""
        await asyncio.to_thread(self.loop.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, each: Sequence[Prepared], single: bool) -> Any:
        call = Call(self, each, single)
        try:
            call.begin([await self._drafter_aside(prepared) for prepared in each])
            await asyncio.wrap_future(call.over)
        except BaseException:
            call.cancel()
            raise
        return call.answers()

    async def _drafter_aside(self, prepared: Prepared) -> Drafter | None:
        """The drafter that a request asks for; one that has to be made, with a model perhaps, is made by a thread."""
        speculation = prepared.request.speculation
        if not speculation.enabled or self.roster.has(speculation):
            return self._drafter(prepared)
        return await asyncio.to_thread(self._drafter, prepared)

    @cached_property
    def _alarms(self) -> WeakValueDictionary[asyncio.AbstractEventLoop, _Alarm]:
        """One for each event loop, as long as there are streams in it."""
        return WeakValueDictionary()

    def _alarm(self) -> _Alarm:
        here = asyncio.get_running_loop()
        alarm = self._alarms.get(here)
        if alarm is None:
            alarm = self._alarms[here] = _Alarm(here)
        return alarm


class AsyncStream(Following, AsyncIterator[Chunk]):
    """The chunks of one request. It ends with the last of them, with :meth:`aclose`, or when nobody holds it.

    One task at a time reads it. A task that is cancelled while it waits cancels the request.
    """

    def __init__(self, llm: AsyncLLM, prepared: Prepared) -> None:
        self._bell = _Bell()
        super().__init__(llm, prepared, self._bell.ring)
        self._llm = llm

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            BaseException: what the request broke off with.
        """
        if self._over:
            raise StopAsyncIteration
        try:
            if not self._begun:
                self._bell.alarm = self._llm._alarm()
                self._begin(await self._llm._drafter_aside(self._prepared))
            while (chunk := self._flow.take()) is None:
                self._front.loop.check()
                await self._bell.wait()
        except BaseException:
            self.cancel()
            raise
        return chunk

    async def aclose(self) -> None:
        """End the request and the iterator, and free all that it holds."""
        self._leave()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Alarm:
    """Wakes an event loop, once for all that have something to take at that moment."""

    def __init__(self, here: asyncio.AbstractEventLoop) -> None:
        self._here = here
        self._rung: deque[asyncio.Event] = deque()
        self._coming = False

    def ring(self, event: asyncio.Event) -> None:
        """Have an event set, from any thread.

        Raises:
            RuntimeError: the event loop was closed.
        """
        self._rung.append(event)
        if not self._coming:
            self._coming = True
            try:
                self._here.call_soon_threadsafe(self._wake)
            except RuntimeError:
                self._coming = False
                raise

    def _wake(self) -> None:
        self._coming = False  # first, so that what rings from here on comes again
        while self._rung:
            self._rung.popleft().set()


class _Bell:
    """Tells one task that there is something to take; it knows nothing of the stream, which may be dropped."""

    def __init__(self) -> None:
        self.alarm: _Alarm | None = None
        self._event = asyncio.Event()

    def ring(self) -> None:
        if self.alarm is not None:
            self.alarm.ring(self._event)

    async def wait(self) -> None:
        """Wait for the next ring, or for one that nobody has waited for."""
        await self._event.wait()
        self._event.clear()
