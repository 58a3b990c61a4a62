"""The decoder: a row's bits depend on its path alone, and are those of the torch reference to rounding."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import KernelError, OptionError
from paceline.kernels import REFERENCE
from paceline.targets.decoder import Decoder
from paceline.targets.spec import LayerSpec, ModelSpec
from tests.decoders import (
    VOCAB,
    Cache,
    paths,
    piece,
    random_ids,
    random_tensors,
    random_tree,
    rope_spec,
    tiny_decoder,
    tiny_spec,
    tree_rows,
)

if TYPE_CHECKING:
    from paceline.targets.linear import Format

FORMATS: tuple[Format, ...] = ("fp32", "bf16", "int8")
EVERYWHERE = [*paths(), REFERENCE]

PLAIN = LayerSpec(rope_spec(), None)
VARIANTS: dict[str, ModelSpec] = {
    "llama": tiny_spec(),
    "biases": tiny_spec(biases=("q", "k", "v", "o", "gate", "up", "down")),
    "gemma": tiny_spec(
        [LayerSpec(rope_spec(base=1e6), None), LayerSpec(rope_spec(), 24), LayerSpec(rope_spec(), 24)],
        post_norms=True,
        activation="gelu_tanh",
        attention_softcap=5.0,
        logit_softcap=3.0,
        embedding_multiplier=40**0.5,
        tied=True,
    ),
    "olmo": tiny_spec(pre_norms=False, post_norms=True, qk_norm="full"),
    "qwen3": tiny_spec(qk_norm="head", heads=5, kv_heads=1),
    "granite": tiny_spec(
        residual_multiplier=0.22, embedding_multiplier=12.0, logit_multiplier=1 / 8, attention_scale=0.015625
    ),
    "phi": tiny_spec([LayerSpec(rope_spec(12, scale=1.19), None)] * 2, head_dim=24),
    "smollm3": tiny_spec([PLAIN, LayerSpec(None, None)], activation="gelu"),
    "small heads": tiny_spec([LayerSpec(rope_spec(8), None)] * 2, head_dim=8, hidden=33, intermediate=50),
    "wide heads": tiny_spec([LayerSpec(rope_spec(80), 100)] * 2, head_dim=80, heads=9, kv_heads=1),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("path", paths())
def test_every_variant_is_close_to_the_reference(name: str, path: str) -> None:
    spec = VARIANTS[name]
    ids = random_ids(25)
    tree = random_tree(9, seed=1)
    found = []
    for where in (path, REFERENCE):
        cache = Cache(tiny_decoder(spec, path=where, threads=2))
        prompt = cache.run(piece(0, ids), features=range(len(spec.layers) + 1))
        branches = cache.run(tree_rows(0, tree, len(ids)))
        found.append([prompt.logits, prompt.hidden, *prompt.features.values(), branches.logits])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("path", EVERYWHERE)
@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16])
def test_a_prompt_in_pieces_gives_the_bits_of_token_by_token(form: Format, path: str, kv: torch.dtype) -> None:
    decoder = tiny_decoder(tiny_spec(), form, threads=2, kv=kv, path=path)
    ids = random_ids(12 if path == REFERENCE else 150)
    plain = Cache(decoder).chain(ids)
    for cuts in ([len(ids)], [1, 9, len(ids)], [7, 7 + len(ids) // 3, len(ids)]):
        cache = Cache(decoder, seed=len(cuts))
        starts = [0, *cuts[:-1]]
        parts = [cache.run(piece(0, ids[a:b], a)).logits for a, b in zip(starts, cuts, strict=True)]
        assert torch.equal(torch.cat(parts), plain)


@pytest.mark.parametrize("name", ["gemma", "olmo", "small heads", "wide heads"])
@pytest.mark.parametrize("form", FORMATS)
def test_variants_keep_their_bits_in_pieces(name: str, form: Format) -> None:
    decoder = tiny_decoder(VARIANTS[name], form, threads=2)
    ids = random_ids(290)
    plain = Cache(decoder).chain(ids)
    cache = Cache(decoder, seed=3)
    parts = [cache.run(piece(0, ids[:133])).logits, cache.run(piece(0, ids[133:], 133)).logits]
    assert torch.equal(torch.cat(parts), plain)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("path", EVERYWHERE)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_every_node_of_a_tree_has_the_bits_of_its_own_path(form: Format, path: str, name: str) -> None:
    decoder = tiny_decoder(VARIANTS[name], form, threads=2, path=path)
    context = 7 if path == REFERENCE else 120  # with the tree it crosses a chunk of 128
    ids = random_ids(context, seed=4)
    nodes = 9 if path == REFERENCE else 64
    tree = random_tree(nodes, seed=5)
    cache = Cache(decoder)
    cache.run(piece(0, ids))
    scores = cache.run(tree_rows(0, tree, context))
    for node in range(0, nodes, 7):
        whole = [*ids, *(tree.tokens[n] for n in tree.path(node))]
        alone = Cache(decoder, seed=node).run(piece(0, whole))
        assert torch.equal(scores.logits[node], alone.logits[-1]), node


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("form", FORMATS)
def test_neighbours_and_threads_change_no_bit(threads: int, form: Format) -> None:
    spec = VARIANTS["gemma"]
    prompts = [random_ids(n, seed=n) for n in (3, 140, 37)]
    trees = [random_tree(n, seed=n) for n in (1, 30, 9)]
    single = tiny_decoder(spec, form)
    expected = []
    for prompt, tree in zip(prompts, trees, strict=True):
        cache = Cache(single)
        expected.append((cache.run(piece(0, prompt)).logits, cache.run(tree_rows(0, tree, len(prompt))).logits))
    cache = Cache(tiny_decoder(spec, form, threads=threads), sequences=3, seed=9)
    cache.run(piece(1, prompts[1][:50]))
    first = cache.run(piece(0, prompts[0]), piece(1, prompts[1][50:], 50), piece(2, prompts[2]))
    assert torch.equal(first.logits, torch.cat([expected[0][0], expected[1][0][50:], expected[2][0]]))
    order = (2, 0, 1)
    mixed = cache.run(*(tree_rows(i, trees[i], len(prompts[i])) for i in order))
    assert torch.equal(mixed.logits, torch.cat([expected[i][1] for i in order]))


@settings(max_examples=25, deadline=None)
@given(
    context=st.integers(0, 300),
    nodes=st.integers(1, 64),
    seed=st.integers(0, 1000),
    window=st.sampled_from([None, 1, 5, 16, 40, 129]),
    threads=st.sampled_from([1, 2, 3]),
)
def test_any_tree_after_any_context(context: int, nodes: int, seed: int, window: int | None, threads: int) -> None:
    decoder = tiny_decoder(tiny_spec([LayerSpec(rope_spec(), window)]), threads=threads)
    ids, tree = random_ids(context, seed), random_tree(nodes, seed)
    cache = Cache(decoder, seed=seed)
    if ids:
        cache.run(piece(0, ids))
    scores = cache.run(tree_rows(0, tree, context))
    node = seed % nodes
    whole = [*ids, *(tree.tokens[n] for n in tree.path(node))]
    assert torch.equal(scores.logits[node], Cache(decoder).run(piece(0, whole)).logits[-1])


def test_a_block_whose_rows_see_each_other() -> None:
    """Visible words need not be trees: every row of a block may see the whole block."""
    ids, block = random_ids(20), random_ids(6, seed=1)
    found = []
    for path in (paths()[0], REFERENCE):
        cache = Cache(tiny_decoder(tiny_spec(), path=path))
        cache.run(piece(0, ids))
        rows = piece(0, block, 20)
        rows.context[:] = [20] * 6
        rows.visible[:] = [0b111111] * 6
        rows.positions[:] = [25] * 6
        found.append(cache.run(rows).logits)
    assert torch.allclose(found[0], found[1], atol=2e-5)


def test_pages_before_a_window_may_be_gone() -> None:
    decoder = tiny_decoder(tiny_spec([LayerSpec(rope_spec(), 20)] * 2))
    ids = random_ids(200)
    plain = Cache(decoder).chain(ids)
    cache = Cache(decoder)
    for at, token in enumerate(ids):
        cache.tables[0, : max(0, at - 19) // 16] = -1
        assert torch.equal(cache.run(piece(0, [token], at)).logits[0], plain[at])


def test_only_scored_rows_have_logits() -> None:
    decoder = tiny_decoder(tiny_spec())
    ids = random_ids(20)
    whole = Cache(decoder).run(piece(0, ids))
    cache = Cache(decoder)
    some = decoder.forward(cache.batch([piece(0, ids)], [3, 19]), cache.slabs)
    assert torch.equal(some.logits, whole.logits[[3, 19]])
    assert torch.equal(some.hidden, whole.hidden[[3, 19]])
    none = decoder.forward(cache.batch([piece(0, ids)], []), cache.slabs)
    assert none.logits.shape == (0, VOCAB)


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("rows", [1, 40])
def test_timing_the_parts_of_a_pass_changes_no_bit(path: str, rows: int) -> None:
    spec = tiny_spec(hidden=256, intermediate=512)
    ids = random_ids(200 + rows)
    cache = Cache(tiny_decoder(spec, threads=2, path=path))
    cache.run(piece(0, ids[:200]))
    batch = cache.batch([piece(0, ids[200:], 200)])
    plain = cache.decoder.forward(batch, cache.slabs).logits
    spent = torch.zeros(3, dtype=torch.float64)
    for _ in range(5):
        before = spent.clone()
        logits = cache.decoder.forward(batch, cache.slabs, seconds=spent).logits
        assert torch.equal(logits, plain)
        assert (spent > before).all()


def test_seconds_are_checked() -> None:
    for path, seconds, message in (
        ("", torch.zeros(2, dtype=torch.float64), "shape"),
        ("", torch.zeros(3), "float64"),
        (REFERENCE, torch.zeros(3, dtype=torch.float64), "does not time"),
    ):
        cache = Cache(tiny_decoder(tiny_spec(), path=path))
        with pytest.raises(KernelError, match=message):
            cache.decoder.forward(cache.batch([piece(0, [1])]), cache.slabs, seconds=seconds)


@pytest.mark.parametrize("path", [paths()[0], REFERENCE])
def test_features_are_the_residual_stream(path: str) -> None:
    spec = VARIANTS["gemma"]
    decoder = tiny_decoder(spec, path=path, threads=2)
    ids = random_ids(9)
    scores = Cache(decoder).run(piece(0, ids), features=(0, 3))
    embedding = decoder.plan.tensors["embedding.data"][ids]
    assert torch.allclose(scores.features[0], embedding * spec.embedding_multiplier)
    last = scores.features[3]
    normed = last * torch.rsqrt(last.square().mean(1, keepdim=True) + 1e-5) * decoder.plan.tensors["norm"]
    assert torch.allclose(scores.hidden, normed, atol=1e-5)
    alone = Cache(decoder).run(piece(0, ids[:1]), features=(0, 1, 2, 3))
    assert torch.equal(alone.features[3], last[:1])


@pytest.mark.parametrize("path", [paths()[0], REFERENCE])
def test_a_prefix_is_the_model_of_the_first_layers(path: str) -> None:
    spec = VARIANTS["gemma"]
    decoder = tiny_decoder(spec, "int8", path=path)
    short = decoder.prefix(2)
    assert short.plan.tensors is decoder.plan.tensors
    assert [group.layers for group in short.groups] == [1, 1]
    ids = random_ids(30)
    whole = Cache(decoder).run(piece(0, ids), features=[2])
    part = Cache(short).run(piece(0, ids), features=[2])
    assert torch.equal(part.features[2], whole.features[2])
    for layers in (0, 4):
        with pytest.raises(OptionError, match="3 layers"):
            decoder.prefix(layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([VOCAB])}, "token id"),
        ({"ids": torch.tensor([-1])}, "token id"),
        ({"positions": torch.tensor([512], dtype=torch.int32)}, "position"),
        ({"storage": torch.tensor([600], dtype=torch.int32)}, "page"),
        ({"tables": (torch.tensor([[-1, -1]], dtype=torch.int32),)}, "page"),
        ({"tables": (torch.tensor([[99, 99]], dtype=torch.int32),)}, "page"),
        ({"context": torch.tensor([1])}, "torch.int32"),
        ({"context": torch.tensor([600], dtype=torch.int32)}, "page"),
        ({"score": torch.tensor([1])}, "scored"),
    ],
)
def test_bad_batches_are_refused(change: dict[str, Any], message: str) -> None:
    cache = Cache(tiny_decoder(tiny_spec()))
    batch = replace(cache.batch([piece(0, [5])]), **change)
    with pytest.raises(KernelError, match=message):
        cache.decoder.forward(batch, cache.slabs)


def test_options_are_checked() -> None:
    spec = tiny_spec()
    tensors = random_tensors(spec, "fp32")
    with pytest.raises(OptionError, match="float16"):
        Decoder(spec, tensors, "fp32", kv_dtype=torch.float16)
    with pytest.raises(OptionError, match="threads"):
        Decoder(spec, tensors, "fp32", threads=0)
    with pytest.raises(OptionError, match="101 ids"):
        Decoder(spec, tensors, "fp32", vocab_size=102)
    with pytest.raises(KernelError, match="no path 'sse'"):
        Decoder(spec, tensors, "fp32", path="sse")
    assert Decoder(spec, tensors, "fp32", max_model_len=64).max_positions == 64


@pytest.mark.parametrize("path", [paths()[0], REFERENCE])
def test_padded_ids_have_no_logits(path: str) -> None:
    spec = tiny_spec()
    tensors = random_tensors(spec, "int8")
    whole = Cache(Decoder(spec, tensors, "int8", path=path)).run(piece(0, [1, 2, 3])).logits
    cut = Cache(Decoder(spec, tensors, "int8", vocab_size=90, path=path)).run(piece(0, [1, 2, 3])).logits
    assert torch.equal(cut, whole[:, :90])


def test_a_forked_child_starts_threads_of_its_own() -> None:
    cache = Cache(tiny_decoder(tiny_spec(), threads=3))
    expected = cache.run(piece(0, [1, 2, 3])).logits
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(cache.run(piece(0, [1, 2, 3])).logits, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(cache.run(piece(0, [1, 2, 3])).logits, expected)
