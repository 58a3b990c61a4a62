"""A training from start to end: taken up to the same bits, stopped by what goes wrong, judged as decoding is."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.drafters._eagle import EagleDrafter
from paceline.errors import DrafterError, OptionError, ResourceError, WeightsError
from paceline.heads.formats import read_head
from paceline.pages import PagePool
from paceline.record import add_up
from paceline.sampling import Sampling
from paceline.targets.head_decoder import HeadDecoder
from paceline.train import checkpoint
from paceline.train.assemble import assemble
from paceline.train.eagle3 import Eagle3, Eagle3Options
from paceline.train.evaluate import Evaluation, Held
from paceline.train.examples import Example
from paceline.train.recipe import Recipe
from paceline.train.run import Run, Running
from paceline.train.texts import Material
from tests.bench_models import model_folder, tiny_llm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from paceline.llm import LLM

__all__ = ["model_folder", "tiny_llm"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def texts(llm: LLM, count: int, temperature: float, seed: int, tokens: int = 20) -> list[Example]:
    dice = random.Random(seed)
    prompts = [[dice.randrange(256) for _ in range(6 + number % 5)] for number in range(count)]
    sampling = [
        Sampling(temperature=temperature, max_tokens=tokens, seed=seed + n, ignore_eos=True) for n in range(count)
    ]
    return [
        Example.of(found.prompt_token_ids, found.token_ids)
        for found in llm.generate(prompts, sampling, speculation=False)
    ]


@pytest.fixture(scope="module")
def material(tiny_llm: LLM) -> Material:
    greedy, drawn = texts(tiny_llm, 10, 0.0, 1), texts(tiny_llm, 10, 0.8, 2)
    held = [Held(example, "ab"[n % 2], 0.0, 1.0) for n, example in enumerate(greedy[:4])]
    held += [Held(example, "ab"[n % 2], 0.8, 1.0) for n, example in enumerate(drawn[:4])]
    return Material(greedy[4:] + drawn[4:], held, {"answers": "0123"})


OPTIONS = Eagle3Options(columns=200, keep=0.7, sampled=60)


def a_run(
    llm: LLM,
    material: Material,
    folder: Path,
    recipe: Recipe | None = None,
    options: Eagle3Options = OPTIONS,
    told: list[str] | None = None,
    **running: Any,
) -> Run:
    wanted = {"rows": 64, "evaluations": 2, "save_seconds": 0.0, "log_steps": 2, **running}
    return assemble(
        lambda *given: Eagle3(options, *given),
        llm.loaded,
        material,
        recipe or Recipe(3, 3e-3, average=0.9),
        Running(**wanted),
        folder,
        command=["paceline", "train"],
        tell=lambda line: None if told is None else told.append(line),
        advance=lambda done, total: None,
    )


def steps_of(log: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Killed(BaseException):
    pass


def kill_at(run: Run, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the run die before that step, as by a signal."""
    take = run.training.step

    def stepped() -> Any:
        if run.training.taken == step:
            raise Killed
        return take()

    monkeypatch.setattr(run.training, "step", stepped)


def test_a_training_that_was_killed_goes_on_to_the_same_bits(
    tiny_llm: LLM, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = a_run(tiny_llm, material, tmp_path / "whole")
    standing = whole.go()
    assert whole.training.taken == whole.training.steps > 8
    for step in (2, 5):
        run = a_run(tiny_llm, material, tmp_path / "cut")
        kill_at(run, step, monkeypatch)
        with pytest.raises(Killed):
            run.go()
    told: list[str] = []
    run = a_run(tiny_llm, material, tmp_path / "cut", told=told)
    again = run.go()
    assert any(line.startswith("going on after step 5 of") for line in told)
    assert replace(again, seconds=0.0) == replace(standing, seconds=0.0)
    assert same(run.training.state(), whole.training.state())
    assert steps_of(run.log, "evaluation") == steps_of(whole.log, "evaluation")
    heads = [read_head(str(tmp_path / name)) for name in ("whole", "cut")]
    assert same(heads[0].tensors, heads[1].tensors)
    state, notes = checkpoint.load(run.path)
    assert same(state, whole.training.state())
    assert notes["provenance"]["command"] == ["paceline", "train"]
    assert {"versions", "machine", "commit", "date"} <= notes["provenance"].keys()
    assert a_run(tiny_llm, material, tmp_path / "cut").go() == again  # there is nothing left to do


def test_what_is_written_is_what_was_evaluated_best(tiny_llm: LLM, material: Material, tmp_path: Path) -> None:
    run = a_run(tiny_llm, material, tmp_path, evaluations=5)
    standing = run.go()
    best = max(steps_of(run.log, "evaluation"), key=lambda found: score(found))
    assert (best["step"], score(best)) == (standing.best, standing.score)
    head = read_head(str(tmp_path))
    assert head.manifest is not None
    assert head.manifest.training["tau"] == best["tau"]
    assert head.manifest.training["steps"] == standing.best
    assert head.manifest.layers == head.spec.taps(3)  # type: ignore[union-attr]
    assert head.manifest.trained_length == max(len(example.tokens) for example in material.examples)
    assert {tensor.dtype for tensor in head.tensors.values()} == {torch.bfloat16, torch.int64}
    if standing.best == run.training.taken:
        with run.training.averaged():
            tensors = run.training.objective.network.state_dict()
        assert all(
            torch.equal(tensors[f"_weights.{name.replace('.', '/')}"].bfloat16(), tensor)
            for name, tensor in head.tensors.items()
            if name != "target_ids"
        )


def score(found: dict[str, Any]) -> float:
    return Evaluation(found["tau"], found["accepted"]).score


def test_it_stops_when_it_becomes_no_better(tiny_llm: LLM, material: Material, tmp_path: Path) -> None:
    run = a_run(tiny_llm, material, tmp_path, Recipe(20, 0.0), evaluations=9, patience=2)
    standing = run.go()
    assert standing.worse == 2
    assert run.training.taken < run.training.steps // 2


def test_a_loss_that_is_no_number_stops_it_and_keeps_what_was_good(
    tiny_llm: LLM, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tiny_llm, material, tmp_path)
    good: dict[str, Tensor] = {}
    objective = run.training.objective

    def poisoned(pack: Any) -> Any:
        measured = objective(pack)
        if run.training.taken == 6:
            good.update({name: tensor.clone() for name, tensor in run.training.state().items()})
            return replace(measured, loss=measured.loss * torch.nan)
        return measured

    monkeypatch.setattr(run.training, "objective", poisoned, raising=True)
    monkeypatch.setattr(run, "evaluator", lambda _: Evaluation({"greedy": {"all": 1.0}}, {}))
    with pytest.raises(DrafterError, match=rf"diverged at step 7 of .*checkpoint {run.path} is of before"):
        run.go()
    state, _ = checkpoint.load(run.path)
    assert same(state, good)
    assert state["progress"][0] == 6
    assert steps_of(run.log, "diverged") == [{"kind": "diverged", "step": 7}]
    read_head(str(tmp_path))


def test_a_full_disk_is_told_of_and_costs_nothing_that_was_written(
    tiny_llm: LLM, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tiny_llm, material, tmp_path)
    save = vars(checkpoint)["save_file"]

    def full(tensors: Any, path: Path, **more: Any) -> None:
        if run.training.taken == 4:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path, **more)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ResourceError, match=r"checkpoint.*cannot be written.*No space left"):
        run.go()
    assert checkpoint.load(run.path)[0]["progress"][0] == 3
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoint.safetensors", "log.jsonl"]


def test_other_settings_and_other_files_are_no_training_to_go_on_with(
    tiny_llm: LLM, material: Material, tmp_path: Path
) -> None:
    a_run(tiny_llm, material, tmp_path).go()
    with pytest.raises(OptionError, match=r"is of a training with options .*now it is"):
        a_run(tiny_llm, material, tmp_path, options=replace(OPTIONS, depth=2)).go()
    with pytest.raises(OptionError, match=r"is of a training with data"):
        a_run(tiny_llm, replace(material, digests={"answers": "4567"}), tmp_path).go()
    run = a_run(tiny_llm, material, tmp_path)
    whole = run.path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"x" * 100):
        run.path.write_bytes(broken)
        with pytest.raises(WeightsError, match="no checkpoint of a training"):
            a_run(tiny_llm, material, tmp_path).go()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_simulated_acceptance_is_that_of_decoding(temperature: float, tiny_llm: LLM, tmp_path: Path) -> None:
    """Of a head that is right half of the time, over enough tokens: drafts of decoding differ by int8's rounding, and
    those of sampled answers by noise that was drawn anew."""
    learned = texts(tiny_llm, 24, temperature, 5, 40)
    held = [Held(example, "all", temperature, 1.0) for example in learned]
    material = Material(learned, held, {})
    run = a_run(tiny_llm, material, tmp_path, Recipe(12, 4e-3), drafts=3, evaluations=0, rows=512)
    run.go()
    (simulated,) = steps_of(run.log, "evaluation")
    head = HeadDecoder(read_head(str(tmp_path)), tiny_llm.loaded.decoder)
    drafter = EagleDrafter("eagle3", head, PagePool(head.groups[0], 256), tiny_llm.max_model_len, 1)
    records = []
    for number, example in enumerate(learned):
        prompt = example.tokens[: example.counts.index(True)]
        sampling = Sampling(temperature=temperature, max_tokens=example.counted, seed=5 + number, ignore_eos=True)
        wish = {"adaptive": False, "num_speculative_tokens": 3}
        with tiny_llm.paused() as engine:
            (running,) = tiny_llm.submit(prompt, sampling, drafter=drafter, speculation=wish)
            while running.finish_reason is None:
                engine.step()
        assert tuple(running.tokens) == example.tokens
        records.append(running.record.as_dict())
    found = add_up(records)
    drawn = "at 0.8" if temperature else "greedy"
    assert 1.2 < found["mean_accepted_length"] < 3.8
    assert simulated["tau"][drawn]["all"] == pytest.approx(found["mean_accepted_length"], rel=0.05)


@pytest.mark.parametrize(
    "options",
    [{"against": "x"}, {"layout": "x"}, {"depth": 0}, {"depth": 8}, {"keep": 0.0}, {"columns": 0}, {"sampled": -1}],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Eagle3Options(**options)


def test_the_variants_of_the_head_are_trained_and_read_back(tiny_llm: LLM, material: Material, tmp_path: Path) -> None:
    """EAGLE-3.1, other widths and layers, both layouts, whole distributions and tokens."""
    every = [
        Eagle3Options(columns=50, fc_norm=True, norm_output=True, layout="speculators", sampled=0),
        Eagle3Options(columns=300, kv_heads=1, intermediate=24, features=(1, 2), against="tokens", depth=1),
        Eagle3Options(columns=70, norm_before_residual=True, depth=2, layout="speculators"),
    ]
    for number, options in enumerate(every):
        run = a_run(tiny_llm, material, tmp_path / str(number), Recipe(1), options)
        run.go()
        head = read_head(str(tmp_path / str(number)))
        assert head.spec.draft_vocab_size == min(options.columns, tiny_llm.loaded.decoder.vocab_size)
        for name in options.flags:
            assert getattr(head.spec, name)
        HeadDecoder(head, tiny_llm.loaded.decoder)
        assert asdict(options)["columns"] == run.settings["options"]["columns"]
