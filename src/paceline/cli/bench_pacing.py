"""``paceline bench pacing``: whether auto is ever slower than plain decoding, or than the best fixed length."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.pacing import Grid, Pacing
from paceline.bench.run import parse_method
from paceline.cli.flags import verb
from paceline.cli.measure import MEASURING, Measuring, Rounds, Tokens, decimals, numbers, of_categories
from paceline.cli.model import ENGINE, ModelName
from paceline.cli.output import tell
from paceline.cli.tables import paced
from paceline.prompts import read_prompts
from paceline.targets.hub import DEFAULT_MODEL
from paceline.tree import MAX_NODES


@verb(engine=ENGINE, measuring=MEASURING)
def pacing(
    *,
    engine: dict[str, Any],
    measuring: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", help="A JSONL file; give several. Unless said the shipped ones.")
    ] = None,
    categories: Annotated[str | None, typer.Option("--categories", help="Only these, as in qa,rag.")] = None,
    users: Annotated[str, typer.Option("--users", help="Users who each wait for an answer.")] = "1,2,4,8,16,32",
    temperature: Annotated[str, typer.Option("--temperature", help="Of the answers.")] = "0,0.8",
    lengths: Annotated[str, typer.Option("--lengths", help="Fixed lengths that auto is compared with.")] = "2,4,8",
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts of each cell, or as many as users.")] = 16,
    max_tokens: Tokens = 96,
    rounds: Rounds = 3,
    reference: Annotated[
        str | None, typer.Option("--reference", help="A method that auto is compared with where there is one user.")
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.0, help="Begin no further cell after so many minutes.")
    ] = math.inf,
) -> int:
    grid = Grid(
        users=numbers("--users", users, 1, 256),
        temperatures=decimals("--temperature", temperature),
        lengths=numbers("--lengths", lengths, 1, MAX_NODES - 1),
        prompts=count,
        max_tokens=max_tokens,
        rounds=rounds,
        reference=None if reference is None else parse_method(reference, {}),
        minutes=minutes,
    )
    result = Measuring(**measuring)
    files = [read_prompts(path) for path in prompts] if prompts else [read_prompts()]
    asked = of_categories([prompt for file in files for prompt in file], categories)
    engine = {"max_num_seqs": max(grid.users), **engine}
    llm = result.open_async(model, engine)
    with result.cells(llm, asked, engine=engine, max_tokens=max_tokens, count=count) as cells:
        report = Pacing(llm, asked, cells, grid).report()
    result.show(report, *paced(report))
    if report["missing"]:
        tell(f"{report['missing']} rounds of cells are missing: run the same command again to go on.")
    return int(any(row["failed"] or row["differing"] for row in report["cells"]))
