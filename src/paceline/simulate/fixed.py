"""Fixed lengths: every step drafts equally many tokens for everybody. The best of them knows the future."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.simulate.acceptance import DEPTHS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.simulate.acceptance import Kind, Stream
    from paceline.simulate.device import Server

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)


@dataclass(frozen=True)
class Trace:
    """What a fixed length did, whatever the machine: one entry for each step.

    Attributes:
        tokens: how many came of it, all steps together.
        rows: of the step.
        done: tokens of the answers so far, all users together.
        levels: [steps, DEPTHS], for how many sequences a draft of each depth was asked for.
    """

    tokens: int
    rows: NDArray[np.int64]
    done: NDArray[np.int64]
    levels: NDArray[np.int64]


def trace(stream: Stream, length: int, tokens: int) -> Trace:
    """Decode with so many drafts a step until there are ``tokens`` tokens."""
    users = np.arange(len(stream.runs))
    place = np.zeros(len(users), np.int64)
    total, rows, done, levels = 0, [], [], []
    while total < tokens:
        room = np.minimum(length, stream.left[users, place] - 1)
        drafts = np.minimum(room, stream.given[users, place])
        rows.append(len(users) + int(drafts.sum()))
        done.append(int(stream.done[users, place].sum()))
        levels.append(np.bincount(room, minlength=DEPTHS + 1))
        taken = 1 + np.minimum(drafts, stream.runs[users, place])
        total += int(taken.sum())
        place = (place + taken) % stream.places
    asked = np.cumsum(np.array(levels)[:, ::-1], axis=1)[:, ::-1][:, 1:]
    return Trace(total, np.array(rows), np.array(done), asked)


def speed(trace: Trace, kind: Kind, server: Server, users: int, context: int) -> float:
    """Tokens a second on a machine, of users that began with so much context each."""
    read = users * context + trace.done
    seconds = server.step(trace.rows, users, read).sum()
    if kind == "head":
        seconds += server.draft(trace.levels, read / users).sum()
    else:
        seconds += server.look_up(trace.levels[:, 0]).sum()
    return trace.tokens / float(seconds)
