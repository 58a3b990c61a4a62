"""Ids to text and back: every cut of the tokens gives the same text, and stop strings end it exactly."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paceline.errors import RequestError, TokenizerError
from paceline.text import _BYTE_OF, Detokenizer, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It didn't look back, it ran on.",
    "def rename(old: str, new: str) -> None:\n    table[new] = table.pop(old)\n",
    "Größe, naïve café, Ærøskøbing; 速度は力なり。世界、こんにちは! 你好,世界",
    "emoji 😀😀 👩‍👩‍👧‍👦 👍🏽 🇩🇪 and numbers 1234567890 3.14159",
    "STOP ha ha ha END ab abc abab <stop> the end",
]
SPECIALS = ["<s>", "</s>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    """A byte-level BPE of 400 tokens: many characters are split."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("plain added token")])
    return Tokenizer(backend, bos_id=0, eos_ids=(1,))


@cache
def pieces() -> Tokenizer:
    """SentencePiece-like: a space before the text, pieces, and bytes for what the vocabulary lacks."""
    trained = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    trained.train_from_iterator([*CORPUS[:2], *CORPUS[4:]], trainer)
    # The trainer marks the bytes as special, which a real vocabulary does not.
    model = json.loads(trained.to_str())["model"]
    vocabulary = {**model["vocab"], "▁the": len(model["vocab"])}
    merges = [(left, right) for left, right in model["merges"]]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer, backend.decoder = trained.normalizer, trained.decoder
    backend.add_special_tokens(["<unk>", *SPECIALS])
    return Tokenizer(backend, bos_id=1, eos_ids=(2,), add_bos=True)


@cache
def metaspace() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend)


@cache
def words() -> Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    return Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "stop": 2, "[UNK]": 3}, unk_token="[UNK]")))


KINDS = {"byte_level": byte_level, "pieces": pieces, "metaspace": metaspace, "words": words}
kinds = pytest.mark.parametrize("kind", KINDS)


def run(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[Detokenizer, list[str]]:
    """Push the ids until a stop string, and finish; the deltas after each token and at the end."""
    text = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    deltas = []
    for token in ids:
        done = text.push(token)
        deltas.append(text.delta())
        if done:
            break
    text.finish()
    deltas.append(text.delta())
    return text, deltas


def some_ids(tokenizer: Tokenizer, most: int = 40) -> st.SearchStrategy[list[int]]:
    """Ids at random, bytes more often than their share, and real texts cut anywhere."""
    anything = st.integers(0, tokenizer.vocab_size - 1)
    bytes_ = st.sampled_from(sorted(tokenizer.byte_ids)) if tokenizer.byte_ids else anything
    real = st.sampled_from(CORPUS).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    cut = st.tuples(real, st.integers(0, 50), st.integers(0, most)).map(lambda t: t[0][t[1] : t[1] + t[2]])
    return st.one_of(
        st.lists(st.one_of(anything, bytes_), max_size=most),
        cut,
        st.tuples(cut, cut).map(lambda t: t[0] + t[1]),
    )


@kinds
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_the_text_is_what_decoding_all_ids_gives(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(some_ids(tokenizer))
    text, deltas = run(tokenizer, ids, skip_special_tokens=skip)
    assert text.text == tokenizer.decode(ids, skip)
    assert "".join(deltas) == text.text
    assert len(text.token_offsets) == len(ids)
    assert text.token_offsets == sorted(text.token_offsets)
    assert text.token_offsets[-1:] in ([], [len(text.text)])


@kinds
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_nothing_shown_is_ever_taken_back(kind: str, data: st.DataObject) -> None:
    """What has been shown after i tokens begins the whole text, and begins what i tokens alone decode to."""
    tokenizer = KINDS[kind]()
    ids = data.draw(some_ids(tokenizer))
    text, deltas = run(tokenizer, ids)
    shown = ""
    for i, delta in enumerate(deltas[:-1]):
        shown += delta
        assert tokenizer.decode(ids[: i + 1]).startswith(shown)
        assert text.text.startswith(shown)


@kinds
@settings(max_examples=400, deadline=None)
@given(data=st.data(), include=st.booleans(), min_tokens=st.sampled_from([0, 0, 0, 3]))
def test_stop_strings_against_a_search_after_every_token(
    kind: str, data: st.DataObject, include: bool, min_tokens: int
) -> None:
    """The plain form: decode everything after each token, look for every stop string, stop at the first."""
    tokenizer = KINDS[kind]()
    ids = data.draw(some_ids(tokenizer, 25))
    whole = tokenizer.decode(ids)
    letters = st.text("abSTOP hend.☃", min_size=1, max_size=3)
    if whole.replace("\ufffd", ""):
        place = st.integers(0, len(whole) - 1)
        slices = st.tuples(place, st.integers(1, 12)).map(lambda t: whole[t[0] : t[0] + t[1]])
        letters = st.one_of(letters, slices.filter(lambda s: "\ufffd" not in s))
    stop = data.draw(st.lists(letters, min_size=1, max_size=3))

    expected, count, matched = whole, len(ids), None
    searched = 0  # text that a shorter prefix had already; a run of bytes that breaks off hides it for a while
    for i in range(len(ids)):
        before, now = tokenizer.decode(ids[:i]).rstrip("\ufffd"), tokenizer.decode(ids[: i + 1])
        searched = max(searched, len(before))
        ends = [
            (place + len(s), place, s)
            for s in stop
            for place in range(len(now))
            if now.startswith(s, place) and place + len(s) > searched
        ]
        if ends and i >= min_tokens:
            end, start, matched = min(ends)
            expected, count = now[: end if include else start], i + 1
            break

    text, deltas = run(tokenizer, ids, stop=stop, include_stop=include, min_tokens=min_tokens)
    assert text.stopped == matched
    assert text.text == expected == "".join(deltas)
    assert len(text.token_offsets) == count
    assert all(offset <= len(expected) for offset in text.token_offsets)
    assert tokenizer.decode(ids[:count]).startswith(expected)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_stop_string_is_found_however_tokens_split_it(data: st.DataObject) -> None:
    """The same text, split at random into tokens of one to many bytes."""
    tokenizer = byte_level()
    text = data.draw(st.sampled_from(["foo STOP bar", "xSTOP", "STOP", "SSTOP more", "😀STOP😀", "日本STOP"]))
    by_bytes = spellings(tokenizer)
    raw, ids = text.encode(), []
    while raw:
        lengths = [n for n in range(1, len(raw) + 1) if raw[:n] in by_bytes]
        n = data.draw(st.sampled_from(lengths))
        ids.append(by_bytes[raw[:n]])
        raw = raw[n:]
    result, deltas = run(tokenizer, ids, stop=["STOP"])
    assert result.text == text.split("STOP")[0]
    assert "".join(deltas) == result.text
    assert all("S" not in delta for delta in deltas) or text == "SSTOP more"


def spellings(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}


def named(tokenizer: Tokenizer, *names: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(name) for name in names]
    assert None not in ids
    return [token for token in ids if token is not None]


def spelled(*tokens: str) -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer that has exactly these tokens, and their ids."""
    alphabet = {byte: character for character, byte in _BYTE_OF.items()}
    names = ["".join(alphabet[byte] for byte in token.encode()) for token in tokens]
    vocabulary = {name: token for token, name in enumerate(dict.fromkeys(names))}
    backend = Backend(models.WordLevel(vocabulary, unk_token=names[0]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend), [vocabulary[name] for name in names]


def test_half_a_stop_string_is_never_shown() -> None:
    tokenizer, ids = spelled("go ", "E", "N", "D", " on")
    text, deltas = run(tokenizer, ids, stop=["END"])
    assert deltas == ["go ", "", "", "", ""]
    assert (text.text, text.stopped, len(text.token_offsets)) == ("go ", "END", 4)


def test_what_was_no_stop_string_after_all_is_shown() -> None:
    tokenizer, ids = spelled("E", "N", "E", "N", "x")
    assert run(tokenizer, ids, stop=["ENENEN"])[1] == ["", "", "", "", "ENENx", ""]
    assert run(tokenizer, ids[:4], stop=["ENENEN"])[1] == ["", "", "", "", "ENEN"]


def test_the_stop_string_may_begin_inside_another_beginning() -> None:
    tokenizer, ids = spelled("a", "a", "a", "b", "c")
    text, deltas = run(tokenizer, ids, stop=["aab"])
    assert deltas == ["", "", "a", "", ""]
    assert text.text == "a"


@pytest.mark.parametrize(("stop", "expected"), [(["ab", "abc"], "x"), (["abc", "b"], "xa"), (["bc", "abc"], "x")])
def test_the_match_that_completes_first_wins_then_the_one_that_begins_first(stop: list[str], expected: str) -> None:
    for tokens in (["x", "a", "b", "c", "y"], ["xabcy"], ["xa", "bcy"]):
        tokenizer, ids = spelled(*tokens)
        assert run(tokenizer, ids, stop=stop)[0].text == expected


def test_a_stop_string_that_is_the_whole_answer() -> None:
    tokenizer, ids = spelled("ha", " ha")
    text, deltas = run(tokenizer, ids, stop=["ha ha"])
    assert (text.text, deltas) == ("", ["", "", ""])
    assert run(tokenizer, ids, stop=["ha ha"], include_stop=True)[0].text == "ha ha"


def test_repeated_words_are_cut_at_one_token() -> None:
    tokenizer, ids = spelled("ha", *[" ha"] * 9)
    text, _ = run(tokenizer, ids, stop=[" ha ha ha"])
    assert (text.text, len(text.token_offsets)) == ("ha", 4)


def test_a_stop_string_before_half_a_character_ends_at_that_token() -> None:
    """The token that completes the stop string also begins a character that the next one would complete."""
    tokenizer = byte_level()
    by_bytes = spellings(tokenizer)
    first, *rest = (by_bytes[bytes([byte])] for byte in "\n世".encode())
    backend = Backend(models.WordLevel({"Ċä": 0, "¸": 1, "ĸ": 2}, unk_token="Ċä"))
    backend.decoder = decoders.ByteLevel()
    text, _ = run(Tokenizer(backend), [0, 1, 2], stop=["\n"])
    assert (text.text, len(text.token_offsets)) == ("", 1)
    assert run(tokenizer, [first, *rest])[1] == ["\n", "", "", "世", ""]


def test_a_stop_string_of_byte_tokens_ends_with_its_last_byte() -> None:
    tokenizer = pieces()
    smile = named(tokenizer, *(f"<0x{byte:02X}>" for byte in "😀".encode()))
    (the,) = named(tokenizer, "▁the")
    text, _ = run(tokenizer, [the, *smile, the], stop=["e😀"])
    assert (text.text, text.stopped, len(text.token_offsets)) == ("th", "e😀", 5)
    plain, deltas = run(tokenizer, [the, *smile, the])
    assert deltas == ["the", "", "", "", "", "😀 the", ""]
    assert plain.token_offsets == [3, 3, 3, 3, 4, 8]
    broken, _ = run(tokenizer, [the, *smile, smile[0], the])
    assert broken.text == "the" + "\ufffd" * 5 + " the"


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 ok", "👍🏽🇩🇪", "速度は力なり。", "naïve café", "\u0000\u00a0 \n"])
@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_characters_come_whole(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    result, deltas = run(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert result.text == text
    assert "\ufffd" not in "".join(deltas)


def test_a_character_that_is_never_finished_is_replaced_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ok 😀", add_special_tokens=False)
    whole = len(tokenizer.token_bytes(ids[-1]))
    assert whole < 4, "the last token must not be the whole character"
    text, deltas = run(tokenizer, ids[:-1])
    assert deltas[-1] == "\ufffd"
    assert text.text == tokenizer.decode(ids[:-1]) == "ok \ufffd"


def test_a_silent_token_counts_but_has_no_text() -> None:
    tokenizer, ids = spelled("a", "b")
    text = Detokenizer(tokenizer)
    text.push(ids[0])
    text.push(ids[1], silent=True)
    text.finish()
    assert (text.text, text.token_offsets) == ("a", [1, 1])


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a", add_special_tokens=False), 2]
    assert run(tokenizer, ids)[0].text == "a"
    assert run(tokenizer, ids, skip_special_tokens=False)[0].text == "a<|im_end|>"
    assert run(tokenizer, ids, skip_special_tokens=False, stop=["<|im"])[0].text == "a"


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    tokenizer, ids = spelled("a", "b", "c", "a", "b")
    text, _ = run(tokenizer, ids, stop=["ab"], min_tokens=2)
    assert (text.text, len(text.token_offsets)) == ("abc", 5)
    spanning, _ = run(tokenizer, ids, stop=["bc"], min_tokens=2)
    assert (spanning.text, len(spanning.token_offsets)) == ("a", 3)


def test_the_space_after_a_prompt_is_kept() -> None:
    tokenizer = pieces()
    prompt, answer = tokenizer.encode("The quick"), tokenizer.encode("brown", add_special_tokens=False)
    assert run(tokenizer, answer)[0].text == "brown"
    assert run(tokenizer, answer, context=prompt)[0].text == " brown"
    assert run(tokenizer, answer, context=[*prompt, min(tokenizer.byte_ids)])[0].text == " brown"


def test_nothing_follows_the_end() -> None:
    tokenizer, ids = spelled("a", "b")
    text, _ = run(tokenizer, ids[:1])
    with pytest.raises(ValueError, match="ended"):
        text.push(ids[1])
    with pytest.raises(RequestError, match="empty"):
        Detokenizer(tokenizer, stop=["x", ""])


@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_the_work_for_a_token_does_not_grow_with_the_text(kind: str) -> None:
    """Counted in ids handed to the backend: for 2,000 tokens, broken bytes among them, a few each."""
    tokenizer = KINDS[kind]()
    asked = 0
    decode = Tokenizer.decode

    class Counting(Tokenizer):
        def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
            nonlocal asked
            asked += len(ids)  # type: ignore[arg-type]
            return decode(self, ids, skip_special_tokens)  # type: ignore[arg-type]

    counting = Counting(tokenizer.backend)
    broken = named(tokenizer, "æ" if kind == "byte_level" else "<0xE6>")
    ids = (tokenizer.encode(CORPUS[0], add_special_tokens=False) + broken * 20) * 20
    text, _ = run(counting, ids, stop=["no such text"])
    assert text.text == tokenizer.decode(ids)
    assert asked <= 25 * len(ids)
    if kind == "byte_level":
        assert asked == 0


def test_encode_reads_special_tokens_and_adds_the_first() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("a<|im_end|>")[-1] == 2
    assert tokenizer.encode("<s>a", add_special_tokens=False)[0] == 0
    assert tokenizer.encode("") == []
    adding = pieces()
    assert adding.encode("the")[0] == 1
    assert adding.encode("<s>the").count(1) == 1
    assert adding.encode("the", add_special_tokens=False)[0] != 1
    assert adding.encode("")[0] == 1


def test_ids_out_of_range_are_named() -> None:
    tokenizer = byte_level()
    assert tokenizer.vocab_size == 401
    tokenizer.check([0, 400])
    with pytest.raises(RequestError, match=r"401 at place 1 .* 0 to 400"):
        tokenizer.check([5, 401])
    with pytest.raises(RequestError, match=r"-1 at place 0"):
        tokenizer.check([-1])


@kinds
def test_single_tokens_for_display(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(CORPUS[0], add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token) for token in ids).decode()
    assert joined.replace(" ", "") == tokenizer.decode(ids).replace(" ", "")
    assert tokenizer.token_text(ids[0]) in (tokenizer.decode(ids[:1]), " " + tokenizer.decode(ids[:1]))


def test_token_bytes_of_pieces_of_characters() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("速", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "速".encode()
    assert tokenizer.token_text(401 - 1) == "plain added token"
    assert pieces().token_bytes(min(pieces().byte_ids)) == b"\x00"
    assert tokenizer.token_bytes(5_000) == b""


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(backend)
    backend.decoder = decoders.Strip(" ", 0, 1)
    with pytest.raises(TokenizerError, match="Strip at the end"):
        Tokenizer(backend)
