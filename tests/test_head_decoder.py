"""EAGLE heads on the kernels: a row's bits depend on its path and its states alone, and are those of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from paceline.errors import DrafterError, KernelError
from paceline.heads.eagle import EagleNetwork
from paceline.heads.spec import EagleSpec
from paceline.kernels import REFERENCE
from paceline.targets.head_decoder import HeadDecoder
from paceline.targets.linear import unpack_linear
from tests.decoders import VOCAB, Cache, paths, piece, random_ids, random_tree, tiny_decoder, tiny_spec, tree_rows
from tests.heads import EAGLES, eagle_spec, random_weights, tiny_eagle

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.targets.linear import Format
    from tests.decoders import Rows

FORMATS: tuple[Format, ...] = ("fp32", "bf16", "int8")
EVERYWHERE = [*paths(), REFERENCE]


def head_decoder(name: str, form: Format = "fp32", threads: int = 1, path: str = "") -> HeadDecoder:
    return HeadDecoder(tiny_eagle(name), tiny_decoder(tiny_spec(), form, threads, path=path))


class HeadCache(Cache):
    """Slabs for the head's own keys."""

    def __init__(self, head: HeadDecoder, sequences: int = 1, seed: int = 0) -> None:
        super().__init__(head, sequences, seed=seed)  # type: ignore[arg-type]
        self.head = head

    def pass_(self, states: Tensor, *segments: Rows) -> tuple[Tensor, Tensor]:
        return self.head.forward(self.batch(segments), self.slabs, states)


def random_states(head: HeadDecoder, rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, head.spec.hidden, generator=generator)


@pytest.mark.parametrize("name", EAGLES)
@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("form", FORMATS)
def test_every_head_is_close_to_the_reference(name: str, path: str, form: Format) -> None:
    ids, tree = random_ids(25), random_tree(9, seed=1)
    found = []
    for where in (path, REFERENCE):
        head = head_decoder(name, form, 2, where)
        cache = HeadCache(head)
        taps = [random_states(head_decoder("eagle"), 25, seed) for seed in range(len(head.taps))]
        states = head.states(taps)
        prompt = cache.pass_(states, piece(0, ids))
        found.append([states, *prompt, *cache.pass_(random_states(head, 9), tree_rows(0, tree, 25))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4 if form == "fp32" else 0.05, rtol=1e-3)


@pytest.mark.parametrize("name", EAGLES)
@pytest.mark.parametrize("path", EVERYWHERE)
def test_every_head_is_the_network(name: str, path: str) -> None:
    """A whole sequence, and a tree below it whose rows see their own branch."""
    given, target = tiny_eagle(name), tiny_decoder(tiny_spec(), path=path)
    head, ids, tree = HeadDecoder(given, target), random_ids(20), random_tree(9, seed=3)
    assert isinstance(given.spec, EagleSpec)
    rows = unpack_linear(target.plan.linear("head"), VOCAB, 40, "fp32")
    network = EagleNetwork(given.spec, given.tensors, embedding=target.plan.tensors["embedding.data"], head=rows)
    taps = [random_states(head_decoder("eagle"), 20, seed) for seed in range(len(head.taps))]
    cache = HeadCache(head)
    with torch.no_grad():
        if given.spec.kind == "eagle":
            wanted = torch.nn.functional.rms_norm(taps[0], (40,), target.plan.tensors["norm"], 1e-5)
        else:
            wanted = network.fuse(torch.cat(taps, 1))
        states = head.states(taps)
        assert torch.allclose(states, wanted, atol=1e-4)
        outputs, past = network(torch.tensor(ids), wanted, torch.arange(20))
        logits, last = cache.pass_(states, piece(0, ids))
        assert torch.allclose(logits, network.logits(outputs), atol=1e-4)
        assert torch.allclose(last, network.next_state(outputs), atol=1e-4)
        below = random_states(head, 9)
        visible = torch.tensor([[True] * 20 + [bool(mask >> node & 1) for node in range(9)] for mask in tree.masks()])
        positions = 20 + torch.tensor(tree.depths())
        outputs, _ = network(torch.tensor(tree.tokens), below, positions, visible=visible, cache=past)
        logits, last = cache.pass_(below, tree_rows(0, tree, 20))
        assert torch.allclose(logits, network.logits(outputs), atol=1e-4)
        assert torch.allclose(last, network.next_state(outputs), atol=1e-4)


@pytest.mark.parametrize("name", ["eagle", "eagle3, own width", "eagle3.1"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("path", EVERYWHERE)
def test_pieces_and_trees_have_the_bits_of_row_by_row(name: str, form: Format, path: str) -> None:
    head = head_decoder(name, form, 2, path)
    length, nodes = (9, 6) if path == REFERENCE else (120, 40)
    ids, tree = random_ids(length), random_tree(nodes, seed=2)
    states, below = random_states(head, length), random_states(head, nodes, seed=1)
    cache = HeadCache(head)
    plain = [cache.pass_(states[i : i + 1], piece(0, [token], i)) for i, token in enumerate(ids)]
    cache = HeadCache(head, seed=1)
    cut = length // 3
    parts = [cache.pass_(states[:cut], piece(0, ids[:cut])), cache.pass_(states[cut:], piece(0, ids[cut:], cut))]
    for place in range(2):
        assert torch.equal(torch.cat([part[place] for part in parts]), torch.cat([row[place] for row in plain]))
    grown = cache.pass_(below, tree_rows(0, tree, length))
    for node in range(0, nodes, 5):
        on_path = tree.path(node)
        alone = HeadCache(head, seed=node).pass_(
            torch.cat([states, below[on_path]]), piece(0, [*ids, *(tree.tokens[n] for n in on_path)])
        )
        assert torch.equal(grown[0][node], alone[0][-1])
        assert torch.equal(grown[1][node], alone[1][-1])


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["eagle, bias and two layers", "eagle3, few ids"])
def test_neighbours_and_threads_change_no_bit(name: str, threads: int, form: Format) -> None:
    single, several = head_decoder(name, form), head_decoder(name, form, threads)
    lengths = (3, 140, 37)
    prompts = [random_ids(n, seed=n) for n in lengths]
    states = [random_states(single, n, seed=n) for n in lengths]
    alone = [HeadCache(single).pass_(s, piece(0, p)) for s, p in zip(states, prompts, strict=True)]
    together = HeadCache(several, 3, seed=9).pass_(torch.cat(states), *(piece(i, p) for i, p in enumerate(prompts)))
    for place in range(2):
        assert torch.equal(together[place], torch.cat([found[place] for found in alone]))


def test_what_belongs_to_the_target_is_not_copied() -> None:
    target = tiny_decoder(tiny_spec(), "int8")
    head = HeadDecoder(tiny_eagle("eagle"), target)
    for name in ("embedding.data", "embedding.scale", "head.data", "head.scale"):
        assert head.plan.tensors[name] is target.plan.tensors[name]
    own = HeadDecoder(tiny_eagle("eagle3, own width"), target)
    assert own.plan.tensors["embedding.data"].shape == (101, 33)


def test_features_are_checked() -> None:
    head = head_decoder("eagle3")
    cache = HeadCache(head)
    batch = cache.batch([piece(0, [5, 6])])
    with pytest.raises(KernelError, match=r"\(2, 40\) are needed, not \(1, 40\)"):
        head.forward(batch, cache.slabs, random_states(head, 1))
    with pytest.raises(KernelError, match=r"torch\.float32"):
        head.forward(batch, cache.slabs, random_states(head, 2).double())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden": 48}, "states of 48 values, the target has 40"),
        ({"vocab_size": 90}, "it has 90 ids, the target 101"),
        ({"features": (0, 1, 3)}, "layers 0, 1, 3 of 2"),
        ({"hidden": 32}, "32 wide and takes embedding from its target"),
        ({"hidden": 32, "own_head": False, "own_embedding": True}, "32 wide and takes head"),
    ],
)
def test_heads_of_another_model_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        HeadDecoder(random_weights(eagle_spec("eagle3", **changes)), tiny_decoder(tiny_spec()))
