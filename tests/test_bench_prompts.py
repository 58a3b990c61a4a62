"""The shipped prompts, and the reader of every kind of file."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import OptionError
from paceline.prompts import Prompt, read_prompts, spread

FAR = Path(__file__).parents[1] / "measurements" / "prompts" / "far.jsonl"
GROUPS = {"mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "editing"}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_shipped_prompts_are_of_all_kinds() -> None:
    prompts = read_prompts()
    assert len(prompts) == 80
    groups = Counter(prompt.group for prompt in prompts)
    assert set(groups) == GROUPS
    assert min(groups.values()) >= 8
    assert all(len(prompt.turns) == (2 if prompt.group == "mt_bench" else 1) for prompt in prompts)
    # English takes about 4.4 characters a token, so these have well over 1,000 tokens.
    assert sum(len(prompt.turns[0]) > 5500 for prompt in prompts) >= 3


def test_the_sets_far_from_what_drafters_know_are_whole() -> None:
    prompts = read_prompts(FAR)
    groups = Counter(prompt.group for prompt in prompts)
    assert set(groups) == {"rare_code", "other_languages", "tool_json", "random_words"}
    assert min(groups.values()) >= 40
    turns = [turn for prompt in prompts for turn in prompt.turns]
    assert len(set(turns)) == len(turns)
    assert not any(re.search(r"\{[a-z]+\d+\}", turn) for turn in turns), "a place for a random word was left open"


def test_every_kind_of_line_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "prompts.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x"]},
        "",
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        {"prompt": "line\u2028separator"},
        {"turns": ["c"]},
    )
    assert read_prompts(path) == [
        Prompt("81", "writing", ("a", "b")),
        Prompt("HumanEval/0", "code", ("def f():\n",)),
        Prompt("4", "prompts", ("line\u2028separator",)),
        Prompt("5", "prompts", ("c",)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "line 2: this is not JSON"),
        ("[1, 2]", "line 2: a prompt is a JSON object"),
        ('{"text": "a"}', "line 2: neither 'turns' nor 'prompt'"),
        ('{"turns": []}', "line 2: 'turns' is a list"),
        ('{"turns": "a"}', "line 2: 'turns' is a list"),
        ('{"turns": ["a", 1]}', "line 2: every turn is a text"),
        ('{"prompt": " "}', "line 2: every turn is a text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(OptionError, match=message):
        read_prompts(path)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(OptionError, match="holds no prompt"):
        read_prompts(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(OptionError, match="more than one prompt with the id '7'"):
        read_prompts(write(tmp_path / "twice.jsonl", *[{"question_id": 7, "turns": ["a"]}] * 2))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path / "bytes.jsonl")


def test_a_sample_is_spread_over_the_categories() -> None:
    prompts = read_prompts()
    assert {prompt.group for prompt in spread(prompts, 7)} == GROUPS
    assert len({prompt.id for prompt in spread(prompts, 30)}) == 30
    assert len(spread(prompts, 1000)) == 80
    with pytest.raises(OptionError, match="at least 1"):
        spread(prompts, 0)
