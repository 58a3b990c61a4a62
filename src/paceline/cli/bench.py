"""``paceline bench``: what a step costs, what a method brings, what a number format costs in quality,
and how others fare."""

import sys
from contextlib import ExitStack, closing
from typing import Annotated, Any

import typer

from paceline.bench.environment import environment
from paceline.bench.peer_worker import CONTEXT
from paceline.bench.peers import Beside, Work, cut, digest, parse_peer, start
from paceline.bench.perplexity import ANSWERS, PROMPTS, REFERENCE, ratios, score, write_answers
from paceline.bench.rewriting import Rewriting, rewriting_prompts
from paceline.bench.run import Comparison, parse_method
from paceline.bench.runner import Runner
from paceline.bench.step import StepBench
from paceline.cli import VERBS
from paceline.cli.flags import with_flags
from paceline.cli.measure import LOADING, Count, Formats, Output, Prompts, Ticker, chosen, numbers, runner
from paceline.cli.model import ENGINE, AsJson, Debug, ModelName, Quiet, open_model
from paceline.cli.output import print_json, tell
from paceline.cli.tables import beside, compared, header, perplexities, rewritten, show, stepped
from paceline.errors import OptionError
from paceline.prompts import Prompt, read_prompts, spread
from paceline.sampling import Sampling
from paceline.targets import load
from paceline.targets.hub import DEFAULT_MODEL
from paceline.text import Tokenizer
from paceline.tree import MAX_NODES

bench = typer.Typer(help=VERBS["bench"], add_completion=False)

Repeats = Annotated[int, typer.Option("--repeats", min=1, help="How often each cell is taken.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of each answer.")]
Drafts = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", min=1, max=MAX_NODES - 1, help="The most tokens drafted at a time."),
]


@bench.command(help="Methods in turn on the same prompts, by category; plain decoding is always among them.")
@with_flags(engine=ENGINE)
def run(
    context: typer.Context,
    *,
    engine: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    prompts: Prompts = None,
    count: Count = None,
    categories: Annotated[
        str | None, typer.Option("--categories", help="Only these, as in qa,rag; mt_bench is its eight small ones.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", help="plain, ngram, draft_layers=6, ngram:prompt_lookup_max=3,adaptive=false ...; give several."
        ),
    ] = None,
    drafts: Drafts = None,
    adaptive: Annotated[
        bool | None, typer.Option("--adaptive/--no-adaptive", help="Draft less where it does not pay.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="The share of the mass to draw from.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of sampled answers.")] = 0,
    max_tokens: Tokens = 128,
    repeats: Repeats = 3,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    common = {"num_speculative_tokens": drafts, "adaptive": adaptive}
    common = {name: value for name, value in common.items() if value is not None}
    methods = [parse_method(text, common) for text in method or ["ngram"]]
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    asked = _only(chosen(prompts, None), categories)
    asked = asked if count is None else spread(asked, count)
    engine.setdefault("max_num_seqs", 1)
    llm = open_model(model, engine, False, quiet=quiet)
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, **common}
    with Ticker(quiet) as ticker:
        comparison = Comparison(
            llm,
            asked,
            methods,
            runner(llm, asked, output, ticker, **settings),
            max_tokens=max_tokens,
            repeats=repeats,
            sampling=sampling,
        )
        report = comparison.report()
    if as_json:
        print_json(report)
    else:
        tell(header(report["environment"]))
        show(*compared(report))
    return int(any(figures["differing"] for groups in report["methods"].values() for figures in groups.values()))


@bench.command(help="Where copying pays: n-gram drafting on ten functions and ten passages to be rewritten.")
@with_flags(engine=ENGINE)
def rewrite(
    context: typer.Context,
    *,
    engine: dict[str, Any],
    humaneval: Annotated[str, typer.Option("--humaneval", help="A JSONL file of HumanEval's prompts.")],
    prompts: Annotated[str, typer.Option("--prompts", help="A JSONL file of Spec-Bench's questions.")],
    model: ModelName = DEFAULT_MODEL,
    drafts: Drafts = None,
    max_tokens: Tokens = 256,
    repeats: Repeats = 5,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    asked = rewriting_prompts(read_prompts(humaneval), read_prompts(prompts))
    engine.setdefault("max_num_seqs", 1)
    llm = open_model(model, engine, False, quiet=quiet)
    with Ticker(quiet) as ticker:
        cells = runner(llm, asked, output, ticker, rewrite=max_tokens, num_speculative_tokens=drafts)
        report = Rewriting(llm, asked, cells, max_tokens=max_tokens, repeats=repeats, drafts=drafts).report()
    if as_json:
        print_json(report)
    else:
        tell(header(report["environment"]))
        show(*rewritten(report))
    return int(any(figures["differing"] for figures in report["sets"].values()))


@bench.command(help="One step of the engine by rows, context and number format, beside its floor.")
@with_flags(engine=LOADING)
def step(
    context: typer.Context,
    *,
    engine: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    dtype: Formats = None,
    rows: Annotated[str, typer.Option("--rows", help="Row counts of a step, the root counted.")] = "1,2,4,8,16,32,64",
    contexts: Annotated[str, typer.Option("--context", help="Tokens before the step.")] = "256,2048",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each kind and round.")] = 20,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often all kinds are gone through.")] = 3,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    counts, lengths = numbers("--rows", rows, 1, MAX_NODES), numbers("--context", contexts, 1, 1 << 20)
    reports = []
    with Ticker(quiet) as ticker:
        for name in dtype or ["int8"]:
            room = StepBench.room(lengths, steps)
            llm = open_model(
                model, {**engine, "dtype": name, "max_num_seqs": 1, "max_model_len": room}, False, quiet=quiet
            )
            cells = runner(llm, read_prompts(), output, ticker, step=steps)
            reports.append(StepBench(llm, cells, counts, lengths, steps=steps, rounds=rounds).report())
    if as_json:
        print_json({"reports": reports})
    else:
        tell(header(reports[0]["environment"]))
        show(*stepped(reports))
    return 0


@bench.command(help="Perplexity of prompts, and of the model's own fp32 answers to them, in each number format.")
@with_flags(engine=LOADING)
def perplexity(
    context: typer.Context,
    *,
    engine: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    prompts: Prompts = None,
    count: Count = None,
    dtype: Formats = None,
    max_tokens: Tokens = 128,
    least: Annotated[int, typer.Option("--least", min=1, help="Fail where fewer tokens are scored.")] = 20_000,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    asked = chosen(prompts, count)
    report: dict[str, Any] = {"perplexity": {}}
    texts = {PROMPTS: [turn for prompt in asked for turn in prompt.turns]}
    with Ticker(quiet) as ticker:
        for name in dict.fromkeys([REFERENCE, *(dtype or ["int8"])]):
            llm = open_model(model, {**engine, "dtype": name, "max_num_seqs": 1}, False, quiet=quiet)
            cells = runner(llm, asked, output, ticker, perplexity=max_tokens)
            if name == REFERENCE:
                texts[ANSWERS] = write_answers(llm, asked, cells, max_tokens)
                report["environment"] = cells.environment
            report["perplexity"][name] = score(llm, texts, cells)
    report["ratios"] = ratios(report["perplexity"])
    if as_json:
        print_json(report)
    else:
        tell(header(report["environment"]))
        show(perplexities(report))
    scored = report["perplexity"][REFERENCE]["all"]["tokens"]
    if scored < least:
        tell(f"{scored} tokens were scored, and {least} are wanted: give more prompts, or a lower --least.")
    return int(scored < least)


@bench.command(help="paceline in int8 beside other engines, each in a process of its own: prompts and plain decoding.")
def peers(
    context: typer.Context,
    *,
    model: ModelName = DEFAULT_MODEL,
    peer: Annotated[
        list[str],
        typer.Option(
            "--peer",
            help="KIND=PYTHON,MODEL; KIND is transformers (a folder), openvino (a folder) or llama.cpp (a GGUF file).",
        ),
    ],
    threads: Annotated[int, typer.Option("--threads", "-t", min=1, help="Threads of every engine.")] = 2,
    prompts: Prompts = None,
    count: Annotated[int, typer.Option("--count", min=1, help="How many prompts of each kind.")] = 5,
    prefill: Annotated[int, typer.Option("--prefill", min=2, max=CONTEXT // 2, help="Tokens of a long prompt.")] = 1000,
    before: Annotated[int, typer.Option("--context", min=2, max=CONTEXT // 2, help="Tokens before decoding.")] = 200,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, max=CONTEXT // 2, help="Tokens decoded.")] = 128,
    repeats: Repeats = 5,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    engines = [("paceline", sys.executable, model), *map(parse_peer, peer)]
    if len({kind for kind, _, _ in engines}) < len(engines):
        raise OptionError("--peer takes each kind of engine once, and paceline is always there.")
    opened = load.open_model(model, progress=not quiet)
    asked = spread(found := chosen(prompts, None), len(found))
    encode = Tokenizer.from_parts(opened.tokenizer).encode
    works = [Work("prefill", prefill, 1), Work("decode", before, max_tokens)]
    rows = {work: cut([prompt.turns[0] for prompt in asked], encode, work.prompt, count) for work in works}
    with ExitStack() as stack:
        started = [stack.enter_context(closing(start(*engine, threads))) for engine in engines]
        settings = {
            "fingerprint": opened.fingerprint,
            "engines": {engine.name: engine.version for engine in started},
            "threads": threads,
            "prompts": [[str(work), digest(ids)] for work, ids in rows.items()],
        }
        if not quiet:
            tell(*(f"{engine.name}: {engine.version}" for engine in started))
        ticker = stack.enter_context(Ticker(quiet))
        measured = Beside(started, rows, Runner(output, environment(), settings, ticker), repeats=repeats)
        measured.warm_up()
        report = measured.report()
    if as_json:
        print_json(report)
    else:
        tell(header(report["environment"]))
        show(beside(report))
    return 0


def _only(prompts: list[Prompt], categories: str | None) -> list[Prompt]:
    """The prompts of the categories named.

    Raises:
        OptionError: one of them has no prompt.
    """
    if categories is None:
        return prompts
    wanted = [name.strip() for name in categories.split(",")]
    known = {name for prompt in prompts for name in (prompt.category, prompt.group)}
    for name in wanted:
        if name not in known:
            raise OptionError(f"no prompt is of the category {name!r}; there are {', '.join(sorted(known))}.")
    return [prompt for prompt in prompts if prompt.category in wanted or prompt.group in wanted]
