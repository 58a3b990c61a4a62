"""What a draft model of another tokenizer reads: the text of the committed tokens in ids of its own."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bridges.spelling import Spelling

_NEAR = 24  # ids at the end that may change with the text behind them
_FAR = 64  # ids behind the last cut from which on a new one is looked for
_TRIES = 8  # places at which a cut is tried each time
_MOST = 512  # ids behind the last cut at which the next is made anywhere
INNER = bytes(range(0x80, 0xC0))
"""The bytes that stand in a character of UTF-8 behind its first."""


class TextReading:
    """Re-encodes the end of a growing text, never all of it.

    The text is cut where encoding both sides apart gives the same ids as encoding them together; what lies before the
    latest cut is settled. Such places are found by comparing. In a BPE or unigram model every boundary between two
    tokens is one, since no merge crosses it and the best path goes through it; only what splits the text beforehand,
    or a normalizer, can make it differ, and then the comparison shows it. Before a cut there remain so many ids that
    text behind the end does not reach it: it changes the last word, perhaps two. Were an id before a cut to change
    all the same, or the cut be forced, the draft model would read the same text in other pieces, which costs nothing
    but a little of its insight.

    Special tokens become the draft model's own of the same text, where it has one; else their text is text. Bytes
    that are no whole character yet become the longest tokens that spell them; broken ones are U+FFFD.

    Attributes:
        ids: the draft model's ids of all tokens taken in.
        settled: how many leading ids never change again.
        ready: whether ``ids`` is all of the text: False where it ends with bytes that the draft model cannot spell.
    """

    def __init__(self, source: Spelling, own: Spelling, tokens: Sequence[int]) -> None:
        """Read ``tokens``, a list that grows, of the tokenizer ``source`` in ids of ``own``."""
        self._source = source
        self._own = own
        self._tokens = tokens
        self._taken = 0
        self._tail = b""  # the text behind ``settled``
        self._begins = own.prefix != "never"  # whether the tail may begin with a space of the tokenizer's
        self._padded = source.prefix != "never"  # whether the next text may begin with one that is none of the text's
        tokenizer = own.tokenizer
        self.ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        self.settled = len(self.ids)
        self.ready = True
        self._whole = self.settled  # the end of the ids of whole characters
        self._rest = b""  # the bytes behind them

    def fork(self, tokens: Sequence[int]) -> TextReading:
        """The same for another sequence that has begun alike."""
        twin = TextReading(self._source, self._own, tokens)
        twin.__dict__.update({**self.__dict__, "_tokens": tokens, "ids": list(self.ids)})
        return twin

    @property
    def begins(self) -> bool:
        """Whether the next text may begin with a space that the draft model's tokenizer puts there."""
        return self._begins and not self._tail

    def update(self) -> int:
        """Take in the tokens that came since; returns how many leading ids are what they were."""
        if self._taken == len(self._tokens):
            return len(self.ids)
        start = self.settled
        before = self.ids[start:]
        while self._taken < len(self._tokens):
            self._take(self._taken, self._tokens[self._taken])
            self._taken += 1
        self._encode()
        if len(self.ids) - self.settled > _FAR:
            self._settle()
        return start + common(before, self.ids[start:])

    def covers(self, filled: int) -> int:
        """How many leading tokens ``filled`` leading ids are of, those in part counted."""
        return self._taken if filled else 0

    def _take(self, place: int, token: int) -> None:
        source = self._source.tokenizer
        if token in source.special_ids:
            if place == 0 and token == source.bos_id and source.add_bos:
                return  # the draft model begins texts in its own way
            name = self._source.name(token)
            own = self._own.special.get(name)
            if own is not None:
                if place or [own] != self.ids:  # not twice at the beginning
                    self._mark(own)
                return
            spelled = name.encode()
        else:
            spelled = source.token_bytes(token)
            spelled = spelled.removeprefix(b" ") if self._padded else spelled
        self._padded = False
        self._tail += spelled

    def _mark(self, special: int) -> None:
        """End the text with a special token; what follows is another."""
        self._encode(ended=True)
        self.ids.append(special)
        self.settled, self._tail = len(self.ids), b""
        self._begins = self._own.prefix == "always"
        self._padded = self._source.prefix == "always"

    def _encode(self, ended: bool = False) -> None:
        """Encode the tail as it stands."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._tail, final=ended)
        self._rest = decoder.getstate()[0]
        whole = self._own.encode(text, self._begins) if text else []
        rest = self._own.spell(self._rest)
        self.ready = rest is not None
        self._whole = self.settled + len(whole)
        self.ids[self.settled :] = [*whole, *(rest or ())]

    def _settle(self) -> None:
        """Move the cut towards the end."""
        last = self._whole - _NEAR
        for cut in range(last, max(self.settled, last - _TRIES), -1):
            text = self._text(cut)
            if text is not None and self._own.encode(text) == self.ids[cut : self._whole]:
                self._cut(cut, text.encode() + self._rest)
                return
        if len(self.ids) - self.settled > _MOST:
            self._force()

    def _force(self) -> None:
        """Cut the text where it is, and encode both sides apart."""
        place = len(self._tail) - _NEAR
        while self._tail[place] in INNER:
            place -= 1
        text, rest = self._tail[:place], self._tail[place:]
        self.ids[self.settled :] = self._own.encode(text.decode("utf-8", "replace"), self._begins)
        self._cut(len(self.ids), rest)
        self._encode()

    def _text(self, cut: int) -> str | None:
        """What the ids from ``cut`` on spell, unless that begins within a character."""
        try:
            return self._own.spelled(self.ids[cut : self._whole]).decode()
        except UnicodeDecodeError:
            return None

    def _cut(self, cut: int, tail: bytes) -> None:
        self._tail = tail
        self.settled, self._begins = cut, False


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
