"""Draft models of other tokenizers draft for toy targets and for tiny real ones: not one token differs."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline import LLM, Sampling, drafting
from paceline.bridges import bridge
from paceline.drafters import View
from paceline.text import Tokenizer
from paceline.tree import Drawn, Dropping
from tests.draft_models import Draft, ride
from tests.models import tiny
from tests.test_bridges import KINDS
from tests.toys import EOS, VOCAB, StrictTarget, ToyRun, alone, path_rule, same
from tests.toys import TOKENIZER as BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.bridges import Kind

PROMPT = list(b"the one behind saves a third")
ORDER = random.Random(6).sample(range(VOCAB), VOCAB)  # the draft model's id of each of the target's


@cache
def shuffled() -> Tokenizer:
    """The bytes and the end of the toy tokenizer, under other ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: BYTES.backend.token_to_id(letter) or 0)
    vocabulary = {letter: ORDER[place] for place, letter in enumerate(letters)} | {"<eos>": ORDER[EOS]}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, eos_ids=(ORDER[EOS],))


def readable(seed: int) -> Callable[[list[int]], torch.Tensor]:
    """A toy that writes ASCII: broken bytes read as U+FFFD, so that the draft model would see another path."""
    rows, ascii_ = path_rule(VOCAB, seed=seed), torch.full((VOCAB,), -30.0)
    ascii_[:128] = 0.0
    return lambda path: rows(path) + ascii_


RULE, OTHER = readable(71), readable(72)


def half_right(path: list[int]) -> torch.Tensor:
    return RULE(path) if sum(path) % 2 else OTHER(path)


def mirrored(rule: Callable[[list[int]], torch.Tensor]) -> Callable[[list[int]], torch.Tensor]:
    """The same toy under the shuffled ids."""
    back = {own: token for token, own in enumerate(ORDER)}
    columns = torch.tensor([back[own] for own in range(VOCAB)])
    return lambda path: rule([back[own] for own in path])[columns]


@pytest.mark.parametrize("kind", ["intersection", "retokenized"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [1, 3])
def test_the_target_under_other_ids_is_accepted(kind: Kind, temperature: float, width: int) -> None:
    """Fully through common tokens, sampled too; as text greedily, and sampled as often as the likeliest is drawn."""
    model = StrictTarget(mirrored(RULE), VOCAB)
    draft = Draft(model, pages=128, vocabularies=bridge(BYTES, shuffled(), kind), tree=width)
    settings: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "max_tokens": 49}
    run = ToyRun(RULE, pages=128)
    spec = {"num_speculative_tokens": 5}
    sequences = [run.add(PROMPT[: 5 + 9 * n], draft.drafter, seed=n, speculation=spec, **settings) for n in range(3)]
    ride(run, draft, sequences)
    for n, sequence in enumerate(sequences):
        same(sequence, alone(RULE, PROMPT[: 5 + 9 * n], seed=n, **settings))
        record = sequence.record
        if kind == "intersection" or temperature == 0.0:
            assert record.accepted_at == record.reached
            assert width > 1 or record.steps == 8
        else:
            assert record.accepted > 5


@pytest.mark.parametrize("kind", ["intersection", "retokenized"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("window", [None, 8])
def test_a_half_right_model_under_other_ids_keeps_its_books(kind: Kind, width: int, window: int | None) -> None:
    model = StrictTarget(mirrored(half_right), VOCAB, window=window)
    draft = Draft(model, pages=128, vocabularies=bridge(BYTES, shuffled(), kind), tree=width)
    run = ToyRun(RULE, pages=128, max_batch_tokens=20)
    settings = [{"temperature": 0.4 * n, "seed": n, "max_tokens": 30, "ignore_eos": n > 0} for n in range(3)]
    sequences = [
        run.add(PROMPT[: 9 * n + 1], draft.drafter, speculation={"num_speculative_tokens": 3 + 2 * n}, **own)  # type: ignore[arg-type]
        for n, own in enumerate(settings)
    ]
    ride(run, draft, sequences)
    for n, (sequence, own) in enumerate(zip(sequences, settings, strict=True)):
        same(sequence, alone(RULE, PROMPT[: 9 * n + 1], **own))  # type: ignore[arg-type]
    assert window or any(0 < s.record.accepted < s.record.drafted for s in sequences)


@pytest.mark.parametrize("kind", ["intersection", "retokenized"])
@pytest.mark.parametrize("own", ["pieces", "metaspace", "fallback", "composed", "sentencepiece"])
@pytest.mark.parametrize("source", ["bytes", "byte_level", "pieces", "composed"])
def test_any_two_vocabularies(source: str, own: str, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """Random toys that write anything: broken characters, special tokens in the middle, ids of all kinds."""
    ours, theirs = KINDS[source](), KINDS[own]()
    rule = path_rule(ours.vocab_size, seed=81)
    window = 4 if kind == "retokenized" else None
    model = StrictTarget(path_rule(theirs.vocab_size, seed=82), theirs.vocab_size, window=window)
    draft = Draft(model, pages=128, vocabularies=bridge(ours, theirs, kind), tree=2)
    prompts = [ours.encode(text) for text in ("a", "so 👍🏽 it", "def f(x):\n    return 世界 + 12345")]
    settings = [{"temperature": 0.5 * n, "seed": n, "max_tokens": 24, "ignore_eos": True} for n in range(3)]
    run = ToyRun(rule, vocab=ours.vocab_size, pages=128)
    sequences = [
        run.add(prompt, draft.drafter, **setting)  # type: ignore[arg-type]
        for prompt, setting in zip(prompts, settings, strict=True)
    ]
    ride(run, draft, sequences)
    for prompt, setting, sequence in zip(prompts, settings, sequences, strict=True):
        same(sequence, alone(rule, prompt, vocab=ours.vocab_size, **setting))  # type: ignore[arg-type]
    assert sum(sequence.record.drafted for sequence in sequences) > 0
    assert not caplog.records


def test_a_fork_and_a_rewind_read_on() -> None:
    model = StrictTarget(mirrored(RULE), VOCAB)
    draft = Draft(model, vocabularies=bridge(BYTES, shuffled(), "intersection"))
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, draft.drafter, max_tokens=60)
    for _ in range(4):
        run.engine.step()
    drafter = draft.drafter
    view = drafting.view(sequence)
    twin = type(view)(99, list(view.tokens), view.draw)
    drafter.fork(sequence.id, twin)
    assert drafter.length(99) == drafter.length(sequence.id) == len(sequence.tokens)
    trees = drafter.propose([twin, view], [5, 5])
    assert trees[0].tokens == trees[1].tokens
    drafter.rewind(99, 1000)
    drafter.rewind(sequence.id, 3)
    assert drafter.length(sequence.id) == 0
    assert drafter.propose([view], [5])[0].tokens == trees[0].tokens
    drafter.release(99)
    run.engine.cancel(sequence)
    draft.check_empty()


@pytest.mark.parametrize("own", ["metaspace", "sentencepiece"])
def test_a_draft_waits_for_a_character_that_it_cannot_spell(own: str) -> None:
    """And one of few long tokens, in a target's many short ones, stays within its budget."""
    theirs = KINDS[own]()
    word = theirs.encode("the", add_special_tokens=False)[-1]
    row = torch.zeros(theirs.vocab_size)
    row[word] = 9.0
    draft = Draft(StrictTarget(lambda path: row, theirs.vocab_size), vocabularies=bridge(BYTES, theirs, "retokenized"))
    tokens = BYTES.encode("so 👍")[:-2]
    view = View(1, tokens, lambda *_, **__: [Drawn([], [])], dropping=Dropping())
    draft.drafter.start(view, 0)
    assert (len(draft.drafter.propose([view], [4])[0]) == 1) == (own == "metaspace")
    tokens += BYTES.encode("so 👍")[-2:]
    tree = draft.drafter.propose([view], [4])[0]
    assert len(tree) == 5
    assert bytes(tree.tokens[1:]) == (theirs.token_bytes(word) * 4)[:4]
    draft.drafter.release(1)


def write(folder: Path, tokenizer: Tokenizer, seed: int, family: str = "llama", order: list[int] | None = None) -> str:
    """A tiny random model of a tokenizer's size, its ids in another order."""
    folder.mkdir()
    size = tokenizer.vocab_size + 7  # rows that only fill up
    model, save = tiny(family, seed, vocab_size=size, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    if order is not None:
        with torch.no_grad():
            rows = model.get_input_embeddings().weight
            rows[torch.tensor(order)] = rows[: len(order)].clone()
    save(folder)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    config = {name: tokenizer.backend.id_to_token(token) for name, token in names.items() if token is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": tokenizer.add_bos}))
    return str(folder)


@pytest.fixture
def folders(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for models, with the cache of converted models that other tests have."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path_factory.getbasetemp() / "bench" / "cache"))
    return tmp_path


def test_tiny_models_of_two_tokenizers(folders: Path) -> None:
    """Real decoders, greedy and sampled, several at once."""
    target = write(folders / "target", KINDS["byte_level"](), 1)
    other = write(folders / "other", KINDS["pieces"](), 2, "qwen2")
    drafting_ = {"method": "draft_model", "model": other}
    llm = LLM(target, speculation=drafting_, max_num_seqs=4, threads=2, cache_memory=1 << 25)
    prompts = ["The quick brown fox", "def f(x):\n    return", "世界 👍🏽 <|im_end|>", "a"]
    for temperature in (0.0, 0.8):
        sampling = Sampling(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
        plain = [answer.token_ids for answer in llm.generate(prompts, sampling, speculation=False)]
        for tree in ("none", 3):
            drafted = llm.generate(prompts, sampling, speculation={"adaptive": False, "tree": tree})
            assert [answer.token_ids for answer in drafted] == plain
            assert all(answer.record.drafted for answer in drafted)
            assert all(answer.record.lossless == "bits" for answer in drafted)


def test_the_same_weights_under_other_ids(folders: Path) -> None:
    """The intersection finds every token again, and with it the target's own logits, bit for bit."""
    target = write(folders / "target", BYTES, 1)
    other = write(folders / "other", shuffled(), 1, order=ORDER)
    drafting_ = {"method": "draft_model", "model": other, "adaptive": False}
    llm = LLM(target, speculation=drafting_, max_num_seqs=4, threads=2, cache_memory=1 << 24)
    readable_ = list(range(32, 127))
    for temperature in (0.0, 0.8):
        sampling = Sampling(temperature=temperature, seed=5, max_tokens=49, allowed_token_ids=readable_)
        plain = llm.generate("Once upon a time", sampling, speculation=False)
        answer = llm.generate("Once upon a time", sampling)
        assert answer.token_ids == plain.token_ids
        assert answer.record.accepted == answer.record.drafted
        assert answer.record.steps == 8
