import codecs
import json

import pytest
import torch
from tiny_chat import chat_tokenizer

from medusa.prompts import Prompt, encode_messages, encode_prompt, padded_batch, read_prompts
from medusa.training.data.reading import read_examples


def write_rows(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_the_three_kinds_of_rows_all_become_conversations(tmp_path):
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    file = write_rows(
        tmp_path / "p.jsonl",
        {"prompt": "One", "category": "first"},
        {"turns": ["Two", "And then?"], "question_id": 7},
        {"messages": [system, user]},
    )
    one, two, three = read_prompts(file)
    assert one.messages == ({"role": "user", "content": "One"},)
    assert (one.category, one.later_turns, one.answer) == ("first", (), None)
    assert (two.messages[0]["content"], two.later_turns) == ("Two", ("And then?",))
    assert three.messages == (system, user)


def test_an_answer_in_the_file_is_set_apart_from_the_question(tmp_path):
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
    (prompt,) = read_prompts(write_rows(tmp_path / "p.jsonl", {"messages": [question, answer]}))
    assert prompt.messages == (question,)
    assert prompt.answer == "Hello!"


def test_limit_takes_the_first_rows_and_reads_no_further(tmp_path):
    file = write_rows(tmp_path / "p.jsonl", {"prompt": "a"}, "", {"prompt": "b"}, "not json")
    assert [p.messages[0]["content"] for p in read_prompts(file, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{broken", "is not valid JSON"),
        ('["list"]', "must be a JSON object"),
        ({"text": "x"}, "exactly one of prompt, turns, messages, got \\['text'\\]"),
        ({"prompt": "x", "turns": ["y"]}, "exactly one of"),
        ({"prompt": "  "}, "prompt must be text that is not empty"),
        ({"prompt": 3}, "prompt must be text that is not empty, got 3"),
        ({"turns": []}, "at least one text"),
        ({"turns": ["x", ""]}, "turns must be text that is not empty"),
        ({"messages": "x"}, "must be a list of messages, got str"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role of a message must be one of"),
        ({"messages": [{"role": "user"}]}, "must be an object with 'role' and 'content'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must end with a user message"),
        ({"messages": []}, "must end with a user message"),
        ({"prompt": "x", "category": 3}, "category must be text"),
    ],
)
def test_an_unreadable_row_is_refused_with_file_and_row(tmp_path, row, complaint):
    file = write_rows(tmp_path / "p.jsonl", {"prompt": "fine"}, "", row)
    with pytest.raises(ValueError, match=complaint) as error:
        read_prompts(file)
    assert f"{file} row 3" in str(error.value)


def test_a_missing_empty_or_binary_file_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write_rows(tmp_path / "empty.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(tmp_path / "binary.jsonl")


def test_messages_are_rendered_with_the_chat_template_up_to_the_answer():
    tokenizer = chat_tokenizer()
    encoded = encode_messages(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(encoded["input_ids"][0]) == "<|user|>hi<|end|><|assistant|>"
    assert encoded["attention_mask"].shape == encoded["input_ids"].shape


def test_without_a_chat_template_only_one_message_can_be_rendered():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    message = {"role": "user", "content": "once upon"}
    assert tokenizer.decode(encode_messages(tokenizer, [message])["input_ids"][0]) == "once upon"
    with pytest.raises(ValueError, match="no chat template"):
        encode_messages(tokenizer, [message, message])


def test_prompts_encoded_one_by_one_make_a_left_padded_batch():
    rows = [
        {name: torch.ones(1, n, dtype=torch.long) for name in ("input_ids", "attention_mask")} for n in (3, 1)
    ]
    batch = padded_batch(rows, pad_id=9)
    assert batch["input_ids"].tolist() == [[1, 1, 1], [9, 9, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_an_answer_that_only_calls_a_tool_is_no_answer_text(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]}
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "What time is it?"}, call]}))
    (prompt,) = read_prompts(path)
    assert prompt.answer is None


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = json.dumps({"prompt": "hi", "note": "x"}).replace('"x"', "[" * 80 + "]" * 80)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "half \\ud83d"}', r"row 1 holds text that is not Unicode, half of a surrogate pair"),
        ('{"prompt": "hi", "chat_template_kwargs": {"\\udc00": 1}}', "row 1 holds text that is not Unicode"),
        ('{"prompt": "hi", "note": ' + DEEP + "}", "row 1 is nested deeper than 64 levels"),
        (NESTED, "row 1 is nested deeper than 64 levels"),
        ('{"prompt": "hi", "tools": [1]}', r"row 1: tools must be a list of objects, got \[1\]"),
        ('{"prompt": "hi", "chat_template_kwargs": {"documents": 5}}', "row 1: documents must be a list"),
        *(
            (json.dumps({"prompt": "hi", "chat_template_kwargs": {name: True}}), f"row 1: .*'{name}'")
            for name in ("tokenize", "conversation", "self", "chat_template", "tools", "messages")
        ),
    ],
    ids=lambda each: each[:24],
)
def test_a_row_that_breaks_what_comes_later_is_named(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(row)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)
    path.write_text(row.replace('"prompt"', '"text"'))
    with pytest.raises(ValueError, match=message):
        list(read_examples([str(path)]))


@pytest.mark.parametrize("template", ["{{ 1 + level }}", "{{ raise_exception('no') }}"])
def test_a_row_that_the_chat_template_refuses_is_named(template):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    prompt = Prompt(({"role": "user", "content": "hi"},), origin="a row 1", template_options={"level": "x"})
    with pytest.raises(ValueError, match="a row 1: the chat template refuses the conversation"):
        encode_prompt(tokenizer, prompt)


def test_a_mark_of_the_byte_order_is_no_part_of_a_prompt(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"prompt": "hi"}\n')
    assert read_prompts(path)[0].messages[0]["content"] == "hi"
