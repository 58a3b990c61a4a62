"""Chat templates give what transformers gives, and what is no conversation is refused in one sentence."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

import pytest

from paceline.chat import ChatTemplate
from paceline.errors import OptionError, RequestError, TokenizerError

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>' }}{{ 'system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- "Functions:\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content | tojson + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

INSTRUCTIONS = """{%- set loop_messages = messages %}
{{- bos_token }}
{%- set ns = namespace(index=0, done=false) %}
{% for message in loop_messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
        {%- set ns.index = ns.index + 1 %}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
    {%- if ns.index >= 3 %}{% break %}{% endif %}
{% endfor %}
{% if enable_thinking is defined and not enable_thinking %}
<think></think>
{% endif %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "instructions": INSTRUCTIONS}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  Wie heißt <b>das</b>? 😀 \n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "Das \"heißt\" 'so'."},
        {"role": "user", "content": "Danke"},
    ],
    "null fields": [{**USER, "tool_calls": None}],
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"wörd": "<é>", "n": [1, 2.5]}}}],
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look ü up", "parameters": {}}}]


def theirs(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

    plain = _normalize_chat_messages(messages)
    given: dict[str, Any] = {**SPECIALS, **variables}
    rendered: Any = render_jinja_template([plain], chat_template=source, **given)
    return str(rendered[0][0])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(template: str, conversation: str, prompt: bool) -> None:
    messages = CONVERSATIONS[conversation]
    ours = ChatTemplate(TEMPLATES[template], SPECIALS)
    expected = theirs(TEMPLATES[template], messages, add_generation_prompt=prompt)
    assert ours.render(messages, add_generation_prompt=prompt) == expected


def test_tools_and_tool_calls_equal_transformers() -> None:
    messages: list[dict[str, Any]] = [USER, CALL, {"role": "tool", "content": "gefunden: ü"}]
    ours = ChatTemplate(HEADERS, SPECIALS).render(messages, tools=TOOLS)
    assert ours == theirs(HEADERS, messages, tools=TOOLS, add_generation_prompt=True)
    assert '"wörd": "<é>"' in ours


def test_further_variables_reach_the_template() -> None:
    ours = ChatTemplate(INSTRUCTIONS, SPECIALS)
    assert "<think></think>" not in ours.render([USER])
    rendered = ours.render([USER], enable_thinking=False)
    assert rendered.endswith("<think></think>\n")
    assert rendered == theirs(INSTRUCTIONS, [USER], add_generation_prompt=True, enable_thinking=False)
    assert ChatTemplate(HEADERS, SPECIALS).render([USER], date_string="1 May 2025").count("1 May 2025") == 1


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"enable_thinkin": 1}, "chat template; did you mean 'enable_thinking'?"),
        ({"documents": []}, "'documents' is no variable of the model's chat template, which reads enable_thinking."),
        ({"tools": TOOLS}, "'tools' is no variable of the model's chat template, which reads enable_thinking."),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused(variables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError) as caught:
        ChatTemplate(INSTRUCTIONS, SPECIALS).render([USER], **variables)
    assert sentence in str(caught.value)


def test_a_template_without_variables_says_that() -> None:
    with pytest.raises(OptionError, match=r"chat template, which reads none\.$"):
        ChatTemplate("{{ messages[0].content }}").render([USER], zzz=1)


def test_the_date_is_the_day_of_rendering() -> None:
    assert datetime.now().strftime("%Y") in ChatTemplate(HEADERS, SPECIALS).render([USER])


def test_text_parts_are_one_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}
    assert ChatTemplate(CHATML).render([parts]) == ChatTemplate(CHATML).render([{"role": "user", "content": "a b"}])


def test_strings_of_other_kinds_become_plain() -> None:
    class Role(StrEnum):
        USER = "user"

    assert ChatTemplate("{{ messages[0].role }}").render([{"role": Role.USER, "content": "x"}]) == "user"


def test_variables_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", SPECIALS)
    assert template.render([USER], bos_token="!") == USER["content"] + "!"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hello", "messages are a list"),
        ({"role": "user", "content": "x"}, "messages are a list"),
        ([], "no messages"),
        (["hello"], "message 0 is not an object with role and content but a str"),
        ([USER, {"content": "x"}], "message 1 has no role"),
        ([{"role": 3, "content": "x"}], "message 0 has no role"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user", "content": 7}], "content of message 0 is a int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "a part that is no text"),
        ([{"role": "user", "content": ["x"]}], "a part that is no text"),
        ([{"role": "user", "content": "x", "extra": object()}], "not a object"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        ChatTemplate(CHATML).render(messages)


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="no chat template: give a plain prompt"):
        ChatTemplate(None).render([USER])


def test_a_template_that_refuses_is_one_sentence() -> None:
    with pytest.raises(RequestError, match=r"refuses the messages: Conversation roles must alternate[^\n]*$"):
        ChatTemplate(TURNS, SPECIALS).render([USER, USER])


def test_a_template_that_fails_is_one_sentence() -> None:
    with pytest.raises(RequestError, match=r"fails on these messages \(TypeError"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([USER])
    with pytest.raises(RequestError, match="undefined"):
        ChatTemplate("{{ nothing.there }}").render([USER])


def test_a_broken_template_is_found_at_load() -> None:
    with pytest.raises(TokenizerError, match=r"does not compile .*line 2"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(attack: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(attack).render([USER])


@pytest.mark.parametrize("attack", ["{{ 'x'.join.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_what_the_sandbox_hides_is_empty(attack: str) -> None:
    assert ChatTemplate(attack).render([USER]) == ""
