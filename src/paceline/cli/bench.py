"""``paceline bench``: what a step costs, what a method brings, what a number format costs in quality,
and how others fare."""

import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.environment import environment
from paceline.bench.peer_process import parse_peer, start
from paceline.bench.peer_worker import CONTEXT, ENGINES, OURS
from paceline.bench.peers import Beside, Work, cut, digest
from paceline.bench.perplexity import ANSWERS, PROMPTS, REFERENCE, ratios, score, write_answers
from paceline.bench.rewriting import Rewriting, rewriting_prompts
from paceline.bench.run import Comparison, parse_method
from paceline.bench.runner import Runner
from paceline.bench.step import StepBench
from paceline.cli import VERBS
from paceline.cli.bench_load import load as load_verb
from paceline.cli.bench_pacing import pacing as pacing_verb
from paceline.cli.flags import Group, verb
from paceline.cli.help import Headed
from paceline.cli.measure import (
    ASKED,
    LOADING,
    MEASURING,
    Adaptive,
    Asked,
    Drafts,
    Formats,
    Measuring,
    Repeats,
    Rounds,
    Seed,
    Temperature,
    Tokens,
    TopP,
    common_options,
    numbers,
)
from paceline.cli.model import ENGINE, METHOD_HELP, ModelName
from paceline.cli.output import tell
from paceline.cli.tables import beside, compared, perplexities, rewritten, simulated, stepped
from paceline.errors import OptionError
from paceline.prompts import read_prompts, spread
from paceline.sampling import Sampling
from paceline.simulate import compare
from paceline.simulate.plot import plot
from paceline.targets import load
from paceline.targets.hub import DEFAULT_MODEL
from paceline.text import Tokenizer
from paceline.tree import MAX_NODES

bench = typer.Typer(help=VERBS["bench"], add_completion=False, rich_markup_mode=None)
command = partial(bench.command, cls=Headed)
command(help="Many requests at a time: latency, throughput and goodput of methods side by side.")(load_verb)
command(help="Whether auto is ever slower than plain decoding, or than the best fixed length.")(pacing_verb)


@command(help="Methods in turn on the same prompts, by category; plain decoding is always among them.")
@verb(engine=ENGINE, asked=ASKED, measuring=MEASURING)
def run(
    *,
    engine: dict[str, Any],
    asked: dict[str, Any],
    measuring: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    method: Annotated[list[str] | None, typer.Option("--method", help=METHOD_HELP)] = None,
    drafts: Drafts = None,
    adaptive: Adaptive = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_tokens: Tokens = 128,
    repeats: Repeats = 3,
) -> int:
    common = common_options(drafts, adaptive)
    methods = [parse_method(text, common) for text in method or ["auto"]]
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    result = Measuring(**measuring)
    prompts = Asked(**asked).take(quiet=result.quiet)
    llm = result.open(model, {"max_num_seqs": 1, **engine})
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, **common}
    with result.cells(llm, prompts, **settings) as cells:
        report = Comparison(
            llm, prompts, methods, cells, max_tokens=max_tokens, repeats=repeats, sampling=sampling
        ).report()
    result.show(report, *compared(report))
    return int(any(figures["differing"] for groups in report["methods"].values() for figures in groups.values()))


@command(help="Where copying pays: drafting on ten functions and ten passages to be rewritten.")
@verb(engine=ENGINE, measuring=MEASURING)
def rewrite(
    *,
    engine: dict[str, Any],
    measuring: dict[str, Any],
    humaneval: Annotated[str, typer.Option("--humaneval", help="A JSONL file of HumanEval's prompts.")],
    prompts: Annotated[str, typer.Option("--prompts", help="A JSONL file of Spec-Bench's questions.")],
    model: ModelName = DEFAULT_MODEL,
    method: Annotated[str, typer.Option("--method", help="What drafts, as for bench run.")] = "auto",
    drafts: Drafts = None,
    max_tokens: Tokens = 256,
    repeats: Repeats = 5,
) -> int:
    asked = rewriting_prompts(read_prompts(humaneval), read_prompts(prompts))
    common = {} if drafts is None else {"num_speculative_tokens": drafts}
    drafting = parse_method(method, common)
    result = Measuring(**measuring)
    llm = result.open(model, {"max_num_seqs": 1, **engine})
    with result.cells(llm, asked, rewrite=max_tokens, num_speculative_tokens=drafts) as cells:
        report = Rewriting(llm, asked, drafting, cells, max_tokens=max_tokens, repeats=repeats).report()
    result.show(report, *rewritten(report))
    return int(any(figures["differing"] for figures in report["sets"].values()))


@command(help="One step of the engine by rows, context and number format, beside its floor.")
@verb(engine=LOADING, measuring=MEASURING)
def step(
    *,
    engine: dict[str, Any],
    measuring: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    dtype: Formats = None,
    rows: Annotated[str, typer.Option("--rows", help="Row counts of a step, the root counted.")] = "1,2,4,8,16,32,64",
    contexts: Annotated[str, typer.Option("--context", help="Tokens before the step.")] = "256,2048",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each kind and round.")] = 20,
    rounds: Rounds = 3,
) -> int:
    counts, lengths = numbers("--rows", rows, 1, MAX_NODES), numbers("--context", contexts, 1, 1 << 20)
    result = Measuring(**measuring)
    reports = []
    for name in dtype or ["int8"]:
        room = StepBench.room(lengths, steps)
        llm = result.open(model, {**engine, "dtype": name, "max_num_seqs": 1, "max_model_len": room})
        with result.cells(llm, read_prompts(), step=steps) as cells:
            reports.append(StepBench(llm, cells, counts, lengths, steps=steps, rounds=rounds).report())
    result.show({"environment": reports[0]["environment"], "reports": reports}, *stepped(reports))
    return 0


@command(help="Perplexity of prompts, and of the model's own fp32 answers to them, in each number format.")
@verb(engine=LOADING, asked=ASKED, measuring=MEASURING)
def perplexity(
    *,
    engine: dict[str, Any],
    asked: dict[str, Any],
    measuring: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    dtype: Formats = None,
    max_tokens: Tokens = 128,
    least: Annotated[int, typer.Option("--least", min=0, help="Fail where fewer tokens are scored.")] = 0,
) -> int:
    result = Measuring(**measuring)
    prompts = Asked(**asked).take(quiet=result.quiet)
    report: dict[str, Any] = {"perplexity": {}}
    texts = {PROMPTS: [turn for prompt in prompts for turn in prompt.turns]}
    for name in dict.fromkeys([REFERENCE, *(dtype or ["int8"])]):
        llm = result.open(model, {**engine, "dtype": name, "max_num_seqs": 1})
        with result.cells(llm, prompts, perplexity=max_tokens) as cells:
            if name == REFERENCE:
                texts[ANSWERS] = write_answers(llm, prompts, cells, max_tokens)
                report["environment"] = cells.environment
            report["perplexity"][name] = score(llm, texts, cells)
    report["ratios"] = ratios(report["perplexity"])
    result.show(report, perplexities(report))
    scored = report["perplexity"][REFERENCE]["all"]["tokens"]
    if scored < least:
        tell(f"{scored} tokens were scored, and --least wants {least}: give more prompts.")
    return int(scored < least)


@command(help="paceline in int8 beside other engines, each in a process of its own: prompts and plain decoding.")
@verb(asked=Group("Prompts", Asked, {"categories": None}), measuring=MEASURING)
def peers(
    *,
    asked: dict[str, Any],
    measuring: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    peer: Annotated[
        list[str],
        typer.Option(
            "--peer",
            help=f"KIND=PYTHON,MODEL; KIND is {', '.join(kind for kind in ENGINES if kind != OURS)}, PYTHON where it "
            "is installed, MODEL a folder or GGUF file of its format.",
        ),
    ],
    threads: Annotated[int, typer.Option("--threads", "-t", min=1, help="Threads of every engine.")] = 2,
    prefill: Annotated[int, typer.Option("--prefill", min=2, max=CONTEXT // 2, help="Tokens of a long prompt.")] = 1000,
    before: Annotated[int, typer.Option("--context", min=2, max=CONTEXT // 2, help="Tokens before decoding.")] = 200,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, max=CONTEXT // 2, help="Tokens decoded.")] = 128,
    repeats: Repeats = 5,
) -> int:
    engines = [(OURS, sys.executable, model), *map(parse_peer, peer)]
    if len({kind for kind, _, _ in engines}) < len(engines):
        raise OptionError(f"--peer takes each kind of engine once, and {OURS} is always there.")
    result, count = Measuring(**measuring), asked.pop("count", 5)
    opened = load.open_model(model, progress=not result.quiet)
    found = Asked(**asked).take(quiet=result.quiet)
    texts = [prompt.turns[0] for prompt in spread(found, len(found))]
    encode = Tokenizer.from_parts(opened.tokenizer).encode
    works = [Work("prefill", prefill, 1), Work("decode", before, max_tokens)]
    rows = {work: cut(texts, encode, work.prompt, count) for work in works}
    with ExitStack() as stack:
        started = [stack.enter_context(closing(start(*engine, threads))) for engine in engines]
        settings = {
            "fingerprint": opened.fingerprint,
            "engines": {engine.name: engine.version for engine in started},
            "threads": threads,
            "prompts": [[str(work), digest(ids)] for work, ids in rows.items()],
        }
        if not result.quiet:
            tell(*(f"{engine.name}: {engine.version}" for engine in started))
        ticker = stack.enter_context(result.ticker())
        measured = Beside(started, rows, Runner(result.output, environment(), settings, ticker), repeats=repeats)
        measured.warm_up()
        report = measured.report()
    result.show(report, *beside(report))
    return 0


@command(help="The pacer on modelled GPUs against the best fixed length that knows the future.")
@verb(measuring=MEASURING)
def simulate(
    *,
    measuring: dict[str, Any],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How often requests and machines are drawn.")] = 20,
    users: Annotated[str, typer.Option("--users", help="Requests at a time.")] = "1,2,4,8,16,32,64,128,256,512",
    contexts: Annotated[
        str, typer.Option("--context", help="Tokens of a request when it begins.")
    ] = "1024,4096,16384,32768,131072",
    figure: Annotated[Path | None, typer.Option("--plot", help="Draw the result into this SVG or PNG file.")] = None,
    tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Of each user on the average; else by their number.")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many simulate at a time.")] = 2,
) -> int:
    counts, lengths = numbers("--users", users, 1, 4096), numbers("--context", contexts, 1, 1 << 20)
    result = Measuring(**measuring)
    with result.ticker() as ticker:
        cells = Runner(result.output, environment(), {}, ticker)
        report = compare.run(cells, seeds, counts, lengths, processes, tokens)
    if figure is not None:
        plot(report, figure)
    result.show(report, *simulated(report))
    return int(any(row["failed"] for row in report["cells"]))
