"""The thread that owns an engine: what it tells, whom it obeys, how it ends, and whom an error harms."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from paceline.errors import ClosedError, RequestError
from paceline.loop import Loop, Ticket
from tests.toys import VOCAB, ToyRun, alone, path_rule, same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paceline.engine import Engine
    from paceline.request import Sequence

RULE = path_rule(VOCAB, seed=41)
PROMPT = list(b"one thread")
WAIT = 60.0  # seconds; nothing here takes one


class Notes:
    """Notes what it hears: how many tokens, and how it ended."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.refused: BaseException | None = None
        self.ended = threading.Event()

    def hear(self, sequence: Sequence) -> None:
        self.heard.append(len(sequence.output))
        if sequence.finish_reason is not None:
            self.ended.set()

    def refuse(self, error: BaseException) -> None:
        self.refused = error
        self.ended.set()


class Deaf(Notes):
    """Cannot hear."""

    def hear(self, sequence: Sequence) -> None:
        raise RuntimeError("nobody is there any more")


class Gate:
    """A target that is held up in one of its passes."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._target, self._number = engine.target, number
        self.passes = 0
        self.reached, self.open = threading.Event(), threading.Event()
        self.vocab_size, self.max_positions = engine.target.vocab_size, engine.target.max_positions
        self.groups = engine.target.groups
        engine.target = self

    def forward(self, *given: Any) -> Any:
        self.passes += 1
        if self.passes == self._number:
            self.reached.set()
            assert self.open.wait(WAIT)
        return self._target.forward(*given)


class Looped:
    """A toy engine in a loop."""

    def __init__(self, rule: Callable[[list[int]], Tensor] = RULE, **options: Any) -> None:
        self.run = ToyRun(rule, **options)
        self.loop = Loop(self.run.engine)

    def begin(self, prompt: list[int] = PROMPT, notes: Notes | None = None, **wishes: Any) -> tuple[Ticket, Any]:
        notes = notes or Notes()
        ticket = Ticket(notes)
        self.loop.begin(ticket, lambda: [self.run.add(prompt, **wishes)])
        return ticket, notes

    def begin_elsewhere(self) -> tuple[Ticket, Any]:
        """Begin a request from another thread."""
        begun: list[tuple[Ticket, Any]] = []
        thread = threading.Thread(target=lambda: begun.append(self.begin()))
        thread.start()
        thread.join(WAIT)
        return begun[0]

    def answer(self, prompt: list[int] = PROMPT, **wishes: Any) -> Sequence:
        ticket, notes = self.begin(prompt, **wishes)
        assert notes.ended.wait(WAIT)
        return ticket.sequences[0]

    def check_empty(self) -> None:
        """Nothing is held, as seen before the next step."""
        with self.loop.paused() as engine:
            assert engine.idle
            self.run.check()
            self.run.check_empty()
        assert not self.loop._listeners


@pytest.fixture
def looped() -> Iterator[Looped]:
    made = Looped()
    yield made
    made.loop.close()


def test_every_step_is_told_and_the_end_once(looped: Looped) -> None:
    ticket, notes = looped.begin()
    assert notes.ended.wait(WAIT)
    reference = alone(RULE, PROMPT)
    same(ticket.sequences[0], reference)
    looped.check_empty()
    assert notes.heard == list(range(1, len(reference.output) + 1))


def test_commands_are_obeyed_between_steps_in_their_order(looped: Looped) -> None:
    order: list[int] = []
    threads = set()

    def note(number: int) -> int:
        assert not looped.run.engine._stepping
        order.append(number)
        threads.add(threading.get_ident())
        return -number

    looped.begin(max_tokens=100)
    futures = [looped.loop.call(partial(note, number)) for number in range(50)]
    assert [future.result(WAIT) for future in futures] == [-number for number in range(50)]
    assert order == list(range(50))
    assert threads == {looped.loop._thread.ident}


def test_a_command_may_call_another(looped: Looped) -> None:
    assert looped.loop.call(lambda: looped.loop.call(lambda: 7).result(0)).result(WAIT) == 7


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_command_raises_is_its_callers(looped: Looped, error: BaseException) -> None:
    def fail() -> list[Sequence]:
        raise error

    neighbour, heard = looped.begin(max_tokens=100)
    with pytest.raises(type(error)):
        looped.loop.call(fail).result(WAIT)
    notes = Notes()
    looped.loop.begin(Ticket(notes), fail)
    assert notes.ended.wait(WAIT)
    assert notes.refused is error
    assert heard.ended.wait(WAIT)
    same(neighbour.sequences[0], alone(RULE, PROMPT, max_tokens=100))
    looped.check_empty()


def test_a_listener_that_raises_loses_its_request_alone(looped: Looped, caplog: pytest.LogCaptureFixture) -> None:
    deaf, _ = looped.begin(max_tokens=100, notes=Deaf())
    same(looped.answer(max_tokens=100), alone(RULE, PROMPT, max_tokens=100))
    assert deaf.sequences[0].finish_reason == "abort"
    assert len(deaf.sequences[0].output) == 1
    assert "nobody is there any more" in caplog.text
    looped.check_empty()


def test_a_step_that_fails_ends_what_ran_and_nothing_else() -> None:
    def rule(path: list[int]) -> Tensor:
        if path[0] == 3 and len(path) > 5:
            raise MemoryError("no memory is left")
        return RULE(path)

    looped = Looped(rule, max_num_seqs=2)
    tickets = [looped.begin([first, *PROMPT[:3]]) for first in (2, 3, 4, 5)]
    for _, notes in tickets:
        assert notes.ended.wait(WAIT)
    sequences = [ticket.sequences[0] for ticket, _ in tickets]
    assert [type(sequence.error) for sequence in sequences] == [MemoryError, MemoryError, type(None), type(None)]
    for first, sequence in zip((4, 5), sequences[2:], strict=True):
        same(sequence, alone(RULE, [first, *PROMPT[:3]]))
    looped.check_empty()
    looped.loop.close()


def test_a_plan_that_always_fails_leaves_nobody_waiting(looped: Looped, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(looped.run.engine.scheduler, "plan", fail)
        assert isinstance(looped.answer().error, ZeroDivisionError)
    same(looped.answer(), alone(RULE, PROMPT))
    looped.check_empty()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7])
def test_cancelling_takes_effect_with_the_current_step(number: int) -> None:
    """In the first piece of a prompt, in others, in the last, while decoding."""
    looped = Looped(max_batch_tokens=16)
    gate = Gate(looped.run.engine, number)
    ticket, notes = looped.begin(PROMPT * 4, max_tokens=100)
    assert gate.reached.wait(WAIT)
    looped.loop.cancel(ticket)
    looped.loop.cancel(ticket)
    gate.open.set()
    looped.check_empty()
    assert gate.passes == number
    assert notes.ended.is_set()
    assert ticket.sequences[0].finish_reason == "abort"
    assert len(ticket.sequences[0].output) == max(0, number - 2)
    same(looped.answer(), alone(RULE, PROMPT))
    looped.loop.close()


def test_cancelling_what_waits_leaves_what_runs() -> None:
    looped = Looped(max_num_seqs=1)
    gate = Gate(looped.run.engine, 3)
    first, heard = looped.begin()
    assert gate.reached.wait(WAIT)
    waiting, notes = looped.begin()
    looped.loop.cancel(waiting)
    gate.open.set()
    assert notes.ended.wait(WAIT)
    assert waiting.sequences[0].finish_reason == "abort"
    assert not waiting.sequences[0].output
    assert heard.ended.wait(WAIT)
    same(first.sequences[0], alone(RULE, PROMPT))
    looped.check_empty()
    looped.loop.close()


def test_while_paused_the_engine_is_the_callers_alone(looped: Looped) -> None:
    ticket, notes = looped.begin(max_tokens=100)
    with looped.loop.paused() as engine:
        assert looped.loop.held()
        length = len(ticket.sequences[0].output)
        late, _ = looped.begin_elsewhere()
        for _ in range(3):
            engine.step()
        assert len(ticket.sequences[0].output) == length + 3
        assert not late.sequences
        with looped.loop.paused() as again:
            assert again is engine
        assert looped.loop.held()
        assert looped.loop.call(threading.get_ident).result(0) == threading.get_ident()
        with pytest.raises(RequestError, match="paused by this thread"):
            looped.begin()
        with pytest.raises(RequestError, match="leave the block"):
            looped.loop.close()
    assert not looped.loop.held()
    assert notes.ended.wait(WAIT)
    same(ticket.sequences[0], alone(RULE, PROMPT, max_tokens=100))
    looped.check_empty()
    same(late.sequences[0], alone(RULE, PROMPT))


def test_what_is_stepped_by_hand_is_told_when_the_pause_ends(looped: Looped) -> None:
    gate = Gate(looped.run.engine, 2)
    ticket, notes = looped.begin()
    assert gate.reached.wait(WAIT)
    threading.Timer(0.01, gate.open.set).start()
    with looped.loop.paused() as engine:
        while not engine.idle:
            engine.step()
        assert not notes.ended.is_set()
    assert notes.ended.wait(WAIT)
    same(ticket.sequences[0], alone(RULE, PROMPT))


def test_an_error_in_a_pause_gives_the_engine_back(looped: Looped) -> None:
    with pytest.raises(KeyboardInterrupt), looped.loop.paused():
        raise KeyboardInterrupt
    same(looped.answer(), alone(RULE, PROMPT))


def test_closing_ends_what_runs_and_refuses_what_comes(looped: Looped) -> None:
    gate = Gate(looped.run.engine, 5)
    running, heard = looped.begin(max_tokens=100)
    assert gate.reached.wait(WAIT)
    looped.loop.stop()
    late, refused = looped.begin()
    asked = looped.loop.call(lambda: 0)
    gate.open.set()
    looped.loop.close()
    looped.loop.close()
    assert not looped.loop._thread.is_alive()
    assert gate.passes == 5
    assert heard.ended.is_set()
    assert running.sequences[0].finish_reason == "abort"
    assert isinstance(refused.refused, ClosedError)
    for future in (asked, looped.loop.call(lambda: 0)):
        with pytest.raises(ClosedError, match="was closed"):
            future.result(0)
    with pytest.raises(ClosedError, match="was closed"), looped.loop.paused():
        pass
    _, refused = looped.begin()
    assert isinstance(refused.refused, ClosedError)
    looped.loop.cancel(late)
    looped.run.check_empty()


def test_closed_from_its_own_thread_it_does_not_wait_for_itself(looped: Looped) -> None:
    looped.loop.call(looped.loop.close).result(WAIT)
    looped.loop._thread.join(WAIT)
    assert not looped.loop._thread.is_alive()


def test_requests_from_many_threads_are_told_to_their_own(looped: Looped) -> None:
    prompts = [[*PROMPT, number] for number in range(24)]
    expected = [alone(RULE, prompt) for prompt in prompts]
    found: SimpleQueue[tuple[int, Sequence]] = SimpleQueue()

    def work(first: int) -> None:
        for number in range(first, 24, 4):
            found.put((number, looped.answer(prompts[number])))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    for _ in range(24):
        number, sequence = found.get_nowait()
        same(sequence, expected[number])
    looped.check_empty()


def test_an_idle_loop_sleeps(looped: Looped) -> None:
    looped.answer()
    looped.check_empty()
    before = os.times()
    threading.Event().wait(0.2)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1


def test_a_loop_that_has_ended_holds_no_engine() -> None:
    looped = Looped()
    engine, loop = weakref.ref(looped.run.engine), weakref.ref(looped.loop)
    looped.answer()
    looped.loop.close()
    del looped
    gc.collect()
    assert engine() is None
    assert loop() is None


def test_the_interpreter_waits_for_a_loop_that_still_frees_its_engine() -> None:
    script = """
import time
from paceline.loop import Loop

class Engine:
    idle = True

    def __del__(self):
        time.sleep(0.3)  # as a large model may take
        print("freed")

Loop(Engine()).stop()
time.sleep(0.1)  # by now it frees the engine
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "freed\n", "")


def test_a_forked_child_is_told_so(looped: Looped) -> None:
    ticket, _ = looped.begin(max_tokens=5)

    def child() -> int:
        calls: list[Callable[[], Any]] = [looped.begin, lambda: looped.loop.call(lambda: 0), looped.loop.check]
        for call in calls:
            with pytest.raises(ClosedError, match="forked"):
                call()
        with pytest.raises(ClosedError, match="forked"), looped.loop.paused():
            pass
        looped.loop.cancel(ticket)
        looped.loop.stop()
        looped.loop.close()
        atexit._run_exitfuncs()
        return 0

    assert forked(child) == 0
    same(looped.answer(), alone(RULE, PROMPT))


def forked(child: Callable[[], int]) -> int:
    """The exit code of a child that does this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, where there are threads
        number = os.fork()
    if number == 0:
        code = 1
        try:
            code = child()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
