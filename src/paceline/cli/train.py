"""``paceline train``: drafters for a target, from what the target itself says."""

import sys
import tomllib
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import TypeAdapter, ValidationError

from paceline.cli import VERBS
from paceline.cli.flags import Group, memory, verb
from paceline.cli.help import Headed
from paceline.cli.model import ENGINE, AsJson, ModelName, Quiet, open_model
from paceline.cli.output import print_json, tell
from paceline.errors import OptionError
from paceline.folders import cache_folder
from paceline.options import reject_unknown
from paceline.targets.hub import DEFAULT_MODEL
from paceline.targets.progress import shown
from paceline.train.answers import Asking, answer
from paceline.train.assemble import assemble
from paceline.train.data import read_texts
from paceline.train.eagle3 import Eagle3, Eagle3Options
from paceline.train.examples import preview as parts_of
from paceline.train.provenance import answers_digest
from paceline.train.recipe import Recipe
from paceline.train.run import Running
from paceline.train.texts import Data, collect

train = typer.Typer(help=VERBS["train"], add_completion=False, rich_markup_mode=None)
command = partial(train.command, cls=Headed)

TRAINING = Group("Training", Recipe)
RUNNING = Group("Running", Running, readers={"keep_features": memory})
DATA = Group("Data", Data)
EAGLE3 = Group("EAGLE-3 head", Eagle3Options)
ASKING = Group("Answers", Asking)

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The folder of what is trained; unless said one in the cache."),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of options, spelled as the flags with _ for -.")
]
Preview = Annotated[
    int | None,
    typer.Option("--preview", min=1, help="Show so many texts, the tokens that count in brackets, and do not train."),
]


@command(help="An EAGLE-3 head: trained on the target's states, drafts from them.")
@verb(engine=ENGINE, data=DATA, training=TRAINING, running=RUNNING, head=EAGLE3)
def eagle3(
    *,
    engine: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    running: dict[str, Any],
    head: dict[str, Any],
    model: ModelName = DEFAULT_MODEL,
    output: Output = None,
    config: Config = None,
    preview: Preview = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    given = {"data": data, "training": training, "running": running, "head": head}
    kinds = {"training": Recipe, "running": Running, "head": Eagle3Options, "data": Data}
    options = configured(config, kinds, given)
    make = partial(Eagle3, options["head"])
    return _train(Eagle3.kind, make, model, engine, options, output, preview, as_json=as_json, quiet=quiet)


@command(help="Have the target answer prompts, to train on: written as they come, and taken up again.")
@verb(engine=ENGINE, asking=ASKING)
def answers(
    *,
    engine: dict[str, Any],
    asking: dict[str, Any],
    prompts: Annotated[Path, typer.Option("--prompts", help="A JSONL file of prompts or chats.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSONL file of answers.")],
    model: ModelName = DEFAULT_MODEL,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Only so many, the first ones.")] = None,
    quiet: Quiet = False,
) -> int:
    how = Asking(**asking)
    found = read_texts(prompts)
    tell(*(f"{prompts}, {line}: skipped" for line in found.skipped))
    texts = [text for text in found.texts if text.answer is None][:count]
    llm = open_model(model, {"max_num_seqs": 32, **engine}, False, quiet=quiet)
    with llm, shown("answering", not quiet) as advance:
        done = answer(llm, texts, output, how, answers_digest(llm.loaded), advance)
    tokens = sum(len(text.answer_ids or ()) for text in done)
    print(f"{len(done)} answers of {tokens:,} tokens in {output}")
    return 0


def configured(path: Path | None, kinds: dict[str, type], given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Options of each kind from a TOML file and flags, of which flags come first.

    Raises:
        OptionError: the file cannot be read, an option is unknown, or a value of another type or out of range.
    """
    written: dict[str, Any] = {}
    if path is not None:
        try:
            written = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(f"the options in {path} cannot be read: {error}.") from error
    known = {name: [field.name for field in fields(kind)] for name, kind in kinds.items()}
    reject_unknown(str(path), written, [name for names in known.values() for name in names])
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        own = {key: value for key, value in written.items() if key in known[name]}
        try:
            found[name] = TypeAdapter(kind).validate_python({**own, **given[name]})
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{part}: " for part in first["loc"][:1])
            raise OptionError(where + first["msg"].removeprefix("Value error, ")) from error
    return found


def _train(
    kind: str,
    make: Any,
    model: str,
    engine: dict[str, Any],
    options: dict[str, Any],
    output: Path | None,
    preview: int | None,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train a drafter of any kind; ``make`` is what `assemble` makes it by."""
    recipe: Recipe = options["training"]
    say = (lambda line: None) if quiet else tell
    with open_model(model, {"max_num_seqs": 32, **engine}, False, quiet=quiet) as llm:
        folder = output or cache_folder() / "trained" / f"{llm.loaded.path.name}-{kind}"
        with shown("answering", not quiet and options["data"].prompts is not None) as advance:
            material = collect(options["data"], llm, folder / "training", recipe.seed, say, advance)
        if preview is not None:
            for example in material.examples[:preview]:
                print("".join(f"[{text}]" if counts else text for text, counts in parts_of(example, llm.tokenizer)))
            return 0
        target = llm.loaded
    torch.set_num_threads(target.decoder.threads)
    with shown("training", not quiet) as advance:
        run = assemble(
            make, target, material, recipe, options["running"], folder, command=sys.argv, tell=say, advance=advance
        )
        standing = run.go()
    report = {"folder": str(folder), "steps": run.training.taken, "tokens": run.training.tokens, **asdict(standing)}
    if as_json:
        print_json(report)
    else:
        print(f"{folder}: the best of {run.training.taken} steps is after {standing.best}, tau {standing.score:.3f}")
    return 0
