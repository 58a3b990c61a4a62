"""Reports of verifying and measuring as tables."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEPTHS = 10  # of a tree, that a table shows; the others are in the JSON


def show(*tables: Table) -> None:
    """Print tables on standard output: as wide as the terminal, or in 80 columns."""
    text = io.StringIO()  # rich would end the program by itself where nobody reads
    console = Console(file=text, width=shutil.get_terminal_size().columns)
    for place, table in enumerate(tables):
        console.print(*[""] * bool(place), table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


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


def verified(report: Mapping[str, Any]) -> list[Table]:
    """What each combination compared: a table for each temperature and number of requests at a time."""
    tables: dict[tuple[float, int], Table] = {}
    columns = ("compared", "differing", "tokens", "accepted", "rejected", *["enough"] * report["full"])
    for row in report["combinations"]:
        place = row["temperature"], row["batch"]
        if place not in tables:
            tables[place] = _table(f"temperature {place[0]:g}, {place[1]} at a time", "method", *columns, wrapped=0)
        shown = {**row, "compared": row["prompts"], "enough": "yes" if row["counts"] else "no"}
        name = row["method"] + (" + oracle" if row["mixed"] else "")
        tables[place].add_row(name, *(str(shown[column]) for column in columns))
    return list(tables.values())


def crowded(report: Mapping[str, Any]) -> list[Table]:
    """What a crowd of requests did: what happened how often, what became of drafts, and who gave the tokens."""
    seen, given = _table("what happened", "what", "times"), _table("tokens by drafter", "drafter", "tokens")
    for table, counts in ((seen, report["seen"]), (given, report["by_drafter"])):
        for name, number in counts.items():
            table.add_row(name, f"{number:,}")
    columns = ("requests", "gave way", "drafted", "accepted", "rejected", "differing")
    drafts = _table("drafts", "method", *columns, wrapped=0)
    for way, found in report["by_way"].items():
        shown = {**found, "gave way": found["preemptions"]}
        drafts.add_row(way, *(f"{shown[column]:,}" for column in columns))
    return [seen, drafts, given]


def compared(report: Mapping[str, Any]) -> list[Table]:
    """For each method its figures by category, and how often drafts were accepted at each depth."""
    return [table for method, groups in report["methods"].items() for table in _figures(method, "category", groups)]


def rewritten(report: Mapping[str, Any]) -> list[Table]:
    """The rewriting set: what is half copied, what is not, and every request."""
    names = {"copied": "half copied", "rest": "less copied", "all": "all"}
    sets = {names[name]: figures for name, figures in report["sets"].items()}
    each = _table("", "request", "copied", "tokens", "tau", "speed-up")
    for request in report["requests"]:
        each.add_row(
            request["id"],
            f"{request['share']:.0%}",
            str(request["tokens"]),
            _two(request["tau"]),
            _x(request["speedup"]),
        )
    return [*_figures(report["method"], "plain output", sets), each]


def stepped(reports: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Steps by format, context and rows: as multiples of the floor, and where the time goes, in milliseconds."""
    return [table for report in reports for table in _steps(report)]


def _steps(report: Mapping[str, Any]) -> list[Table]:
    dtype = report["environment"]["dtype"]
    steps = _table(f"{dtype}: steps", "context", "rows", "ms", "least", "x floor", "by round", "floor ms", "GB/s")
    parts = _table(f"{dtype}: milliseconds of", "context", "rows", *report["steps"][0]["parts"])
    others = _table(f"{dtype}: besides", "what", "value")
    for line in report["steps"]:
        place = str(line["context"]), str(line["rows"])
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
        others.add_row(f"read bandwidth, {reader}", f"{speed / 1e9:.1f} GB/s")
    prefill, sampling = report["prefill"], report["sampling"]
    rate = prefill["tokens"] / prefill["seconds"]
    others.add_row(f"prefill of {prefill['tokens']} tokens", f"{prefill['seconds']:.3f} s, {rate:.0f} tokens/s")
    others.add_row("plain decoding, sampled / greedy", f"{sampling['rate']:.3f}")
    others.add_row("a verified row, sampled - greedy", f"{_ms(sampling['seconds a verified row'])} ms")
    return [steps, parts, others]


def perplexities(report: Mapping[str, Any]) -> Table:
    """Perplexity by format and kind of text, and its ratio to fp32."""
    table = _table("", "format", "text", "tokens", "perplexity", "ratio to fp32", words=(0, 1))
    for dtype, kinds in report["perplexity"].items():
        for kind, found in kinds.items():
            ratio = report["ratios"][dtype][kind]
            table.add_row(dtype, kind, str(found["tokens"]), f"{found['perplexity']:.4f}", f"{ratio:.5f}")
    return table


def beside(report: Mapping[str, Any]) -> list[Table]:
    """Engines by work; ratios are of their seconds to those of the first."""
    tables = {
        work: _table(title, "engine", "s", "least to most", "tokens/s", "ratio", "95 %", "same tokens")
        for work, title in report["works"].items()
    }
    for figure in report["figures"]:
        seconds, (low, high) = figure["seconds"], figure["interval"]
        tables[figure["work"]].add_row(
            figure["peer"],
            f"{seconds['median']:.3f}",
            f"{seconds['low']:.3f} to {seconds['high']:.3f}",
            f"{figure['speed']:.1f}",
            _x(figure["ratio"]),
            f"{low:.2f} to {high:.2f}",
            "" if figure["agrees"] is None else f"{figure['agrees']:.1f}",
        )
    return list(tables.values())


def simulated(report: Mapping[str, Any]) -> list[Table]:
    """The pacer against fixed lengths by machine, and what has no room. Best and auto are ratios to plain decoding;
    "from" is where their 95 % intervals begin, and "fails" names the bounds that do not hold."""
    tables: dict[tuple[str, ...], Table] = {}
    columns = ("context", "users", "length", "best", "auto", "from", "of best", "from", "fails")
    for row in report["cells"]:
        place = row["drafts"], row["device"], row["model"]
        if place not in tables:
            tables[place] = _table(" · ".join(place), *columns, words=(8,))
        tables[place].add_row(
            *(str(row[column]) for column in columns[:3]),
            *map(_x, (row["best"], row["auto"], row["auto_interval"][0])),
            *(f"{ratio:.3f}" for ratio in (row["of_best"], row["of_best_interval"][0])),
            ", ".join(row["failed"]),
        )
    left = _table("no room", "device", "model", "context", "users", words=(0, 1))
    for entry in report["left_out"]:
        users = ", ".join(map(str, entry["users"]))
        left.add_row(entry["device"], entry["model"], str(entry["context"]), users)
    return [*tables.values(), left]


def paced(report: Mapping[str, Any]) -> list[Table]:
    """For each temperature and number of users auto by category, as a ratio to plain decoding and to the best fixed
    length; then the fixed lengths, and what holds over all. "fails" names the bounds that do not hold."""
    tables: dict[tuple[float, int], tuple[Table, Table]] = {}
    for row in report["cells"]:
        place = row["temperature"], row["users"]
        _, auto, *others = row["methods"]
        if place not in tables:
            title = f"temperature {place[0]:g}, {place[1]} user" + "s" * (place[1] != 1)
            columns = ("auto", "95 %", "whole", "tau", "of best", "95 %", "rounds", "fails")
            tables[place] = _table(title, "category", *columns), _table(f"{title}: others", "category", *others)
        found, best = row["methods"], row["of_best"]
        tables[place][0].add_row(
            row["category"],
            *(_two(found[auto]["ratio"]), _interval(found[auto]["interval"])),
            *map(_two, (found[auto]["end_to_end"], found[auto]["tau"])),
            *(_two(best["ratio"]), _interval(best["interval"]), str(row["rounds"]) + "*" * row["again"]),
            ", ".join(row["failed"] + ["other tokens"] * bool(row["differing"])),
        )
        tables[place][1].add_row(row["category"], *(_two(found[name]["ratio"]) for name in others))
    whole = _table("over all", "what", "ratio", "95 %")
    whole.add_row("geometric mean of auto / plain", _two(report["geometric_mean"]), "")
    for key, said in (("of_reference", "1 user, auto / reference"), ("two_users", "2 users, auto / plain")):
        for temperature, found in report[key].items():
            whole.add_row(f"{said}, temperature {temperature}", _two(found["ratio"]), _interval(found["interval"]))
    return [*(table for both in tables.values() for table in both), whole]


def _interval(interval: Sequence[float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def loaded(report: Mapping[str, Any]) -> list[Table]:
    """For each method how much it served, then for each pattern of arrivals how quickly. Both are compared with plain
    decoding: throughput over rounds, latencies over requests."""
    patterns = {_arrivals(pattern): pattern["methods"] for pattern in report["arrivals"]}
    limits = any(limit is not None for limit in report["limits_ms"].values())
    return [
        *(_served(method, patterns, limits) for method in report["arrivals"][0]["methods"]),
        *(_waited(name, methods) for name, methods in patterns.items()),
    ]


def _served(method: str, patterns: Mapping[str, Mapping[str, Any]], limits: bool) -> Table:
    refused = any(methods[method]["refused"] for methods in patterns.values())
    columns = ["tokens/s", "req/s", *["good/s"] * limits, "speed-up", "over rounds", "tau", "differ"]
    table = _table(f"{method}: served", "arrivals", *columns, *["refused"] * refused, wrapped=0)
    for name, methods in patterns.items():
        found = methods[method]
        faster = found["speedup"]["output_throughput"]
        table.add_row(
            name,
            f"{found['output_throughput']['median']:.1f}",
            *(f"{found[f'request_{kind}']['median']:.2f}" for kind in ("throughput", *["goodput"] * limits)),
            _x(None if faster is None else faster["median"]),
            "" if faster is None else f"{faster['low']:.2f} to {faster['high']:.2f}",
            _two(found["mean_accepted_length"]),
            *(str(found[key]) for key in ("differing", *["refused"] * refused)),
        )
    return table


def _waited(name: str, methods: Mapping[str, Any]) -> Table:
    columns = ("method", "of", "mean", "p50", "p95", "p99", "faster", "95 %")
    table = _table(f"{name}: milliseconds", *columns, wrapped=0, words=(0, 1))
    for method, found in methods.items():
        for place, (kind, called) in enumerate(_LATENCIES.items()):
            table.add_row("" if place else method, called, *_latency(found, kind))
    return table


_LATENCIES = {"ttft": "first token", "tpot": "each token", "itl": "gap", "e2el": "all"}


def _arrivals(pattern: Mapping[str, Any]) -> str:
    level = f"{pattern['level']:g}"
    return f"{level} per s" if pattern["kind"] == "rate" else f"{level} user" + "s" * (level != "1")


def _latency(found: Mapping[str, Any], kind: str) -> list[str]:
    values, ratio = found[f"{kind}_ms"] or {}, found["speedup"].get(kind)
    shown = ["" if (value := values.get(key)) is None else f"{value:.1f}" for key in ("mean", "p50", "p95", "p99")]
    return [
        *shown,
        *(["", ""] if ratio is None else [_x(ratio["ratio"]), "{:.2f} to {:.2f}".format(*ratio["interval"])]),
    ]


def _figures(method: str, groups_of: str, groups: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """A method's speed by group, and how its drafts fared."""
    speed = _table(f"{method}: speed", groups_of, "tokens/s", "speed-up", "over repeats", "95 %", "end to end")
    drafts = _table(
        f"{method}: drafts",
        groups_of,
        "prompts",
        "tokens",
        "differing",
        "tau",
        "macro",
        "accepted, % by depth",
        words=(0, 6),
    )
    for group, figures in groups.items():
        rate, ratio, interval = (figures.get(key) for key in ("tokens_per_second", "speedup", "interval"))
        speed.add_row(
            group,
            "" if rate is None else f"{rate['median']:.1f}",
            _x(None if ratio is None else ratio["median"]),
            "" if ratio is None else f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
            _x(figures["end_to_end"]["median"]),
        )
        drafts.add_row(
            group,
            *(str(figures[key]) for key in ("prompts", "tokens", "differing")),
            *(_two(figures[key]) for key in ("tau", "tau_macro")),
            _by_depth(figures["accepted_by_position"]),
        )
    return [speed, drafts]


def _by_depth(positions: Sequence[Mapping[str, int]]) -> str:
    """Percent accepted of those that were judged at each of the first depths."""
    rates = [f"{100 * at['accepted'] / at['reached']:.0f}" for at in positions if at["reached"]]
    return " ".join(rates[:_DEPTHS]) + " ..." * (len(rates) > _DEPTHS)


def _table(title: str, *columns: str, wrapped: int = -1, words: Sequence[int] = (0,)) -> Table:
    """A table whose numbers stand below each other.

    Args:
        wrapped: the column that gives way where the table is too wide.
        words: the columns that are not numbers.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for place, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if place in words else "right"
        table.add_column(column, justify=side, no_wrap=place != wrapped % len(columns), overflow="fold")
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3f}"


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _x(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"
