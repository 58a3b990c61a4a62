"""``paceline bench load``: how many users a method serves, and how quickly."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.arrivals import Arrivals, Closed, Poisson
from paceline.bench.latency import Limits
from paceline.bench.load import LoadBench
from paceline.bench.load_plot import plot
from paceline.bench.run import parse_method
from paceline.cli.flags import verb
from paceline.cli.measure import (
    MEASURING,
    REQUESTS,
    Adaptive,
    Asked,
    Drafts,
    Measuring,
    Rounds,
    Seed,
    Temperature,
    Tokens,
    TopP,
    common_options,
    numbers,
    rates,
)
from paceline.cli.model import ENGINE, METHOD_HELP, ModelName
from paceline.cli.tables import loaded
from paceline.figure import check
from paceline.sampling import Sampling
from paceline.targets.hub import DEFAULT_MODEL


@verb(engine=ENGINE, asked=REQUESTS, measuring=MEASURING)
def load(
    *,
    engine: dict[str, Any],
    asked: dict[str, Any],
    measuring: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    method: Annotated[list[str] | None, typer.Option("--method", help=METHOD_HELP)] = None,
    users: Annotated[
        str | None,
        typer.Option("--users", "--max-concurrency", help="Users who each wait for an answer; 1,8,32 unless said."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", "--request-rate", help="Requests a second that arrive at random, as 2,5.")
    ] = None,
    drafts: Drafts = None,
    adaptive: Adaptive = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_tokens: Tokens = 96,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of --max-tokens, all of them.")] = False,
    rounds: Rounds = 3,
    ttft: Annotated[
        float | None, typer.Option("--ttft-limit", min=0.0, help="Goodput counts first tokens within so many ms.")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option("--tpot-limit", min=0.0, help="Goodput counts so many ms a token, or less.")
    ] = None,
    figure: Annotated[Path | None, typer.Option("--plot", help="Draw the result into this SVG or PNG file.")] = None,
) -> int:
    common = common_options(drafts, adaptive)
    methods = [parse_method(text, common) for text in method or ["auto"]]
    closed = numbers("--users", users or "1,8,32", 1, 4096) if users or not rate else []
    opened = rates("--rate", rate) if rate else []
    arrivals: list[Arrivals] = [*map(Closed, closed), *map(Poisson, opened)]
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos)
    result = Measuring(**measuring)
    if figure is not None:
        check(figure)
    prompts = Asked(**asked).take(max(32, *closed), quiet=result.quiet)
    engine = {"max_num_seqs": min(max(16, *closed), 256), **engine}
    llm = result.open_async(model, engine)
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, **common}
    with result.cells(llm, prompts, engine=engine, ignore_eos=ignore_eos, **settings) as cells:
        report = LoadBench(
            llm, prompts, methods, arrivals, cells, sampling=sampling, rounds=rounds, limits=Limits(ttft, tpot)
        ).report()
    if figure is not None:
        plot(report, figure)
    result.show(report, *loaded(report))
    every = (found for pattern in report["arrivals"] for found in pattern["methods"].values())
    return int(any(found["differing"] for found in every))
