"""A tokenizer seen from its bytes: what its ids spell, and ids for text that begins anywhere."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.text import Tokenizer

Prefix = Literal["never", "first", "always"]


class Spelling:
    """What two tokenizers can be compared by.

    Byte-level BPE, SentencePiece with its space mark and byte tokens, and Tekken meet in the bytes that an id stands
    for inside a text.

    Attributes:
        tokenizer: whose ids these are.
        rows: how many ids the model has rows for; higher ones do not exist here.
        prefix: whether the tokenizer puts a space before the very first text, before the text after every special
            token too, or nowhere.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.rows = tokenizer.vocab_size if rows is None else min(rows, tokenizer.vocab_size)
        backend = tokenizer.backend
        schemes = [
            _scheme(json.loads(part.__getstate__())) for part in (backend.normalizer, backend.pre_tokenizer) if part
        ]
        self.prefix: Prefix = _first_of(schemes)

    @cached_property
    def plain(self) -> dict[bytes, int]:
        """Bytes to the id that stands for them, special ids left out.

        Where several do, a piece of text goes before a byte token, which tokenizers write only in need, and a low id
        before a high one.
        """
        tokenizer, found = self.tokenizer, dict[bytes, int]()
        ids = (token for token in range(self.rows) if token not in tokenizer.special_ids)
        for token in sorted(ids, key=lambda token: (token in tokenizer.byte_ids, token)):
            spelled = tokenizer.token_bytes(token)
            if spelled:
                found.setdefault(spelled, token)
        return found

    @cached_property
    def special(self) -> dict[str, int]:
        """The special tokens by their text."""
        return {self.name(token): token for token in sorted(self.tokenizer.special_ids) if token < self.rows}

    def name(self, token: int) -> str:
        """What a special token is called."""
        return self.tokenizer.backend.id_to_token(token) or ""

    def role(self, token: int) -> tuple[bool, bool]:
        """Whether a special token begins texts, and whether it ends answers."""
        return token == self.tokenizer.bos_id, token in self.tokenizer.eos_ids

    def spelled(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids that stand inside a text."""
        return b"".join(map(self.tokenizer.token_bytes, ids))

    def encode(self, text: str, begins: bool = False) -> list[int]:
        """The ids of ``text``, in which no special token is looked for.

        ``begins`` says that nothing, or a special token, stands before it, so that a tokenizer that puts a space
        there does so; otherwise the text goes on from another. Ids for which the model has no row are left out.
        """
        ids: list[int] = (self._first if begins else self._inner).encode(text, add_special_tokens=False).ids
        return ids if self.rows == self.tokenizer.vocab_size else [token for token in ids if token < self.rows]

    def spell(self, data: bytes) -> list[int] | None:
        """Ids for bytes that may be no text, such as a part of a character: the longest known piece each time.

        None where the tokenizer has no token for one of the bytes.
        """
        ids, start = list[int](), 0
        while start < len(data):
            ends = range(len(data), start, -1)
            end = next((end for end in ends if data[start:end] in self.plain), None)
            if end is None:
                return None
            ids.append(self.plain[data[start:end]])
            start = end
        return ids

    @cached_property
    def _first(self) -> tokenizers.Tokenizer:
        return _literal(self.tokenizer.backend.to_str())

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        if self.prefix == "never":
            return self._first
        state = json.loads(self.tokenizer.backend.to_str())
        for part in ("normalizer", "pre_tokenizer"):
            state[part] = _without_prefix(state[part])
        return _literal(json.dumps(state))


def _literal(state: str) -> tokenizers.Tokenizer:
    """A tokenizer of its own that takes the names of special tokens as text, cuts nothing off and fills nothing up."""
    backend = tokenizers.Tokenizer.from_str(state)
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def _scheme(part: dict[str, Any]) -> Prefix:
    """Where a normalizer or splitter puts a space before text."""
    if part["type"] == "Sequence":
        return _first_of([_scheme(inner) for inner in part[_members(part)]])
    if part["type"] == "Metaspace":
        scheme: Prefix = part["prepend_scheme"]
        return scheme
    return "always" if part["type"] == "Prepend" or part.get("add_prefix_space") else "never"


def _first_of(schemes: list[Prefix]) -> Prefix:
    return next((scheme for scheme in schemes if scheme != "never"), "never")


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """The same normalizer or splitter, but it puts no space before text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        kept = [bare for bare in map(_without_prefix, part[_members(part)]) if bare is not None]
        return {**part, _members(part): kept}
    changes = {"prepend_scheme": "never", "add_prefix_space": False}
    return {**part, **{name: value for name, value in changes.items() if name in part}}


def _members(part: dict[str, Any]) -> str:
    return "normalizers" if "normalizers" in part else "pretokenizers"
