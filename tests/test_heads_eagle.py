"""Published EAGLE heads of every dialect: what is read, and that it computes what the papers say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from paceline.heads.eagle import EagleNetwork, path_logits
from paceline.heads.formats import read_head
from paceline.heads.spec import EagleSpec
from tests.heads_files import (
    COLUMNS,
    DIM,
    HEADS,
    HIDDEN,
    IDS,
    KV_HEADS,
    Weights,
    eagle1,
    eagle3,
    nvidia,
    speculators,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paceline.heads.head import Head

TOKENS = [7, 3, 39, 0, 12, 5]
PATH = [8, 21, 2]
make = Weights(100)
EMBEDDING, HEAD = make(IDS, HIDDEN) * 4, make(IDS, HIDDEN)
THETA, EPS = 500000.0, 1e-5


def spec_of(head: Head) -> EagleSpec:
    assert isinstance(head.spec, EagleSpec)
    return head.spec


def network(head: Head) -> EagleNetwork:
    return EagleNetwork(spec_of(head), head.tensors, embedding=EMBEDDING, head=HEAD)


def states_for(head: Head) -> Tensor:
    spec = spec_of(head)
    return Weights(5)(len(TOKENS) - 1, spec.fused * spec.target_hidden) * 3


# The reference: one row after another, in the names of the files, from the formulas alone.


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + EPS).sqrt() * weight


def turn(heads: Tensor, position: int) -> Tensor:
    turned = heads.clone()
    for pair in range(DIM // 2):
        angle = torch.tensor(position / THETA ** (2 * pair / DIM))
        a, b = heads[:, pair], heads[:, pair + DIM // 2]
        turned[:, pair] = a * angle.cos() - b * angle.sin()
        turned[:, pair + DIM // 2] = b * angle.cos() + a * angle.sin()
    return turned


class Row:
    """A llama layer without its first norm, with its keys and values so far."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self.w = {name.removeprefix(prefix + "."): t for name, t in tensors.items() if name.startswith(prefix)}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, read: Tensor, residual: Tensor, position: int) -> Tensor:
        q, k, v = ((self.w[f"self_attn.{n}_proj.weight"] @ read).reshape(-1, DIM) for n in "qkv")
        self.keys.append(turn(k, position))
        self.values.append(v)
        q, out = turn(q, position), []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = torch.stack([(q[head] @ key[group]) / DIM**0.5 for key in self.keys]).softmax(0)
            out.append(sum(s * value[group] for s, value in zip(scores, self.values, strict=True)))
        x = residual + self.w["self_attn.o_proj.weight"] @ torch.cat(out)
        y = norm(x, self.w["post_attention_layernorm.weight"])
        gate = F.silu(self.w["mlp.gate_proj.weight"] @ y) * (self.w["mlp.up_proj.weight"] @ y)
        return x + self.w["mlp.down_proj.weight"] @ gate


def reference(tensors: dict[str, Tensor], prefix: str, states: Tensor, flags: dict[str, Any]) -> Tensor:
    """Logits along PATH below TOKENS."""
    embedding = tensors.get("embed_tokens.weight", EMBEDDING)
    layer, found = Row(tensors, prefix), []
    state = torch.empty(0)
    for place, token in enumerate(TOKENS[1:] + PATH):
        if place < len(states):
            state = states[place]
            if flags.get("fc_norm"):
                parts = torch.split(state, len(state) // 3)
                state = torch.cat([norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
            if flags.get("norm_before_fc"):
                state = norm(state, tensors["input_norm.weight"])
            if prefix and "lm_head.weight" in tensors:
                state = tensors["fc.weight"] @ state
        if "lm_head.weight" in tensors:
            normed = norm(state, tensors[f"{prefix}.hidden_norm.weight"])
            read = torch.cat([norm(embedding[token], tensors[f"{prefix}.input_layernorm.weight"]), normed])
            out = layer(read, normed if flags.get("norm_before_residual") else state, place)
            final = norm(out, tensors["norm.weight"])
            logits, state = tensors["lm_head.weight"] @ final, final if flags.get("norm_output") else out
        else:
            x = tensors["fc.weight"] @ torch.cat([embedding[token], state]) + tensors.get("fc.bias", torch.zeros(1))
            state = layer(x, x, place)
            logits = HEAD @ state
        if place >= len(states) - 1:
            found.append(logits)
    return torch.stack(found)


def drafts_as_written(
    tmp_path: Path, made: tuple[dict[str, Any], dict[str, Tensor]], prefix: str, **flags: bool
) -> Head:
    config, tensors = made
    head = read_head(str(write(tmp_path / "head", config, tensors)))
    states = states_for(head)
    found = path_logits(network(head), TOKENS, states, PATH)
    torch.testing.assert_close(found, reference(tensors, prefix, states, flags), atol=2e-5, rtol=2e-5)
    return head


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1(bias: bool, tmp_path: Path) -> None:
    head = drafts_as_written(tmp_path, eagle1(bias=bias), "layers.0")
    spec = spec_of(head)
    assert (spec.kind, spec.fused, spec.fc_bias, spec.own_head, spec.own_embedding) == ("eagle", 1, bias, False, False)
    assert spec.taps(32) == (32,)
    assert spec.draft_vocab_size == IDS
    assert head.provenance.dialect == "eagle"


def test_a_bias_that_is_not_mentioned_need_not_be_there(tmp_path: Path) -> None:
    config, tensors = eagle1(bias=False)
    del config["bias"]
    assert not spec_of(drafts_as_written(tmp_path, (config, tensors), "layers.0")).fc_bias


def test_eagle1_with_its_own_embedding(tmp_path: Path) -> None:
    config, tensors = eagle1()
    tensors["embed_tokens.weight"] = Weights(9)(IDS, HIDDEN)
    assert spec_of(drafts_as_written(tmp_path, (config, tensors), "layers.0")).own_embedding


def test_eagle3_of_its_own_repository(tmp_path: Path) -> None:
    head = drafts_as_written(tmp_path, eagle3(), "midlayer")
    spec = spec_of(head)
    assert (spec.kind, spec.fused, spec.features, spec.draft_vocab_size) == ("eagle3", 3, None, COLUMNS)
    assert spec.taps(32) == (2, 16, 29)
    assert head.target_ids.tolist() == [3 * column + 2 for column in range(COLUMNS)]
    assert spec.max_positions == 2048


def test_eagle3_for_a_wider_target(tmp_path: Path) -> None:
    spec = spec_of(drafts_as_written(tmp_path, eagle3(target_hidden=24), "midlayer"))
    assert (spec.hidden, spec.target_hidden, spec.own_embedding) == (HIDDEN, 24, True)


def test_eagle3_with_all_ids(tmp_path: Path) -> None:
    config, tensors = eagle3(columns=IDS)
    head = drafts_as_written(tmp_path, (config, tensors), "midlayer")
    assert not spec_of(head).own_ids
    assert head.target_ids.tolist() == list(range(IDS))
    # a map that maps every id to itself says no more
    tensors |= {"d2t": torch.zeros(IDS, dtype=torch.int64), "t2d": torch.ones(IDS, dtype=torch.bool)}
    assert read_head(str(write(tmp_path / "mapped", config, tensors))).spec == head.spec


def test_eagle3_of_nvidia_has_its_layers_by_input(tmp_path: Path) -> None:
    spec = spec_of(drafts_as_written(tmp_path, nvidia(), "layers.0"))
    assert spec.features == (1, 5, 9)
    assert spec.taps(12) == (1, 5, 9)


def test_layers_counted_by_output_are_one_more_by_input(tmp_path: Path) -> None:
    config, tensors = eagle3()
    config["eagle3_layers_to_capture"] = [1, 15, 28]
    head = read_head(str(write(tmp_path, config, tensors)))
    assert spec_of(head).features == (2, 16, 29)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"norm_before_residual": True, "norm_output": True},
    ],
    ids=["plain", "3.1", "norm_before_fc", "both"],
)
def test_speculators(flags: dict[str, bool], tmp_path: Path) -> None:
    head = drafts_as_written(tmp_path, speculators(**flags), "layers.0", **flags)
    spec = spec_of(head)
    names = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
    assert {name for name in names if getattr(spec, name)} == set(flags)
    assert (head.provenance.dialect, head.provenance.target) == ("eagle3 (speculators)", "someone/target-8b")


def test_flags_of_the_repository_layout(tmp_path: Path) -> None:
    config, tensors = eagle3()
    tensors |= {f"fc_norm.{place}.weight": 1 + Weights(place)(HIDDEN) for place in range(3)}
    made = {**config, "fc_norm": True, "norm_output": True}, tensors
    assert spec_of(drafts_as_written(tmp_path, made, "midlayer", fc_norm=True, norm_output=True)).fc_norm


def test_norm_before_fc_inside_eagle_config(tmp_path: Path) -> None:
    config, tensors = nvidia()
    config["eagle_config"]["norm_before_fc"] = True
    tensors["input_norm.weight"] = 1 + Weights(3)(3 * HIDDEN)
    assert spec_of(drafts_as_written(tmp_path, (config, tensors), "layers.0", norm_before_fc=True)).norm_before_fc


def test_file_without_draft_vocab_size(tmp_path: Path) -> None:
    config, tensors = eagle3()
    del config["draft_vocab_size"]
    assert read_head(str(write(tmp_path, config, tensors))).spec.draft_vocab_size == COLUMNS


def test_d2t_may_hold_the_ids_themselves_where_t2d_proves_it(tmp_path: Path) -> None:
    config, tensors = eagle3()
    expected = read_head(str(write(tmp_path / "offsets", config, tensors)))
    tensors["d2t"] = tensors["d2t"] + torch.arange(COLUMNS)
    found = read_head(str(write(tmp_path / "ids", config, tensors)))
    assert torch.equal(found.target_ids, expected.target_ids)


def test_rope_of_its_configuration(tmp_path: Path) -> None:
    config, tensors = eagle3()
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    plain = spec_of(read_head(str(write(tmp_path / "plain", config, tensors))))
    scaled = spec_of(read_head(str(write(tmp_path / "scaled", {**config, "rope_scaling": scaling}, tensors))))
    assert plain.rope.inv_freq == pytest.approx([1, THETA**-0.5])
    assert scaled.rope.inv_freq != plain.rope.inv_freq


def test_qwen_like_configurations(tmp_path: Path) -> None:
    config, tensors = eagle1()
    config |= {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
    tensors |= {f"layers.0.self_attn.{n}_proj.bias": Weights(2)(HEADS * DIM if n == "q" else 8) for n in "qkv"}
    head = read_head(str(write(tmp_path, config, tensors)))
    assert spec_of(head).biases == ("q", "k", "v")
    assert network(head).linear("layers.0.q", torch.zeros(HIDDEN)).abs().sum() > 0


@pytest.mark.parametrize("how", ["shards", "pytorch_model.bin", "a file of its own", "prefixed", "half"])
def test_files(how: str, tmp_path: Path) -> None:
    config, tensors = eagle3()
    expected = read_head(str(write(tmp_path / "expected", config, tensors)))
    path = tmp_path / "head"
    if how == "shards":
        write(path, config, {}, "unused.bin")
        (path / "unused.bin").unlink()
        names = sorted(tensors)
        parts = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
        for file, part in parts.items():
            save_file({name: tensors[name].contiguous() for name in part}, path / file)
        index = {name: file for file, part in parts.items() for name in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    elif how == "prefixed":
        write(path, config, {f"model.{name}": tensor for name, tensor in tensors.items()})
    elif how == "half":
        floats = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
        write(path, config, floats)
        expected = read_head(str(write(tmp_path / "other", config, floats, "pytorch_model.bin")))
        assert expected.tensors["fc"].dtype == torch.bfloat16
    else:
        write(path, config, tensors, "pytorch_model.bin")
    found = read_head(str(path / "pytorch_model.bin" if how == "a file of its own" else path))
    assert found.spec == expected.spec
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_two_layers(tmp_path: Path) -> None:
    config, tensors = speculators()
    second = {k: v for k, v in eagle1(7)[1].items() if k.startswith("layers.0")}
    tensors |= {name.replace("layers.0", "layers.1"): tensor for name, tensor in second.items()}
    tensors["layers.1.input_layernorm.weight"] = 1 + Weights(8)(HIDDEN)
    config["transformer_layer_config"] = {**config["transformer_layer_config"], "num_hidden_layers": 2}
    head = read_head(str(write(tmp_path, config, tensors)))
    states = states_for(head)
    first, second_layer, found = Row(tensors, "layers.0"), Row(tensors, "layers.1"), []
    state = torch.empty(0)
    for place, token in enumerate(TOKENS[1:] + PATH):
        state = tensors["fc.weight"] @ states[place] if place < len(states) else state
        embedded = norm(tensors["embed_tokens.weight"][token], tensors["layers.0.input_layernorm.weight"])
        x = first(torch.cat([embedded, norm(state, tensors["layers.0.hidden_norm.weight"])]), state, place)
        state = second_layer(norm(x, tensors["layers.1.input_layernorm.weight"]), x, place)
        found.append(tensors["lm_head.weight"] @ norm(state, tensors["norm.weight"]))
    expected = torch.stack(found[len(states) - 1 :])
    torch.testing.assert_close(path_logits(network(head), TOKENS, states, PATH), expected, atol=2e-5, rtol=2e-5)


def test_whole_sequences_and_batches_equal_single_rows(tmp_path: Path) -> None:
    head = read_head(str(write(tmp_path, *speculators(fc_norm=True, norm_output=True))))
    net, states = network(head), states_for(head)
    places = torch.arange(len(states))
    tokens = torch.tensor(TOKENS[1:])
    whole, _ = net(tokens, net.fuse(states), places)
    batch, _ = net(torch.stack([tokens, tokens.flip(0)]), net.fuse(torch.stack([states, states])), places)
    torch.testing.assert_close(batch[0], whole)
    cache, rows = None, []
    for place in places.tolist():
        fused = net.fuse(states[place : place + 1])
        row, cache = net(tokens[place : place + 1], fused, places[place : place + 1], cache=cache)
        rows.append(row[0])
    torch.testing.assert_close(torch.stack(rows), whole, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=["3", "3.1"])
def test_unrolled_rows_see_what_a_draft_sees(flags: dict[str, bool], tmp_path: Path) -> None:
    """Training unrolls all places at once: step s of row i is the s-th draft below the i-th token."""
    head = read_head(str(write(tmp_path, *speculators(**flags))))
    net, states = network(head), states_for(head)
    rows, tokens = len(states), torch.tensor(TOKENS[1:] + PATH)
    visible, own = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.eye(rows, dtype=torch.bool)
    state, cache = net.fuse(states), None
    for step in range(3):
        shifted = tokens[step : step + rows]
        outputs, cache = net(shifted, state, torch.arange(rows) + step, visible=visible, cache=cache)
        state, visible = net.next_state(outputs), torch.cat([visible, own], 1)
        for row in range(rows):
            text = TOKENS[: row + 2]
            path = (TOKENS + PATH)[row + 2 : row + 2 + step]
            expected = path_logits(net, text, states[: row + 1], path)[-1]
            torch.testing.assert_close(net.logits(outputs[row]), expected, atol=1e-5, rtol=1e-5)


def test_a_hidden_row_changes_nothing(tmp_path: Path) -> None:
    head = read_head(str(write(tmp_path, *eagle3())))
    net, states = network(head), states_for(head)
    places, visible = torch.arange(4), torch.ones(4, 4, dtype=torch.bool).tril()
    visible[3, 1] = False
    changed = torch.tensor(TOKENS[1:5])
    first, _ = net(changed, net.fuse(states[:4]), places, visible=visible)
    changed[1] = 11
    second, _ = net(changed, net.fuse(states[:4]), places, visible=visible)
    assert torch.equal(first[3], second[3])
    assert not torch.equal(first[2], second[2])


def test_gradients_reach_every_weight_of_its_own(tmp_path: Path) -> None:
    head = read_head(str(write(tmp_path, *speculators(norm_before_fc=True))))
    net = network(head)
    outputs, _ = net(torch.tensor(TOKENS[1:]), net.fuse(states_for(head)), torch.arange(5))
    names, weights = zip(*net.named_parameters(), strict=True)
    found = torch.autograd.grad(net.logits(outputs).logsumexp(-1).sum(), weights)
    assert [name for name, gradient in zip(names, found, strict=True) if not gradient.abs().sum()] == []
