"""Tiny models of every family, in every number format: trees, batches and pieces do not change one token."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from paceline.batch import Rows
from paceline.pages import PagePool, PageTable
from paceline.targets.linear import Format
from paceline.targets.spec import from_hf_config
from paceline.targets.weights import FolderWeights
from paceline.tree import TokenTree
from tests.models import FAMILIES, tiny
from tests.test_families import logits_in_pieces, packed_decoder
from tests.toys import ScriptedDrafter, ToyRun, path_rule

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from paceline.targets.decoder import Decoder

PROMPTS = ([5, 9, 2, 77, 31, 8, 40, 41, 42, 43, 44, 45, 3], [7], [60, 61] * 9)
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 4})


def half_right(answers: Seq[Seq[int]]) -> Callable[[Seq[int], int], list[int]]:
    """Knows the answers to the prompts, and says every third token wrong."""
    known = {len(prompt): (prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)}

    def rule(tokens: Seq[int], budget: int) -> list[int]:
        start = next(n for n, (prompt, _) in sorted(known.items(), reverse=True) if list(tokens[:n]) == list(prompt))
        done = len(tokens) - start
        right = known[start][1][done : done + budget]
        return [token if (done + place) % 3 else (token + 1) % 90 for place, token in enumerate(right)]

    return rule


def run(decoder: Decoder) -> ToyRun:
    return ToyRun(
        path_rule(1), target=decoder, vocab=decoder.vocab_size, max_model_len=64, pages=32, max_batch_tokens=7
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_not_one_token_differs(family: str, tmp_path: Path) -> None:
    _, write = tiny(family)
    spec = from_hf_config(json.loads((write(tmp_path) / "config.json").read_text()))
    accepted = rejected = 0
    for dtype in get_args(Format):
        decoder = packed_decoder(spec, FolderWeights(spec, tmp_path), tmp_path, dtype)
        for settings in SETTINGS:
            plain = run(decoder)
            alone = [plain.add(prompt, max_tokens=24, eos=(), **settings) for prompt in PROMPTS]
            for sequence in alone:
                plain.finish(sequence)
            drafted = run(decoder)
            drafter = ScriptedDrafter(half_right([sequence.output for sequence in alone]))
            together = [drafted.add(prompt, drafter, max_tokens=24, eos=(), **settings) for prompt in PROMPTS]
            drafted.finish(*together)
            assert [s.output for s in together] == [s.output for s in alone]
            accepted += sum(s.record.accepted for s in together)
            rejected += sum(s.record.drafted - s.record.accepted for s in together)
    assert accepted > 100
    assert rejected > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_of_a_tree_is_scored_as_its_path_is(family: str, tmp_path: Path) -> None:
    """Bit for bit, below contexts shorter and longer than the windows, in a tree of 24 nodes."""
    _, write = tiny(family)
    spec = from_hf_config(json.loads((write(tmp_path) / "config.json").read_text()))
    source = random.Random(3)
    for dtype, length in zip(get_args(Format), (5, 20, 33), strict=True):
        decoder = packed_decoder(spec, FolderWeights(spec, tmp_path), tmp_path, dtype)
        pools = [PagePool(group, 8) for group in decoder.groups]
        tables = [PageTable(pool, 128) for pool in pools]
        for table in tables:
            table.reserve(length + 24)
        context = [source.randrange(90) for _ in range(length)]
        rows = Rows()
        rows.piece(context, 0, tables, 0)
        decoder.forward(rows.batch(), [pool.slab for pool in pools])
        tree = TokenTree.root(source.randrange(90))
        for token in range(23):
            tree.add(source.randrange(len(tree)), token, 0.0, "test")
        rows = Rows()
        rows.tree(tree, length, tables)
        logits = decoder.forward(rows.batch(), [pool.slab for pool in pools]).logits
        for node in range(0, 24, 4):
            path = torch.tensor([*context, *(tree.tokens[n] for n in tree.path(node))])
            assert torch.equal(logits[node], logits_in_pieces(decoder, path, [len(path)])[-1])
