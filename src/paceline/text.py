"""Text to token ids and back: the tokenizer, and the detokenizer that finds stop strings."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import tokenizers

    from paceline.targets.vocabulary import TokenizerParts

REPLACEMENT = "\ufffd"
# A piece of text under these never changes when more tokens follow, but for runs of byte tokens.
_STABLE_DECODERS = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the ids that a model needs.

    Attributes:
        backend: the tokenizer itself.
        bos_id: the id that begins a text, if the model has one.
        eos_ids: the ids that end an answer, perhaps none.
        add_bos: whether a plain prompt begins with ``bos_id``.
        byte_level: whether tokens are spelled in the byte alphabet of GPT-2.
        byte_ids: the ids of the byte tokens ``<0x00>`` to ``<0xFF>``, where the decoder falls back to them.
        special_ids: the ids that ``skip_special_tokens`` leaves out.

    Raises:
        TokenizerError: the decoder is of a kind whose text cannot be streamed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool = False,
    ) -> None:
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.add_bos = add_bos
        kinds = _decoder_kinds(backend)
        self.byte_level = kinds == ["ByteLevel"]
        if not self.byte_level and not set(kinds) <= _STABLE_DECODERS:
            raise TokenizerError(
                f"the tokenizer's decoder ({', '.join(kinds)}) is not supported: use a model whose tokenizer "
                f"decodes by ByteLevel or by {', '.join(sorted(_STABLE_DECODERS))}."
            )
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, added_token in added.items() if added_token.special)
        fallback = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)] if "ByteFallback" in kinds else []
        self.byte_ids = frozenset(token for token in fallback if token is not None)
        self._size = max(backend.get_vocab_size(with_added_tokens=False), *(token + 1 for token in added), 0)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_parts(cls, parts: TokenizerParts) -> Tokenizer:
        """The tokenizer that a model's files describe."""
        return cls(parts.tokenizer, bos_id=parts.bos_id, eos_ids=parts.eos_ids, add_bos=parts.add_bos)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's head may have more rows, which are padding."""
        return self._size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; the names of special tokens inside it become these tokens.

        ``add_special_tokens`` begins a plain prompt with ``bos_id`` where the model expects that and the text
        does not do so itself; a rendered chat template needs nothing added.

        Raises:
            RequestError: the text cannot be written in UTF-8.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise RequestError("the text holds what is no character (bytes that are not UTF-8): take it out.") from None
        if add_special_tokens and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for inside a text: perhaps not whole characters."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def token_text(self, token: int) -> str:
        """A token for display, alone; a part of a character is U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def check(self, ids: object) -> list[int]:
        """A prompt's ids as plain integers; those of arrays are welcome too.

        Raises:
            RequestError: it is no list, or an id in it is no whole number or not in the vocabulary.
        """
        if isinstance(ids, str | bytes | bytearray | Mapping) or not isinstance(ids, Iterable):
            chat = ": messages are for chat" if isinstance(ids, Mapping) else ""
            raise RequestError(f"a prompt is a text or a list of token ids, not of type {type(ids).__name__}{chat}.")
        return [self._whole(place, token) for place, token in enumerate(ids)]

    def _whole(self, place: int, value: Any) -> int:
        try:
            token = index(value)
        except TypeError:
            token = None
        if token is None or isinstance(value, bool):
            raise RequestError(f"token id {value!r} at place {place} is not a whole number.")
        if not 0 <= token < self._size:
            raise RequestError(
                f"token id {token} at place {place} is not in the vocabulary: ids go from 0 to {self._size - 1}."
            )
        return token

    def _spell(self, token: int) -> bytes:
        name = self.backend.id_to_token(token)
        if name is None:
            return b""
        if token in self.byte_ids:
            return bytes([int(name[3:5], 16)])
        if not self.byte_level:
            return (name if token in self.special_ids else name.replace("\u2581", " ")).encode()
        try:
            return bytes(_BYTE_OF[character] for character in name)
        except KeyError:  # an added token, which is written as it is
            return name.encode()


class Detokenizer:
    """Turns one answer's tokens into text, one by one, and finds the stop string that ends it.

    The text is a function of the tokens alone, however they are grouped into steps. Text is *decided* once no
    later token can change it; of that, text which may be the beginning of a stop string is held back from
    ``delta``. A stop string counts as found at the token that completes it; where a token completes several,
    the one whose last character comes first counts, then the one that begins first.

    The standard library's incremental UTF-8 decoder is used rather than ``tokenizers.decoders.DecodeStream``:
    that one holds back a whole token for the sake of half a character at its end, so that a stop string would
    be seen a token late; decodes a run of broken bytes again and again; and fails where a byte token spoils
    the characters before it.

    Args:
        tokenizer: whose tokens these are.
        skip_special_tokens: leave special tokens out of the text.
        stop: the stop strings, none of them empty.
        include_stop: whether the text ends with the stop string rather than before it.
        min_tokens: no stop string ends within the text of so many first tokens.
        context: the prompt's ids where the text goes on from it: a leading space is then kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        if not all(stop):
            raise RequestError("a stop string is empty: leave it out.")
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._spelling: _Spelling = (
            _Bytes(tokenizer) if tokenizer.byte_level else _Pieces(tokenizer, context, skip_special_tokens)
        )
        self._stop = tuple(stop)
        self._beginnings = {text[0] for text in stop}
        self._longest = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._parts: list[str] = []  # text that may be shown
        self._shown = 0  # how many of the parts delta has given out
        self._length = 0  # of the parts together
        self._held = ""  # decided text that may be the beginning of a stop string
        self._offsets: list[int] = []
        self._latest = 0  # the index of the latest token that has text
        self._ended = False
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All decided text."""
        return "".join(self._parts) + self._held

    @property
    def token_offsets(self) -> list[int]:
        """For each token the length of the text up to its end."""
        return self.offsets()

    def offsets(self, start: int = 0) -> list[int]:
        """``token_offsets`` from the token at ``start`` on; those of bytes may still grow."""
        end = self._length + len(self._held)
        return [min(offset, end) for offset in self._offsets[start:]]

    def push(self, token: int, *, silent: bool = False) -> bool:
        """Take the next committed token; a ``silent`` one (that which stops the answer) has no text.

        Returns whether it completed a stop string, which is then in ``stopped``; nothing may follow it.
        """
        if self._ended:
            raise ValueError("The text has ended: no token may follow.")
        own = ""
        if not (silent or token in self._skipped):
            earlier, own = self._spelling.push(token)
            self._settle(earlier)
            self._latest = len(self._offsets)
        self._offsets.append(self._length + len(self._held) + len(own))
        if own:
            self._decide(own)
        if self._stop and not self._ended and len(self._offsets) > self._min_tokens:
            self._look_ahead()
        return self.stopped is not None

    def finish(self) -> None:
        """The answer has ended, for whatever reason: all that was held back is text now."""
        if not self._ended:
            self._settle(self._spelling.rest())
            self._end(self._held)

    def delta(self) -> str:
        """The text that may be shown and has not been given out before."""
        new = "".join(self._parts[self._shown :])
        self._shown = len(self._parts)
        return new

    def _settle(self, text: str) -> None:
        """Decide text of tokens that were taken earlier; ``_look_ahead`` has searched it already."""
        if text:
            end = self._length + len(self._held) + len(text)
            self._offsets[self._latest :] = [end] * (len(self._offsets) - self._latest)
            self._hold(self._held + text)

    def _decide(self, text: str) -> None:
        """Take newly decided text, and end where a stop string is complete in it."""
        found = self._search(text) if len(self._offsets) > self._min_tokens else None
        if found is None:
            self._hold(self._held + text)
        else:
            start, self.stopped = found
            self._end((self._held + text)[: start + len(self.stopped) * self._include_stop])

    def _search(self, text: str) -> tuple[int, str] | None:
        """The first stop string that ends in ``text`` behind what is held, and where in both it begins."""
        both = self._held + text
        found = [(both.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stop]
        return min(
            ((start, stop) for start, stop in found if start >= 0),
            key=lambda match: (match[0] + len(match[1]), match[0]),
            default=None,
        )

    def _look_ahead(self) -> None:
        """End where text that is not decided yet, but whole as it stands, completes a stop string."""
        rest = self._spelling.rest()
        if not rest or rest.endswith(REPLACEMENT):
            return
        both = self._held + rest
        ending = [stop for stop in self._stop if both.endswith(stop)]
        if ending:
            self.stopped = max(ending, key=len)
            self._offsets[self._latest :] = [self._length + len(both)] * (len(self._offsets) - self._latest)
            self._end(both if self._include_stop else both[: -len(self.stopped)])

    def _hold(self, text: str) -> None:
        """Let go of decided text up to what may be the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._beginnings and any(stop.startswith(text[start:]) for stop in self._stop):
                break
        else:
            start = len(text)
        self._show(text[:start])
        self._held = text[start:]

    def _end(self, text: str) -> None:
        self._show(text)
        self._held = ""
        self._ended = True

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._length += len(text)


class _Spelling(Protocol):
    """How tokens become text."""

    def push(self, token: int) -> tuple[str, str]:
        """The text that this token decides: that of earlier tokens, and that which ends with it."""

    def rest(self) -> str:
        """What the text would end with if no token followed."""


class _Bytes:
    """Tokens are bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> tuple[str, str]:
        return "", self._decoder.decode(self._tokenizer.token_bytes(token))

    def rest(self) -> str:
        return REPLACEMENT if self._decoder.getstate()[0] else ""


class _Pieces:
    """Tokens are pieces of text or single bytes.

    One broken byte turns all the bytes of its run into U+FFFD, so a run is undecided until another piece ends
    it. A piece depends on what came before only in that the first one loses a space; so the text is decoded
    after one known piece, whose own text is taken off.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        apart = tokenizer.byte_ids | tokenizer.special_ids
        pieces = (token for token in reversed(context) if token not in apart)
        self._before = list(islice(pieces, 1))
        self._run: list[int] = []

    def push(self, token: int) -> tuple[str, str]:
        if token in self._tokenizer.byte_ids:
            self._run.append(token)
            return "", ""
        earlier, whole = self.rest(), self._after([*self._run, token])
        self._before, self._run = [token], []
        return earlier, whole[len(earlier) :]

    def rest(self) -> str:
        return self._after(self._run) if self._run else ""

    def _after(self, ids: list[int]) -> str:
        known = self._tokenizer.decode(self._before, self._skip)
        return self._tokenizer.decode(self._before + ids, self._skip)[len(known) :]


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """The kinds of a tokenizer's decoders, in order; a tokenizer without one joins its tokens with spaces."""
    if backend.decoder is None:
        return []
    return list(_kinds(json.loads(backend.decoder.__getstate__())))


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _kinds(part)
    else:
        if decoder["type"] == "Strip" and decoder["stop"]:
            yield "Strip at the end"
        else:
            yield decoder["type"]


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (Radford et al. 2019): printable Latin-1
    ones for themselves, the others as U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
