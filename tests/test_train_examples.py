"""What heads are trained on: the target's own answers, which of their tokens count, and its states."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.errors import ContextLengthError, OptionError
from paceline.sampling import Sampling
from paceline.targets.spec import LayerSpec
from paceline.train.examples import Example, answered, frequent_ids, preview
from paceline.train.pack import Pack, Reader
from paceline.train.shared import Shared
from paceline.train.taps import Taps
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


def labels_by_hand(examples: list[Example], depth: int) -> list[tuple[int, int]]:
    """The row of every root and the label of its draft at ``depth``."""
    found, base = [], 0
    for example in examples:
        tokens, counts = example.tokens, example.counts
        for root in range(len(tokens) - 2):
            if counts[root + 2]:
                whole = root + 2 + depth < len(tokens) and all(counts[root + 2 : root + 3 + depth])
                found.append((base + root, tokens[root + 2 + depth] if whole else -1))
        base += len(tokens)
    return found


def test_labels_never_leave_their_answer() -> None:
    examples = [
        Example.of([1, 2, 3], [4, 5, 6]),
        Example.of([7], [8, 9]),
        Example((1, 2, 3, 4, 5, 6, 7, 8), (False, True, True, False, True, True, True, False)),
        Example.of([1, 2], [3]),
    ]
    pack = Pack.of(examples, Taps(tiny_decoder(tiny_spec()), (2,)))
    roots = pack.roots()
    for depth in range(4):
        assert list(zip(roots.tolist(), pack.labels(roots, depth).tolist(), strict=True)) == labels_by_hand(
            examples, depth
        )
    assert pack.tokens[roots + 2].tolist() == [4, 5, 6, 9, 3, 5, 6, 7, 3]


def test_an_epoch_reads_every_example_once() -> None:
    examples = [Example.of([token], [token] * (2 + token % 5)) for token in range(20)] + [Example.of([1], [50])]
    reader = Reader(examples, Taps(tiny_decoder(tiny_spec()), (0,)), 16)
    dice = random.Random(0)
    orders = []
    for _ in range(2):
        packs, shares = zip(*reader.epoch(dice), strict=True)
        order = [int(pack.tokens[row]) for pack in packs for row in (pack.places == 0).nonzero()[:, 0]]
        assert sorted(order) == list(range(20))  # the last of all has nothing to learn from
        assert all(len(pack.tokens) <= 16 for pack in packs)
        assert list(shares) == sorted(set(shares))
        assert shares[-1] == 1.0
        orders.append(order)
    assert orders[0] != orders[1]
    with pytest.raises(OptionError, match="nothing to train on"):
        Reader(examples[-1:], Taps(tiny_decoder(tiny_spec()), (0,)), 16)


WINDOWS = tiny_spec([LayerSpec(rope_spec(), 20), LayerSpec(rope_spec(), None), LayerSpec(rope_spec(), 20)])


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_states_are_the_bits_that_decoding_sees(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.train.taps._PIECE", 17)
    target, tokens = tiny_decoder(WINDOWS, form, threads=2), random_ids(70)
    cache = Cache(target)
    passes = [cache.run(piece(0, [token], at), features=(0, 2, 3)) for at, token in enumerate(tokens)]
    for layer, states in zip((2, 0, 3), Taps(target, (2, 0, 3))(tokens), strict=True):
        assert torch.equal(states, torch.cat([scores.features[layer] for scores in passes]))


def test_states_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(tiny_spec(max_positions=12))
    runs = 0
    forward = target.forward

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal runs
        runs += 1
        return forward(*given, **more)

    monkeypatch.setattr(target, "forward", counted)
    taps = Taps(target, (1, 2), memory=2 * 40 * 4 * 10)
    for tokens, expected in (([1, 2, 3, 4, 5, 6], 1), ([1, 2, 3, 4, 5, 6], 1), ([1, 2, 3, 4, 5], 2)):
        taps(tokens)
        assert runs == expected
    taps([1, 2, 3, 4, 5])  # for which there was no room
    assert runs == 3
    taps([1, 2, 3, 4])  # and for this there is
    taps([1, 2, 3, 4])
    assert runs == 4
    with pytest.raises(ContextLengthError, match=r"13 tokens.*12"):
        taps(range(13))


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
