"""``paceline verify``: not one token may differ."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from paceline.bench import crowd as crowds
from paceline.bench.run import parse_method
from paceline.bench.verify import ENOUGH, FIRST_SEED, Verification
from paceline.bench.visitors import CROWD, ROOM, visitors
from paceline.bench.ways import SHARE, WAYS, chosen_ways, combinations, draws
from paceline.cli.flags import verb
from paceline.cli.measure import ASKED, MEASURING, Asked, Drafts, Measuring, Tokens
from paceline.cli.model import ENGINE, MODEL_HELP
from paceline.cli.output import tell
from paceline.cli.tables import crowded, verified
from paceline.errors import OptionError
from paceline.targets.hub import DEFAULT_MODEL

AT_A_TIME = 8
SHIPPED = 8
LEGEND = (
    "self: the model as its own drafter, all of whose drafts are accepted.",
    "oracle: knows the answer, and swaps half of its tokens for wrong ones.",
)
ENOUGH_LEGEND = f"enough: at least {ENOUGH} drafts accepted, and rejected where any can be."
METHOD_HELP = f"Only {', '.join(way.name for way in WAYS)}, or one written as for bench run; give several."


@verb(engine=ENGINE, asked=ASKED, measuring=MEASURING)
def verify(
    *,
    engine: dict[str, Any],
    asked: dict[str, Any],
    measuring: dict[str, Any],
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    method: Annotated[list[str] | None, typer.Option("--method", help=METHOD_HELP)] = None,
    max_tokens: Tokens = 64,
    drafts: Drafts = 5,
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
            help=f"Each prompt in one of {SHARE} combinations or more, by lot, and enough drafts judged.",
        ),
    ] = False,
    every: Annotated[
        bool, typer.Option("--every", help="With --full: each prompt in every combination, none by lot.")
    ] = False,
    crowd: Annotated[
        int | None,
        typer.Option(
            "--crowd",
            min=1,
            help="So many requests of every kind at once instead, some left early, in a cache too small for them.",
        ),
    ] = None,
    orders: Annotated[int, typer.Option("--orders", min=1, help="Of arrival, with --crowd.")] = 3,
) -> int:
    if crowd is not None:
        if full or every:
            raise OptionError("crowd excludes full and every: what its requests are is drawn by lot.")
        return _crowd(crowd, orders, method, model, engine, asked, Measuring(**measuring))
    if every and not full:
        raise OptionError("every goes with full: without it each prompt is in every combination anyway.")
    ways, result = chosen_ways(method), Measuring(**measuring)
    lots = len(combinations(ways)) if every else draws(ways)
    prompts = Asked(**asked).take(None if full else SHIPPED, quiet=result.quiet)
    if engine.setdefault("max_num_seqs", AT_A_TIME) < AT_A_TIME:
        raise OptionError(f"max_num_seqs is {engine['max_num_seqs']}; verifying runs {AT_A_TIME} requests at a time.")
    llm = result.open(model, engine)
    settings = {"verify": max_tokens, "drafts": drafts, "draft_layers": draft_layers, "seed": FIRST_SEED}
    with result.cells(llm, prompts, **settings) as cells:
        report = Verification(
            llm,
            prompts,
            cells,
            max_tokens=max_tokens,
            draws=lots if full else None,
            drafts=drafts or 5,
            draft_layers=draft_layers,
            ways=ways,
        ).report()
    result.show(report, *verified(report))
    if not result.as_json:
        print("", *LEGEND, *[ENOUGH_LEGEND] * full, "", sep="\n")
        for difference in report["differences"]:
            found = {key: value for key, value in difference.items() if key not in ("expected", "found")}
            print("differs:", *(f"{key} {value}" for key, value in found.items()))
        print(f"compared: {report['compared']}", f"differing: {report['differing']}", sep="\n")
    if report["short"]:
        tell(f"{report['short']} combinations had too few accepted or rejected drafts to count: give more prompts.")
    return 1 if report["differing"] or report["short"] else 0


def _crowd(
    count: int,
    orders: int,
    methods: Sequence[str] | None,
    model: str,
    engine: dict[str, Any],
    asked: dict[str, Any],
    result: Measuring,
) -> int:
    prompts = Asked(**asked).take(quiet=result.quiet)
    engine = {"max_num_seqs": crowds.AT_ONCE, "max_model_len": crowds.CONTEXT, "cache_memory": crowds.CACHE, **engine}
    ways = chosen_ways(methods, CROWD)
    room = False if methods else parse_method(ROOM, {}).speculation
    llm = result.open_async(model, engine, room)
    everyone = visitors(llm, prompts, count, ways)
    with result.cells(llm, prompts, crowd=count, methods=methods, engine=engine) as cells:
        report = crowds.Crowd(llm, everyone, cells, orders=orders).report()
    result.show(report, *crowded(report))
    if not result.as_json:
        for difference in report["differences"]:
            print("differs:", *(f"{key} {difference[key]}" for key in ("request", "choice", "place")))
        for request, error in report["errors"].items():
            print(f"lost: request {request}, {error}")
        print("", *(f"{key}: {report[key]}" for key in ("compared", *crowds.WRONG)), sep="\n")
    if report["short"]:
        tell(
            f"too seldom for the run to count: {', '.join(report['short'])}. Give more requests, or, for those that "
            "give way, a smaller --cache-memory."
        )
    return 1 if any(report[key] for key in (*crowds.WRONG, "short")) else 0
