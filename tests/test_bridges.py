"""Bridges between vocabularies: what the draft model reads, and what becomes of what it drafts."""

from __future__ import annotations

import codecs
import random
from functools import cache
from typing import TYPE_CHECKING
from unicodedata import normalize

import pytest
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from paceline.bridges import ENOUGH, bridge
from paceline.bridges.agreeing import Agreeing, SameReading, difference
from paceline.bridges.intersection import Intersection
from paceline.bridges.reading import TextReading
from paceline.bridges.retokenized import Retokenized
from paceline.bridges.spelling import Spelling
from paceline.drafters import View
from paceline.errors import DrafterError
from paceline.prompts import read_prompts
from paceline.text import Tokenizer
from tests.other_tokenizers import (
    CORPUS,
    SENTENCEPIECE_FILE,
    TEKKEN_FILE,
    composed,
    fallback,
    sentence_pieces,
    tekken,
)
from tests.test_text import byte_level, metaspace, pieces
from tests.tokenizer_texts import texts
from tests.toys import TOKENIZER as BYTES
from tests.toys import no_draw, trials

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline import LLM

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "pieces": pieces,
    "metaspace": metaspace,
    "fallback": fallback,
    "composed": composed,
    "bytes": lambda: BYTES,
    "sentencepiece": sentence_pieces,
    "tekken": tekken,
}
SOURCES = ["byte_level", "pieces", "composed", "sentencepiece", "tekken"]  # that lose nothing of a text
FAITHFUL = ["byte_level", "pieces", "fallback", "bytes", "sentencepiece", "tekken"]  # that spell all bytes as they are
HARD = [
    "emoji 😀👍🏽 👩\u200d👩\u200d👧\u200d👦 🇩🇪 end",
    "速度は力なり。世界、こんにちは!你好,世界" * 4,
    "def f(x):\n    if x <= 0:\n\t\treturn {'a': [1, 22, 333, 4444]}\n\n\n    return f(x - 1)\n",
    "e\u0301 a\u0308 \u1112\u1161\u11ab naïve",
    "11111111112222222222333333333344444444445555555555" * 3,
    "   leading, trailing   \n\n ",
    "x" * 200,
]
TEXTS = [*HARD, *CORPUS, *(text for text in texts(60) if "<" not in text)]
PROMPTS = [turn for prompt in read_prompts(None) for turn in prompt.turns]


@cache
def spelling(kind: str) -> Spelling:
    return Spelling(KINDS[kind]())


@cache
def plain_ids(kind: str) -> list[int]:
    return sorted(spelling(kind).plain.values())


@cache
def broken_ids(kind: str) -> list[int]:
    """Ids of parts of characters."""
    return [token for text, token in spelling(kind).plain.items() if max(text) > 127 and len(text) < 3]


def steps(ids: list[int], dice: random.Random) -> list[list[int]]:
    """The ids in steps of one to seven."""
    cuts, start = [], 0
    while start < len(ids):
        end = start + dice.randint(1, 7)
        cuts.append(ids[start:end])
        start = end
    return cuts


def read(source: Spelling, own: Spelling, cuts: list[list[int]]) -> TextReading:
    """Read step by step, and check after each what a reading promises."""
    tokens: list[int] = []
    reading = TextReading(source, own, tokens)
    before = list(reading.ids)
    for cut in cuts:
        tokens += cut
        settled = before[: reading.settled]
        kept = reading.update()
        assert reading.ids[:kept] == before[:kept]
        assert kept == len(before) or reading.ids[kept : kept + 1] != before[kept : kept + 1]
        assert reading.ids[: len(settled)] == settled
        assert reading.settled <= len(reading.ids)
        before = list(reading.ids)
    assert reading.update() == len(before)
    assert reading.ids == before
    return reading


def whole(own: Spelling, text: str) -> list[int]:
    """All of a text at once, as the draft model's own prompts are encoded."""
    tokenizer = own.tokenizer
    assert tokenizer.bos_id is not None or not tokenizer.add_bos
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return [*first, *own.encode(text, begins=True)]


def test_the_conversions_of_the_tests_give_the_ids_of_the_originals() -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE_FILE))
    original = Tekkenizer.from_file(str(TEKKEN_FILE))
    for text in texts():
        if "<s>" not in text:
            assert sentence_pieces().encode(text, add_special_tokens=False) == model.encode(text)
            assert tekken().encode(text, add_special_tokens=False) == original.encode(text, bos=False, eos=False)


@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_reading_step_by_step_is_encoding_the_whole_text(source: str, own: str) -> None:
    dice = random.Random(1)
    for text in [*TEXTS, *PROMPTS[::9]]:
        ids = spelling(source).tokenizer.encode(text)
        reading = read(spelling(source), spelling(own), steps(ids, dice))
        assert reading.ready
        assert reading.ids == whole(spelling(own), spelling(source).tokenizer.decode(ids))


@pytest.mark.parametrize("own", FAITHFUL)
@pytest.mark.parametrize("source", SOURCES)
@trials(60)
@given(data=st.data())
def test_any_bytes_are_read(source: str, own: str, data: st.DataObject) -> None:
    """Broken bytes are U+FFFD, and an unfinished character at the end is there byte for byte."""
    ours, theirs = spelling(source), spelling(own)
    ids = data.draw(st.lists(st.sampled_from(plain_ids(source)) | st.sampled_from(broken_ids(source)), max_size=30))
    cuts = steps(ids, random.Random(data.draw(st.integers(0, 9))))
    reading = read(ours, theirs, cuts)
    text = ours.spelled(ids)
    if ours.prefix != "never":
        text = text.removeprefix(b" ")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    characters = decoder.decode(text).encode()
    space = b" " if theirs.prefix != "never" and characters else b""
    assert reading.ready
    assert theirs.spelled(reading.ids[theirs.tokenizer.add_bos :]) == space + characters + decoder.getstate()[0]


def test_a_character_is_read_while_it_comes() -> None:
    """An emoji whose bytes come one by one: spelled by a model that has bytes, waited for by one that has none."""
    ids = BYTES.encode("so 👍 it")
    for own in ("byte_level", "sentencepiece", "tekken", "metaspace"):
        tokens: list[int] = []
        reading = TextReading(spelling("bytes"), spelling(own), tokens)
        for place, token in enumerate(ids):
            tokens.append(token)
            reading.update()
            assert reading.ready == (own != "metaspace" or not 3 <= place < 6)
            if reading.ready and own != "metaspace":
                read_so_far = spelling(own).spelled(reading.ids[spelling(own).tokenizer.add_bos :])
                assert read_so_far.removeprefix(b" ") == spelling("bytes").spelled(tokens)
        assert reading.ids == whole(spelling(own), "so 👍 it")


def test_a_text_that_cannot_be_cut_is_cut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are words without the spaces between them do not spell the text."""
    backend = Backend(models.WordLevel({"?": 0, "a": 1, "é": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs, given = Spelling(Tokenizer(backend)), list[int]()
    encode = theirs.encode

    def counted(text: str, begins: bool = False) -> list[int]:
        given.append(len(text))
        return encode(text, begins)

    text = "a é é é é é " * 900
    tokens = BYTES.encode(text)
    tokens, rest = tokens[:3001], tokens[3001:6001]
    reading = TextReading(spelling("bytes"), theirs, tokens)
    reading.update()
    monkeypatch.setattr(theirs, "encode", counted)
    for token in rest:
        tokens.append(token)
        before, kept = list(reading.ids), reading.update()
        assert reading.ids[:kept] == before[:kept]
    assert max(given) < 1500
    assert reading.ids == whole(theirs, bytes(tokens).decode("utf-8", "ignore"))


LONG = ["one two, three. " * 300, "x" * 5000, "1234567" * 700, "世界你好" * 700, "e\u0301" * 2000]


@pytest.mark.parametrize("text", LONG, ids=["words", "letter", "digits", "signs", "accents"])
@pytest.mark.parametrize("own", ["sentencepiece", "tekken", "composed", "pieces"])
def test_a_long_text_is_never_encoded_again(own: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it consists of: spaces to cut at, none at all, digits in groups, characters that compose."""
    theirs, given = spelling(own), list[int]()
    encode = theirs.encode

    def counted(text: str, begins: bool = False) -> list[int]:
        given.append(len(text))
        return encode(text, begins)

    tokens = BYTES.encode(text)
    tokens, rest = tokens[:4000], tokens[4000:4400]
    reading = TextReading(spelling("bytes"), theirs, tokens)
    reading.update()
    monkeypatch.setattr(theirs, "encode", counted)
    for token in rest:
        tokens.append(token)
        reading.update()
    assert sum(given) < 2500 * len(rest)
    assert max(given) < 3000
    spelled = theirs.spelled(reading.ids[theirs.tokenizer.add_bos :]).removeprefix(b" ")
    expected = bytes(tokens).decode("utf-8", "ignore")
    assert spelled.decode("utf-8", "ignore") == (normalize("NFC", expected) if own == "composed" else expected)


def test_marks_become_the_draft_models_own_or_text(llm: LLM) -> None:
    ours = Spelling(llm.tokenizer)
    ids = llm.chat_ids([{"role": "user", "content": "Hi <|im_end|> there"}])
    text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    theirs = spelling("composed")  # it has both marks
    reading = read(ours, theirs, [ids])
    start, end = (theirs.special[name] for name in ("<|im_start|>", "<|im_end|>"))
    assert reading.ids.count(start) == text.count("<|im_start|>") == 3
    assert reading.ids.count(end) == ids.count(ours.special["<|im_end|>"])
    assert theirs.tokenizer.decode(reading.ids, skip_special_tokens=False) == text
    for own in ("tekken", "sentencepiece"):  # they have none of them
        reading = read(ours, spelling(own), steps(ids, random.Random(2)))
        assert reading.ids == whole(spelling(own), text)


def test_a_text_begins_once() -> None:
    """The draft model's own first token stands at the beginning, whatever the target has there, and nowhere else."""
    text = "Hello there, world"
    for source in ("tekken", "byte_level", "sentencepiece"):
        tokenizer = spelling(source).tokenizer
        for ids in (tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)):
            for own in ("tekken", "sentencepiece", "byte_level"):
                reading = read(spelling(source), spelling(own), steps(ids, random.Random(3)))
                assert reading.ids == whole(spelling(own), text)
    plain = Spelling(Tokenizer(tekken().backend, bos_id=1, eos_ids=(2,)))  # its templates write the first token
    ids = plain.tokenizer.encode(f"<s>{text}")
    assert read(plain, spelling("sentencepiece"), [ids]).ids == whole(spelling("sentencepiece"), text)
    prompt = [1, *tekken().encode("[INST] Hello there[/INST] Hi", add_special_tokens=False), 2]
    reading = read(spelling("tekken"), spelling("sentencepiece"), [prompt])
    pieces_ = [sentence_pieces().backend.id_to_token(token) for token in reading.ids]
    assert pieces_ == ["<s>", "[INST]", "▁", "▁Hello", "▁there", "[/INST]", "▁", "▁Hi", "</s>"]


def test_names_of_marks_in_a_text_are_text() -> None:
    """What a user types must not end a turn for the draft model."""
    ids = BYTES.encode("a </s> b <|im_end|> c")
    for own in ("tekken", "sentencepiece", "composed"):
        theirs = spelling(own)
        reading = read(spelling("bytes"), theirs, steps(ids, random.Random(4)))
        assert not theirs.tokenizer.special_ids & set(reading.ids[theirs.tokenizer.add_bos :])


def test_a_twin_goes_its_own_way() -> None:
    tokens = BYTES.encode("the quick brown fox " * 10)
    reading = TextReading(spelling("bytes"), spelling("tekken"), tokens)
    reading.update()
    other = list(tokens)
    twin = reading.fork(other)
    tokens += BYTES.encode("jumps")
    other += BYTES.encode("sleeps")
    reading.update()
    twin.update()
    assert reading.ids == whole(spelling("tekken"), BYTES.decode(tokens))
    assert twin.ids == whole(spelling("tekken"), BYTES.decode(other))


@pytest.mark.parametrize("pair", [("byte_level", "pieces"), ("tekken", "sentencepiece"), ("sentencepiece", "tekken")])
def test_common_tokens_are_one_to_one_and_spell_the_same(pair: tuple[str, str]) -> None:
    ours, theirs = (spelling(kind) for kind in pair)
    forth, back = Intersection(ours, theirs).pairs, Intersection(theirs, ours).pairs
    assert {own: token for token, own in forth.items()} == back
    assert list(forth) == sorted(forth)
    assert len(forth) > 100
    for token, own in forth.items():
        special = token in ours.tokenizer.special_ids
        assert special == (own in theirs.tokenizer.special_ids)
        if special:
            assert ours.name(token) == theirs.name(own)
            assert ours.role(token) == theirs.role(own)
        else:
            assert ours.tokenizer.token_bytes(token) == theirs.tokenizer.token_bytes(own)


def test_marks_are_common_only_in_the_same_role() -> None:
    """byte_level and pieces both end answers with </s>; only one of them begins texts with <s>."""
    ours, theirs = byte_level(), pieces()
    common = Intersection(Spelling(ours), Spelling(theirs)).pairs
    named = {ours.backend.id_to_token(token) for token in common if token in ours.special_ids}
    assert named == {"<s>", "</s>", "<|im_end|>"}
    other = Tokenizer(theirs.backend, bos_id=1, eos_ids=(3,))
    common = Intersection(Spelling(ours), Spelling(other)).pairs
    assert {ours.backend.id_to_token(token) for token in common if token in ours.special_ids} == {"<s>"}


def test_of_several_ids_of_the_same_bytes_one_is_taken() -> None:
    """A piece goes before a byte token, and ids without a row do not exist."""
    theirs = spelling("sentencepiece")
    letter = sentence_pieces().backend.token_to_id("A")
    assert sentence_pieces().token_bytes(sentence_pieces().backend.token_to_id("<0x41>") or 0) == b"A"
    assert theirs.plain[b"A"] == letter
    short = Spelling(sentence_pieces(), 1000)
    assert short.plain[b"A"] == sentence_pieces().backend.token_to_id("<0x41>")
    assert max(short.plain.values()) < 1000
    assert all(token < 1000 for token in short.encode("Hello world, an ordinary text"))


def test_the_choice_of_a_bridge() -> None:
    same = bridge(tekken(), tekken())
    assert isinstance(same, Agreeing)
    assert isinstance(same.reading([]), SameReading)
    assert isinstance(bridge(tekken(), sentence_pieces()), Intersection)
    assert isinstance(bridge(sentence_pieces(), tekken(), "retokenized"), Retokenized)
    assert isinstance(bridge(tekken(), tekken(), "intersection"), Intersection)
    texts_ = PROMPTS[:10]
    assert Intersection(spelling("sentencepiece"), spelling("tekken")).coverage(texts_) > 0.9 > ENOUGH
    few = bridge(BYTES, tekken())  # of which single bytes alone are common
    assert isinstance(few, Retokenized)
    assert isinstance(bridge(BYTES, tekken(), sampled=True), Intersection)
    assert not few.sampled
    assert same.sampled
    with pytest.raises(DrafterError, match=r"'retokenized'.*'intersection'"):
        bridge(BYTES, tekken(), "retokenized", sampled=True)
    with pytest.raises(DrafterError, match=r"id 0 is '!' in the target, '<unk>' in the draft model.*auto"):
        bridge(renamed("!"), tekken(), "same")
    with pytest.raises(DrafterError, match="no token in common"):
        bridge(renamed("☃zz☃"), sentence_pieces(), "intersection")


def renamed(name: str) -> Tokenizer:
    """A tokenizer of one token."""
    return Tokenizer(Backend(models.WordLevel({name: 0}, unk_token=name)))


def test_ids_that_only_one_has() -> None:
    """A draft model may know more ids; one that knows fewer, or others, is translated."""
    vocabularies = {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2, "d": 3}
    base, more = (Backend(models.WordLevel(vocabulary, unk_token="a")) for vocabulary in vocabularies)
    assert difference(Tokenizer(base), Tokenizer(more)) is None
    assert difference(Tokenizer(more), Tokenizer(base)) == "id 3 is 'd' in the target, nothing in the draft model"
    assert isinstance(bridge(Tokenizer(base), Tokenizer(more)), Agreeing)
    reading = Agreeing(target_rows=4, draft_rows=3).reading(tokens := [0, 1, 2])
    reading.update()
    assert reading.ready
    tokens.append(3)
    reading.update()
    assert not reading.ready


def test_a_draft_ends_with_a_mark_of_the_same_role_or_without_one() -> None:
    """byte_level and pieces both end answers with </s>; only pieces has <unk>."""
    ours, theirs = spelling("byte_level"), spelling("pieces")
    retokenized = Retokenized(ours, theirs)
    unknown, end, letter = (theirs.tokenizer.backend.token_to_id(name) for name in ("<unk>", "</s>", "b"))
    assert unknown is not None
    assert end is not None
    assert letter is not None
    logits = torch.zeros(theirs.rows + 9)
    for token, logit in ((unknown, 9.0), (theirs.rows, 8.0), (end, 7.0), (letter, 6.0)):
        logits[token] = logit
    view = View(0, [5], no_draw)
    drawn = retokenized.draw(view, logits, [], 3, 0)
    assert drawn.tokens == [end, letter]
    assert drawn.chances == sorted(drawn.chances, reverse=True)
    assert 0.0 < sum(drawn.chances) < 1.0
    committed = ours.tokenizer.encode("a")
    (last,) = ours.tokenizer.encode("b", add_special_tokens=False)
    assert retokenized.retokenize(committed, [letter, end, letter], False) == [(last, 1), (1, 2)]
    assert retokenized.retokenize(committed, [end], False) == [(1, 1)]


def retold(
    source: str, own: str, text: str, place: int, length: int
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """The target's tokens of ``text``, so many of the draft model's behind ``place``, and these retokenized."""
    ours, theirs = spelling(source), spelling(own)
    ids = ours.tokenizer.encode(text, add_special_tokens=False)
    written = ours.spelled(ids[:place])
    rest = ours.spelled(ids)[len(written) :]
    inner = len(rest) - len(rest.lstrip(bytes(range(0x80, 0xC0))))  # of the character that ``place`` cuts
    drafted = [*(theirs.spell(rest[:inner]) or ()), *theirs.encode(rest[inner:].decode("utf-8", "ignore"))][:length]
    return ids, drafted, Retokenized(ours, theirs).retokenize(ids[:place], drafted, False) if drafted else []


@pytest.mark.parametrize("source", ["byte_level", "composed", "tekken", "sentencepiece", "pieces"])
@pytest.mark.parametrize("own", ["byte_level", "fallback", "bytes", "sentencepiece", "tekken"])
def test_retokenized_drafts_spell_what_was_drafted(source: str, own: str) -> None:
    """And most of them are the target's own tokens of the text, with no regard to where the draft was cut off."""
    dice = random.Random(5)
    ours, theirs = spelling(source), spelling(own)
    right = drafts = 0
    for text in [*TEXTS, *PROMPTS[::5]]:
        text = text[:400]
        total = len(ours.tokenizer.encode(text, add_special_tokens=False))
        for _ in range(4):
            place = dice.randrange(1, max(2, total))
            ids, drafted, found = retold(source, own, text, place, 6)
            tokens = [token for token, _ in found]
            spelled, expected = ours.spelled(tokens), theirs.spelled(drafted)
            assert expected.startswith(spelled)
            taken = [n for _, n in found]
            assert taken == sorted(taken)
            assert all(1 <= n <= len(drafted) for n in taken)
            assert all(token not in ours.tokenizer.special_ids for token in tokens)
            right += sum(a == b for a, b in zip(tokens, ids[place:], strict=False))
            drafts += len(tokens)
    assert right >= 0.9 * drafts
    assert drafts > 100
