"""Tokenizers from GGUF metadata give the ids of the tokenizers that they were made from."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import TYPE_CHECKING, Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.errors import TokenizerError
from paceline.targets.gguf import GgufFile
from paceline.targets.gguf_tokenizer import SPLITTERS, TokenType, from_metadata
from paceline.targets.vocabulary import TokenizerParts, compare_vocabularies, from_folder
from tests.gguf_files import write_gguf
from tests.models import tiny
from tests.tokenizer_texts import texts

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As the originals' tokenizer.json files spell their splitters.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(expression: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(expression), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
ORIGINALS: dict[str, list[Any]] = {
    "gpt-2": [GPT2_WORDS],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2_WORDS],
    "llama-bpe": _split(LLAMA3),
    "qwen2": _split(LLAMA3.replace("{1,3}", "")),
    "tekken": _split(TEKKEN),
    "gpt-4o": _split(GPT4O),
}


def original(pre: str) -> Tokenizer:
    """A trained byte-level tokenizer with the splitter of the models that `pre` names."""
    return Tokenizer.from_str(trained(pre))


@cache
def trained(pre: str) -> str:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in {"llama-bpe", "tekken"}))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(ORIGINALS[pre])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer.to_str()


def metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a GGUF file says about a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "types": [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "ids": {"bos": 1, "eos": 2, "unknown": 0, "padding": 2},
        "flags": {"add_bos_token": False},
        "template": "{{ messages }}",
    }


def keys(parts: dict[str, Any]) -> dict[str, Any]:
    """The same as keys and values of a file."""
    found = {f"tokenizer.ggml.{name}": parts[name] for name in ("model", "pre", "tokens", "merges")}
    found["tokenizer.ggml.token_type"] = parts["types"]
    found |= {f"tokenizer.ggml.{name}_token_id": number for name, number in parts["ids"].items()}
    found |= {f"tokenizer.ggml.{name}": flag for name, flag in parts["flags"].items()}
    return found


@pytest.mark.parametrize("pre", ORIGINALS)
def test_ids_equal_the_original(pre: str) -> None:
    tokenizer = original(pre)
    parts = from_metadata(keys(metadata(tokenizer, pre)))
    for text in texts():
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert parts.tokenizer.encode(text, add_special_tokens=False).ids == expected
        composed = tokenizer.decode(expected, skip_special_tokens=False)
        assert parts.tokenizer.decode(expected, skip_special_tokens=False) == composed


def test_splitters_are_told_apart() -> None:
    words = original("gpt-2")
    cuts = set()
    for pre in ORIGINALS:
        splitter = from_metadata(keys(metadata(words, pre))).tokenizer.pre_tokenizer
        cuts.add(tuple(word for word, _ in splitter.pre_tokenize_str("camelCase's it's 2024!/\n\n  x/\n")))
    assert len(cuts) == len(ORIGINALS)


@pytest.mark.parametrize("pre", SPLITTERS)
def test_no_splitter_loses_a_byte(pre: str) -> None:
    parts = from_metadata(keys(metadata(original("gpt-2"), pre)))
    for text in texts():
        if parts.tokenizer.normalizer is None:
            ids = parts.tokenizer.encode(text, add_special_tokens=False).ids
            assert parts.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_through_a_file_and_back(tmp_path: Path) -> None:
    model, _ = tiny("llama", vocab_size=604)  # four rows more than the tokenizer has ids
    described = metadata(original("smollm"), "smollm")
    for number in range(4):
        described["tokens"].append(f"[PAD{600 + number}]")
        described["types"].append(TokenType.UNUSED)
    path = write_gguf(model, "llama", tmp_path / "model.gguf", tokenizer=described)
    parts = GgufFile(path).tokenizer_parts
    assert parts.size == 600
    assert (parts.bos_id, parts.eos_ids, parts.add_bos) == (1, (2,), False)
    assert parts.chat_template == "{{ messages }}"
    assert parts.special_tokens["eos_token"] == "<|im_end|>"
    parts.save(tmp_path)
    again = TokenizerParts.saved(tmp_path)
    assert compare_vocabularies(parts, again) == []
    assert (again.eos_ids, again.chat_template) == (parts.eos_ids, parts.chat_template)
    text = "<|im_start|>user\nHello 2024!<|im_end|>"
    assert again.tokenizer.encode(text).ids == original("smollm").encode(text).ids


def by_score(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's BPE as it is defined: merge the best neighbours, the leftmost first, until none are left."""
    best = dict(zip(tokens, scores, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-best[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in best]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[str] = []
    for piece in pieces:
        found += [piece] if piece in best else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return found


def scored_metadata(**changes: Any) -> dict[str, Any]:
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    plain = [text for text in texts() if "<" not in text]
    learner.train_from_iterator(plain[::2], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    model = json.loads(learner.to_str())["model"]
    learned = ["".join(merge) for merge in model["merges"]]
    letters = [token for token in model["vocab"] if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned, *letters]
    tokens = list(dict.fromkeys(tokens))
    scores = [0.0 if token.startswith("<") else -float(number) for number, token in enumerate(tokens)]
    types = [TokenType.NORMAL] * len(tokens)
    types[:3] = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types[3:259] = [TokenType.BYTE] * 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def test_scores_decide_as_sentencepiece_defines() -> None:
    described = scored_metadata()
    parts = from_metadata(described)
    assert parts.add_bos
    plain = [text for text in texts() if text and "<" not in text]
    for text in plain:
        found = parts.tokenizer.encode(text, add_special_tokens=False)
        assert found.tokens == by_score(text, described["tokenizer.ggml.tokens"], described["tokenizer.ggml.scores"])
        if "▁" not in text:
            assert parts.tokenizer.decode(found.ids) == text
    assert len(plain) > 150


def test_marks_are_whole_and_take_the_space_as_the_family_does() -> None:
    tokens = scored_metadata()["tokenizer.ggml.tokens"]
    described = scored_metadata()
    described["tokenizer.ggml.tokens"] = [*tokens, "<|end|>", "  "]
    described["tokenizer.ggml.scores"] = [*described["tokenizer.ggml.scores"], 0.0, 0.0]
    described["tokenizer.ggml.token_type"] = [
        *described["tokenizer.ggml.token_type"],
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
    ]
    plain = from_metadata(described)
    phi = from_metadata({**described, "general.architecture": "phi3"})
    assert plain.eos_ids == (2, len(tokens))
    assert plain.tokenizer.encode("<|end|>\n").tokens[0] == "<|end|>"
    assert len(plain.tokenizer.encode("<|end|>\n").ids) > 1
    assert phi.tokenizer.encode("<|end|>\n").ids == [len(tokens)]
    assert "  " in plain.tokenizer.encode("a  b").tokens


def test_no_space_before_the_first_word_where_the_file_says_so() -> None:
    parts = from_metadata(scored_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert not parts.tokenizer.encode("the").tokens[0].startswith("▁")
    assert parts.tokenizer.decode(parts.tokenizer.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "grok-9"}, "splitter 'grok-9'"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"),
        ({"tokenizer.ggml.model": None}, "'None' is not supported"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.merges": ["nothing known"]}, "does not fit together"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None}, "same token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "600 tokens, but 1 token types"),
        ({"tokenizer.ggml.add_eos_token": True}, "ends every text"),
        ({"tokenizer.ggml.model": "llama"}, "no score"),
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        from_metadata({**keys(metadata(original("gpt-2"), "gpt-2")), **change})


# Folders.


def folder(path: Path, **files: Any) -> Path:
    original("qwen2").save(str(path / "tokenizer.json"))
    for name, content in files.items():
        stem, _, ending = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{stem}.{ending}").write_text(text)
    return path


def test_folder(tmp_path: Path) -> None:
    parts = from_folder(
        folder(
            tmp_path,
            tokenizer_config_json={
                "eos_token": {"content": "<|im_end|>"},
                "bos_token": None,
                "chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}],
            },
            generation_config_json={"eos_token_id": [2, 0], "temperature": 0.7},
        )
    )
    assert parts.eos_ids == (2, 0)
    assert (parts.bos_id, parts.add_bos, parts.chat_template) == (None, False, "d")
    assert parts.generation_config["temperature"] == 0.7
    assert parts.special_tokens == {"eos_token": "<|im_end|>"}
    folder(tmp_path, chat_template_jinja="from the file")
    assert from_folder(tmp_path).chat_template == "from the file"


def test_folder_first_token_by_its_processor(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = original("llama-bpe")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    parts = from_folder(tmp_path)
    assert (parts.bos_id, parts.add_bos) == (0, True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "add_bos_token": False}))
    assert not from_folder(tmp_path).add_bos
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert from_folder(tmp_path).eos_ids == (2,)


def test_folder_without_or_with_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(TokenizerError, match="convert it once with transformers"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a readable tokenizer"):
        from_folder(tmp_path)
    with pytest.raises(TokenizerError, match="not readable as JSON"):
        from_folder(folder(tmp_path, tokenizer_config_json="{"))


# Pairs.


def parts_of(tokenizer: Tokenizer, **changes: Any) -> TokenizerParts:
    fields: dict[str, Any] = {"bos_id": None, "eos_ids": (2,), "add_bos": False, "chat_template": None}
    return TokenizerParts(tokenizer, **{**fields, **changes})


def test_equal_vocabularies() -> None:
    assert compare_vocabularies(parts_of(original("smollm")), parts_of(original("smollm"))) == []


def test_what_differs_is_named() -> None:
    target = parts_of(original("smollm"))
    swapped = json.loads(original("smollm").to_str())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    first = min(vocabulary["a"], vocabulary["b"])
    (found,) = compare_vocabularies(target, parts_of(Tokenizer.from_str(json.dumps(swapped))))
    assert f"2 of 600 ids differ, the first is {first}: 'a' in the target, 'b' in the drafter" in found

    longer = original("smollm")
    longer.add_special_tokens([AddedToken("<extra>", special=True)])
    sentences = compare_vocabularies(target, parts_of(longer))
    assert "the first is 600: nothing in the target, '<extra>' in the drafter" in sentences[0]
    assert "the target has 600 ids, the drafter 601" in sentences[1]
    assert "'<extra>' (id 600), only in the drafter" in sentences[2]

    (found,) = compare_vocabularies(target, parts_of(original("smollm"), bos_id=1, add_bos=True))
    assert "in the target texts do not" in found
    other_splitter = original("smollm")
    other_splitter.pre_tokenizer = GPT2_WORDS
    (found,) = compare_vocabularies(target, parts_of(other_splitter))
    assert "splitters" in found


def test_token_types_are_those_of_the_package() -> None:
    assert {kind.name: kind.value for kind in TokenType} == {kind.name: kind.value for kind in gguf.TokenType}
