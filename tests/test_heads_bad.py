"""Heads that are broken, contradict themselves, or are of another kind: refused in one sentence that says why."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.errors import DrafterError, HubError, WeightsError
from paceline.heads.formats import is_head, read_head
from tests.heads_files import COLUMNS, HIDDEN, IDS, eagle1, eagle3, medusa, medusa_vllm, nvidia, speculators, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Made = tuple[dict[str, Any], dict[str, Tensor]]
    Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def poisoned(name: str, value: float) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    return change


def added(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: torch.zeros(shape)})


def without(*names: str) -> Change:
    return lambda _, tensors: [tensors.pop(name) for name in names]


def said(**keys: Any) -> Change:
    return lambda config, _: config.update(keys)


def put(name: str, tensor: Tensor) -> Change:
    return lambda _, tensors: tensors.update({name: tensor})


def shifted(place: int, by: int) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"][place] += by

    return change


def unmasked(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["t2d"][2], tensors["t2d"][3] = False, True


def unmapped() -> Made:
    config, tensors = eagle3()
    del tensors["t2d"]
    return config, tensors


CASES: list[tuple[str, Callable[[], Made], Change, str]] = [
    ("missing", eagle3, without("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight is missing"),
    ("missing norms", eagle3, without("norm.weight", "fc.weight"), "fc.weight is missing"),
    ("missing layer", eagle3, without(*[n for n in eagle3()[1] if "self_attn" in n]), r"\(and 3 more\)"),
    ("eagle 1 missing", eagle1, without("layers.0.self_attn.o_proj.weight"), "o_proj.weight is missing"),
    ("said bias", eagle1, lambda c, t: (c.update(bias=True), t.pop("fc.bias")), "fc.bias is missing"),
    ("denied bias", eagle1, said(bias=False), "fc.bias is there"),
    ("surplus", eagle3, added("midlayer.extra.weight", 3), "nothing accounts for the tensor midlayer.extra.weight"),
    ("input norm of EAGLE-1", eagle1, added("layers.0.input_layernorm.weight", HIDDEN), "nothing accounts for"),
    ("misshapen", eagle3, added("fc.weight", HIDDEN, 3 * HIDDEN + 1), "not 3 states of 16"),
    ("other width", eagle3, said(hidden_size=32), "not 3 states of 32"),
    ("other heads", eagle3, said(num_attention_heads=2, head_dim=4), "q_proj.weight has the shape"),
    ("NaN", eagle3, poisoned("midlayer.mlp.down_proj.weight", float("nan")), "down_proj.weight holds NaN or inf"),
    ("infinite", eagle1, poisoned("fc.weight", float("-inf")), "fc.weight holds NaN or inf"),
    ("integers", eagle3, put("norm.weight", torch.ones(HIDDEN, dtype=torch.int32)), "stored as torch.int32"),
    ("columns", eagle3, said(draft_vocab_size=11), "lm_head has 10 columns, but the configuration says 11"),
    ("no d2t", eagle3, without("d2t"), "no d2t that says which is which"),
    ("no head", eagle3, without("lm_head.weight"), "lm_head is missing"),
    ("d2t too high", eagle3, shifted(9, IDS), "ids are 0 to 39"),
    ("d2t negative", eagle3, shifted(0, -3), "to the id -1"),
    ("d2t twice", unmapped, shifted(1, 3), "maps 2 columns to the id 8"),
    ("other inner width", eagle3, said(intermediate_size=25), "but the head asks for"),
    ("d2t against t2d", eagle3, unmasked, "d2t and t2d contradict each other"),
    ("d2t shifted", eagle3, shifted(0, 1), "contradict each other"),
    ("d2t short", eagle3, put("d2t", torch.zeros(9, dtype=torch.int64)), "must hold 10 integers"),
    ("d2t of floats", eagle3, put("d2t", torch.zeros(COLUMNS)), "must hold 10 integers"),
    ("t2d short", eagle3, put("t2d", torch.zeros(39, dtype=torch.bool)), "t2d must say for each of 40 ids"),
    ("t2d alone", lambda: eagle3(columns=IDS), put("t2d", torch.arange(IDS) > 1), "t2d leaves ids out"),
    ("layers", eagle3, said(num_hidden_layers=2), "says 2 layers, but the file has tensors of the layers 0"),
    ("no configuration", eagle3, lambda c, _: c.clear(), "needs its config.json"),
    ("flag without tensors", eagle3, said(fc_norm=True), "fc_norm.0.weight is missing"),
    ("one norm short", lambda: speculators(fc_norm=True), without("fc_norm.1.weight"), "fc_norm.1.weight is missing"),
    ("denied norms", lambda: speculators(fc_norm=True), said(fc_norm=False), "fc_norm.0.weight is there"),
    ("both", lambda: speculators(fc_norm=True, norm_before_fc=True), said(), "exclude each other"),
    ("flags of 3 in 1", eagle1, said(norm_output=True), "norms of EAGLE-3 in a head of EAGLE-1"),
    ("ids twice", nvidia, said(eagle_aux_hidden_state_layer_ids=[2, 5, 9]), "layer_ids twice"),
    ("both ways", nvidia, said(eagle3_layers_to_capture=[1, 4, 8]), "by input and by output"),
    ("order", eagle3, said(eagle_aux_hidden_state_layer_ids=[9, 5, 1]), "must ascend"),
    ("no layers", eagle3, said(eagle_aux_hidden_state_layer_ids=["a"]), "must be a list of layers"),
    ("four ids", eagle3, said(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "not 4 states of 16"),
    ("target width", eagle3, said(target_hidden_size=17), "not 3 states of 17"),
    ("unknown key", eagle3, said(mystery=3), "mystery = 3 is not supported"),
    ("unknown speculators key", speculators, said(mystery=3), "mystery = 3 is not supported"),
    ("unknown eagle key", nvidia, lambda c, _: c["eagle_config"].update(extra=1), "extra = 1 is not supported"),
    ("last state", nvidia, lambda c, _: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux_hidden_state"),
    ("window", eagle3, said(use_sliding_window=True, sliding_window=8), "sliding window"),
    ("mistral window", eagle1, said(model_type="mistral", sliding_window=8), "sliding window"),
    ("theta", eagle3, said(rope_theta=-1.0), "no usable numbers"),
    ("epsilon", eagle1, said(rms_norm_eps=-1.0), "no usable numbers"),
    ("flag of text", speculators, said(norm_output="yes"), "must be true or false, but it is 'yes'"),
    ("family", eagle1, said(model_type="gemma2"), "family 'gemma2'"),
    ("quantized", eagle3, said(quantization_config={"quant_method": "fp8"}), "quantized"),
    ("speculators eagle 1", speculators, said(speculators_model_type="eagle"), "of type 'eagle' are not supported"),
    ("no layer config", speculators, said(transformer_layer_config=None), "no transformer_layer_config"),
    ("twice", eagle3, added("model.fc.weight", 2, 2), "fc.weight is there twice"),
    ("DFlash", eagle3, said(dflash_config={"mask_token_id": 1}), "kind DFlash"),
    ("DSpark", eagle3, added("markov_head.markov_w1", 4, 2), "kind DSpark"),
    ("P-EAGLE", eagle3, added("mask_hidden", 1, 48), "kind P-EAGLE"),
    ("latent", eagle3, added("midlayer.self_attn.kv_a_proj_with_mqa.weight", 2, 2), "latent attention"),
    ("MLP speculator", medusa, said(n_predict=3), "kind MLP speculator"),
    ("no head at all", eagle1, without("fc.weight"), "no drafting head"),
    ("medusa missing block", medusa, without("1.0.linear.weight"), "1.0.linear.weight is missing"),
    ("medusa missing product", medusa, without("2.1.weight"), "2.1.weight is missing"),
    ("medusa missing head", medusa, without("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"), "have gaps"),
    ("medusa surplus", medusa, added("embed_tokens.weight", 2, 2), "nothing accounts for the tensor embed_tokens"),
    ("medusa NaN", medusa, poisoned("0.1.weight", float("nan")), "0.1.weight holds NaN"),
    ("medusa width", medusa, added("1.0.linear.weight", HIDDEN, 8), "1.0.linear.weight has the shape"),
    ("medusa ids", medusa, added("2.1.weight", 30, HIDDEN), "2.1.weight has the shape"),
    ("medusa other ids", medusa, said(vocab_size=41), "have vocab_size 40, the configuration 41"),
    ("medusa unknown key", medusa, said(mystery=3), "mystery = 3 are not supported"),
    (
        "medusa of two depths",
        lambda: medusa(layers=2),
        lambda _, t: t.update({"0.1.weight": t.pop("0.2.weight")}),
        "one and",
    ),
    ("medusa block lost", lambda: medusa(layers=2), without("0.0.linear.weight"), "0.0.linear.weight is missing"),
    ("vllm scale", medusa_vllm, said(logit_scale=0.5), "logit_scale = 0.5"),
    ("vllm layers", medusa_vllm, said(num_hidden_layers=1), "num_hidden_layers 2, the configuration 1"),
    ("vllm no map", lambda: medusa_vllm(columns=12), without("token_map"), "token_map is missing"),
    ("vllm idle map", medusa_vllm, put("token_map", torch.arange(IDS)), "token_map is there"),
    (
        "vllm map twice",
        lambda: medusa_vllm(columns=12),
        put("token_map", torch.ones(12, dtype=torch.int64)),
        "to the id 1",
    ),
    ("vllm map high", lambda: medusa_vllm(columns=12), put("token_map", torch.arange(12) + 30), "to the id 41"),
    ("vllm product", medusa_vllm, without("lm_heads.1.weight"), "lm_heads.1.weight is missing"),
    ("vllm bias", medusa_vllm, said(medusa_fc_bias=True), "medusa_fc_bias False, the configuration True"),
]


@pytest.mark.parametrize(("make", "change", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_refused(make: Callable[[], Made], change: Change, message: str, tmp_path: Path) -> None:
    config, tensors = make()
    config, tensors = dict(config), {name: tensor.clone() for name, tensor in tensors.items()}
    change(config, tensors)
    path = write(tmp_path, config or None, tensors)
    with pytest.raises((WeightsError, DrafterError), match=message) as caught:
        read_head(str(path))
    assert str(caught.value).count("\n") == 0


MADE: dict[str, Callable[[], Made]] = {
    "eagle": eagle1,
    "eagle3": eagle3,
    "wide": lambda: eagle3(target_hidden=24),
    "speculators": lambda: speculators(fc_norm=True, norm_output=True),
    "norm_before_fc": lambda: speculators(norm_before_fc=True),
    "medusa": lambda: medusa(layers=2),
    "medusa_vllm": lambda: medusa_vllm(columns=12, bias=True),
    "medusa_shared": lambda: medusa_vllm(shared=True),
}


@pytest.mark.parametrize("made", MADE)
def test_no_tensor_may_be_called_or_shaped_otherwise(made: str, tmp_path: Path) -> None:
    config, tensors = MADE[made]()
    read_head(str(write(tmp_path / "whole", config, tensors)))
    for place, (name, tensor) in enumerate(tensors.items()):
        rest = {other: value for other, value in tensors.items() if other != name}
        longer = torch.cat([tensor, tensor[:1]])
        for kind, changed in (("called", {f"{name}s": tensor}), ("longer", {name: longer})):
            path = write(tmp_path / f"{kind}{place}", config, {**rest, **changed})
            with pytest.raises((WeightsError, DrafterError), match=r"\.$"):
                read_head(str(path))


@pytest.mark.parametrize("made", MADE)
def test_nonsense_in_a_configuration_is_an_error_of_ours_or_changes_nothing(made: str, tmp_path: Path) -> None:
    config, tensors = MADE[made]()
    whole = read_head(str(write(tmp_path / "whole", config, tensors)))
    path = write(tmp_path / "head", config, tensors)
    layers = config.get("transformer_layer_config") or {}
    junk = ("x", -1, 2.5, [1], {"a": 1}, True)
    wrong = [{**config, key: value} for key in [*config, "eagle_config", "bias", "norm_output"] for value in junk]
    wrong += [{**config, "transformer_layer_config": {**layers, key: value}} for key in layers for value in junk]
    refused = 0
    for changed in wrong:
        (path / "config.json").write_text(json.dumps(changed))
        try:
            found = read_head(str(path))
        except (WeightsError, DrafterError):
            refused += 1
        else:
            assert found.tensors.keys() == whole.tensors.keys()
            assert found.spec.shapes() == whole.spec.shapes()
    assert refused > len(wrong) // 10


class Writes:
    """What writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_a_side_effect_is_refused(name: str, zipped: bool, tmp_path: Path) -> None:
    made, trace = tmp_path / "head", tmp_path / "trace"
    made.mkdir()
    hostile = {"0.0.linear.weight": Writes(trace)}
    if zipped:
        torch.save(hostile, made / name)
    else:
        (made / name).write_bytes(pickle.dumps(hostile))
    for path in (made, made / name):
        with pytest.raises(WeightsError, match="cannot be read as plain tensors"):
            read_head(str(path))
        with pytest.raises(WeightsError, match="cannot be read as plain tensors"):
            is_head(str(path))
    assert not trace.exists()
    pickle.loads(pickle.dumps(Writes(trace)))  # it would have
    assert trace.exists()


def test_what_is_not_there(tmp_path: Path) -> None:
    for name in ("", str(tmp_path / "nothing"), str(tmp_path / "nothing.safetensors"), "gone.pt"):
        with pytest.raises(HubError, match="neither a folder or file"):
            read_head(name)
    with pytest.raises(WeightsError, match="has no weights"):
        read_head(str(tmp_path))
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(WeightsError, match="not a file of weights"):
        read_head(str(tmp_path / "notes.txt"))


def test_broken_files(tmp_path: Path) -> None:
    config, tensors = eagle3()
    path = write(tmp_path, config, tensors)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match="broken or cut"):
        read_head(str(path))
    (path / "model.safetensors").write_bytes(data)
    for text in ("{", "[]"):
        (path / "config.json").write_text(text)
        with pytest.raises(WeightsError, match="JSON"):
            read_head(str(path))


@pytest.mark.parametrize("make", [eagle1, eagle3, nvidia, speculators, medusa, medusa_vllm])
def test_heads_are_told_from_models(make: Callable[[], Made], tmp_path: Path) -> None:
    assert is_head(str(write(tmp_path / "head", *make())))
    config, tensors = eagle1()
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc")}
    assert not is_head(str(write(tmp_path / "model", config, model)))


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", "somewhere/model.gguf"])
def test_what_only_whole_models_are_called_is_no_head(name: str) -> None:
    """Nothing is looked for, so a draft model may be named as any model is."""
    assert not is_head(name)
