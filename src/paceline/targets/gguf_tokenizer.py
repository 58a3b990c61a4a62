"""Tokenizers from the metadata of GGUF files, built to give the ids of the original tokenizer.

The format is described by the `gguf` package; which splitter a name in `tokenizer.ggml.pre` stands for is
defined by llama.cpp. A name that is not listed here is refused: a wrong splitter gives plausible, wrong ids.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.errors import TokenizerError
from paceline.targets.vocabulary import TokenizerParts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """Words with one leading sign, `digits`, runs of signs with the line ends after them, white space."""
    words = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


def _cased_words(digits: str, ending: str) -> str:
    """The same, but words are cut where a lower-case letter is followed by an upper-case one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_DIGITS = (r"\p{N}", _GPT2)
_GPT4O = (_cased_words(r"\p{N}{1,3}", rf"(?i:{_CONTRACTIONS})?"),)
# Name to the expressions that cut a text one after the other.
SPLITTERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "gpt2": (_GPT2,),
    "phi-2": (_GPT2,),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": (_cased_words(r"\p{N}", ""),),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
# Whole words of the vocabulary are taken before any merge, and texts start with BOS unless the file says no.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})  # the originals normalize to NFC

# Texts that end a turn; files often name only the end of the whole text.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def from_metadata(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that the metadata describe.

    Args:
        metadata: the file's keys and values, arrays as lists.

    Raises:
        TokenizerError: no tokenizer, an unknown kind or splitter, or lists that do not fit each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = _vocabulary(metadata)
    if kind == "gpt2":
        tokenizer, bos_default = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, bos_default = _scored(metadata, tokens, types), True
    else:
        raise TokenizerError(f"the GGUF tokenizer '{kind}' is not supported (only gpt2 and llama).")
    if metadata.get("tokenizer.ggml.add_eos_token"):
        raise TokenizerError("the GGUF tokenizer ends every text with a token, which is not supported.")
    _add_special(tokenizer, metadata, tokens, types)
    bos_id = _token_id(metadata, "bos", tokens)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", bos_default)) and bos_id is not None
    return TokenizerParts(
        tokenizer=tokenizer,
        bos_id=bos_id,
        eos_ids=_eos_ids(metadata, tokens, types),
        add_bos=add_bos,
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=_special_tokens(metadata, tokens),
        generation_config={
            ours: metadata[f"general.sampling.{theirs}"]
            for theirs, ours in _SAMPLING.items()
            if f"general.sampling.{theirs}" in metadata
        },
    )


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError("the GGUF file has no tokenizer (tokenizer.ggml.tokens).")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"the GGUF tokenizer has {len(tokens)} tokens, but {len(types)} token types.")
    size = len(tokens)
    while size and types[size - 1] == TokenType.UNUSED and tokens[size - 1].startswith("[PAD"):
        size -= 1  # rows that only fill up the embedding
    return tokens[:size], types[:size]


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTERS:
        raise TokenizerError(
            f"the splitter '{name}' (tokenizer.ggml.pre) is not supported (only {', '.join(sorted(SPLITTERS))})."
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise TokenizerError("the GGUF tokenizer has no merges (tokenizer.ggml.merges).")
    pairs = [_pair(merge) for merge in merges]
    tokenizer = _model(tokens, pairs, ignore_merges=name in _WHOLE_WORDS)
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in SPLITTERS[name]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in _WHOLE_WORDS


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _model(tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: Any) -> Tokenizer:
    numbers = {text: number for number, text in enumerate(tokens)}
    if len(numbers) != len(tokens):
        raise TokenizerError("the GGUF tokenizer has the same token twice.")
    try:
        return Tokenizer(models.BPE(vocab=numbers, merges=merges, **options))
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(f"the GGUF tokenizer does not fit together ({error}).") from error


def _scored(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours that form a token those with the highest score merge first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(tokens):
        raise TokenizerError("the GGUF tokenizer has no score for each token (tokenizer.ggml.scores).")
    whole = {TokenType.NORMAL, TokenType.UNUSED}
    numbers = {text: n for n, text in enumerate(tokens) if types[n] in whole}
    # Equal scores: the earlier token first, as the tokens were found in this order in training.
    merges: list[tuple[float, int, int, int, str, str]] = []
    for text, number in numbers.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in numbers and right in numbers:
                merges.append((-scores[number], number, numbers[left], numbers[right], left, right))
    merges.sort(key=lambda merge: merge[:4])
    unknown = _token_id(metadata, "unknown", tokens)
    unknown = 0 if unknown is None else unknown
    tokenizer = _model(
        tokens,
        [(left, right) for *_, left, right in merges],
        byte_fallback=True,
        fuse_unk=True,
        unk_token=tokens[unknown],
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else normalizers.Sequence([spaces])
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _add_special(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> None:
    phi3 = metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"
    special, plain = [], []
    for text, kind in zip(tokens, types, strict=True):
        # Phi-3's own tokenizer swallows white space after its marks; the format has no place to say so.
        strip = phi3 and text not in {"<unk>", "<s>", "<|endoftext|>"}
        if kind in {TokenType.CONTROL, TokenType.UNKNOWN}:
            special.append(AddedToken(text, special=True, normalized=False, rstrip=strip))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(text, special=False, normalized=False, rstrip=strip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _token_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return int(found) if found is not None and 0 <= int(found) < len(tokens) else None


def _eos_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    named = [_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")]
    turns = [n for n, text in enumerate(tokens) if text in _TURN_ENDS and types[n] != TokenType.NORMAL]
    return tuple(dict.fromkeys(number for number in [*named, *turns] if number is not None))


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {ours: _token_id(metadata, theirs, tokens) for ours, theirs in names.items()}
    return {name: tokens[number] for name, number in found.items() if number is not None}
