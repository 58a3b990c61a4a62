"""What a model brings besides its weights: tokenizer, stop ids, chat template, sampling defaults."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from paceline.errors import TokenizerError
from paceline.targets.json_files import read_object

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer and what belongs to it.

    Attributes:
        tokenizer: turns text into ids; encode with `add_special_tokens=False` and add `bos_id` by `add_bos`.
        bos_id: the id that starts a text, if there is one.
        eos_ids: the ids that end an answer, the tokenizer's own first.
        add_bos: whether plain texts start with `bos_id`.
        chat_template: the source of the Jinja template, if there is one.
        special_tokens: name ("bos_token", "eos_token", "unk_token", "pad_token") to text, for the template.
        generation_config: the model's own sampling settings, as it spells them.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """One more than the highest id; rows of the head from here on are padding and are never emitted."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def digest(self) -> str:
        """The same wherever the same ids stand for the same tokens, whatever kind of file they come from."""
        return _digest(sorted(self.tokenizer.get_vocab(with_added_tokens=True).items()))

    @property
    def template_digest(self) -> str | None:
        """Of the chat template and the special tokens that it may name; None where there is no template."""
        return None if self.chat_template is None else _digest([self.chat_template, self.special_tokens])

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `parts.json` into `folder`."""
        self.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        names = ("bos_id", "eos_ids", "add_bos", "chat_template", "special_tokens", "generation_config")
        parts = {name: getattr(self, name) for name in names}
        (folder / "parts.json").write_text(json.dumps(parts), encoding="utf-8")

    @classmethod
    def saved(cls, folder: Path) -> TokenizerParts:
        """Read back what `save` wrote."""
        fields = json.loads((folder / "parts.json").read_text(encoding="utf-8"))
        eos_ids = tuple(fields.pop("eos_ids"))
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), eos_ids=eos_ids, **fields)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def from_folder(folder: Path) -> TokenizerParts:
    """Read a Hugging Face folder.

    Raises:
        TokenizerError: no `tokenizer.json`, a broken file, or a tokenizer that adds more than a first token.
    """
    tokenizer = _tokenizer(folder)
    config = _json(folder / "tokenizer_config.json")
    generation = _json(folder / "generation_config.json")
    model = _json(folder / "config.json")
    model = {**model, **model.get("text_config", {})}
    special = _special_tokens(folder, config)
    bos_id = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    eos_ids = _eos_ids(tokenizer, special, generation, model)
    add_bos, bos_id = _bos_policy(tokenizer, config, bos_id)
    template = _chat_template(folder, config)
    return TokenizerParts(tokenizer, bos_id, eos_ids, add_bos, template, special, generation)


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, TokenizerError) if path.exists() else {}


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists():
            raise TokenizerError(
                f"{folder} has tokenizer.model but no tokenizer.json; convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        raise TokenizerError(f"{folder} has no tokenizer.json.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(f"{path} is not a readable tokenizer ({error}); fetch it again.") from error


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in (_json(folder / "special_tokens_map.json"), config):
        for name in SPECIAL_NAMES:
            token = source.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
    return found


def _eos_ids(
    tokenizer: Tokenizer, special: dict[str, str], generation: dict[str, Any], model: dict[str, Any]
) -> tuple[int, ...]:
    """Those of the generation settings, else of the configuration, and always the tokenizer's own."""
    own = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    given = generation.get("eos_token_id", model.get("eos_token_id"))
    listed = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(token for token in [own, *listed] if isinstance(token, int)))


def _bos_policy(tokenizer: Tokenizer, config: dict[str, Any], bos_id: int | None) -> tuple[bool, int | None]:
    """Whether texts start with a token, by the tokenizer's own processor unless its configuration says so."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    front = full[: len(full) - len(plain)]
    if full != front + plain or len(front) > 1:
        raise TokenizerError("the tokenizer adds more than one first token to a text, which is not supported.")
    given = config.get("add_bos_token")
    if isinstance(given, bool) and bos_id is not None:
        return given, bos_id
    return bool(front), front[0] if front else bos_id


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None


def compare_vocabularies(target: TokenizerParts, draft: TokenizerParts) -> list[str]:
    """What keeps a drafter's ids from meaning the target's, one sentence each; empty where nothing does.

    Ids that one of the two lacks altogether are differences too; how far the two heads are padded beyond
    their tokenizers is not.
    """
    ours = {number: text for text, number in target.tokenizer.get_vocab(with_added_tokens=True).items()}
    theirs = {number: text for text, number in draft.tokenizer.get_vocab(with_added_tokens=True).items()}
    found = []
    differing = sorted(number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number))
    if differing:
        first = differing[0]
        found.append(
            f"{len(differing)} of {len(ours)} ids differ, the first is {first}: "
            f"{_named(ours.get(first))} in the target, {_named(theirs.get(first))} in the drafter"
        )
    if target.size != draft.size:
        found.append(f"the target has {target.size} ids, the drafter {draft.size}")
    found += _compare_special(target, draft)
    for name, text in (("normalizer", "normalizer"), ("pre_tokenizer", "splitter"), ("model", "model")):
        if not differing and _part(target, name) != _part(draft, name):
            found.append(f"the {text}s of the two tokenizers differ, so that a text has other ids")
    return found


def _compare_special(target: TokenizerParts, draft: TokenizerParts) -> list[str]:
    found = []
    if target.bos_id != draft.bos_id and target.add_bos and draft.add_bos:
        found.append(f"texts start with id {target.bos_id} in the target, {draft.bos_id} in the drafter")
    if target.add_bos != draft.add_bos:
        policy = {True: "start with a first token", False: "do not"}
        found.append(f"in the target texts {policy[target.add_bos]}, in the drafter they {policy[draft.add_bos]}")
    ours, theirs = (
        {(number, token.content) for number, token in parts.tokenizer.get_added_tokens_decoder().items()}
        for parts in (target, draft)
    )
    if ours != theirs:
        number, text = min(ours ^ theirs)
        owner = "target" if (number, text) in ours else "drafter"
        found.append(f"the special tokens differ, the first is {text!r} (id {number}), only in the {owner}")
    return found


def _named(text: str | None) -> str:
    return "nothing" if text is None else repr(text)


def _part(parts: TokenizerParts, name: str) -> str | None:
    part = getattr(parts.tokenizer, name)
    if part is None:
        return None
    state = part.__getstate__()
    return state.decode() if isinstance(state, bytes) else str(state)
