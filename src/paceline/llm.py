"""The Python interface for ordinary programs: load a model once, then generate, chat and stream."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, Unpack

from paceline.calls import Call, Following
from paceline.completion import Chunk
from paceline.front import Front

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from paceline.prepare import Prepared
    from paceline.sampling import Sampling
    from paceline.wishes import Wishes


class LLM(Front):
    """A model, ready to generate. Threads may share it: their requests ride together.

    Its constructor is :class:`~paceline.front.Front`'s. A Ctrl-C reaches the thread that waits: what it asked for is
    cancelled, and nothing else.
    """

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        **wishes: Unpack[Wishes],
    ) -> Any:
        """Complete one prompt or a list of them, each a text or a list of token ids.

        Args:
            sampling: for all prompts, or a list with the settings of each.
            wishes: the fields of :class:`~paceline.wishes.Wishes`.

        Returns:
            One :class:`Completion`, or a list of them in the order of the prompts; for ``sampling.n`` above 1 a
            list of n in place of each.

        Raises:
            RequestError: a prompt is empty, too long, no text, or holds ids out of range; there is no prompt at all,
                for an empty list may be an empty prompt; or the rules of ``sampling`` leave no token to go on with.
            OptionError: the speculation asked for is not to be had, or there are not as many settings as prompts.
            ModelError: the model's logits are not numbers.
            ClosedError: the model was closed, or the process was forked.
        """
        return self._run(*self.preparer.prompts(prompts, sampling, wishes))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        **wishes: Any,
    ) -> Any:
        """Answer one conversation or a list of them; see :meth:`generate` for the rest.

        What is no wish goes to the chat template, as in ``enable_thinking=False``.

        Raises:
            RequestError: as for :meth:`generate`; or the messages are no conversation, or none, or not one that the
                model's template takes.
            OptionError: as for :meth:`generate`; or the template does not read what is no wish.
        """
        return self._run(*self.preparer.conversations(messages, sampling, wishes))

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        **wishes: Unpack[Wishes],
    ) -> Stream:
        """Complete one prompt step by step. Leaving the iterator stops the request and frees all that it holds.

        The chunks of several choices (``sampling.n``) come as they are made, each with its ``choice``. Whoever reads
        slowly gets several steps in one chunk.

        Raises:
            OptionError: the speculation asked for is not to be had.
            RequestError: as for :meth:`generate`.
        """
        return Stream(self, self.preparer.one("stream", prompt, sampling, wishes))

    def forget(self) -> None:
        """Forget what was learned from earlier requests, and computed of them: the drafters' state, the pacer's
        estimates, shared beginnings.

        Raises:
            RequestError: requests are still running.
            ClosedError: the model was closed, or the process was forked.
        """
        self.loop.call(self._forget).result()

    def close(self) -> None:
        """End the engine's thread. Requests that run end with the finish reason "abort", later ones are refused.

        Raises:
            RequestError: the engine is paused by this thread.
        """
        self.loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, each: Sequence[Prepared], single: bool) -> Any:
        call = Call(self, each, single)
        try:
            call.begin([self._drafter(prepared) for prepared in each])
            call.over.result()
        except BaseException:
            call.cancel()
            raise
        return call.answers()


class Stream(Following, Iterator[Chunk]):
    """The chunks of one request. It ends with the last of them, with :meth:`close`, or when nobody holds it."""

    def __init__(self, llm: LLM, prepared: Prepared) -> None:
        self._bell = _Bell()
        super().__init__(llm, prepared, self._bell.ring)

    def __next__(self) -> Chunk:
        """The next chunk.

        Raises:
            BaseException: what the request broke off with. An interrupt of the waiting cancels the request; what it
                had come to can still be read.
        """
        if self._over:
            raise StopIteration
        self._flow.arrived()
        try:
            if not self._begun:
                self._begin(self._front._drafter(self._prepared))
            while (chunk := self._flow.take()) is None:
                self._front.loop.check()
                self._bell.wait()
            return chunk
        except BaseException:
            self._flow.untake()
            self.cancel()
            raise

    def close(self) -> None:
        """End the request and the iterator, and free all that it holds."""
        self._leave()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Bell:
    """Wakes one thread; a lock that is taken until it rings, as an event costs several times as much."""

    def __init__(self) -> None:
        self._quiet = Lock()
        self._quiet.acquire()

    def ring(self) -> None:
        """Let the thread that waits, or else the next that will, go on."""
        if self._quiet.locked():
            self._quiet.release()

    def wait(self) -> None:
        """Wait until it has rung."""
        self._quiet.acquire()
