"""Service under load as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.figure import blank, save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

_SIZE = 3.2  # inches of a panel
_AXES = {"users": "users at a time", "rate": "requests per second"}
_FIGURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "tokens per second": lambda found: found["output_throughput"]["median"],
    "time to first token, p95, ms": lambda found: found["ttft_ms"] and found["ttft_ms"]["p95"],
    "time per output token, p95, ms": lambda found: found["tpot_ms"] and found["tpot_ms"]["p95"],
}


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw throughput and the 95th percentiles of both latencies against users, and against the rate of arrivals.

    A line each method. The same report gives the same file.

    Raises:
        OptionError: matplotlib is not installed, or does not know the kind of file.
        ResourceError: the file cannot be written.
    """
    patterns = sorted(report["arrivals"], key=lambda pattern: pattern["level"])
    kinds = [kind for kind in _AXES if any(pattern["kind"] == kind for pattern in patterns)]
    figure = blank(_SIZE * len(_FIGURES), _SIZE * 0.8 * len(kinds))
    panels = figure.subplots(len(kinds), len(_FIGURES), squeeze=False)
    for line, kind in enumerate(kinds):
        own = [pattern for pattern in patterns if pattern["kind"] == kind]
        for place, (title, take) in enumerate(_FIGURES.items()):
            panel = panels[line, place]
            panel.set_title(title, fontsize=8)
            panel.set_xlabel(_AXES[kind], fontsize=8)
            _lines(panel, own, take)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize=7, loc="outside lower center")
    save(figure, path)


def _lines(panel: Axes, patterns: list[Mapping[str, Any]], take: Callable[[Mapping[str, Any]], float | None]) -> None:
    levels = [pattern["level"] for pattern in patterns]
    for method in patterns[0]["methods"]:
        values = [take(pattern["methods"][method]) for pattern in patterns]
        panel.plot(levels, [float("nan") if value is None else value for value in values], marker=".", label=method)
    panel.set_xscale("log", base=2)
    panel.set_xticks(levels, [f"{level:g}" for level in levels])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.2)
