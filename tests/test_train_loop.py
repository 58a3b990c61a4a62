"""Heads that are trained draft what they were trained on, and the loop keeps its promises."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

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
from paceline.train.examples import answered
from paceline.train.recipe import Recipe
from paceline.train.trainer import train_head
from tests.bench_models import model_folder, tiny_llm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from paceline.drafters import Drafter
    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.llm import LLM
    from paceline.train.examples import Example
    from paceline.train.loop import Progress

__all__ = ["model_folder", "tiny_llm"]  # fixtures

DEPTH = 3
KINDS: tuple[HeadKind, ...] = ("medusa", "eagle", "eagle3")


def learn(
    llm: LLM, kind: HeadKind, examples: list[Example], recipe: Recipe, columns: int = 50, rows: int = 64
) -> tuple[Head, list[Progress]]:
    """A head of the depth that is drafted, and how its training went."""
    epochs: list[Progress] = []
    head = train_head(kind, llm.loaded, examples, recipe, columns=columns, depth=DEPTH, rows=rows, report=epochs.append)
    return head, epochs


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
        with llm.paused() as engine:
            (running,) = llm.submit(prompt, sampling, drafter=drafter, speculation=wish)
            while running.finish_reason is None:
                engine.step()
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
    untrained, _ = learn(tiny_llm, kind, examples, Recipe(0), 200, 256)
    assert acceptance(tiny_llm, untrained, examples)[0] < 0.8
    trained, _ = learn(tiny_llm, kind, examples, Recipe(120, 4e-3, enough=0.99), 200, 256)
    found = write(trained, tmp_path / "head")
    assert found.spec == trained.spec
    assert found.tensors.keys() == trained.tensors.keys()
    for name, tensor in trained.tensors.items():
        assert torch.equal(found.tensors[name], tensor)
    rates = acceptance(tiny_llm, found, examples)
    assert len(rates) == DEPTH
    assert min(rates) > 0.9


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_gives_one_result(kind: HeadKind, tiny_llm: LLM, examples: list[Example]) -> None:
    one, same, other = (learn(tiny_llm, kind, examples[:6], Recipe(2, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[0].tensors[name]) for name, tensor in one[0].tensors.items())
    assert one[1] == same[1] != other[1]
    assert [epoch.step for epoch in one[1]] == [1, 2]


@pytest.mark.usefixtures("one_thread")
def test_training_ends_when_it_is_enough(tiny_llm: LLM, examples: list[Example]) -> None:
    head, epochs = learn(tiny_llm, "medusa", examples[:4], Recipe(50, 1e-2, enough=0.9))
    assert len(epochs) < 50
    assert min(epochs[-1].accuracy) >= 0.9
    assert all(min(epoch.accuracy) < 0.9 for epoch in epochs[:-1])
    assert (head.provenance.dialect, head.provenance.target) == ("trained", tiny_llm.loaded.name)


@pytest.mark.usefixtures("one_thread")
def test_a_training_that_diverges_says_so(tiny_llm: LLM, examples: list[Example]) -> None:
    with pytest.raises(DrafterError, match=r"diverged.*lower the rate"):
        learn(tiny_llm, "eagle3", examples[:4], Recipe(5, 1e30))


@pytest.mark.usefixtures("one_thread")
def test_the_whole_distribution_can_be_learned(tiny_llm: LLM, examples: list[Example]) -> None:
    """This target is never sure of a token, so what the head says most likely is not all that it has learned."""
    epochs: list[Progress] = []
    recipe, few = Recipe(100, 4e-3), examples[:6]
    train_head("eagle3", tiny_llm.loaded, few, recipe, rows=64, against="distribution", report=epochs.append)
    assert epochs[-1].loss < epochs[0].loss / 10
    assert epochs[0].accuracy[0] < 0.1
    assert epochs[-1].accuracy[0] > 0.8


def test_the_rate_rises_in_a_straight_line_and_falls_as_a_cosine() -> None:
    recipe = Recipe(1, 2.0, warmup=0.2, floor=0.1)
    rates = {0.0: 0.0, 0.1: 1.0, 0.2: 2.0, 0.6: 1.1, 1.0: 0.2}
    assert {done: pytest.approx(recipe.rate_at(done)) for done in rates} == rates
    assert Recipe(1, 2.0, warmup=0.0).rate_at(0.0) == 2.0
    assert Recipe(1, 2.0, warmup=1.0).rate_at(0.5) == 1.0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_default_model_says_is_learned(kind: HeadKind, llm: LLM) -> None:
    turns = [[{"role": "user", "content": prompt.turns[0]}] for prompt in spread(read_prompts(), 20)]
    answers = answered(llm, [llm.chat_ids(turn) for turn in turns], 64)
    head, _ = learn(llm, kind, answers, Recipe(60, enough=0.97), 1024, 1024)
    assert min(acceptance(llm, head, answers)) > 0.9
