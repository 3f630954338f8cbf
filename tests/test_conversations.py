"""Every door reads conversations alike: training data, prompts, and what endpoints are asked."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from fake_endpoint import fake_endpoints
from tiny_training import chat_tokenizer, write_rows

from medusa.conversations import as_template
from medusa.prompts import encode_prompt, read_prompts
from medusa.serving.chat_requests import ChatMessage
from medusa.training.data.loading import Renderer
from medusa.training.data.reading import parse_row, read_examples
from medusa.training.distillation.answering import ChatEndpoint

TEMPLATE = (  # iterates the arguments, as Qwen3-Coder's does, and reads reasoning as gpt-oss's does
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }} "
    "{% if message.thinking %}<think>{{ message.thinking }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "({% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }},{% endfor %})"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
ASKED, SEEN = {"role": "user", "content": "Rain?"}, {"role": "tool", "content": "No."}
SAID = {"role": "assistant", "content": "It is dry."}


def called(arguments, **beside):
    return {"role": "assistant", "content": None, "tool_calls": [call_of(arguments)], **beside}


def call_of(arguments):
    return {"type": "function", "function": {"name": "look", "arguments": arguments}}


def trained_on(row, template=TEMPLATE):
    """What a row is rendered to, and the parts of it that the model wrote."""
    (document,) = Renderer(chat_tokenizer(template)).render(parse_row(row, "data row 1"))
    return document.text, [document.text[start:end] for start, end in document.written]


def prompted(row, tmp_path):
    tokenizer = chat_tokenizer(TEMPLATE)
    (prompt,) = read_prompts(write_rows(tmp_path / "prompts.jsonl", [row]))
    return tokenizer.decode(encode_prompt(tokenizer, prompt)["input_ids"][0])


def sent(row, tmp_path):
    """The messages that an endpoint is sent for a row of prompts."""
    (prompt,) = read_prompts(write_rows(tmp_path / "prompts.jsonl", [row]))
    with fake_endpoints() as start:
        fake = start()
        ChatEndpoint(fake.url, "tiny").answer(prompt.messages, temperature=0, max_new_tokens=9, seed=4)
    return fake.requests[0][1]["messages"]


@pytest.mark.parametrize("given", [{"city": "Oslo", "no": 1}, '{"city": "Oslo", "no": 1}'], ids=type)
def test_arguments_as_an_object_and_as_text_are_the_same_call_at_every_door(given, tmp_path):
    messages = [ASKED, called(given), SEEN]
    history = 'user Rain?<|im_end|>\nassistant look(city="Oslo",no=1,)<|im_end|>\ntool No.<|im_end|>\n'
    history += "assistant "
    text, written = trained_on({"messages": [*messages, SAID]})
    assert text == history + "It is dry.<|im_end|>"
    assert written == ['look(city="Oslo",no=1,)<|im_end|>', "It is dry.<|im_end|>"]
    assert prompted({"messages": messages}, tmp_path) == history
    _, call, _ = sent({"messages": messages}, tmp_path)
    (function,) = [each["function"] for each in call["tool_calls"]]
    assert json.loads(function["arguments"]) == {"city": "Oslo", "no": 1}
    (asked,) = as_template([ChatMessage.model_validate(call).as_conversation], chat_tokenizer(TEMPLATE))
    assert asked["tool_calls"][0]["function"]["arguments"]["no"] == 1


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, called('{"no": 1e400}'), SEEN]},
        {"messages": [ASKED, called({"no": [float("nan")]}), SEEN]},
        {"messages": [{**ASKED, "weight_of_it": float("inf")}]},
        {"messages": [ASKED], "tools": [{"least": float("-inf")}]},
        {"messages": [ASKED], "chat_template_kwargs": {"x": float("nan")}},
    ],
    ids=["text", "object", "message", "tools", "variables"],
)
def test_numbers_that_are_not_finite_reach_no_template(row, tmp_path):
    for read in (
        lambda: prompted(row, tmp_path),
        lambda: trained_on({**row, "messages": [*row["messages"], SAID]}),
    ):
        with pytest.raises(ValueError, match=r"row 1.*: numbers must be finite, .* got -?(inf|nan)"):
            read()
    beside = {"messages": [ASKED], "score": float("nan")}
    assert prompted(beside, tmp_path), "what nobody reads may be anything"


ARGUMENTS = (
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }},{% endfor %}"
)


@pytest.mark.parametrize(
    ("writes", "shown"),
    [
        ("{{ call.function.arguments | tojson }}", '{"city": "Oslo"}'),
        ("{{ '' + call.function.arguments }}", '{"city": "Oslo"}'),
        ("{{ call.function.arguments }}", '{"city": "Oslo"}'),
        ("{{ '' if call.function.arguments is mapping else call.function.arguments }}", ""),
    ],
    ids=["as JSON", "joined to text", "as they are", "by their type"],
)
@pytest.mark.parametrize("given", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=type)
def test_a_template_gets_arguments_as_it_writes_them(writes, shown, given, tmp_path):
    assert ARGUMENTS in TEMPLATE
    template = TEMPLATE.replace(ARGUMENTS, writes)
    row = {"messages": [ASKED, called(given)]}
    assert trained_on(row, template)[1] == [f"look({shown})<|im_end|>"]


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": '{"name": "look", "arguments": {"no": 1}}'},
        {"from": "function_call", "value": '[{"name": "look", "arguments": "{\\"no\\": 1}"}]'},
        {"from": "gpt", "value": None, "function_call": {"name": "look", "arguments": '{"no": 1}'}},
        {"from": "gpt", "value": None, "tool_calls": [{"name": "look", "arguments": {"no": 1}}]},
    ],
    ids=["role", "role with several", "older key", "without a function around"],
)
def test_a_call_is_the_same_however_other_programs_write_it(turn):
    row = {"conversations": [{"from": "human", "value": "Rain?"}, turn], "tools": '[{"name": "look"}]'}
    assert trained_on(row) == (
        'tools [{"name": "look"}]\nuser Rain?<|im_end|>\nassistant look(no=1,)<|im_end|>',
        ["look(no=1,)<|im_end|>"],
    )


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (call_of("{not json"), "arguments of a tool call is not valid JSON"),
        (call_of("[1]"), r"arguments of a tool call must be a JSON object, got '\[1\]'"),
        (call_of('{"a": "half \\ud83d"}'), "arguments of a tool call holds text that is not Unicode"),
        ({"function": {"arguments": {}}}, "a tool call must be an object with function, .* with name"),
    ],
)
def test_a_call_that_cannot_be_read_is_refused_with_its_row(call, complaint, tmp_path):
    row = {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(ValueError, match=f"data row 1, message 2: {complaint}"):
        parse_row(row, "data row 1")
    with pytest.raises(ValueError, match=f"row 1, message 2: {complaint}"):
        read_prompts(write_rows(tmp_path / "prompts.jsonl", [row]))


@pytest.mark.parametrize("is_hub", [False, True], ids=["parquet", "hub"])
def test_nulls_that_arrow_adds_are_neither_shown_nor_trained_on(is_hub, tmp_path, monkeypatch):
    tools = [
        [{"type": "function", "function": {"name": "look", "parameters": {name: {"type": "string"}}}}]
        for name in ("city", "zone")
    ]
    told = ({"enable_thinking": False}, {"effort": "low"})
    calls = (called({"city": "Paris"}), called({"zone": [{"x": None, "y": 1}]}))
    rows = [
        {"messages": [ASKED, call], "tools": tool, "chat_template_kwargs": each}
        for call, tool, each in zip(calls, tools, told, strict=True)
    ]
    if is_hub:
        monkeypatch.setattr(
            "datasets.load_dataset", lambda name, split: pyarrow.Table.from_pylist(rows).to_pylist()
        )
        source = "owner/name"
    else:
        source = str(tmp_path / "data.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    read = list(read_examples([source]))
    assert [each.template_options for each in read] == [
        {"tools": tool, **each} for tool, each in zip(tools, told, strict=True)
    ]
    given = [each.messages[1]["tool_calls"][0]["function"]["arguments"] for each in read]
    assert given == [{"city": "Paris"}, {"zone": [{"y": 1}]}]


def test_nulls_that_somebody_wrote_are_kept(tmp_path):
    rows = [{"messages": [ASKED, called('{"city": null}')]}]
    source = str(tmp_path / "data.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    as_object = write_rows(tmp_path / "data.jsonl", [{"messages": [ASKED, called({"city": None})]}])
    for example in read_examples([source, str(as_object)]):
        assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}


@pytest.mark.parametrize(
    ("role", "ours"),
    [
        *((each, "assistant") for each in ("gpt", "chatgpt", "bing", "Bard", "Assistant", "model")),
        *((each, "user") for each in ("human", "User")),
        *((each, "tool") for each in ("observation", "function", "ipython")),
        *((each, "system") for each in ("developer", "System")),
    ],
)
def test_roles_of_other_programs_are_ours_at_every_door(role, ours, tmp_path):
    turns = [{"from": "human", "value": "Rain?"}, {"from": role, "value": "It is dry."}]
    assert [each["role"] for each in parse_row({"conversations": turns}, "x").messages] == ["user", ours]
    messages = [ASKED, {"role": role, "content": "It is dry."}, ASKED]
    shown = f"user Rain?<|im_end|>\n{ours} It is dry.<|im_end|>\nuser Rain?<|im_end|>\nassistant "
    assert prompted({"messages": messages}, tmp_path) == shown
    assert [each["role"] for each in sent({"messages": messages}, tmp_path)] == ["user", ours, "user"]


def test_a_role_that_nobody_knows_is_refused_with_file_and_row(tmp_path):
    turns = [{"from": "human", "value": "Rain?"}, {"from": "claude-like", "value": "No."}]
    path = write_rows(tmp_path / "data.jsonl", [{"conversations": turns}])
    complaint = f"{path} row 1, message 2: the role of a message must be one of .*, got 'claude-like'"
    with pytest.raises(ValueError, match=complaint):
        list(read_examples([str(path)]))


SING = {"role": "system", "content": "Sing."}
BRIEF = {"role": "system", "content": "Be brief."}
EXCHANGE = {"instruction": "Rain?", "output": "It is dry."}
SYSTEM, PAIR = "system Be brief.<|im_end|>\n", "user Hi<|im_end|>\nassistant Hello<|im_end|>\n"
RAIN = "user Rain?<|im_end|>\nassistant It is dry.<|im_end|>"
THOUGHT = RAIN.replace("It is", "<think>Hm.</think>It is")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({**EXCHANGE, "system": "Be brief.", "history": [["Hi", "Hello"]]}, SYSTEM + PAIR + RAIN),
        ({**EXCHANGE, "system": "", "history": None}, RAIN),
        ({"messages": [ASKED, SAID], "system": "Be brief."}, SYSTEM + RAIN),
        ({"conversations": [ASKED, SAID], "system_prompt": "Be brief."}, SYSTEM + RAIN),
        ({"messages": [BRIEF, ASKED, SAID], "system": "Be brief."}, SYSTEM + RAIN),
        ({**EXCHANGE, "tools": [{"name": "look"}]}, 'tools [{"name": "look"}]\n' + RAIN),
        ({**EXCHANGE, "thinking": "Hm."}, THOUGHT),
        ({"messages": [ASKED, {**SAID, "thinking": "Hm."}]}, THOUGHT),
    ],
)
def test_what_a_row_says_beside_its_messages_is_read(row, text):
    assert trained_on(row)[0] == text


def test_an_instruction_tells_the_template_what_a_conversation_does():
    row = {**EXCHANGE, "chat_template_kwargs": {"level": "low"}}
    assert trained_on(row, "{{ level }} " + TEMPLATE)[0] == "low " + RAIN


def test_a_prompt_is_asked_behind_the_system_message_and_the_history_of_its_row(tmp_path):
    row = {"prompt": "Rain?", "system": "Be brief.", "history": [["Hi", "Hello"]]}
    assert prompted(row, tmp_path) == SYSTEM + PAIR + "user Rain?<|im_end|>\nassistant "
    row = {"messages": [ASKED], "system": "Be brief."}
    assert prompted(row, tmp_path) == SYSTEM + "user Rain?<|im_end|>\nassistant "


@pytest.mark.parametrize("left_out", [{"train": False}, {"weight": 0}, {"loss": False}], ids=str)
def test_an_answer_that_its_row_takes_out_is_context_and_counted(left_out):
    renderer = Renderer(chat_tokenizer(TEMPLATE))
    row = {
        "messages": [ASKED, {**SAID, **left_out}, {**ASKED, **left_out}, {**SAID, "weight": 1, "train": True}]
    }
    (document,) = renderer.render(parse_row(row, "data row 1"))
    ((start, end),) = document.written
    assert document.text == f"{RAIN}\n{RAIN}"
    assert (start, end) == (len(document.text) - len("It is dry.<|im_end|>"), len(document.text))
    assert renderer.skipped == {"skipped: an answer that its row takes out": 1}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "message 2: weight must be 0 or 1, .* got 0.5"),
        ({"messages": [ASKED, {**SAID, "train": "no"}]}, "message 2: train must be true or false, .* 'no'"),
        ({"messages": [{**ASKED, "train": True}, SAID]}, "message 1: train must not be True .* of the user"),
        ({"messages": [ASKED, SAID], "train": False}, "train belongs to one message"),
        ({"messages": [ASKED, SAID], "thinking": "Hm."}, "thinking belongs to one message"),
        ({"messages": [ASKED, SAID], "history": [["a", "b"]]}, "history goes with one question"),
        ({"messages": [ASKED, SAID], "functions": [{}]}, "functions is the older form of tools"),
        ({"messages": [SING, ASKED, SAID], "system": "Be brief."}, "two system messages, .* 'Sing.' among"),
        ({**EXCHANGE, "history": [["a"]]}, r"history must be a list of pairs"),
        ({**EXCHANGE, "system": 3}, "system must be text, got 3"),
        ({"text": "Once", "system": "Be brief."}, "system belongs to a conversation, got it beside text"),
        ({"text": "Once", "history": [["a", "b"]]}, "history belongs to a conversation"),
        ({"text": "Once", "tools": [{"name": "look"}]}, "tools belongs to a conversation"),
    ],
)
def test_what_a_row_says_and_cannot_mean_is_refused(row, complaint):
    with pytest.raises(ValueError, match=f"data row 1.*{complaint}"):
        parse_row(row, "data row 1")


LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}"
    "{% endif %}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
ASKS_FIRST = "{% if messages[0].role == 'assistant' %}{{ raise_exception('ask first') }}{% endif %}"
ANSWERS_AS_TEXT = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{{ m.content + '\n' }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}\n{% endif %}{% endfor %}"
)
QWEN_VL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "Be short."},
    ASKED,
    SAID,
    {"role": "user", "content": "And then?"},
]


@pytest.mark.parametrize(
    "template, of_parts",
    [
        (LLAVA, {"system", "user", "assistant"}),
        (IDEFICS, {"system", "user", "assistant"}),
        (ASKS_FIRST + LLAVA, {"system", "user", "assistant"}),
        (ANSWERS_AS_TEXT, {"system", "user"}),
        (QWEN_VL, set()),
        (TEMPLATE, set()),
    ],
    ids=["LLaVA", "Idefics3", "a question first", "answers as text", "Qwen2-VL", "text"],
)
def test_a_template_gets_content_in_the_form_in_which_it_shows_it(template, of_parts):
    """The templates of many models that read images leave a plain text out, without a word."""
    tokenizer = chat_tokenizer(template)
    given = as_template(TURNS, tokenizer)
    assert {each["role"] for each in given if isinstance(each["content"], list)} == of_parts
    rendered = tokenizer.apply_chat_template(given, tokenize=False)
    places = [rendered.find(each["content"]) for each in TURNS]
    assert -1 not in places and places == sorted(places), rendered
    assert SAID["content"] in "".join(trained_on({"messages": TURNS}, template)[1])
