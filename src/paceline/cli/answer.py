"""One request that is run while somebody watches, and may be interrupted."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from paceline.cli.report import Run
from paceline.completion import Chunk, Completion

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from paceline.llm import LLM
    from paceline.sampling import Sampling


class Interrupt:
    """Notes the first Ctrl-C, so that a step is never cut in two; the second one is a KeyboardInterrupt again."""

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


def answer(
    llm: LLM,
    ids: list[int],
    sampling: Sampling,
    show: Callable[[Chunk], None] | None = None,
    **request: Any,
) -> Run:
    """Run one request to its end, or to an interrupt; what it has come to by then is what is returned.

    Args:
        ids: the prompt.
        show: is called with what each step adds, where there is a single answer.
        request: what else ``LLM.submit`` is told.

    Raises:
        RequestError: the request cannot be served, or breaks off.
    """
    running = llm.submit(ids, sampling, **request)
    show = show if len(running) == 1 else None
    times: list[float] = []
    counts, going = [0], True
    with Interrupt() as interrupt:
        try:
            while going and not interrupt.came:
                going = llm.step(running)
                count = sum(len(one.output) for one in running)
                if show is not None:
                    show(Chunk.of(running[0], counts[-1]))
                if count > counts[-1]:
                    times.append(time.perf_counter())
                    counts.append(count)
        finally:
            llm.cancel(running)
    if interrupt.came and show is not None:
        show(Chunk.of(running[0], counts[-1]))  # what was held back, as it might have been half a character
    first = counts[min(1, len(times))]
    seconds = times[-1] - times[0] if times else 0.0
    return Run([Completion.of(one) for one in running], counts[-1] - first, seconds, interrupt.came)
