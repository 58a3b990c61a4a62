"""The comparison as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.figure import blank, save

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

_SIZE = 3.2  # inches of a panel


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each drafter and machine: speed over plain decoding against the number of users.

    Solid is the pacer, dashed the best fixed length, a colour each context. The same report gives the same file.

    Raises:
        OptionError: matplotlib is not installed, or does not know the kind of file.
        ResourceError: the file cannot be written.
    """
    rows = report["cells"]
    drafts = list(dict.fromkeys(row["drafts"] for row in rows))
    machines = list(dict.fromkeys((row["device"], row["model"]) for row in rows))
    contexts = sorted({row["context"] for row in rows})
    figure = blank(_SIZE * len(machines), _SIZE * 0.8 * len(drafts))
    panels = figure.subplots(len(drafts), len(machines), sharex=True, sharey="row", squeeze=False)
    for line, what in enumerate(drafts):
        for place, (device, model) in enumerate(machines):
            panel = panels[line, place]
            panel.set_title(f"{what} · {device} · {model}", fontsize=8)
            here = [row for row in rows if (row["drafts"], row["device"], row["model"]) == (what, device, model)]
            for number, context in enumerate(contexts):
                _lines(panel, [row for row in here if row["context"] == context], f"C{number}", context)
            _dress(panel, sorted({row["users"] for row in rows}))
    figure.supxlabel("users", fontsize=9)
    figure.supylabel("speed over plain decoding (dashed: best fixed length)", fontsize=9)
    panels[0, 0].legend(fontsize=7, title="context", title_fontsize=7)
    save(figure, path)


def _lines(panel: Axes, rows: list[Mapping[str, Any]], colour: str, context: int) -> None:
    users = [row["users"] for row in rows]
    label = f"{context // 1024} k" if context >= 1024 else str(context)
    panel.plot(users, [row["auto"] for row in rows], color=colour, marker=".", linewidth=1, label=label)
    panel.plot(users, [row["best"] for row in rows], color=colour, linestyle="--", linewidth=0.8)


def _dress(panel: Axes, users: list[int]) -> None:
    panel.axhline(1.0, color="0.6", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks(users, [str(count) for count in users])
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.2)
