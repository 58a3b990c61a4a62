"""Tokenizers of three kinds to translate between: those that mistral-common carries, and small ones trained here."""

from __future__ import annotations

import base64
import json
from functools import cache
from importlib.resources import files
from typing import Any

import sentencepiece
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paceline.targets.gguf_tokenizer import TokenType, from_metadata
from paceline.text import _BYTE_OF, Tokenizer

LETTER_OF = {byte: letter for letter, byte in _BYTE_OF.items()}
_DATA = files("mistral_common") / "data"
SENTENCEPIECE_FILE = _DATA / "mistral_instruct_tokenizer_240323.model.v3"
TEKKEN_FILE = _DATA / "tekken_240911.json"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It didn't look back, it ran on and on.",
    "def rename(old: str, new: str) -> None:\n    table[new] = table.pop(old)\n    return None\n",
    "Größe, naïve café, Ærøskøbing; 速度は力なり。世界、こんにちは! 你好,世界",
    "emoji 😀😀 👩‍👩‍👧‍👦 👍🏽 🇩🇪 and numbers 1234567890 3.14159",
    "STOP ha ha ha END ab abc abab <stop> the end of the quick race in the rain",
]


@cache
def sentence_pieces() -> Tokenizer:
    """The SentencePiece model of Mistral 7B v0.3: 32,768 pieces, bytes for the rest, a space before each text."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE_FILE))
    numbers = range(model.get_piece_size())
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": [model.get_score(number) for number in numbers],
        "tokenizer.ggml.token_type": [_kind(model, number) for number in numbers],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
    return Tokenizer.from_parts(from_metadata(metadata))


def _kind(model: Any, number: int) -> TokenType:
    if model.is_unknown(number):
        return TokenType.UNKNOWN
    if model.is_control(number):
        return TokenType.CONTROL
    return TokenType.BYTE if model.is_byte(number) else TokenType.NORMAL


@cache
def tekken() -> Tokenizer:
    """The byte-level BPE of Mistral Nemo: 131,072 ids, of which the first 1,000 are special."""
    held = json.loads(TEKKEN_FILE.read_text(encoding="utf-8"))
    config = held["config"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    special += [f"<SPECIAL_{number}>" for number in range(5, config["default_num_special_tokens"])]
    size = config["default_vocab_size"] - len(special)
    spelled = [base64.b64decode(entry["token_bytes"]) for entry in held["vocab"][:size]]
    rank = {token: place for place, token in enumerate(spelled)}
    pairs: list[tuple[bytes, bytes]] = []
    for token in spelled:  # a token is merged from whichever of its halves meet
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [pair for pair in cuts if pair[0] in rank and pair[1] in rank]
        pairs += sorted(found, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    vocabulary = {name: number for number, name in enumerate([*special, *map(_letters, spelled)])}
    merges = [(_letters(left), _letters(right)) for left, right in pairs]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return Tokenizer(backend, bos_id=1, eos_ids=(2,), add_bos=True)


def _letters(token: bytes) -> str:
    return "".join(LETTER_OF[byte] for byte in token)


@cache
def fallback() -> Tokenizer:
    """A unigram model of single letters and some words, with bytes for the rest, and no space before texts."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789.,:;()[]<>=_|/'\n速度世界"
    words = ["▁the", "▁quick", "▁race", "▁and", "▁re", "turn", "ed", "er", "▁▁", "▁▁▁▁", "👍"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("<|im_end|>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [("▁", -5.0), *((letter, -7.0) for letter in letters), *((word, -6.0 - len(word)) for word in words)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "<|im_end|>"])
    return Tokenizer(backend, bos_id=1, eos_ids=(2,))


@cache
def composed() -> Tokenizer:
    """Byte-level, of few tokens, composing characters first, digits in groups of three, with marks of its own."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(
        Regex(r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"), "isolated"
    )
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, "123 234 345 111 222 100 000"], trainer)
    return Tokenizer(backend, eos_ids=(1,))
