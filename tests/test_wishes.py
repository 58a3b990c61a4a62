"""What a call may say beside its prompt and its sampling: every name known, every value of its type, all of it used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline import LLM, OptionError, RequestError, Sampling
from paceline.chat import ChatTemplate
from paceline.constraint import TokenAutomaton
from paceline.wishes import Wishes, check
from tests.bench_models import EOS, model_folder, tiny_llm

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["model_folder", "tiny_llm"]

SETTINGS = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = "wheel to wheel"
FIXED = {"num_speculative_tokens": 6, "adaptive": False}
AUTOMATON = TokenAutomaton.from_texts([list(b"red"), list(b"yellow")], EOS)

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"predicton": "x"}, r"'predicton' is not an option of a request; did you mean 'prediction'\?"),
    ({"origin": True}, r"'origin' is not an option of a request; did you mean 'origins'\?"),
    ({"speculaton": "ngram"}, r"did you mean 'speculation'\?"),
    ({"cachesalt": "x"}, r"did you mean 'cache_salt'\?"),
    ({"constrain": AUTOMATON}, r"did you mean 'constraint'\?"),
    ({"temperature": 0}, r"temperature is a setting of sampling: give it as Sampling\(temperature=\.\.\.\)\.$"),
    ({"max_tokens": 5}, r"max_tokens is a setting of sampling: give it as Sampling\(max_tokens=\.\.\.\)\.$"),
    ({"zzz": 1}, r"'zzz' is not an option of a request\.$"),
    ({"origins": 1}, "origins is true or false, not 1"),
    ({"origins": None}, "origins is true or false, not None"),
    ({"cache_salt": 5}, "cache_salt is a text, not 5"),
    ({"cache_salt": b"x"}, "cache_salt is a text, not b'x'"),
    ({"prediction": 5}, "prediction is a text or a list of token ids, not 5"),
    ({"prediction": b"bytes"}, "prediction is a text or a list of token ids, not b'bytes'"),
    ({"prediction": {1: 2}}, "prediction is a text or a list of token ids"),
    ({"priority": "high"}, "priority is a whole number, not 'high'"),
    ({"priority": True}, "priority is a whole number, not True"),
    ({"priority": 1.5}, r"priority is a whole number, not 1\.5"),
    ({"constraint": "json"}, "constraint has the methods .* str lacks them"),
    ({"constraint": {"type": "json"}}, "constraint has the methods .* dict lacks them"),
    ({"speculation": 5}, "speculation is a mapping, a method's name, true, false or null, not 5"),
    ({"speculation": {"metod": "ngram"}}, r"'metod' is not an option of speculation; did you mean 'method'\?"),
]


def _calls(llm: LLM) -> dict[str, Callable[..., Any]]:
    return {
        "generate": lambda **wishes: llm.generate(PROMPT, SETTINGS, **wishes),
        "stream": lambda **wishes: llm.stream(PROMPT, SETTINGS, **wishes),
        "submit": lambda **wishes: llm.submit(PROMPT, SETTINGS, **wishes),
    }


@pytest.mark.parametrize("call", ["generate", "stream", "submit"])
@pytest.mark.parametrize(("wishes", "sentence"), WRONG)
def test_wishes_that_nobody_can_fulfil_are_refused(
    tiny_llm: LLM, call: str, wishes: dict[str, Any], sentence: str
) -> None:
    """Before anything of the request begins."""
    with pytest.raises(OptionError, match=sentence):
        _calls(tiny_llm)[call](**wishes)
    assert tiny_llm.engine.idle


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        dict.fromkeys(("speculation", "cache_salt", "prediction", "constraint")),
        {"origins": True, "cache_salt": "", "prediction": "", "constraint": AUTOMATON, "speculation": "off"},
        {"prediction": []},
        {"prediction": (1, 2)},
    ],
)
def test_wishes_that_can_be_fulfilled(wishes: dict[str, Any]) -> None:
    check(wishes)
    assert wishes.keys() <= Wishes.__annotations__.keys()


@pytest.mark.parametrize("method", ["prediction", "cascade"])
def test_a_prediction_is_a_text_or_its_ids(tiny_llm: LLM, method: str) -> None:
    plain = tiny_llm.generate(PROMPT, SETTINGS)
    assert plain.record.accepted == 0
    text = "wheel of the road, over the hill"
    ids = tiny_llm.tokenizer.encode(text, add_special_tokens=False)
    speculation = {"method": method, **FIXED}

    def drafted(prediction: Any) -> tuple[list[int], int, int]:
        tiny_llm.forget()
        answer = tiny_llm.generate(PROMPT, SETTINGS, speculation=speculation, prediction=prediction)
        return answer.token_ids, answer.record.drafted, answer.record.accepted

    assert drafted(text) == drafted(ids) == drafted(tuple(ids))
    assert drafted(text)[0] == plain.token_ids
    right = drafted(plain.token_ids)
    assert right[0] == plain.token_ids
    assert right[2] >= 15
    assert drafted("") == drafted([]) == drafted(None)
    assert right[2] > drafted(None)[2]


@pytest.mark.parametrize(
    ("prediction", "sentence"),
    [
        ([-1], "-1 at place 0"),
        ([5, 10**6], "1000000 at place 1"),
        ([True], "True at place 0"),
        (["text"], "prediction is one text or one list of token ids.*call once for each"),
        ([[1, 2]], "prediction is one text or one list of token ids.*call once for each"),
    ],
)
def test_a_prediction_of_ids_that_are_none_is_refused(tiny_llm: LLM, prediction: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        tiny_llm.generate(PROMPT, SETTINGS, prediction=prediction)
    assert tiny_llm.engine.idle


class Spy(ChatTemplate):
    """A chat template that notes what it is given."""

    def __init__(self) -> None:
        super().__init__("{{ messages }}{{ loud }}{{ enable_thinking }}")
        self.given: list[dict[str, Any]] = []

    def render(self, messages: Any, *given: Any, **variables: Any) -> str:
        self.given.append(variables)
        return f"{messages[0]['content']}{'!' if variables.get('loud') else ''}"


def test_chat_hands_the_template_what_is_the_templates_and_nothing_else(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy()
    monkeypatch.setattr(tiny_llm.preparer, "template", spy)
    message = [{"role": "user", "content": PROMPT}]
    loud = tiny_llm.generate(PROMPT + "!", SETTINGS)
    wishes: dict[str, Any] = {
        "speculation": {"method": "prediction", **FIXED},
        "origins": True,
        "cache_salt": "mine",
        "prediction": loud.token_ids,
        "constraint": None,
        "priority": 3,
    }
    assert wishes.keys() == Wishes.__annotations__.keys()
    answer = tiny_llm.chat(message, SETTINGS, loud=True, enable_thinking=False, **wishes)
    assert spy.given == [{"loud": True, "enable_thinking": False}]
    assert answer.token_ids == loud.token_ids
    assert answer.record.method == "prediction"
    assert answer.record.accepted >= 15
    assert len(answer.record.origins) == 20
    several = tiny_llm.chat([message, message], SETTINGS, loud=True)
    assert [each.token_ids for each in several] == [loud.token_ids] * 2
    assert spy.given[1:] == [{"loud": True}] * 2
    with pytest.raises(OptionError, match="origins is true or false"):
        tiny_llm.chat(message, SETTINGS, origins="yes")


@pytest.mark.parametrize(
    ("keyword", "end"),
    [
        ("speculaton", "; did you mean 'speculation'?"),
        ("cache_sal", "; did you mean 'cache_salt'?"),
        ("origin", "; did you mean 'origins'?"),
        ("constrain", "; did you mean 'constraint'?"),
        ("predicton", "; did you mean 'prediction'?"),
        ("enable_thinkin", "; did you mean 'enable_thinking'?"),
        ("date", ", which reads enable_thinking, loud."),
        ("tools", ", which reads enable_thinking, loud."),
    ],
)
def test_chat_refuses_what_is_neither_a_wish_nor_the_templates(
    tiny_llm: LLM, keyword: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_llm.preparer, "template", Spy())
    with pytest.raises(OptionError) as caught:
        tiny_llm.chat([{"role": "user", "content": PROMPT}], SETTINGS, **{keyword: "ngram"})
    assert str(caught.value) == f"{keyword!r} is no variable of the model's chat template{end}"


def test_chat_refuses_settings_of_sampling(tiny_llm: LLM) -> None:
    with pytest.raises(OptionError, match=r"give it as Sampling\(temperature=\.\.\.\)"):
        tiny_llm.chat([{"role": "user", "content": PROMPT}], temperature=0)


@pytest.mark.parametrize("nothing", [[], (), [[]]])
def test_no_messages_are_no_conversation(tiny_llm: LLM, nothing: Any) -> None:
    with pytest.raises(RequestError, match="the conversation has no messages: give at least one"):
        tiny_llm.chat(nothing, SETTINGS)


@pytest.mark.parametrize("messages", ["hello", ["hello"], {"role": "user", "content": "x"}, 5, None, [5], [["hello"]]])
def test_what_is_no_list_of_messages_is_refused(tiny_llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages are a list|message 0 is not an object"):
        tiny_llm.chat(messages, SETTINGS)


def test_a_constraint_holds_and_its_forced_tokens_are_drafted(tiny_llm: LLM) -> None:
    texts = [tiny_llm.tokenizer.encode(text, add_special_tokens=False) for text in ("red", "yellow")]
    constraint, sampling = TokenAutomaton.from_texts(texts, EOS), Sampling(max_tokens=20, seed=1)
    for speculation in (False, {"method": "grammar", **FIXED}, {"method": "auto", **FIXED}):
        answer = tiny_llm.generate(PROMPT, sampling, constraint=constraint, speculation=speculation)
        assert answer.text in ("red", "yellow")
        assert (answer.record.accepted > 0) == bool(speculation)


@pytest.mark.parametrize(("ids", "highest"), [([5, 60_000], 60_000), ([70_000, 60_000], 70_000), ([300], 300)])
def test_a_constraint_of_ids_that_the_model_lacks_is_refused(tiny_llm: LLM, ids: list[int], highest: int) -> None:
    """Before anything is generated, however deep in its language they stand."""
    constraint = TokenAutomaton.from_texts([list(b"red"), ids], EOS)
    sentence = f"the constraint allows token {highest}, but the model has 257 ids, up to 256: make it with this model's"
    with pytest.raises(RequestError, match=sentence):
        tiny_llm.generate(PROMPT, Sampling(), constraint=constraint)
    with pytest.raises(RequestError, match=sentence):
        tiny_llm.stream(PROMPT, Sampling(), constraint=constraint)
    assert tiny_llm.engine.idle


@pytest.mark.parametrize(("method", "wish"), [("grammar", "constraint"), ("prediction", "prediction")])
def test_a_method_without_what_it_drafts_from_says_so(tiny_llm: LLM, method: str, wish: str) -> None:
    reason = f"it drafts from {wish}=..., and none was given"
    for adaptive in (True, False):
        speculation = {"method": method, "adaptive": adaptive}
        record = tiny_llm.generate(PROMPT, SETTINGS, speculation=speculation).record
        assert record.as_dict()["disabled_reason"] == reason
    record = tiny_llm.generate(PROMPT, SETTINGS, speculation={"method": method, **FIXED}, prediction="no").record
    assert (record.disabled_reason == reason) == (method == "grammar")
    assert tiny_llm.generate(PROMPT, SETTINGS, speculation="cascade").record.disabled_reason != reason


def test_a_salt_keeps_what_is_learned_apart(tiny_llm: LLM) -> None:
    """The second request of a key gains by the first; one of another key does not."""
    tiny_llm.forget()
    speculation = {"method": "suffix", **FIXED}

    def accepted(salt: str | None) -> int:
        answer = tiny_llm.generate(PROMPT, SETTINGS, speculation=speculation, cache_salt=salt)
        return int(answer.record.accepted)

    first = [accepted("a"), accepted("a")]
    assert first[1] > first[0]
    assert [accepted("b"), accepted(None)] == [first[0]] * 2
    assert accepted("a") >= first[1]
