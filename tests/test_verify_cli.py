"""Verifying: every combination is dealt as often, a broken verifier is found out, and a cut run goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from paceline.bench.drafters import MixedDrafter, OracleDrafter, chance, variations
from paceline.bench.runner import Runner
from paceline.bench.verify import Verification
from paceline.bench.ways import WAYS, chosen_ways, combinations, deal, draws
from paceline.cli import main
from paceline.cli.verify import ENOUGH_LEGEND
from paceline.drafters import View
from paceline.errors import OptionError
from paceline.heads.write import write_eagle, write_eagle3, write_medusa
from paceline.llm import LLM
from paceline.prompts import read_prompts, spread
from paceline.sampling import Sampling
from paceline.targets.hub import DEFAULT_MODEL
from paceline.train.examples import answered
from paceline.train.recipe import Recipe
from paceline.train.trainer import train_head
from paceline.verify import Verdict, Verifier
from tests.bench_models import model_folder, prompts, tiny_llm
from tests.toys import ScriptedDrafter, no_draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from paceline.heads.head import Head
    from paceline.heads.make import HeadKind
    from paceline.request import Sequence as Running
    from paceline.tree import TokenTree

__all__ = ["model_folder", "tiny_llm"]

ENVIRONMENT = {"code": "c", "machine": "m"}
KINDS: tuple[HeadKind, ...] = ("medusa", "eagle", "eagle3")
WRITERS: dict[HeadKind, Callable[[Head, Path], None]] = {
    "medusa": lambda head, folder: write_medusa(head, folder, "vllm"),
    "eagle": write_eagle,
    "eagle3": write_eagle3,
}


def quiet(line: str) -> None:
    """Nothing is shown."""


def verification(llm: LLM, count: int, path: Path | None = None, **options: Any) -> Verification:
    runner = Runner(path, ENVIRONMENT, {}, quiet)
    return Verification(llm, prompts(count), runner, **{"max_tokens": 10, "draft_layers": 2, **options})


FIRST = ["plain", "ngram", "draft_layers", "self", "oracle"]


def test_every_combination_gets_its_share_of_the_prompts() -> None:
    whole = combinations(chosen_ways(FIRST))
    assert len(whole) == 20
    hands = deal(whole, 240, 4)
    counts = Counter(way for hand in hands for way in hand)
    assert set(counts) == set(whole)
    assert set(counts.values()) == {48}
    assert all(len(set(hand)) == 4 for hand in hands)
    assert hands == deal(whole, 240, 4)
    assert hands != deal(whole, 240, 4, seed=1)
    assert deal(whole, 3, None) == [whole] * 3
    assert draws(chosen_ways(FIRST)) == 4
    assert draws(WAYS[:1]) == 1
    for count in range(1, 20):
        hand = draws(WAYS[:1] * count)
        assert hand * 5 >= 4 * count
        assert 4 * count % hand == 0


def test_the_first_measurement_can_be_taken_again() -> None:
    hands = deal(combinations(chosen_ways(FIRST)), 240, 4)
    spelled = repr([[(each.way.name, each.batch, each.temperature) for each in hand] for hand in hands])
    assert hashlib.sha256(spelled.encode()).hexdigest().startswith("9b04352ba0b3c3b8")


def test_ways_are_chosen_by_name_or_written_out() -> None:
    assert chosen_ways(None) == WAYS
    assert [way.options for way in chosen_ways(["suffix", "ngram:prompt_lookup_max=3"])] == [
        "suffix:tree=none",
        "ngram:prompt_lookup_max=3",
    ]
    for wrong, message in ((["magic"], "unknown"), (["ngram", "ngram"], "named twice"), (["ngram:a=1"], "'a' is not")):
        with pytest.raises(OptionError, match=message):
            chosen_ways(wrong)


def test_not_one_token_differs(tiny_llm: LLM) -> None:
    report = verification(tiny_llm, 2).report()
    assert report["compared"] == 2 * 4 * len(WAYS)
    assert report["differing"] == 0
    assert report["short"] == 0
    rows = {(row["method"], row["batch"], row["temperature"]): row for row in report["combinations"]}
    assert len(rows) == 4 * len(WAYS)
    for (method, _, _), row in rows.items():
        assert row["tokens"] > 4
        if method not in ("ngram", "suffix", "suffix tree"):  # of random text they seldom know anything
            assert (row["drafted"] > 0) == (method != "plain")
        if method in ("self", "grammar"):
            assert row["accepted"] == row["judged"] > 0
        if method == "oracle":
            assert row["accepted"] > 0
            assert row["rejected"] > 0
    json.dumps(report)


class ForgivingVerifier(Verifier):
    """Takes a drafted token for right although the target says another."""

    def accept(self, sequence: Running, tree: TokenTree, logits: Tensor) -> Verdict:
        verdict = super().accept(sequence, tree, logits)
        if verdict.missed and len(verdict.path) == 1:
            return Verdict([0], [tree.tokens[1]], False, [], [])
        return verdict


def test_a_broken_verifier_is_found_out(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llm.engine, "verifier", ForgivingVerifier())
    report = verification(tiny_llm, 2, ways=chosen_ways(FIRST)).report()
    wrong = {row["method"] for row in report["combinations"] if row["differing"]}
    assert "oracle" in wrong
    assert "plain" not in wrong
    assert report["differing"] > 0
    difference = report["differences"][0]
    place = difference["place"]
    assert difference["expected"]["ids"][:place] == difference["found"]["ids"][:place]
    assert difference["expected"]["ids"][place:] != difference["found"]["ids"][place:]


def test_a_cut_run_goes_on(tiny_llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    ways = chosen_ways(["plain", "draft_layers", "suffix", "recycling tree", "prediction", "grammar"])
    whole = verification(tiny_llm, 5, path, draws=4, ways=ways).report()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + lines[7][:30])
    runner = Runner(path, ENVIRONMENT, {}, quiet)
    report = Verification(tiny_llm, prompts(5), runner, max_tokens=10, draft_layers=2, draws=4, ways=ways).report()
    assert report == whole
    assert runner.taken == len(lines) - 7
    assert Counter(path.read_text().splitlines(keepends=True)[:7]) == Counter(lines[:7])


@pytest.fixture(scope="module")
def trained(tiny_llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[HeadKind, Path]:
    """A folder for each kind of head, trained on answers of the model."""
    asked = [tiny_llm.chat_ids([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts(2)]
    examples = answered(tiny_llm, asked, 20)
    folders = {}
    for kind in KINDS:
        head = train_head(kind, tiny_llm.loaded, examples, Recipe(40, 1e-2, enough=0.8), columns=100, depth=3)
        folders[kind] = tmp_path_factory.mktemp("heads") / kind
        WRITERS[kind](head, folders[kind])
    return folders


def test_trained_heads_take_part_and_are_known_by_their_weights(
    model_folder: Path,
    trained: dict[HeadKind, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the command line: chains and trees, enough drafts accepted and rejected everywhere; a cut run goes on."""
    monkeypatch.setattr("paceline.bench.verify.ENOUGH", 8)
    path = tmp_path / "cells.jsonl"
    options = ["verify", str(model_folder), "--full", "--every", "--count", "2", "--max-tokens", "20", "--json"]
    options += ["--threads", "2", "-o", str(path)]
    for kind in KINDS:
        for written in (f"{kind}:model={trained[kind]},tree=none", f"{kind}:model={trained[kind]}"):
            options += ["--method", written]
    assert main(options) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["combinations"]
    assert {(row["method"].partition(":")[0], "tree=none" in row["method"]) for row in rows} == {
        (kind, chain) for kind in KINDS for chain in (False, True)
    }
    assert len(rows) == 6 * 4
    assert report["differing"] == 0
    for row in rows:
        assert row["accepted"] >= 8 <= row["rejected"]
        assert row.get("alone", row)["accepted"] >= 8 or row["temperature"] > 0
    assert str(tmp_path.parent) not in path.read_text()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-5]) + lines[-5][:30])
    assert main(options) == 0
    assert json.loads(capsys.readouterr().out)["combinations"] == rows
    assert len(path.read_text().splitlines()) == len(lines)


def test_where_few_drafts_are_accepted_the_oracle_is_seldom_wrong(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a drafter that is never right nor one that is never wrong leaves a combination short."""
    monkeypatch.setattr("paceline.bench.verify.ENOUGH", 100)
    report = verification(tiny_llm, 5, max_tokens=64, draws=8, ways=chosen_ways(["eagle3", "grammar"])).report()
    assert report["short"] == 0
    alone = {row["method"]: row["alone"] for row in report["combinations"] if row["mixed"]}
    assert alone["eagle3"]["accepted"] < 100
    assert alone["grammar"]["rejected"] == 0


def test_where_too_few_drafts_are_judged_the_oracle_helps_and_the_report_says_so(tiny_llm: LLM) -> None:
    report = verification(tiny_llm, 5, draws=4, ways=chosen_ways(FIRST)).report()
    assert report["differing"] == 0
    mixed = [row for row in report["combinations"] if row["mixed"]]
    assert {row["method"] for row in mixed} == {"ngram", "draft_layers"}
    assert all("alone" in row for row in mixed)
    assert report["short"] == 16  # far fewer than 500 of each, but for the four plain ones
    assert report["compared"] == 5 * 4 + 8  # two methods' four combinations ran again with the oracle


def view(tokens: Sequence[int], number: int = 0) -> View:
    return View(number, tokens, no_draw)


def test_the_oracle_is_wrong_as_often_as_it_is_told() -> None:
    prompt, answer = (7, 8, 9), list(range(100, 1100))
    for share in (0.0, 0.5, 1.0):
        oracle = OracleDrafter({prompt: answer}, 2000, wrong=share)
        oracle.start(view(prompt), 0)
        said = []
        for done in range(0, 1000, 5):
            (tree,) = oracle.propose([view([*prompt, *answer[:done]])], [5])
            tree.check(2000)
            said += tree.tokens[1:]
        right = sum(a == b for a, b in zip(said, answer, strict=True)) / 1000
        assert right == pytest.approx(1 - share, abs=0.05 if share == 0.5 else 0)
    assert len(oracle.propose([view([*prompt, *answer])], [5])[0]) == 1


def test_a_constrained_answer_is_the_free_one_or_one_token_beside_it() -> None:
    answer = [*range(10, 30), 2]
    language = variations(answer, 50, (2,))

    def takes(text: list[int]) -> bool:
        state: Any = language.initial()
        for token in text:
            state = None if state is None else language.advance(state, token)
        return state is not None and bool(language.allowed(state)[2:3].any())

    assert takes(answer[:-1])
    assert not takes(answer[:-2])
    varied = [token for token in range(50) if takes([*answer[:8], token, *answer[9:-1]])]
    assert len(varied) == 2
    assert not any(takes([*answer[:9], token, *answer[10:-1]]) for token in range(50) if token != answer[9])


def test_half_of_the_proposals_are_swapped() -> None:
    prompt, answer = (1,), list(range(2, 402))
    oracle = OracleDrafter({prompt: answer}, 1000, wrong=0.0)
    drafter = MixedDrafter(ScriptedDrafter(lambda tokens, budget: [999]), oracle)
    drafter.start(view(prompt), 0)
    firsts = []
    for done in range(400):
        (tree,) = drafter.propose([view([*prompt, *answer[:done]])], [3])
        firsts.append(tree.tokens[1])
    assert set(firsts) == {999, *answer} & set(firsts)
    assert 150 < firsts.count(999) < 250
    assert drafter.name == "scripted"


def test_chance_is_even() -> None:
    values = [chance("x", place) for place in range(2000)]
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.02)
    assert all(0 <= value < 1 for value in values)


def test_the_verb_prints_what_it_compared(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", "2", "--max-tokens", "6", "--threads", "2", "--quiet"]
    options += [part for name in FIRST for part in ("--method", name)]
    assert main(["verify", str(model_folder), *options]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == ["compared: 40", "differing: 0"]
    assert all(name in out for name in FIRST)
    assert "self: the model as its own drafter" in out
    assert "oracle: knows the answer" in out
    assert "enough" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_verb_compares_what_is_named(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", "500", "--count", "1", "--max-tokens", "6", "--threads", "2", "--json"]
    assert main(["verify", str(model_folder), *options, "--method", "ngram", "--method", "suffix:tree=2"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert {row["method"] for row in report["combinations"]} == {"ngram", "suffix:tree=2"}
    assert report["compared"] == 2 * 4
    assert "500 prompts are asked for, and there are 80" in captured.err
    assert main(["verify", str(model_folder), "--method", "magic"]) == 2


def test_the_verb_fails_where_tokens_differ(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.Verifier", ForgivingVerifier)
    options = ["--prompts", "2", "--max-tokens", "6", "--threads", "2", "--json", "--method", "oracle"]
    assert main(["verify", str(model_folder), *options]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["differing"] > 0
    assert report["environment"]["model"]


def test_the_verb_fails_where_lots_prove_too_little(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", "5", "--full", "--max-tokens", "4", "--threads", "2"]
    options += [part for name in FIRST for part in ("--method", name)]
    assert main(["verify", str(model_folder), *options]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "differing: 0"
    assert ENOUGH_LEGEND in captured.out
    assert "at least 500" in ENOUGH_LEGEND
    assert "16 combinations had too few accepted or rejected drafts" in captured.err


def test_wrong_calls_are_refused(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model_folder), "--max-num-seqs", "4"]) == 2
    assert "8 requests at a time" in capsys.readouterr().err
    assert main(["verify", str(model_folder), "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_seeds_and_prompts_decide_the_answers(tiny_llm: LLM) -> None:
    sampling = Sampling(temperature=0.8, seed=20_000, max_tokens=10)
    (prompt,) = prompts(1)
    expected = tiny_llm.chat([{"role": "user", "content": prompt.turns[0]}], sampling, speculation=False)
    runner = Runner(None, ENVIRONMENT, {}, quiet)
    Verification(tiny_llm, [prompt], runner, max_tokens=10, ways=chosen_ways(FIRST)).report()
    answer = runner.cell({"plain": prompt.id, "temperature": 0.8}, dict)
    assert answer["ids"] == expected.token_ids


@pytest.mark.long
@pytest.mark.parametrize("way", [way.name for way in WAYS])
def test_a_way_to_draft_changes_no_token(llm: LLM, way: str) -> None:
    """All prompts that come with paceline; each in one of the way's combinations, by lot."""
    ways = chosen_ways([way])
    report = Verification(
        llm, read_prompts(), Runner(None, ENVIRONMENT, {}, quiet), draws=draws(ways), ways=ways
    ).report()
    assert report["compared"] >= 80 * draws(ways)
    assert report["differing"] == 0, report["differences"]


SECOND = os.environ.get("PACELINE_SECOND_MODEL")
OTHERS = [
    pytest.param(DEFAULT_MODEL, "fp32", id="fp32"),
    pytest.param(DEFAULT_MODEL, "bf16", id="bf16"),
    *([pytest.param(SECOND, "int8", id="second")] if SECOND else []),
]


@pytest.mark.long
@pytest.mark.parametrize(("model", "dtype"), OTHERS)
@pytest.mark.parametrize("way", [way.name for way in WAYS])
def test_a_way_to_draft_changes_no_token_of_other_models(model: str, dtype: str, way: str) -> None:
    loaded = LLM(model, dtype=dtype, speculation=False, max_model_len=2048, max_num_seqs=8)
    runner = Runner(None, ENVIRONMENT, {}, quiet)
    report = Verification(loaded, spread(read_prompts(), 20), runner, max_tokens=32, ways=chosen_ways([way])).report()
    assert report["compared"] == 20 * 4
    assert report["differing"] == 0, report["differences"]
