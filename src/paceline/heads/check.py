"""Whether a head fits a target: one line a question, with what to do where the answer is no."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import DrafterError
from paceline.heads.spec import EagleSpec, usual_features

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.heads.head import Head
    from paceline.heads.manifest import Manifest
    from paceline.heads.spec import HeadSpec
    from paceline.targets.spec import ModelSpec
    from paceline.targets.vocabulary import TokenizerParts

INSTEAD = "take a head that was trained for this target, or train one"
_BY_OUTPUT = (
    "each is one less than usual, as in files that count the outputs of layers: if it drafts badly, call them "
    "eagle3_layers_to_capture in its config.json, which are counted so"
)
_PADDING = 1024  # heads are padded to multiples of 64 to 512 ids: more is another vocabulary


@dataclass(frozen=True)
class Check:
    """One question about a pair, its answer, and what to do where it is no, or where it is a doubtful yes."""

    name: str
    passed: bool
    found: str
    advice: str | None = None


def check_head(head: Head, target: ModelSpec, usable: int) -> list[Check]:
    """Whether ``head`` can draft for ``target``, of whose ids the first ``usable`` may be emitted."""
    spec = head.spec
    checks = [*_widths(spec, target), *_vocabulary(head, target, usable)]
    if isinstance(spec, EagleSpec):
        checks += [_layers(spec, target), _context(spec, target)]
    return checks


def check_manifest(manifest: Manifest, target: TokenizerParts) -> list[Check]:
    """Whether what is known of a head's training fits its target: other ids make other drafts, another template only
    worse ones."""
    ids = _same("tokenizer", manifest.tokenizer == target.digest, manifest.target)
    template = _same("chat template", manifest.template == target.template_digest, manifest.target)
    return [ids, replace(template, passed=True)]


def _same(name: str, same: bool, trained: str) -> Check:
    found = (
        f"that of {trained}, for which it was trained" if same else f"not that of {trained}, for which it was trained"
    )
    return Check(name, same, found, None if same else INSTEAD)


def require_fit(head: Head, target: ModelSpec, usable: int) -> None:
    """Raise where `check_head` has a line that does not pass.

    Raises:
        DrafterError: saying which, and what to do.
    """
    for check in check_head(head, target, usable):
        if not check.passed:
            where = head.provenance.path or f"the {head.provenance.dialect} head"
            raise DrafterError(f"{where} does not fit its target ({check.name}): {check.found}; {check.advice}.")


def _widths(spec: HeadSpec, target: ModelSpec) -> Iterator[Check]:
    reads = spec.target_hidden if isinstance(spec, EagleSpec) else spec.hidden
    yield _compared("hidden size", f"it reads states of {reads} values", reads, target.hidden)
    if not isinstance(spec, EagleSpec):
        return
    shared = [name for name, own in (("embedding", spec.own_embedding), ("head", spec.own_head)) if not own]
    if shared:
        text = f"it is {spec.hidden} wide and takes {' and '.join(shared)} from its target"
        yield _compared("shared weights", text, spec.hidden, target.hidden)
    if spec.kind == "eagle":
        yield _compared("feature", f"it makes features of {spec.hidden} values", spec.hidden, target.hidden)


def _compared(name: str, text: str, found: int, wanted: int) -> Check:
    passed = found == wanted
    return Check(name, passed, f"{text}, the target has {wanted}", None if passed else INSTEAD)


def _vocabulary(head: Head, target: ModelSpec, usable: int) -> Iterator[Check]:
    spec = head.spec
    rows = spec.vocab_size
    takes_head = not spec.own_head if isinstance(spec, EagleSpec) else spec.head == "target"
    passed = rows == target.vocab_size or (not takes_head and usable <= rows < usable + _PADDING)
    found = f"it has {rows} ids, the target {target.vocab_size}"
    if usable < target.vocab_size:
        found += f", of which {usable} can be emitted"
    yield Check("vocabulary", passed, found, None if passed else INSTEAD)
    if spec.draft_vocab_size < rows:
        reach = int((head.target_ids < usable).sum())
        found = f"{reach} of {usable} ids ({reach / usable:.0%}); others are never drafted"
        yield Check("draft vocabulary", reach > 0, found, None if reach else INSTEAD)


def _layers(spec: EagleSpec, target: ModelSpec) -> Check:
    count = len(target.layers)
    taps = spec.taps(count)
    if spec.kind == "eagle":
        return Check("layers", True, "it reads the target's state after the final norm")
    passed = sorted(set(taps)) == list(taps) and taps[0] >= 0 and taps[-1] <= count
    said = "its file leaves them open: the usual ones" if spec.features is None else "its file names them"
    found = f"it fuses the states before layers {', '.join(map(str, taps))} of {count} ({said})"
    if passed and tuple(tap + 1 for tap in taps) == usual_features(count):
        return Check("layers", True, found, _BY_OUTPUT)
    return Check("layers", passed, found, None if passed else INSTEAD)


def _context(spec: EagleSpec, target: ModelSpec) -> Check:
    found = f"its file says {spec.max_positions} tokens against {target.max_positions}"
    if spec.max_positions < target.max_positions:
        found += ": it drafts beyond them too, perhaps less well"
    return Check("context", True, found)
