"""Whether a head fits a target, heads from nothing, and the self-test."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.errors import DrafterError
from paceline.heads.check import check_head, require_fit
from paceline.heads.formats import read_head
from paceline.heads.make import FLAGS, random_head
from paceline.heads.selftest import CAUSES, FLOOR, TOKENS, agreement
from paceline.heads.spec import MedusaSpec
from paceline.targets.spec import from_hf_config
from tests.heads_files import IDS, LLAMA, eagle1, eagle3, medusa, medusa_vllm, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from paceline.heads.head import Head

    Made = tuple[dict[str, Any], dict[str, Tensor]]

CONFIG = {**LLAMA, "num_hidden_layers": 12, "max_position_embeddings": 8192}
TARGET = from_hf_config(CONFIG)


def failing(head: Head, usable: int = IDS, **changes: Any) -> list[str]:
    target = from_hf_config({**CONFIG, **changes})
    failed = [check for check in check_head(head, target, usable) if not check.passed]
    assert all(check.advice for check in failed)
    if failed:
        with pytest.raises(DrafterError, match=failed[0].name):
            require_fit(head, target, usable)
    else:
        require_fit(head, target, usable)
    return [check.name for check in failed]


@pytest.mark.parametrize("make", [eagle1, eagle3, medusa, medusa_vllm, lambda: medusa_vllm(columns=12)])
def test_a_head_fits_its_target_and_no_other(make: Callable[[], Made], tmp_path: Path) -> None:
    head = read_head(str(write(tmp_path, *make())))
    assert failing(head) == []
    assert "hidden size" in failing(head, hidden_size=32)
    assert failing(head, vocab_size=5000, usable=5000) == ["vocabulary"]
    assert failing(head, vocab_size=5000, usable=30) == (["vocabulary"] if head.provenance.dialect == "eagle" else [])


def test_layers(tmp_path: Path) -> None:
    config, tensors = eagle3()
    usual = read_head(str(write(tmp_path / "usual", config, tensors)))
    assert failing(usual, num_hidden_layers=6) == ["layers"]  # 2, 3, 3
    assert failing(usual, num_hidden_layers=8) == []
    line = next(check for check in check_head(usual, TARGET, IDS) if check.name == "layers")
    assert line.found == "it fuses the states before layers 2, 6, 9 of 12 (its file leaves them open: the usual ones)"
    named = {**config, "eagle_aux_hidden_state_layer_ids": [2, 6, 13]}
    assert failing(read_head(str(write(tmp_path / "named", named, tensors)))) == ["layers"]


def test_layers_that_look_counted_by_output_are_remarked_on(tmp_path: Path) -> None:
    config, tensors = eagle3()
    inputs = {**config, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    head = read_head(str(write(tmp_path / "inputs", inputs, tensors)))
    line = next(check for check in check_head(head, TARGET, IDS) if check.name == "layers")
    assert line.passed
    assert line.advice is not None
    assert "eagle3_layers_to_capture" in line.advice
    outputs = {**config, "eagle3_layers_to_capture": [1, 5, 8]}
    head = read_head(str(write(tmp_path / "outputs", outputs, tensors)))
    line = next(check for check in check_head(head, TARGET, IDS) if check.name == "layers")
    assert line.advice is None
    assert "before layers 2, 6, 9 of 12" in line.found


def test_a_wider_target_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    config, tensors = eagle3(target_hidden=24)
    wide = read_head(str(write(tmp_path / "own", config, tensors)))
    assert failing(wide, hidden_size=24) == []
    assert failing(wide) == ["hidden size"]
    del tensors["embed_tokens.weight"]
    assert failing(read_head(str(write(tmp_path / "shared", config, tensors))), hidden_size=24) == ["shared weights"]


def test_the_context_in_its_file_limits_nothing(tmp_path: Path) -> None:
    head = read_head(str(write(tmp_path, *eagle3())))
    line = next(check for check in check_head(head, TARGET, IDS) if check.name == "context")
    assert line.passed
    assert line.found == "its file says 2048 tokens against 8192: it drafts beyond them too, perhaps less well"


def test_ids_that_cannot_be_emitted_are_counted(tmp_path: Path) -> None:
    head = read_head(str(write(tmp_path, *eagle3())))  # ids 2, 5, ... 29
    line = next(check for check in check_head(head, TARGET, 20) if check.name == "draft vocabulary")
    assert line.found == "6 of 20 ids (30%); others are never drafted"
    assert failing(head, usable=2) == ["draft vocabulary"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("medusa", {}),
        ("medusa", {"head": "shared", "heads": 2, "layers": 2}),
        ("medusa", {"draft_vocab_size": 9}),
        ("eagle", {"layers": 2, "intermediate": 8}),
        ("eagle3", {}),
        ("eagle3", {"target_ids": [5, 2, 30]}),
        ("eagle3", {"flags": FLAGS[1:], "features": (0, 12)}),
    ],
)
def test_random_heads_fit(kind: Any, options: dict[str, Any]) -> None:
    head = random_head(kind, TARGET, 1, **options)
    assert failing(head) == []
    assert {name: tuple(tensor.shape) for name, tensor in head.tensors.items()} == head.spec.shapes()
    again, other = random_head(kind, TARGET, 1, **options), random_head(kind, TARGET, 2, **options)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in head.tensors.items())
    assert any(not torch.equal(other.tensors[name], tensor) for name, tensor in head.tensors.items())
    assert head.spec.kind == kind
    assert len(head.target_ids) == head.spec.draft_vocab_size


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_vocabularies_are_compared_in_a_sentence(kind: Any) -> None:
    head, ids = random_head(kind, TARGET), TARGET.vocab_size
    for usable, end in ((ids, ""), (ids - 2, f", of which {ids - 2} can be emitted")):
        found = {check.name: check.found for check in check_head(head, TARGET, usable)}
        assert found["vocabulary"] == f"it has {ids} ids, the target {ids}{end}"


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 7])
def test_random_heads_fit_small_targets(layers: int) -> None:
    target = replace(TARGET, layers=TARGET.layers[:layers])
    require_fit(random_head("eagle3", target), target, IDS)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("eagle", {"draft_vocab_size": 5}, "all its ids"),
        ("eagle", {"flags": ("fc_norm",)}, "belong to an EAGLE-3 head"),
        ("eagle3", {"draft_vocab_size": 41}, "only|has 40 ids"),
        ("eagle3", {"target_ids": [1, 1]}, "different ids"),
        ("eagle3", {"target_ids": [40]}, "different ids"),
        ("eagle3", {"features": (3, 1)}, "must ascend"),
        ("eagle3", {"features": (3, 13)}, "within 0 to 12"),
        ("eagle3", {"flags": ("fc_nrom",)}, "no flag 'fc_nrom'"),
        ("eagle3", {"flags": ("fc_norm", "norm_before_fc")}, "exclude each other"),
    ],
)
def test_heads_that_cannot_be_made(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        random_head(kind, TARGET, **options)


def test_a_medusa_head_with_fewer_ids_has_its_own_product() -> None:
    spec = random_head("medusa", TARGET, draft_vocab_size=9).spec
    assert isinstance(spec, MedusaSpec)
    assert spec.head == "each"


def test_agreement() -> None:
    wanted = list(range(TOKENS))
    good = agreement(wanted[:7] + [99] * 25, wanted, "h")
    assert (good.agreed, good.total, good.warning) == (7, 32, None)
    assert good.share == 7 / 32 >= FLOOR
    bad = agreement(wanted[:6] + [99] * 26, wanted, "someone/head")
    assert bad.warning is not None
    assert "someone/head guesses only 6 of 32" in bad.warning
    assert all(cause in bad.warning for cause in CAUSES)
    assert agreement([], [], "h").warning is None
    assert agreement([], [], "h").share == 0
    assert agreement([1, 2], [1, 3], "h", floor=0.6).warning is not None
    with pytest.raises(ValueError, match="longer"):
        agreement([1], [1, 2], "h")
