"""``paceline inspect``: what a model or a drafting head is, and whether it can draft for another model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bridges import bridge
from paceline.cli.flags import verb
from paceline.cli.model import MODEL_HELP, AsJson
from paceline.cli.output import print_json
from paceline.errors import DrafterError, ModelError, OptionError
from paceline.heads import describe
from paceline.heads.check import INSTEAD as INSTEAD_OF_HEAD
from paceline.heads.check import Check, check_head, check_manifest
from paceline.heads.files import WEIGHT_ENDINGS
from paceline.heads.formats import is_head, read_head
from paceline.heads.head import Head
from paceline.targets.load import Opened, open_model
from paceline.targets.vocabulary import TokenizerParts, compare_vocabularies
from paceline.text import Tokenizer

INSTEAD = "take a smaller model with the same tokenizer, or draft without one: --method ngram, or --draft-layers N"


@verb()
def inspect(
    *,
    target: Annotated[str, typer.Argument(help=f"{MODEL_HELP} Or a head of Medusa or EAGLE.")],
    draft: Annotated[str | None, typer.Argument(help="A model or a head that is to draft for it.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="int8 (unless said otherwise), bf16 or fp32."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    if _is_head(target):
        return _show_head(target, draft, as_json)
    model = open_model(target, dtype=dtype, progress=True)
    head, checks = _pair(model, draft, dtype)
    if as_json:
        pair = {} if draft is None else {"draft": draft, "checks": [asdict(check) for check in checks]}
        print_json({**facts(model), **pair, **({"head": describe.facts(head)} if head else {})})
    else:
        _print(model)
        if head:
            print(f"\n{draft}:")
            _print_head(head)
        if draft is not None:
            _print_checks(draft, checks, "draft head" if head else "draft model")
    return 0 if all(check.passed for check in checks) else 1


def _is_head(name: str) -> bool:
    """Whether this is a drafting head; what is broken is left to whoever reads it as a model."""
    try:
        return Path(name).suffix in WEIGHT_ENDINGS or is_head(name)
    except ModelError:
        return False


def _show_head(name: str, draft: str | None, as_json: bool) -> int:
    if draft is not None:
        raise OptionError(f"{name} is a drafting head: name the target first, then the head.")
    head = read_head(name)
    if as_json:
        print_json(describe.facts(head))
    else:
        _print_head(head)
    return 0


def _pair(target: Opened, draft: str | None, dtype: str | None) -> tuple[Head | None, list[Check]]:
    """The head, where it is one that can be read, and what speaks for and against the pair."""
    if draft is None:
        return None, []
    if not _is_head(draft):
        return None, check_pair(target, draft, dtype)
    try:
        head = read_head(draft)
    except (ModelError, DrafterError) as error:
        return None, [Check("it loads", False, str(error), INSTEAD_OF_HEAD)]
    loads = Check("it loads", True, head.provenance.dialect)
    trained = [] if head.manifest is None else check_manifest(head.manifest, target.tokenizer)
    return head, [loads, *check_head(head, target.spec, target.vocab_size), *trained]


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
    size, own = draft.weight_bytes, target.weight_bytes
    return [
        Check("it loads", True, f"{draft.spec.family}, {len(draft.spec.layers)} layers"),
        _check_tokens(target.tokenizer, draft.tokenizer),
        Check(
            "smaller",
            size < own,
            f"{size / 2**20:,.0f} MiB of weights against {own / 2**20:,.0f}",
            None if size < own else "drafting with it cannot pay: take a smaller model",
        ),
        Check("context", True, _reach(target.spec.max_positions, draft.spec.max_positions)),
    ]


def _check_tokens(target: TokenizerParts, draft: TokenizerParts) -> Check:
    """Whether the two spell alike, or how drafts get across where they do not."""
    differences = compare_vocabularies(target, draft)
    if not differences:
        return Check("tokens", True, f"{target.size} ids are spelled alike")
    try:
        found = bridge(Tokenizer.from_parts(target), Tokenizer.from_parts(draft))
    except DrafterError as error:
        return Check("tokens", False, f"{differences[0]}; {error}", INSTEAD)
    return Check("tokens", True, f"{differences[0]}: drafts go through the vocabulary {found.kind!r}")


def _reach(target: int, draft: int) -> str:
    if draft >= target:
        return f"{draft} tokens against {target}"
    return f"{draft} tokens against {target}: longer sequences go on without drafts"


def _print(model: Opened) -> None:
    shown = facts(model)
    _print_facts(shown, ("vocabulary", "windows", "weight_bytes", "notes"))
    spec, tokenizer = model.spec, model.tokenizer
    print(f"{'vocabulary:':<20}{tokenizer.size} tokens, {spec.vocab_size} rows")
    print(f"{'weights:':<20}{model.weight_bytes / 2**20:,.0f} MiB")
    if shown["windows"]:
        print(f"{'windows:':<20}{shown['windows']['layers']} layers see {shown['windows']['tokens']} tokens")
    for note in model.notes:
        print(f"{'note:':<20}{note}")


def _print_head(head: Head) -> None:
    shown = describe.facts(head)
    _print_facts(shown, ("vocabulary", "weight_bytes", "notes"))
    vocabulary = shown["vocabulary"]
    print(f"{'vocabulary:':<20}{vocabulary['drafted']} of {vocabulary['ids']} ids")
    print(f"{'weights:':<20}{shown['weight_bytes'] / 2**20:,.1f} MiB")
    for note in shown["notes"]:
        print(f"{'note:':<20}{note}")


def _print_checks(draft: str, checks: list[Check], role: str) -> None:
    print(f"\n{draft} as its {role}:")
    for check in checks:
        print(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.found}")
        if check.advice:
            print(f"      {check.advice}")


def _print_facts(shown: dict[str, Any], apart: tuple[str, ...]) -> None:
    for name, value in shown.items():
        if name not in apart:
            print(f"{name.replace('_', ' ') + ':':<20}{_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and value:
        return ", ".join(map(str, value))
    return "none" if value in (None, {}, []) else str(value)
