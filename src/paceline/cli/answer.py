"""One request that is run while somebody watches, and may be interrupted."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from paceline.cli.report import Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from paceline.completion import Chunk, Completion
    from paceline.llm import LLM
    from paceline.sampling import Sampling


class Interrupt:
    """Lets the first Ctrl-C do something gentle; the second one is a KeyboardInterrupt again."""

    def __init__(self, gently: Callable[[], None]) -> None:
        self.came = False
        self._gently = gently

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
        self._gently()


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
        request: what else ``LLM.stream`` is told.

    Raises:
        RequestError: the request cannot be served, or breaks off.
    """
    show = show if sampling.n == 1 else None
    times: list[float] = []
    completions: dict[int, Completion] = {}
    seen: dict[int, int] = {}  # of each answer the tokens of its first chunk, which took the prompt's pass
    with llm.stream(ids, sampling, **request) as stream, Interrupt(stream.cancel) as interrupt:
        for chunk in stream:
            if show is not None:
                show(chunk)
            if chunk.token_ids:
                times.append(time.perf_counter())
                seen.setdefault(chunk.choice, len(chunk.token_ids))
            if chunk.completion is not None:
                completions[chunk.choice] = chunk.completion
    answers = [completions[choice] for choice in range(sampling.n)]
    tokens = sum(len(completion.token_ids) for completion in answers) - sum(seen.values())
    return Run(answers, tokens, times[-1] - times[0] if times else 0.0, interrupt.came)
