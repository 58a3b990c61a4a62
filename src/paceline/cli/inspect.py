"""``paceline inspect``: what a model is, and whether another can draft for it."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from paceline.cli.model import MODEL_HELP, AsJson, Debug
from paceline.cli.output import print_json
from paceline.errors import ModelError
from paceline.targets.load import Opened, open_model
from paceline.targets.vocabulary import compare_vocabularies

INSTEAD = "take a smaller model with the same tokenizer, or draft without one: --method ngram, or --draft-layers N"


@dataclass(frozen=True)
class Check:
    """One question about a pair of models, its answer, and what to do where it is no."""

    name: str
    passed: bool
    found: str
    advice: str | None = None


def inspect(
    context: typer.Context,
    *,
    target: Annotated[str, typer.Argument(help=MODEL_HELP)],
    draft: Annotated[str | None, typer.Argument(help="A model that is to draft for it.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="int8 (unless said otherwise), bf16 or fp32."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    context.obj["debug"] |= debug
    model = open_model(target, dtype=dtype, progress=True)
    checks = [] if draft is None else check_pair(model, draft, dtype)
    if as_json:
        pair = {} if draft is None else {"draft": draft, "checks": [asdict(check) for check in checks]}
        print_json({**facts(model), **pair})
    else:
        _print(model, checks, draft)
    return 0 if all(check.passed for check in checks) else 1


def facts(model: Opened) -> dict[str, Any]:
    """What a model is, as plain data; sizes in bytes."""
    spec, tokenizer = model.spec, model.tokenizer
    windows = [layer.window for layer in spec.layers if layer.window is not None]
    return {
        "model": model.name,
        "family": spec.family,
        "layers": len(spec.layers),
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "tied": spec.tied,
        "context": spec.max_positions,
        "windows": {"layers": len(windows), "tokens": max(windows)} if windows else None,
        "vocabulary": {"rows": spec.vocab_size, "tokens": tokenizer.size},
        "bos_id": tokenizer.bos_id if tokenizer.add_bos else None,
        "eos_ids": list(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template is not None,
        "generation_config": tokenizer.generation_config,
        "dtype": model.dtype,
        "weight_bytes": model.weight_bytes,
        "converted": str(model.path),
        "fingerprint": model.fingerprint,
        "notes": model.notes,
    }


def check_pair(target: Opened, name: str, dtype: str | None = None) -> list[Check]:
    """Whether the model called ``name`` can draft for ``target``."""
    try:
        draft = open_model(name, dtype=dtype, progress=True)
    except ModelError as error:
        return [Check("it loads", False, str(error), INSTEAD)]
    differences = compare_vocabularies(target.tokenizer, draft.tokenizer)
    tokens = [Check("same tokens", False, difference, INSTEAD) for difference in differences]
    size, own = draft.weight_bytes, target.weight_bytes
    return [
        Check("it loads", True, f"{draft.spec.family}, {len(draft.spec.layers)} layers"),
        *(tokens or [Check("same tokens", True, f"{target.tokenizer.size} ids are spelled alike")]),
        Check(
            "smaller",
            size < own,
            f"{size / 2**20:,.0f} MiB of weights against {own / 2**20:,.0f}",
            None if size < own else "drafting with it cannot pay: take a smaller model",
        ),
        Check("context", True, _reach(target.spec.max_positions, draft.spec.max_positions)),
    ]


def _reach(target: int, draft: int) -> str:
    if draft >= target:
        return f"{draft} tokens against {target}"
    return f"{draft} tokens against {target}: longer sequences go on without drafts"


def _print(model: Opened, checks: list[Check], draft: str | None) -> None:
    for name, value in facts(model).items():
        if name not in ("vocabulary", "windows", "weight_bytes", "converted", "notes"):
            print(f"{name.replace('_', ' ') + ':':<20}{_shown(value)}")
    spec, tokenizer = model.spec, model.tokenizer
    print(f"{'vocabulary:':<20}{tokenizer.size} tokens, {spec.vocab_size} rows")
    print(f"{'weights:':<20}{model.weight_bytes / 2**20:,.0f} MiB")
    windows = facts(model)["windows"]
    if windows:
        print(f"{'windows:':<20}{windows['layers']} layers see {windows['tokens']} tokens")
    for note in model.notes:
        print(f"{'note:':<20}{note}")
    if checks:
        print(f"\n{draft} as its draft model:")
    for check in checks:
        print(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.found}")
        if check.advice:
            print(f"      {check.advice}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, {}, []) else str(value)
