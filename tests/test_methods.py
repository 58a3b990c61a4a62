"""A way to draft is a file: found by its name, refused or made by what it says of itself, and harmless in any case."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline import LLM, OptionError, Sampling, drafters, methods
from paceline.drafters import Outcome, View
from paceline.errors import DrafterError
from paceline.options import Speculation
from paceline.tree import Dropping
from tests.bench_models import model_folder, tiny_llm
from tests.toys import no_draw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["model_folder", "tiny_llm"]

ECHO = '''"""Says the last token again, and again."""

from dataclasses import dataclass, field

from paceline.drafters import Method, Needs
from paceline.tree import TokenTree


@dataclass
class EchoDrafter:
    width: int
    vocab_size: int
    name: str = "{name}"
    needs: Needs = field(default_factory=lambda: Needs(cost="lookup"))
    asked: int = 0

    def start(self, view, valid): ...
    def fork(self, parent, child): ...
    def rewind(self, sequence, length): ...
    def release(self, sequence): ...
    def observe(self, outcomes): ...

    def length(self, sequence):
        return 0

    def propose(self, views, budgets):
        self.asked += len(views)
        return [
            TokenTree.chain(v.tokens[-1], [v.tokens[-1]] * b, [0.9**d for d in range(1, b + 1)], self.name)
            for v, b in zip(views, budgets)
        ]


METHOD = Method(
    lambda speculation, around: EchoDrafter(speculation.lookahead_window, around.target.decoder.vocab_size),
    {more}
)
'''

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Put a drafter's file into a folder where drafters are looked for; returns its name."""
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    written: list[str] = []

    def put(name: str, more: str = "", text: str = ECHO) -> str:
        (tmp_path / f"{name}.py").write_text(text.replace("{name}", name).replace("{more}", more))
        methods._found.cache_clear()
        written.append(name)
        return name

    yield put
    methods._found.cache_clear()
    for name in written:
        sys.modules.pop(f"{drafters.__name__}.{name}", None)
        if hasattr(drafters, name):
            delattr(drafters, name)


SHORT = ["row of riders, row of riders", "who leads", "wind on the hill, and the wheel in front, and the wind"]
SETTINGS = Sampling(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)


def texts(llm: LLM, **options: Any) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(SHORT, SETTINGS, **options)]


def test_a_new_file_is_picked_up_by_itself(tiny_llm: LLM, write: Write) -> None:
    """From what a user writes to the record, and nothing else is touched for it."""
    before = methods.names()
    assert "echo" not in before
    with pytest.raises(OptionError, match="method 'echo' is unknown; choose from auto, cascade"):
        Speculation.parse("echo")
    name = write("echo", 'options=("lookahead_window",)')
    assert methods.names() == sorted([*before, "echo"])
    plain = texts(tiny_llm)
    speculation = {"method": name, "lookahead_window": 4, "num_speculative_tokens": 3, "adaptive": False}
    answers = tiny_llm.generate(SHORT, SETTINGS, speculation=speculation)
    assert [answer.token_ids for answer in answers] == plain
    assert {answer.record.method for answer in answers} == {"echo"}
    assert sum(answer.record.drafted for answer in answers) > 20
    drafter: Any = tiny_llm.roster.drafter(Speculation.parse(speculation))
    assert (drafter.width, drafter.vocab_size) == (4, tiny_llm.loaded.decoder.vocab_size)
    assert drafter.asked > 20
    assert tiny_llm.roster.drafter(Speculation.parse({**speculation, "num_speculative_tokens": 9})) is drafter
    assert tiny_llm.roster.drafter(Speculation.parse({**speculation, "lookahead_window": 5})) is not drafter
    with pytest.raises(OptionError, match=r"choose from auto, cascade, draft_model, .*echo"):
        Speculation.parse("unheard_of")


@pytest.mark.parametrize(
    ("more", "asked", "sentence"),
    [
        ("", {"model": "x"}, "model is given, and method 'mine' drafts without"),
        ("", {"draft_layers": 1}, "draft_layers is given, and method 'mine' drafts without"),
        ("", {"random": True}, "random is for .* eagle3, medusa.*, and 'mine' has none"),
        ("", {"tree": 2}, "method 'mine' drafts chains, and tree is 2"),
        (
            "",
            {"rule": "ratio"},
            "'ratio' needs drafts .* those of method 'mine' are not; .* draft_model, eagle, eagle3",
        ),
        ('model="needed"', {}, "method 'mine' needs a head .* name its checkpoint with model="),
        ('model="needed"', {"draft_layers": 1}, "draft_layers is given, and method 'mine' drafts without"),
        ('model="needed", options=("draft_layers",)', {}, "method 'mine' needs a draft model: .* draft_layers="),
        ('model="needed", options=("random",)', {"random": True, "model": "x"}, "random and model exclude each other"),
    ],
)
def test_a_new_method_is_refused_by_its_own_name(write: Write, more: str, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        methods.check(Speculation(method=write("mine", more), **asked))


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ("trees=True", {"tree": 2}),
        ("sampled=True", {"rule": "ratio"}),
        ('model="optional"', {}),
        ('model="optional"', {"model": "x"}),
        ('model="needed"', {"model": "x"}),
        ('model="needed", options=("random",)', {"random": True}),
        ('model="needed", options=("draft_layers",)', {"draft_layers": 3}),
        ("", {"tree": "none"}),
        ("", {"tree": 1}),
        ("", {"rule": "typical"}),
    ],
)
def test_what_a_new_method_says_it_can_do_it_may(write: Write, more: str, asked: dict[str, Any]) -> None:
    methods.check(Speculation(method=write("mine", more), **asked))


def test_a_new_method_is_named_where_it_would_help(write: Write) -> None:
    write("mine", "sampled=True")
    with pytest.raises(OptionError, match=r"one of the methods .*mine"):
        methods.check(Speculation(method="ngram", rule="block"))


def test_a_file_that_holds_no_method_says_so(write: Write) -> None:
    for text in ("", "METHOD = 5\n"):
        name = write(f"empty{len(text)}", text=text)
        with pytest.raises(DrafterError, match=rf"{name}\.py holds no METHOD = Method\(\.\.\.\)"):
            methods.check(Speculation(method=name))


def test_names_are_in_order_and_files_with_an_underscore_are_none(write: Write) -> None:
    write("_support")
    names = methods.names()
    assert names == sorted(names)
    assert not [name for name in names if name.startswith("_")]
    assert set(names) >= {
        *("cascade", "draft_model", "eagle", "eagle3", "grammar", "lookahead"),
        *("medusa", "ngram", "prediction", "recycling", "suffix"),
    }


ALL = methods.names()
MORE: dict[str, dict[str, Any]] = {
    "draft_model": {"draft_layers": 1},
    **{name: {"random": True} for name in ("medusa", "eagle", "eagle3")},
}


@pytest.mark.parametrize("method", ALL)
def test_every_method_describes_itself(method: str) -> None:
    """Its options exist, and what it needs is what it is refused without."""
    found = methods.find(method)
    assert set(found.options) <= {field.name for field in dataclasses.fields(Speculation)}
    assert found.model != "none" or not {"model", "draft_layers", "random"} & set(found.options)
    assert found.trees or not found.shapes
    assert ("tree" in found.options) == found.trees
    if found.model == "needed":
        with pytest.raises(OptionError, match=f"'{method}' needs a"):
            methods.check(Speculation(method=method))
    methods.check(Speculation(method=method, **MORE.get(method, {})))


@pytest.mark.parametrize("method", ["auto", *ALL])
def test_every_method_decodes_the_same_tokens(tiny_llm: LLM, method: str) -> None:
    plain = texts(tiny_llm)
    more = MORE.get(method, {})
    for speculation in (
        {"method": method, "num_speculative_tokens": 7, "adaptive": False, **more},
        {"method": method, **more},
    ):
        answers = tiny_llm.generate(SHORT, SETTINGS, speculation=speculation, prediction=plain[1], origins=True)
        assert [answer.token_ids for answer in answers] == plain
        assert {answer.record.method for answer in answers} == {"cascade" if method == "auto" else method}
        assert not any(answer.record.failed for answer in answers)


@pytest.mark.parametrize("method", ALL)
def test_every_drafter_survives_hostile_calls(tiny_llm: LLM, method: str) -> None:
    """Sequences that nobody knows are released, nothing is asked for, nobody asks, and nothing happened."""
    speculation = Speculation(method=method, **MORE.get(method, {}))
    drafter = tiny_llm.roster.drafter(speculation)
    assert drafter.name == method
    for _ in range(2):
        drafter.release(10**9)
    assert drafter.propose([], []) == []
    drafter.observe([])
    views = [View(10**6 + place, [1, 2, 3], no_draw, prompt_length=3, dropping=Dropping()) for place in range(2)]
    for view in views:
        drafter.start(view, 0)
        assert drafter.length(view.id) in range(4)
    rows = torch.randn(2, tiny_llm.loaded.spec.hidden, generator=torch.Generator().manual_seed(0))
    taps = dict.fromkeys(drafter.needs.features, rows)
    drafter.observe([Outcome(views[0].id, 0, [1, 2], 0, 3, taps)])  # one is ready to draft, and one is not
    for _ in range(2):
        trees = drafter.propose(views, [0, 0])
        assert [(tree.tokens, tree.parents) for tree in trees] == [([3], [-1])] * 2
    drafter.propose([], [])
    for view in views:
        drafter.rewind(view.id, 0)
        drafter.release(view.id)
        drafter.release(view.id)
    assert texts(tiny_llm, speculation={"method": method, **MORE.get(method, {})}) == texts(tiny_llm)
