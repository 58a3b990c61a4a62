"""Reports of verifying and measuring as tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.report import by_depth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDE = 160  # columns where the output is no terminal


def show(*tables: Table) -> None:
    """Print tables on standard output."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    for table in tables:
        console.print(table)


def header(environment: Mapping[str, Any]) -> str:
    """One line that says what a report was taken with."""
    parts = [
        environment["machine"],
        f"kernels {environment['kernels']}",
        f"torch {environment['versions']['torch']}",
        f"commit {(environment['commit'] or 'unknown')[:12]}",
    ]
    loaded = [str(environment[key]) for key in ("model", "dtype") if key in environment]
    if loaded:
        parts = [" ".join(loaded), f"{environment['threads']} threads", *parts]
    return " · ".join(parts)


def verified(report: Mapping[str, Any]) -> Table:
    """What each combination compared."""
    table = _table(
        "method", "at a time", "temperature", "compared", "differing", "tokens", "accepted", "rejected", "enough"
    )
    for row in report["combinations"]:
        method = row["method"] + (" + oracle" if row["mixed"] else "")
        numbers = [row[key] for key in ("prompts", "differing", "tokens", "accepted", "rejected")]
        table.add_row(
            method,
            str(row["batch"]),
            f"{row['temperature']:g}",
            *(str(number) for number in numbers),
            "yes" if row["counts"] else "no",
        )
    return table


def compared(report: Mapping[str, Any], groups_of: str = "category") -> list[Table]:
    """For each method its figures, and how often drafts were accepted at each depth."""
    speeds = _figures(groups_of)
    positions = _table("method", groups_of, "accepted by position")
    for method, groups in report["methods"].items():
        for group, figures in groups.items():
            _add_figures(speeds, method, group, figures)
            if figures["accepted_by_position"]:
                positions.add_row(method, group, by_depth(figures["accepted_by_position"]))
    return [speeds, positions] if positions.row_count else [speeds]


def rewritten(report: Mapping[str, Any]) -> list[Table]:
    """The rewriting set: what is half copied, what is not, and every request."""
    sets = _figures("plain output")
    names = {"copied": "at least half copied", "rest": "less copied", "all": "all"}
    for name, figures in report["sets"].items():
        _add_figures(sets, "ngram", names[name], figures)
    each = _table("request", "copied", "tokens", "tau", "speed-up")
    for request in report["requests"]:
        each.add_row(
            request["id"],
            f"{request['share']:.0%}",
            str(request["tokens"]),
            _two(request["tau"]),
            _x(request["speedup"]),
        )
    return [sets, each]


def stepped(reports: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Steps by format, context and rows: as multiples of the floor, and where the time goes, in milliseconds."""
    steps = _table("format", "context", "rows", "ms", "least", "x floor", "by round", "floor ms", "GB/s")
    parts = _table(
        "format", "context", "rows", "products", "attention", "small operators", "drafter", "sampling", "python"
    )
    others = _table("format", "what", "value")
    for report in reports:
        dtype = report["environment"]["dtype"]
        for line in report["steps"]:
            place = (dtype, str(line["context"]), str(line["rows"]))
            floor = report["floors"][str(line["context"])]
            low, high = line["floors_by_round"]
            steps.add_row(
                *place,
                _ms(line["seconds"]),
                _ms(line["least"]),
                _two(line["floors"]),
                f"{low:.2f} to {high:.2f}",
                _ms(floor),
                f"{max(report['bandwidth'].values()) / 1e9:.1f}",
            )
            parts.add_row(*place, *(_ms(value) for value in line["parts"].values()))
        for reader, speed in report["bandwidth"].items():
            others.add_row(dtype, f"read bandwidth, {reader}", f"{speed / 1e9:.1f} GB/s")
        prefill, sampling = report["prefill"], report["sampling"]
        rate = prefill["tokens"] / prefill["seconds"]
        others.add_row(
            dtype, f"prefill of {prefill['tokens']} tokens", f"{prefill['seconds']:.3f} s, {rate:.0f} tokens/s"
        )
        others.add_row(dtype, "plain decoding, sampled / greedy", f"{sampling['rate']:.3f}")
        others.add_row(dtype, "a verified row, sampled - greedy", f"{_ms(sampling['seconds a verified row'])} ms")
    return [steps, parts, others]


def perplexities(report: Mapping[str, Any]) -> Table:
    """Perplexity by format and kind of text, and its ratio to fp32."""
    table = _table("format", "text", "tokens", "perplexity", "ratio to fp32")
    for dtype, kinds in report["perplexity"].items():
        for kind, found in kinds.items():
            ratio = report["ratios"][dtype][kind]
            table.add_row(dtype, kind, str(found["tokens"]), f"{found['perplexity']:.4f}", f"{ratio:.5f}")
    return table


def beside(report: Mapping[str, Any]) -> Table:
    """Engines by work; ratios are of their seconds to those of the first."""
    table = _table("work", "engine", "s", "least to most", "tokens/s", "ratio", "95 %", "same tokens")
    for figure in report["figures"]:
        seconds, (low, high) = figure["seconds"], figure["interval"]
        table.add_row(
            report["works"][figure["work"]],
            figure["peer"],
            f"{seconds['median']:.4f}",
            f"{seconds['low']:.4f} to {seconds['high']:.4f}",
            f"{figure['speed']:.1f}",
            _x(figure["ratio"]),
            f"{low:.2f} to {high:.2f}",
            "" if figure["agrees"] is None else f"{figure['agrees']:.1f}",
        )
    return table


def _figures(groups_of: str) -> Table:
    return _table(
        *("method", groups_of, "prompts", "tokens", "tokens/s", "speed-up", "spread", "95 %", "end to end"),
        *("tau", "tau macro", "differing"),
    )


def _add_figures(table: Table, method: str, group: str, figures: Mapping[str, Any]) -> None:
    speed, ratio = figures.get("tokens_per_second"), figures.get("speedup")
    interval = figures.get("interval")
    table.add_row(
        method,
        group,
        str(figures["prompts"]),
        str(figures["tokens"]),
        "" if speed is None else f"{speed['median']:.1f}",
        _x(None if ratio is None else ratio["median"]),
        "" if ratio is None else f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
        _x(figures["end_to_end"]["median"]),
        _two(figures["tau"]),
        _two(figures["tau_macro"]),
        str(figures["differing"]),
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < 2 else "right", no_wrap=place != len(columns) - 1)
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3f}"


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _x(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"
