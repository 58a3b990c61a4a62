"""The thread that owns an engine. It alone works with it, between two steps it does what others ask for."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread, get_ident
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.errors import ClosedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.engine import Engine
    from paceline.request import Sequence

log = logging.getLogger(__name__)
T = TypeVar("T")
_PATIENCE = 5.0  # seconds that the end of the interpreter waits for a step


class Listener(Protocol):
    """Is told on the loop's thread what becomes of a request. It must be quick; what it raises ends its request."""

    def hear(self, sequence: Sequence) -> None:
        """A sequence has more tokens, or has ended, with an error if it broke off."""

    def refuse(self, error: BaseException) -> None:
        """The request was not begun."""


@dataclass(eq=False)
class Ticket:
    """A request on its way; its sequences are the loop's until they have ended."""

    listener: Listener
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True)
class _Command:
    """Something to do between two steps, and whom to tell where it fails or is not done any more."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], None]


class Loop:
    """Steps an engine as long as there is work, and sleeps otherwise. Any thread may call any method.

    It ends with :meth:`close`, at the latest with the interpreter. The queue of commands takes no lock that could be
    held by the one who is interrupted: commands may be given by signal handlers, and by what a garbage collection ends.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._listeners: dict[Sequence, Listener] = {}
        self._holder: int | None = None
        self._closing = self._ended = False
        self._process = os.getpid()
        self._thread = Thread(target=self._run, name="paceline", daemon=True)
        self._thread.start()
        atexit.register(_end, weakref.ref(self), self._thread)

    def held(self) -> bool:
        """Whether the calling thread has the engine for itself, as in :meth:`paused`."""
        return self._holder == get_ident()

    def check(self) -> None:
        """
        Raises:
            ClosedError: this is a forked process, which has no such thread.
        """
        if os.getpid() != self._process:
            raise ClosedError("the process that loaded the model was forked, and runs it still: load it here as well.")

    def begin(self, ticket: Ticket, add: Callable[[], list[Sequence]]) -> None:
        """Have a request queued, without waiting for it: its listener hears what becomes of it, errors too.

        Args:
            add: queues all its sequences, or none and raises.

        Raises:
            ClosedError: in a forked process.
            RequestError: the calling thread has the engine for itself, so nothing would go on.
        """
        self.check()
        if self.held():
            raise RequestError("the engine is paused by this thread: step it by hand, or leave the block first.")
        self._post(partial(self._begin, ticket, add), ticket.listener.refuse)

    def cancel(self, ticket: Ticket) -> None:
        """Have all that a request holds freed before the next step, without waiting for it."""
        if os.getpid() == self._process:
            self._post(partial(self._cancel, ticket), _nobody)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called between two steps; the future has what it returns or raises.

        Raises:
            ClosedError: in a forked process.
        """
        self.check()
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        if get_ident() in (self._holder, self._thread.ident):
            _fulfil(future, function)
        else:
            self._post(partial(_fulfil, future, function), future.set_exception)
        return future

    @contextmanager
    def paused(self) -> Iterator[Engine]:
        """Give the calling thread the engine until the block ends.

        Raises:
            ClosedError: the loop has ended, or the process was forked.
        """
        self.check()
        if self.held():
            yield self._engine
            return
        lent, over = Future[None](), Event()
        try:
            self._post(partial(self._lend, lent, over), lent.set_exception)
            lent.result()
            self._holder = get_ident()
            try:
                yield self._engine
            finally:
                self._holder = None
        finally:
            over.set()

    def stop(self) -> None:
        """Let the loop end after the current step, without waiting for it. What runs then ends as aborted."""
        if os.getpid() == self._process:
            self._post(self._stop, _nobody)

    def close(self, timeout: float | None = None) -> None:
        """:meth:`stop`, and wait for it; no error if it was done before, and nothing in a forked process.

        Raises:
            RequestError: the calling thread has the engine for itself.
        """
        if self.held():
            raise RequestError("the engine is paused by this thread: leave the block before closing.")
        self.stop()
        if os.getpid() == self._process and get_ident() != self._thread.ident:
            self._thread.join(timeout)

    def _post(self, run: Callable[[], None], refuse: Callable[[BaseException], None]) -> None:
        self._commands.put(_Command(run, refuse))
        if self._ended:  # perhaps between the two lines, so that nobody would come for it
            self._turn_away()

    def _turn_away(self) -> None:
        error = ClosedError("the model was closed: load it again.")
        try:
            while True:
                self._commands.get_nowait().refuse(error)
        except Empty:
            pass

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for sequence in list(self._listeners):
                self._end(sequence)
            self._ended = True
            self._turn_away()

    def _turn(self) -> None:
        """Do what was asked for up to now, or, where there is nothing to step, is asked for next; then step."""
        for _ in range(max(self._commands.qsize(), self._engine.idle)):
            _obey(self._commands.get())
            if self._closing:
                return
        if not self._engine.idle:
            self._step()

    def _step(self) -> None:
        try:
            news = self._engine.step()
        except BaseException as error:  # whatever ran has ended with it
            self._break_off(error)
        else:
            for sequence in news:
                self._tell(sequence)
        if self._engine.idle:
            self._tell_ends()

    def _break_off(self, error: BaseException) -> None:
        """Tell those that ended with a failed step. Where none did the next one would fail too: then all end."""
        if not self._tell_ends():
            for sequence in list(self._listeners):
                sequence.error = error
                self._end(sequence)

    def _tell_ends(self) -> int:
        """Tell those who have not heard yet that their sequence has ended; returns how many."""
        ended = [sequence for sequence in self._listeners if sequence.finish_reason is not None]
        for sequence in ended:
            self._tell(sequence)
        return len(ended)

    def _tell(self, sequence: Sequence) -> None:
        listener = self._listeners.get(sequence)
        if listener is None:
            return
        try:
            listener.hear(sequence)
        except Exception:
            log.exception("request %d is left: whoever asked for it cannot be told of it", sequence.id)
            self._engine.cancel(sequence)
        if sequence.finish_reason is not None:
            del self._listeners[sequence]

    def _end(self, sequence: Sequence) -> None:
        self._engine.cancel(sequence)
        self._tell(sequence)

    def _begin(self, ticket: Ticket, add: Callable[[], list[Sequence]]) -> None:
        ticket.sequences += add()
        self._listeners.update(dict.fromkeys(ticket.sequences, ticket.listener))

    def _cancel(self, ticket: Ticket) -> None:
        for sequence in ticket.sequences:
            self._end(sequence)

    def _lend(self, lent: Future[None], over: Event) -> None:
        """Wait while another thread has the engine, and pass on what it did to those who listen."""
        lent.set_result(None)
        over.wait()
        for sequence in list(self._listeners):
            self._tell(sequence)

    def _stop(self) -> None:
        self._closing = True


def _end(loop: weakref.ref[Loop], thread: Thread) -> None:
    """Before the interpreter ends: a loop that has run its course may still be freeing its model on its thread, which
    would be killed in the middle of that."""
    running = loop()
    if running is not None:
        running.stop()
    del running
    thread.join(_PATIENCE)


def _obey(command: _Command) -> None:
    """Whatever a command raises is its caller's."""
    try:
        command.run()
    except BaseException as error:
        command.refuse(error)


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _nobody(error: BaseException) -> None:
    """Whoever leaves does not want to hear of it."""
