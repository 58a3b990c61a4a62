"""``paceline verify``: not one token may differ."""

from typing import Annotated, Any

import typer

from paceline.bench.verify import DRAWS, FIRST_SEED, Verification
from paceline.cli.flags import with_flags
from paceline.cli.measure import Count, Output, Prompts, Ticker, chosen, runner
from paceline.cli.model import ENGINE, MODEL_HELP, AsJson, Debug, Quiet, open_model
from paceline.cli.output import print_json, tell
from paceline.cli.tables import header, show, verified
from paceline.errors import OptionError
from paceline.targets.hub import DEFAULT_MODEL
from paceline.tree import MAX_NODES

AT_A_TIME = 8
SHIPPED = 8


@with_flags(engine=ENGINE)
def verify(
    context: typer.Context,
    *,
    engine: dict[str, Any],
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    prompts: Prompts = None,
    count: Count = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of each answer.")] = 64,
    drafts: Annotated[
        int, typer.Option("--num-speculative-tokens", min=1, max=MAX_NODES - 1, help="Tokens drafted at a time.")
    ] = 5,
    draft_layers: Annotated[
        int,
        typer.Option(
            "--draft-layers", min=1, help="Layers of the short draft model; where it has no more, half of them."
        ),
    ] = 6,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help=f"Each prompt in {DRAWS} combinations by lot, with enough drafts accepted and rejected.",
        ),
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    asked = chosen(prompts, count, None if full else SHIPPED)
    if engine.setdefault("max_num_seqs", AT_A_TIME) < AT_A_TIME:
        raise OptionError(f"max_num_seqs is {engine['max_num_seqs']}; verifying runs {AT_A_TIME} requests at a time.")
    llm = open_model(model, engine, False, quiet=quiet)
    with Ticker(quiet) as ticker:
        settings = {"verify": max_tokens, "drafts": drafts, "draft_layers": draft_layers, "seed": FIRST_SEED}
        verification = Verification(
            llm,
            asked,
            runner(llm, asked, output, ticker, **settings),
            max_tokens=max_tokens,
            draws=DRAWS if full else None,
            drafts=drafts,
            draft_layers=draft_layers,
        )
        report = verification.report()
    if as_json:
        print_json(report)
    else:
        tell(header(report["environment"]))
        show(verified(report))
        for difference in report["differences"]:
            found = {key: value for key, value in difference.items() if key not in ("expected", "found")}
            print("differs:", *(f"{key} {value}" for key, value in found.items()))
        print(f"compared: {report['compared']}", f"differing: {report['differing']}", sep="\n")
    if report["short"]:
        tell(f"{report['short']} combinations had too few accepted or rejected drafts to count: give more prompts.")
    return 1 if report["differing"] or report["short"] else 0
