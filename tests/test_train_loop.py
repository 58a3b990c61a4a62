"""Heads that are trained draft what they were trained on, and the loop keeps its promises."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.drafters._eagle import EagleDrafter
from paceline.drafters.medusa import MedusaDrafter
from paceline.errors import DrafterError
from paceline.heads.formats import read_head
from paceline.heads.write import write_eagle, write_eagle3, write_medusa
from paceline.pages import PagePool
from paceline.prompts import read_prompts, spread
from paceline.record import add_up
from paceline.sampling import Sampling
from paceline.targets.head_decoder import HeadDecoder
from paceline.targets.medusa_decoder import MedusaDecoder
from paceline.train.examples import Example, answered, frequent_ids
from paceline.train.loop import Progress, Recipe, train
from paceline.train.objectives import objective_for
from paceline.train.pack import Reader
from paceline.train.shared import Shared
from paceline.train.start import new_head
from paceline.train.taps import Taps
from tests.bench_models import model_folder, tiny_llm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from paceline.drafters import Drafter
    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.llm import LLM

__all__ = ["model_folder", "tiny_llm"]  # fixtures

DEPTH = 3
KINDS: tuple[HeadKind, ...] = ("medusa", "eagle", "eagle3")


@dataclass
class Lesson:
    """A head before and after its training, and what it was trained on."""

    examples: list[Example]
    before: Head
    after: Head
    epochs: list[Progress]


def learn(llm: LLM, kind: HeadKind, examples: list[Example], columns: int, rows: int, recipe: Recipe) -> Lesson:
    target = llm.loaded.decoder
    shared = Shared.of(target)
    ids = None if kind == "eagle" else frequent_ids(examples, columns, target.vocab_size)
    before = new_head(kind, shared, recipe.seed, ids=ids, heads=DEPTH)
    objective = objective_for(before, shared, steps=DEPTH)
    epochs: list[Progress] = []
    reader = Reader(examples, Taps(target, objective.layers), rows)
    return Lesson(examples, before, train(objective, reader, recipe, epochs.append, llm.loaded.name), epochs)


def drafter_of(head: Head, llm: LLM) -> Drafter:
    target = llm.loaded.decoder
    if head.spec.kind == "medusa":
        return MedusaDrafter(MedusaDecoder(head, target), 1)
    fitted = HeadDecoder(head, target)
    return EagleDrafter(head.spec.kind, fitted, PagePool(fitted.groups[0], 256), llm.max_model_len, 1)


def acceptance(llm: LLM, head: Head, examples: Seq[Example]) -> list[float]:
    """For each depth of a chain how often its token was accepted where it was judged; output equals plain decoding."""
    drafter, records = drafter_of(head, llm), []
    for example in examples:
        prompt = example.tokens[: example.counts.index(True)]
        sampling = Sampling(temperature=0.0, max_tokens=sum(example.counts))
        wish = {"adaptive": False, "num_speculative_tokens": DEPTH}
        (running,) = llm.submit(prompt, sampling, drafter=drafter, speculation=wish)
        while running.finish_reason is None:
            llm.engine.step()
        assert tuple(running.tokens) == example.tokens
        assert not running.record.failed
        records.append(running.record.as_dict())
    judged = add_up(records)["accepted_by_position"]
    return [depth["accepted"] / depth["reached"] for depth in judged]


def write(head: Head, folder: Path) -> Head:
    if head.spec.kind == "medusa":
        write_medusa(head, folder, "vllm")
    elif head.spec.kind == "eagle":
        write_eagle(head, folder)
    else:
        write_eagle3(head, folder)
    return read_head(str(folder))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of the small products of a small head, torch's threads would make a slow test on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def examples(tiny_llm: LLM) -> list[Example]:
    dice = random.Random(5)
    prompts = [[dice.randrange(256) for _ in range(6 + number % 5)] for number in range(20)]
    return answered(tiny_llm, prompts, 20)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_learned_is_accepted(kind: HeadKind, tiny_llm: LLM, examples: list[Example], tmp_path: Path) -> None:
    lesson = learn(tiny_llm, kind, examples, 200, 256, Recipe(120, 4e-3, enough=0.97))
    found = write(lesson.after, tmp_path / "head")
    assert found.spec == lesson.after.spec
    assert found.tensors.keys() == lesson.after.tensors.keys()
    for name, tensor in lesson.after.tensors.items():
        assert torch.equal(found.tensors[name], tensor)
    assert acceptance(tiny_llm, lesson.before, examples)[0] < 0.8
    rates = acceptance(tiny_llm, found, examples)
    assert len(rates) == DEPTH
    assert min(rates) > 0.9


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_gives_one_result(kind: HeadKind, tiny_llm: LLM, examples: list[Example]) -> None:
    def trained(seed: int) -> Lesson:
        return learn(tiny_llm, kind, examples[:6], 50, 64, Recipe(2, 1e-3, seed=seed))

    one, same, other = (trained(seed) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same.after.tensors[name]) for name, tensor in one.after.tensors.items())
    assert one.epochs == same.epochs
    assert [epoch.epoch for epoch in one.epochs] == [1, 2]
    assert one.epochs[0].steps > 1
    assert one.epochs != other.epochs


@pytest.mark.usefixtures("one_thread")
def test_training_ends_when_it_is_enough(tiny_llm: LLM, examples: list[Example]) -> None:
    lesson = learn(tiny_llm, "medusa", examples[:4], 50, 64, Recipe(50, 1e-2, enough=0.9))
    assert len(lesson.epochs) < 50
    assert min(lesson.epochs[-1].accuracy) >= 0.9
    assert all(min(epoch.accuracy) < 0.9 for epoch in lesson.epochs[:-1])
    assert lesson.after.provenance.target == tiny_llm.loaded.name
    assert lesson.after.provenance.dialect == "trained"


@pytest.mark.usefixtures("one_thread")
def test_a_training_that_diverges_says_so(tiny_llm: LLM, examples: list[Example]) -> None:
    with pytest.raises(DrafterError, match=r"diverged.*lower the rate"):
        learn(tiny_llm, "eagle3", examples[:4], 50, 64, Recipe(5, 1e30))


def test_the_rate_rises_and_falls_in_straight_lines() -> None:
    recipe = Recipe(1, 2.0, warmup=0.2)
    rates: dict[float, float] = {0.0: 0.0, 0.1: 1.0, 0.2: 2.0, 0.6: 1.0, 1.0: 0.0}
    assert {done: pytest.approx(recipe.rate_at(done)) for done in rates} == rates
    flat: dict[str, Any] = {"warmup": 0.0}
    assert Recipe(1, 2.0, **flat).rate_at(0.0) == 2.0
    assert Recipe(1, 2.0, warmup=1.0).rate_at(0.5) == 1.0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_default_model_says_is_learned(kind: HeadKind, llm: LLM) -> None:
    turns = [[{"role": "user", "content": prompt.turns[0]}] for prompt in spread(read_prompts(), 20)]
    answers = answered(llm, [llm.chat_ids(turn) for turn in turns], 64)
    lesson = learn(llm, kind, answers, 1024, 1024, Recipe(60, enough=0.97))
    assert min(acceptance(llm, lesson.after, answers)) > 0.9
