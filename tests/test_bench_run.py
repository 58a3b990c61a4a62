"""Methods side by side: figures against values worked out by hand, and real runs on a tiny model."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from paceline.bench.rewriting import copied_share, rewriting_prompts
from paceline.bench.run import Comparison, figures, parse_method
from paceline.bench.runner import Runner
from paceline.cli import main
from paceline.errors import OptionError
from paceline.options import Speculation
from paceline.prompts import Prompt
from paceline.sampling import Sampling
from tests.bench_models import model_folder, prompts, tiny_llm

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.llm import LLM

__all__ = ["model_folder", "tiny_llm"]

ENVIRONMENT = {"code": "c", "machine": "m"}


def turn(tokens: int, decode: float, seconds: float, steps: int, accepted: int, digest: str = "d") -> dict[str, Any]:
    record = {
        "method": "ngram",
        "steps": steps,
        "drafted": 2 * accepted,
        "accepted": accepted,
        "accepted_by_position": [{"accepted": accepted, "reached": steps}],
        "seconds": {"draft": 0.1, "verify": 0.2, "sample": 0.0, "other": 0.3},
        "disabled_reason": None,
    }
    return {"tokens": tokens, "digest": digest, "decode_seconds": decode, "seconds": seconds, "record": record}


def test_figures_are_the_ones_of_the_definitions() -> None:
    plain = {
        "a": [{"turns": [turn(11, 1.0, 2.0, 10, 0)]}, {"turns": [turn(11, 3.0, 4.0, 10, 0)]}],
        "b": [{"turns": [turn(21, 2.0, 3.0, 20, 0), turn(11, 1.0, 1.0, 10, 0)]}] * 2,
    }
    other = {
        "a": [{"turns": [turn(11, 0.5, 1.5, 5, 5)]}, {"turns": [turn(11, 0.5, 1.5, 5, 5)]}],
        "b": [{"turns": [turn(21, 1.0, 2.0, 18, 2), turn(11, 0.5, 0.5, 7, 3)]}] * 2,
    }
    found = figures(plain, other, ["a", "b"])
    assert found["tokens"] == 43
    # each turn's first token comes with the prompt: 40 tokens in 2 seconds
    assert found["tokens_per_second"] == {"median": 20.0, "low": 20.0, "high": 20.0}
    # 4 / 2 in the first repeat, 6 / 2 in the second
    assert found["speedup"] == {"median": 2.5, "low": 2.0, "high": 3.0}
    assert found["end_to_end"] == {"median": 1.75, "low": 1.5, "high": 2.0}
    # of the medians over repeats: a 2 / 0.5, b 3 / 1.5, so a resample lies between 2 and 4
    assert found["interval"] == (2.0, 4.0)
    assert found["tau"] == pytest.approx(1 + 10 / 30)
    assert found["tau_macro"] == pytest.approx((2.0 + 1.2) / 2)
    assert found["accepted_by_position"] == [{"accepted": 20, "reached": 60}]
    assert found["seconds"]["verify"] == pytest.approx(0.6)
    assert found["differing"] == 0
    changed = {**other, "b": [{"turns": [turn(21, 1.0, 2.0, 18, 2), turn(11, 0.5, 0.5, 7, 3, "e")]}] * 2}
    assert figures(plain, changed, ["a", "b"])["differing"] == 1


def test_an_answer_of_one_token_has_no_decode_speed() -> None:
    cells = {"a": [{"turns": [turn(1, 0.0, 1.0, 0, 0)]}]}
    found = figures(cells, cells, ["a"])
    assert "speedup" not in found
    assert found["tau"] is None
    assert found["end_to_end"]["median"] == 1.0


def test_methods_are_written_with_their_options() -> None:
    common = {"num_speculative_tokens": 3}
    assert parse_method("plain", common).speculation == Speculation.off()
    assert parse_method("ngram", common).speculation == Speculation(method="ngram", num_speculative_tokens=3)
    method = parse_method("draft_model:draft_layers=6,adaptive=false,num-speculative-tokens=4", common)
    assert method.speculation == Speculation(
        method="draft_model", draft_layers=6, adaptive=False, num_speculative_tokens=4
    )
    assert parse_method("draft_layers=6", {}).speculation == Speculation(draft_layers=6)
    assert parse_method("draft_model:model=some/name", {}).speculation.model == "some/name"
    assert parse_method("draft_model:model=some/name", {}).name == "draft_model:model=some/name"
    for text, message in (
        ("plain:adaptive=true", "no options"),
        ("ngram:adaptive", "name=value"),
        ("ngram:foo=1", "'foo' is not an option"),
        ("draft_layers:6", "name=value"),
        ("foo=6", "'foo' is not an option"),
        ("magic", "unknown"),
    ):
        with pytest.raises(OptionError, match=message):
            parse_method(text, {})


def test_methods_run_in_turn_on_every_question(tiny_llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    methods = [parse_method("ngram", {}), parse_method("draft_layers=2", {"adaptive": False})]
    runner = Runner(path, ENVIRONMENT, {}, lambda line: None)
    report = Comparison(tiny_llm, prompts(4), methods, runner, max_tokens=12, repeats=2).report()
    assert list(report["methods"]) == ["plain", "ngram", "draft_layers=2"]
    for groups in report["methods"].values():
        assert list(groups) == ["qa", "mt_bench", "all"]
        assert groups["all"]["prompts"] == 4
        assert all(found["differing"] == 0 for found in groups.values())
    assert report["methods"]["plain"]["all"]["drafted"] == 0
    assert report["methods"]["draft_layers=2"]["all"]["drafted"] > 0
    names = [json.loads(line)["cell"] for line in path.read_text().splitlines()]
    history = [name for name in names if "history" in name]
    assert history == [{"history": name, "turn": 0} for name in ("1", "3")]
    cells = [name for name in names if "history" not in name]
    assert len(cells) == 4 * 3 * 2
    first = [cell["method"] for cell in cells[::3]]
    assert set(first) == set(report["methods"]), "each method is the first one now and then"
    # a second run takes nothing and says the same
    again = Runner(path, ENVIRONMENT, {}, lambda line: None)
    assert Comparison(tiny_llm, prompts(4), methods, again, max_tokens=12, repeats=2).report() == json.loads(
        json.dumps(report), object_hook=_pairs
    )
    assert again.taken == 0


def _pairs(value: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(entry) if key == "interval" else entry for key, entry in value.items()}


def test_the_second_turn_follows_the_plain_greedy_answer(tiny_llm: LLM) -> None:
    runner = Runner(None, ENVIRONMENT, {}, lambda line: None)
    prompt = prompts(2)[1]
    sampling = Sampling(temperature=0.9, seed=3)
    Comparison(tiny_llm, [prompt], [], runner, max_tokens=12, repeats=1, sampling=sampling).report()
    first = tiny_llm.chat([{"role": "user", "content": prompt.turns[0]}], Sampling(temperature=0.0, max_tokens=12))
    messages = [
        {"role": "user", "content": prompt.turns[0]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": prompt.turns[1]},
    ]
    name = {"prompt": prompt.id, "category": prompt.category, "method": "plain", "repeat": 0}
    turns = runner.cell(name, dict)["turns"]
    assert turns[1]["prompt_tokens"] == len(tiny_llm.chat_ids(messages))


def test_a_method_is_named_once(tiny_llm: LLM) -> None:
    method = parse_method("ngram", {})
    with pytest.raises(OptionError, match="named twice"):
        Comparison(tiny_llm, prompts(1), [method, method], Runner(None, {}, {}, lambda line: None))


def test_what_was_learned_is_forgotten_before_every_cell(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pacers = []
    forget = tiny_llm.forget

    def note() -> None:
        forget()
        pacers.append(tiny_llm.engine.pacer.cost)

    monkeypatch.setattr(tiny_llm, "forget", note)
    runner = Runner(None, ENVIRONMENT, {}, lambda line: None)
    Comparison(tiny_llm, prompts(2), [parse_method("ngram", {})], runner, max_tokens=4, repeats=2).report()
    assert len({id(pacer) for pacer in pacers}) == 2 * 2 * 2


CODE = [
    Prompt(f"HumanEval/{n}", "code", (f"import os\n\n\ndef other():\n    pass\n\n\ndef name{n}(a):\n    '''x'''\n",))
    for n in range(12)
]
PASSAGE = "The river Tamsel ran straight. Engineers had dug the river a new bed, and the river was fast. " * 20
RAG = [Prompt(str(n), "rag", (PASSAGE + "\nWho dug it?",)) for n in range(11)]


def test_the_rewriting_prompts_follow_the_rule() -> None:
    made = rewriting_prompts([*CODE, Prompt("x", "code", ("no function",))], [Prompt("q", "qa", ("?",)), *RAG])
    assert [prompt.id for prompt in made] == [
        *(f"rename HumanEval/{n}" for n in range(10)),
        *(f"repeat {n}" for n in range(10)),
    ]
    assert "Rename the function `name3` to `new_name3`" in made[3].turns[0]
    assert CODE[3].turns[0].strip() in made[3].turns[0]
    text = made[10].turns[0]
    assert 'replace every "river" by "paceline"' in text
    passage = text.partition("\n\n")[2]
    assert PASSAGE.startswith(passage)
    assert 700 < len(passage) <= 800
    assert passage.endswith(".")
    with pytest.raises(OptionError, match="10 rag questions are needed, and there are 9"):
        rewriting_prompts(CODE, RAG[:9])
    with pytest.raises(OptionError, match="functions"):
        rewriting_prompts(CODE[:9], RAG)


def test_the_copied_share_counts_grams_of_the_output() -> None:
    prompt = list(range(20))
    assert copied_share(prompt, list(range(5, 15))) == 1.0
    assert copied_share(prompt, [99] * 10) == 0.0
    # of the five grams of twelve tokens, the first two lie before the one that is foreign
    assert copied_share(prompt, [*range(9), 99, 10, 11]) == 2 / 5
    assert copied_share(prompt, [1, 2, 3]) == 0.0


def write(path: Path, rows: list[Prompt], key: str) -> str:
    lines = []
    for row in rows:
        fields: dict[str, Any] = {"turns": list(row.turns)} if key == "question_id" else {"prompt": row.turns[0]}
        lines.append(json.dumps({key: row.id, "category": row.category, **fields}))
    path.write_text("\n".join(lines))
    return str(path)


def test_the_run_verb(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = write(tmp_path / "questions.jsonl", prompts(4), "question_id")
    options = ["-m", str(model_folder), "--prompts", questions, "--max-tokens", "6", "--repeats", "1", "--threads", "2"]
    long = "draft_model:draft_layers=2,adaptive=false,num_speculative_tokens=7,tree=none,vocabulary=same,rule=coupled"
    methods = ["--method", "ngram", "--method", long]
    assert main(["bench", "run", *options, *methods, "--output", str(tmp_path / "cells.jsonl")]) == 0
    captured = capsys.readouterr()
    assert "mt_bench" in captured.out
    assert "kernels" in captured.err
    assert max(map(len, captured.out.splitlines())) <= 80
    assert "…" not in captured.out
    assert main(["bench", "run", *options, "--method", "plain", "--categories", "qa", "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert list(report["methods"]) == ["plain"]
    assert report["prompts"] == 2
    assert report["environment"]["dtype"] == "int8"
    assert main(["bench", "run", *options, "--categories", "rag"]) == 2
    assert "no prompt is of the category 'rag'; there are mt_bench, qa, writing" in capsys.readouterr().err


def test_the_rewrite_verb(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = write(tmp_path / "code.jsonl", CODE, "task_id")
    questions = write(
        tmp_path / "questions.jsonl", [Prompt(r.id, "rag", (r.turns[0][:90],)) for r in RAG], "question_id"
    )
    options = ["-m", str(model_folder), "--max-tokens", "4", "--repeats", "1", "--threads", "2"]
    asked = ["bench", "rewrite", *options, "--humaneval", code, "--prompts", questions]
    asked += ["--output", str(tmp_path / "cells.jsonl")]
    assert main([*asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(request["id"] in out for request in report["requests"])
    assert len(report["requests"]) == 20
    assert report["sets"]["all"]["prompts"] == 20
    assert all(found["differing"] == 0 for found in report["sets"].values())


def test_a_method_is_called_after_the_weights_it_drafts_with_not_after_their_place(tmp_path: Path) -> None:
    named = []
    for place, content in (("one", b"12"), ("two", b"12"), ("three", b"13")):
        folder = tmp_path / place / "eagle3"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
        method = parse_method(f"eagle3:model={folder},tree=none", {})
        assert method.speculation.model == str(folder)
        named.append(method.name)
        assert str(tmp_path) not in parse_method(f"eagle3:model = {folder / 'model.safetensors'}", {}).name
    assert re.fullmatch(r"eagle3:model=eagle3@[0-9a-f]{8},tree=none", named[0])
    assert named[0] == named[1] != named[2]
