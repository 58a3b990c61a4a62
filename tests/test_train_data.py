"""Files of texts: what is read, what is skipped and how that is said; answers that the target gives, taken up again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline.errors import OptionError, ResourceError
from paceline.train.answers import Asking, answer
from paceline.train.data import Text, read_texts
from paceline.train.examples import coverage, encoded, preview
from paceline.train.provenance import answers_digest
from paceline.train.texts import Data, collect
from tests.bench_models import EOS, model_folder, tiny_llm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.llm import LLM

__all__ = ["model_folder", "tiny_llm"]  # fixtures

GOOD = {"prompt": "Why?", "answer": "So.", "source": "qa", "temperature": 0.8, "finish_reason": "length"}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def quiet(*_: object) -> None:
    """Neither tells nor advances."""


def test_prompts_and_chats_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    end = {"role": "assistant", "content": "d"}
    path = write(tmp_path / "x", GOOD, {"messages": chat}, {"messages": [*chat, end]}, {"prompt": "p", "extra": 1})
    first, open_, closed, prompt = read_texts(path).texts
    assert first == Text(1, ({"role": "user", "content": "Why?"},), "So.", None, False, 0.8, "qa")
    assert (open_.messages, open_.answer) == (tuple(chat), None)
    assert (closed.messages, closed.answer) == (tuple(chat), "d")
    assert prompt == Text(4, ({"role": "user", "content": "p"},))
    assert open_.key == closed.key != first.key


BAD = {
    "": "empty",
    "{": "not JSON",
    "[1]": "no object",
    '{"answer": "a"}': "neither a 'prompt'",
    '{"prompt": " "}': "neither a 'prompt'",
    '{"prompt": "a", "answer": " "}': "answer is empty",
    '{"prompt": "a", "answer": 1}': "answer is no text",
    '{"prompt": "a", "answer": "b", "answer_ids": ["x"]}': "no list of ids",
    '{"prompt": "a", "temperature": -1}': "temperature",
    '{"prompt": "a", "temperature": "hot"}': "temperature",
    '{"messages": []}': "no list of objects",
    '{"messages": [{"role": "user"}]}': "no list of objects",
    '{"messages": [{"role": "assistant", "content": "a"}]}': "no message of a user",
    '{"messages": [{"role": "system", "content": "a"}]}': "no message of a user",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_are_named_and_skipped_up_to_a_bound(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x", GOOD, line, GOOD, line)
    found = read_texts(path, 2)
    assert [text.line for text in found.texts] == [1, 3]
    assert [skipped.partition(":")[0] for skipped in found.skipped] == ["line 2", "line 4"]
    assert BAD[line] in found.skipped[0]
    with pytest.raises(OptionError, match=r"2 bad lines, and at most 1.*line 2.*line 4"):
        read_texts(path, 1)


def test_a_file_without_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no text"):
        read_texts(write(tmp_path / "x", "", ""))
    with pytest.raises(OptionError, match="cannot be read"):
        read_texts(tmp_path / "none")


def test_the_template_is_that_of_inference_and_only_the_answer_counts(tiny_llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "x", GOOD, {**GOOD, "finish_reason": "stop"}, {**GOOD, "answer_ids": [1, 2, EOS]})
    cut, whole, given = encoded(read_texts(path).texts, tiny_llm.chat_ids, tiny_llm.tokenizer)
    assert preview(cut, tiny_llm.tokenizer) == [("u:Why?\na:", False), ("So.", True)]
    assert preview(whole, tiny_llm.tokenizer) == [("u:Why?\na:", False), ("So.<eos>", True)]
    assert given.tokens[-given.counted :] == (1, 2, EOS)
    prompt = tiny_llm.chat_ids([{"role": "user", "content": "Why?"}])
    assert all(list(example.tokens[: len(prompt)]) == prompt for example in (cut, whole, given))
    assert coverage([cut], tiny_llm.tokenizer.encode("S.")) == 2 / 3


ASKED = [{"prompt": f"{'a' * number}?", "source": "xy"[number % 2]} for number in range(1, 9)]


def ask(llm: LLM, path: Path, asked: Path, advance: Callable[[int, int], None] = quiet) -> list[Text]:
    asking = Asking(max_tokens=6, seed=3)
    return answer(llm, read_texts(asked).texts, path, asking, answers_digest(llm.loaded), advance)


def test_answers_are_the_targets_and_are_taken_up_again(tiny_llm: LLM, tmp_path: Path) -> None:
    asked, path = write(tmp_path / "prompts", *ASKED), tmp_path / "answers"
    whole = ask(tiny_llm, path, asked)
    assert [text.temperature for text in whole] == [0.0, 0.8] * 4
    for place, text in enumerate(whole):
        sampling = Asking(max_tokens=6, seed=3).sampling(text, place)
        alone = tiny_llm.chat(list(text.messages), sampling, speculation=False)
        assert (text.answer, text.answer_ids) == (alone.text, tuple(alone.token_ids))
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 8

    path.write_text("".join(lines[:3]) + lines[3][:20])  # a kill in the middle of a line
    seen: list[tuple[int, int]] = []
    again = ask(tiny_llm, path, asked, lambda done, total: seen.append((done, total)))
    assert again == whole
    assert seen == [(done, 8) for done in range(3, 9)]
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
    assert read_texts(path).texts[0].answer_ids


def test_an_answer_that_cannot_be_written_says_so(tiny_llm: LLM, tmp_path: Path) -> None:
    asked = write(tmp_path / "prompts", *ASKED)
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be written"):
        ask(tiny_llm, tmp_path / "file" / "answers", asked)


def test_answers_of_another_template_are_refused(tiny_llm: LLM, tmp_path: Path) -> None:
    asked, path = write(tmp_path / "prompts", *ASKED), tmp_path / "answers"
    ask(tiny_llm, path, asked)
    path.write_text(path.read_text().replace(answers_digest(tiny_llm.loaded), "0123456789abcdef"))
    with pytest.raises(OptionError, match=r"line 1.*another chat template"):
        ask(tiny_llm, path, asked)
    with pytest.raises(OptionError, match=r"line \d.*another chat template"):
        collect(Data(answers=path, held_out=2), tiny_llm, tmp_path, 0, quiet, quiet)
    with pytest.raises(OptionError, match="no answer that paceline has written"):
        ask(tiny_llm, write(path, {"key": 1}), asked)


def test_what_has_no_answer_is_answered_and_all_kinds_are_held_out(tiny_llm: LLM, tmp_path: Path) -> None:
    given = [{**prompt, "answer": "yes", "temperature": 0} for prompt in ASKED[:3]]
    data = Data(
        answers=write(tmp_path / "a", *given, ""),
        prompts=write(tmp_path / "p", *ASKED),
        held_out=4,
        answer_tokens=5,
        max_length=16,
    )
    told: list[str] = []
    material = collect(data, tiny_llm, tmp_path / "run", 0, told.append, quiet)
    assert len((tmp_path / "run" / "answers.jsonl").read_text().splitlines()) == 5
    assert any("line 4: it is empty: skipped" in line for line in told)
    assert any(line.startswith("5 prompts have no answer") for line in told)
    assert (len(material.examples), len(material.held)) == (4, 4)
    assert {(held.category, held.drawn) for held in material.held} >= {("x", "greedy"), ("y", "at 0.8")}
    texts = [*material.examples, *(held.example for held in material.held)]
    assert len({example.tokens for example in texts}) == 8
    assert max(len(example.tokens) for example in texts) == 16
    assert set(material.digests) == {"answers", "prompts"}
    again = collect(data, tiny_llm, tmp_path / "run", 0, quiet, quiet)
    assert again == material


def test_too_little_to_train_on_is_refused(tiny_llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="give answers of the target, or prompts"):
        Data()
    with pytest.raises(OptionError, match=r"held_out must be at least 1"):
        Data(prompts=tmp_path, held_out=0)
    with pytest.raises(OptionError, match="1 texts 64 cannot be held out"):
        collect(Data(answers=write(tmp_path / "x", GOOD)), tiny_llm, tmp_path, 0, quiet, quiet)
