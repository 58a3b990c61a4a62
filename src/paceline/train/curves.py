"""A training's log as a picture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.errors import OptionError
from paceline.figure import blank, save
from paceline.train.scaling import fit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    Line = dict[str, Any]

_SIZE = 3.2  # inches of a panel
_ALL = "all"


def draw(log: Path, picture: Path) -> None:
    """Draw what ``log`` tells against the answer tokens that were learned from.

    Panels: the loss; how often the guesses of each depth were right; tau, as simulated on held-out texts, with
    a curve on to ten times the tokens; tau by category. The same log gives the same picture.

    Raises:
        OptionError: the log cannot be read, or nothing is in it yet; matplotlib is not installed, or does not know the
            kind of file.
        ResourceError: the picture cannot be written.
    """
    lines = _read(log)
    steps = [line for line in lines if line["kind"] == "steps"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    if not steps and not evaluations:
        raise OptionError(f"{log} has no steps and no evaluation yet; there is nothing to draw.")
    figure = blank(4 * _SIZE, 0.9 * _SIZE)
    loss, right, tau, kinds = figure.subplots(1, 4)
    _dress(loss, "loss")
    loss.plot(_tokens(steps), [line["loss"] for line in steps], linewidth=1)
    _dress(right, "right guesses, by depth")
    for depth in range(max((len(line["accuracy"]) for line in steps), default=0)):
        own = [line for line in steps if len(line["accuracy"]) > depth]
        right.plot(_tokens(own), [line["accuracy"][depth] for line in own], linewidth=1, label=str(depth + 1))
    _dress(tau, "tau on held-out texts", log=True)
    ways = _keys(line["tau"] for line in evaluations)
    _dress(kinds, f"tau by category (solid: {ways[0]})" if ways else "tau by category")
    for number, way in enumerate(ways):
        own = [line for line in evaluations if way in line["tau"]]
        _tau(tau, own, way, f"C{number}")
        _categories(kinds, own, way, "--" if number else "-")
    for panel in (right, tau, kinds):
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=6)
    save(figure, picture)


def _tau(panel: Axes, evaluations: Sequence[Line], way: str, colour: str) -> None:
    points = [(tokens, line["tau"][way][_ALL]) for tokens, line in zip(_tokens(evaluations), evaluations, strict=True)]
    panel.plot(*zip(*points, strict=True), linestyle="", color=colour, marker=".", label=way)
    found = fit(points)
    if found is not None:
        first, last = points[0][0], 10 * points[-1][0]
        along = [first * (last / first) ** (place / 40) for place in range(41)]
        label = f"{way}, ten times the tokens: {found.at(last):.2f}"
        panel.plot(along, [found.at(tokens) for tokens in along], "--", color=colour, linewidth=0.8, label=label)


def _categories(panel: Axes, evaluations: Sequence[Line], way: str, style: str) -> None:
    known = sorted({category for line in evaluations for category in line["tau"][way]} - {_ALL})
    for place, category in enumerate(known):
        own = [line for line in evaluations if category in line["tau"][way]]
        values = [line["tau"][way][category] for line in own]
        label = category if style == "-" else None
        panel.plot(_tokens(own), values, style, color=f"C{place}", linewidth=1, label=label)


def _dress(panel: Axes, title: str, log: bool = False) -> None:
    panel.set_title(title, fontsize=8)
    panel.set_xlabel("answer tokens", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.2)
    if log:
        panel.set_xscale("log")


def _tokens(lines: Sequence[Line]) -> list[int]:
    return [line["tokens"] for line in lines]


def _keys(each: Any) -> list[str]:
    """All keys, in the order in which they are first met, greedy answers first."""
    found = list(dict.fromkeys(key for keys in each for key in keys))
    return sorted(found, key=lambda key: key != "greedy")


def _read(log: Path) -> list[Line]:
    try:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        return [{**line, "kind": line["kind"]} for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{log} is no log of a training ({error!r}).") from error
