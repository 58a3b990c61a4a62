"""A tiny random model with a tokenizer of bytes and a chat template, loaded from a folder as a user would."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.llm import LLM
from paceline.prompts import Prompt
from tests.models import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EOS = 256
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_model(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder of a tiny Llama over bytes."""
    sizes = {"vocab_size": 264, "eos_token_id": EOS, "max_position_embeddings": 1024, **changes}
    _, write = tiny("llama", **sizes)
    write(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder, with a cache of converted models beside it; all modules of tests share the two."""
    base = tmp_path_factory.getbasetemp() / "bench"
    folder = base / "model"
    if not folder.exists():
        folder.mkdir(parents=True)
        write_model(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(base / "cache"))
        yield folder


@pytest.fixture(scope="module")
def tiny_llm(model_folder: Path) -> LLM:
    return LLM(str(model_folder), speculation=False, threads=2, max_num_seqs=8, cache_memory=1 << 24)


def prompts(count: int) -> list[Prompt]:
    """Short prompts of two categories, every second one of two turns."""
    words = ["row", "of", "riders", "paceline", "wind", "front", "lead", "wheel", "road", "hill", "turn", "sprint"]
    lot = random.Random(0)
    texts = [" ".join(lot.choices(words, k=6)) for _ in range(2 * count)]
    return [
        Prompt(str(place), "writing" if place % 2 else "qa", tuple(texts[2 * place : 2 * place + 1 + place % 2]))
        for place in range(count)
    ]
