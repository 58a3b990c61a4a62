"""What heads are trained on: the target's own answers, which of their tokens count, and its states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.errors import ContextLengthError, OptionError
from paceline.sampling import Sampling
from paceline.targets.spec import LayerSpec
from paceline.train.examples import Example, answered, frequent_ids, preview
from paceline.train.features import Features
from paceline.train.pack import Pack, Reader
from paceline.train.shared import Shared
from tests.bench_models import model_folder, tiny_llm
from tests.decoders import VOCAB, Cache, piece, random_ids, rope_spec, tiny_decoder, tiny_spec
from tests.toys import TOKENIZER

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.targets.linear import Format

__all__ = ["model_folder", "tiny_llm"]  # fixtures


def test_answers_are_those_of_plain_decoding(tiny_llm: LLM) -> None:
    prompts = [list(b"wind in front"), list(b"a wheel"), [7]]
    examples = answered(tiny_llm, prompts, 9)
    for prompt, example in zip(prompts, examples, strict=True):
        plain = tiny_llm.generate(prompt, Sampling(temperature=0.0, max_tokens=9), speculation=False)
        assert example == Example.of(prompt, plain.token_ids)
        assert len(plain.token_ids) == 9


def test_the_preview_shows_which_tokens_count() -> None:
    example = Example.of([*b"Q: two?", 256], [*b"2", 256])
    assert preview(example, TOKENIZER) == [("Q: two?<eos>", False), ("2<eos>", True)]
    turns = Example((*b"ab", *b"cd", *b"e", *b"f"), (False, False, True, True, False, True))
    assert preview(turns, TOKENIZER) == [("ab", False), ("cd", True), ("e", False), ("f", True)]


def test_a_draft_vocabulary_has_what_counts_most_often() -> None:
    examples = [Example.of([9, 9, 9, 9], [5, 7, 5]), Example.of([8], [7, 3, 5])]
    assert frequent_ids(examples, 2, 11) == [5, 7]
    assert frequent_ids(examples, 3, 11) == [3, 5, 7]
    assert frequent_ids(examples, 5, 11) == [0, 1, 3, 5, 7]
    for size in (0, 12):
        with pytest.raises(OptionError, match=rf"1 to 11 ids.*not {size}"):
            frequent_ids(examples, size, 11)


def drafts_by_hand(examples: list[Example], depth: int) -> list[tuple[int, bool]]:
    """The row of every root, and whether its draft stays inside the answer down to ``depth``."""
    found, base = [], 0
    for example in examples:
        tokens, counts = example.tokens, example.counts
        for root in range(len(tokens) - 2):
            if counts[root + 2]:
                whole = root + 2 + depth < len(tokens) and all(counts[root + 2 : root + 3 + depth])
                found.append((base + root, whole))
        base += len(tokens)
    return found


def test_drafts_never_leave_their_answer() -> None:
    examples = [
        Example.of([1, 2, 3], [4, 5, 6]),
        Example.of([7], [8, 9]),
        Example((1, 2, 3, 4, 5, 6, 7, 8), (False, True, True, False, True, True, True, False)),
        Example.of([1, 2], [3]),
    ]
    pack = Pack.of(examples, Features(tiny_decoder(tiny_spec()), (2,)))
    roots = pack.roots()
    for depth in range(4):
        inside = pack.inside(roots, depth).tolist()
        assert list(zip(roots.tolist(), inside, strict=True)) == drafts_by_hand(examples, depth)
    assert pack.tokens[roots + 2].tolist() == [4, 5, 6, 9, 3, 5, 6, 7, 3]
    assert pack.tokens[pack.saying() + 1].tolist() == [4, 5, 6, 8, 9, 2, 3, 5, 6, 7, 3]
    assert pack.starts.tolist() == [0] * 6 + [6] * 3 + [9] * 8 + [17] * 3


def test_an_epoch_reads_every_example_once() -> None:
    examples = [Example.of([token], [token] * (2 + token % 5)) for token in range(20)] + [Example.of([1], [50])]
    features = Features(tiny_decoder(tiny_spec()), (0,))
    reader = Reader(examples, features, 16)
    orders = []
    for number in range(2):
        packs = reader.epoch(number)
        assert packs == Reader(examples, features, 16).epoch(number)
        assert sorted(example for pack in packs for example in pack) == list(range(20))  # the last teaches nothing
        rows = [reader.pack(pack, step).tokens for step, pack in enumerate(packs)]
        assert all(len(tokens) <= 16 for tokens in rows)
        assert [set(tokens.tolist()) for tokens in rows] == [set(pack) for pack in packs]
        orders.append(packs)
    assert orders[0] != orders[1] != Reader(examples, features, 16, seed=1).epoch(0)
    with pytest.raises(OptionError, match="nothing to train on"):
        Reader(examples[-1:], features, 16)


WINDOWS = tiny_spec([LayerSpec(rope_spec(), 20), LayerSpec(rope_spec(), None), LayerSpec(rope_spec(), 20)])


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_states_are_those_that_decoding_sees(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several texts in one pass, longer than a pass or not, rounded and otherwise to the bit."""
    monkeypatch.setattr("paceline.train.features._PIECE", 17)
    target, texts = tiny_decoder(WINDOWS, form, threads=2), [random_ids(70), random_ids(3), random_ids(20, seed=1)]
    features = Features(target, (2, 0, 3))
    for text, states in zip(texts, features([Example.of(text, ()) for text in texts]), strict=True):
        cache = Cache(target)
        passes = [cache.run(piece(0, [token], at), features=(0, 2, 3)) for at, token in enumerate(text)]
        for place, layer in enumerate((2, 0, 3)):
            assert torch.equal(states[:, place], torch.cat([scores.features[layer] for scores in passes]).bfloat16())
    assert features.rows == 93


def test_states_are_kept_within_a_bound() -> None:
    target = tiny_decoder(tiny_spec(max_positions=12))
    features = Features(target, (1, 2), memory=2 * 40 * 2 * 10)
    for tokens, rows in (([1, 2, 3, 4, 5, 6], 6), ([1, 2, 3, 4, 5, 6], 6), ([1, 2, 3, 4, 5], 11)):
        features([Example.of(tokens, ())])
        assert features.rows == rows
    features([Example.of([1, 2, 3, 4, 5], ())])  # for which there was no room
    assert features.rows == 16
    features([Example.of([1, 2, 3, 4], ())])  # and for this there is
    features([Example.of([1, 2, 3, 4], ())] * 2)
    assert features.rows == 20
    with pytest.raises(ContextLengthError, match=r"13 tokens.*12"):
        features([Example.of(range(13), ())])


@pytest.mark.parametrize(("form", "tolerance"), [("fp32", 1e-5), ("bf16", 0.02), ("int8", 0.04)])
@pytest.mark.parametrize("changes", [{}, {"tied": True, "logit_softcap": 2.0, "logit_multiplier": 0.7, "hidden": 72}])
def test_shared_weights_are_the_targets_own(form: Format, tolerance: float, changes: dict[str, Any]) -> None:
    spec = tiny_spec(**changes)
    target = tiny_decoder(spec, form)
    shared = Shared.of(target)
    scores = Cache(target).run(piece(0, random_ids(50)), features=(0, 2))
    assert torch.equal(scores.features[0], shared.embedding[random_ids(50)])
    assert torch.allclose(shared.states(scores.features[2]), scores.hidden, atol=1e-5)
    error = (shared.logits(scores.features[2]) - scores.logits).square().mean().sqrt()
    assert error <= tolerance * scores.logits.square().mean().sqrt()


def test_ids_that_cannot_be_emitted_have_no_chance() -> None:
    target = tiny_decoder(tiny_spec())
    target.vocab_size = VOCAB - 4
    logits = Shared.of(target).logits(torch.randn(3, 40))
    assert logits.shape == (3, VOCAB)
    assert bool((logits[:, -4:] == -torch.inf).all())
    assert bool(logits[:, :-4].isfinite().all())
