"""Labels lie on what the model wrote, and on nothing else."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from tiny_training import CHAT_TEMPLATE, chat_tokenizer, conversation

from medusa.prompts import encode_messages
from medusa.training.data.loading import Renderer, tokenise
from medusa.training.data.reading import parse_row

TWO_TURNS = {
    "messages": [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer"},
    ]
}
TURNS = TWO_TURNS["messages"]
FORGETFUL = (  # keeps only the last question, as templates do that drop earlier reasoning
    "{% for message in messages %}{% if message['role'] == 'user' or loop.last %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = "{{ raise_exception('roles must alternate') }}"


def documents_of(row, tokenizer=None):
    tokenizer = tokenizer or chat_tokenizer()
    return list(tokenise(tokenizer, Renderer(tokenizer).render(parse_row(row, "data row 1"))))


def written(document, tokenizer=None):
    """The trained-on parts as text, one string a run."""
    tokenizer = tokenizer or chat_tokenizer()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.is_label.astype(int), [0]])))
    return [tokenizer.decode(document.tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def test_answers_and_their_end_of_turn_are_labels_and_nothing_else_is():
    (document,) = documents_of(TWO_TURNS)
    assert written(document) == ["first answer<|im_end|>", "second answer<|im_end|>"]


def test_tokens_are_those_of_the_chat_template():
    (document,) = documents_of(TWO_TURNS)
    expected = chat_tokenizer().apply_chat_template(TWO_TURNS["messages"], return_dict=True)["input_ids"]
    assert document.tokens.tolist() == expected[:-1]  # the newline after the last turn is never written


def test_the_prompt_of_an_answer_is_what_inference_puts_before_it():
    (document,) = documents_of(conversation("why", "because"))
    prompt = chat_tokenizer().apply_chat_template(
        conversation("why", "because")["messages"][:1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert document.tokens[~document.is_label].tolist() == prompt


def test_an_answer_cut_at_a_length_limit_has_no_end():
    (document,) = documents_of(conversation("why", "because of", finish_reason="length"))
    assert written(document) == ["because of"]


def test_only_the_last_answer_of_a_cut_conversation_lost_its_end():
    (document,) = documents_of({**TWO_TURNS, "finish_reason": "length"})
    assert written(document) == ["first answer<|im_end|>", "second answer"]


def test_a_system_message_is_context():
    row = conversation("why", "because")
    row["messages"].insert(0, {"role": "system", "content": "Be brief."})
    (document,) = documents_of(row)
    assert written(document) == ["because<|im_end|>"]
    assert "Be brief." in chat_tokenizer().decode(document.tokens)


def test_an_assistant_message_that_answers_nothing_is_context():
    row = {"messages": [{"role": "assistant", "content": "Hello!"}, *TWO_TURNS["messages"][:2]]}
    (document,) = documents_of(row)
    assert written(document) == ["first answer<|im_end|>"]


def test_a_conversation_without_an_answer_gives_no_document():
    assert documents_of({"messages": TWO_TURNS["messages"][:1]}) == []


def test_a_template_that_rewrites_history_gives_each_answer_its_own_document():
    tokenizer = chat_tokenizer(FORGETFUL)
    first, second = documents_of(TWO_TURNS, tokenizer)
    assert written(first) == ["first answer<|im_end|>"]
    assert written(second) == ["second answer<|im_end|>"]
    assert "first answer" not in tokenizer.decode(second.tokens)


LONG = [
    {"role": ("user", "assistant")[place % 2], "content": f"message {place} of a long conversation"}
    for place in range(200)
]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, FORGETFUL], ids=["adds", "forgets"])
@pytest.mark.parametrize("most", [30, 200, 1000, 100_000])
def test_of_a_long_conversation_what_a_document_holds_is_rendered_and_is_the_same(
    monkeypatch, template, most
):
    tokenizer, rendered = chat_tokenizer(template), []
    example = parse_row({"messages": LONG}, "data row 1")
    whole = list(tokenise(tokenizer, Renderer(tokenizer).render(example)))
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *given, **more: rendered.append(1) or apply(*given, **more)
    )
    cut = list(tokenise(tokenizer, Renderer(tokenizer, max_length=most).render(example)))
    assert len(cut) == len(whole)
    for ours, theirs in zip(cut, whole, strict=True):
        assert ours.tokens[:most].tolist() == theirs.tokens[:most].tolist()
        assert ours.is_label[:most].tolist() == theirs.is_label[:most].tolist()
        assert (len(ours.tokens) > most) == (len(theirs.tokens) > most)
    if template == CHAT_TEMPLATE and most <= 1000:
        assert len(rendered) < 60, "all 100 answers take 200 renderings"


def test_special_characters_and_repeated_text_do_not_move_the_labels():
    answer = "system\n🙂 first question — ünï"
    (document,) = documents_of(conversation("first question 🙂", answer))
    assert written(document) == [f"{answer}<|im_end|>"]


def test_a_plain_text_is_trained_on_as_a_whole():
    (document,) = documents_of({"text": "Once upon a time"})
    assert written(document) == ["Once upon a time"]


def continuing_tokenizer():
    """Of a model that continues text."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = None, "<|im_end|>"
    return tokenizer


def test_without_a_chat_template_an_answer_continues_the_text_as_at_inference():
    tokenizer = continuing_tokenizer()
    (document,) = documents_of(conversation("Once upon", " a time"), tokenizer)
    prompt = encode_messages(tokenizer, [{"role": "user", "content": "Once upon"}])["input_ids"][0]
    assert document.tokens[~document.is_label].tolist() == prompt.tolist()
    assert written(document, tokenizer) == [" a time<|im_end|>"]


def test_a_continuation_cut_at_a_length_limit_has_no_end():
    row = conversation("Once upon", " a time", finish_reason="length")
    assert written(documents_of(row, continuing_tokenizer())[0]) == [" a time"]


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ({"train": False}, "an answer that its row takes out"),
        ({"content": ""}, "an empty answer"),
        ({"reasoning_content": "Hm."}, "reasoning or tool calls without a template that shows them"),
        ({"tool_calls": [{"name": "look"}]}, "reasoning or tool calls without a template that shows them"),
    ],
)
def test_a_continuation_that_is_no_text_of_the_models_is_left_out_and_counted(beside, why):
    row = conversation("Once upon", " a time")
    row["messages"][1] |= beside
    renderer = Renderer(continuing_tokenizer())
    assert renderer.render(parse_row(row, "data row 1")) == []
    assert renderer.skipped == {f"skipped: {why}": 1}


def test_longer_conversations_need_a_chat_template():
    with pytest.raises(ValueError, match=r"data row 1 is a conversation .* has no chat template"):
        documents_of(TWO_TURNS, continuing_tokenizer())


def test_a_template_that_refuses_a_conversation_names_the_row():
    with pytest.raises(ValueError, match=r"data row 1: the chat template refuses.*roles must alternate"):
        documents_of(TWO_TURNS, chat_tokenizer(REFUSING))


def test_a_tokenizer_without_character_ranges_is_refused():
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match="cannot tell which characters a token covers"):
        list(tokenise(SlowTokenizer(), []))


def test_labels_of_the_embedded_model_end_with_its_end_of_turn(real_tokenizer):
    (document,) = documents_of(TWO_TURNS, real_tokenizer)
    assert written(document, real_tokenizer) == ["first answer<|im_end|>", "second answer<|im_end|>"]
    assert document.tokens[-1] == real_tokenizer.eos_token_id


PHI_3 = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PHI_4 = PHI_3.replace("\n", "")
ONLY_AT_THE_END = PHI_3.replace("<|end|>", "")


def phi_tokenizer(template):
    tokenizer = chat_tokenizer(template)
    marks = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"eos_token": marks[0], "additional_special_tokens": marks[1:]})
    return tokenizer


@pytest.mark.parametrize("template", [PHI_3, PHI_4], ids=["with newlines", "without"])
@pytest.mark.parametrize(
    ("beside", "before", "behind"),
    [
        ({}, "", ""),
        ({"reasoning_content": "Hm."}, "<think>Hm.</think>", ""),
        ({"tool_calls": [{"function": {"name": "look"}}]}, "", '{"name": "look", "arguments": {}}'),
    ],
    ids=["plain", "reasoning", "call"],
)
def test_what_a_template_adds_where_nothing_follows_is_no_label(template, beside, before, behind):
    tokenizer = phi_tokenizer(template)
    row = {"messages": [{**each, **beside} if each["role"] == "assistant" else each for each in TURNS]}
    (document,) = documents_of(row, tokenizer)
    answers = [f"{before}{each}{behind}<|end|>" for each in ("first answer", "second answer")]
    assert written(document, tokenizer) == answers
    assert "<|endoftext|>" not in tokenizer.decode(document.tokens)


def test_turn_marks_that_are_no_tokens_are_kept_whole(real_tokenizer):
    """Its tokenizer joins the end of one such mark with the beginning of the next."""
    tokenizer = copy.deepcopy(real_tokenizer)
    tokenizer.chat_template = PHI_4
    (document,) = documents_of(TWO_TURNS, tokenizer)
    assert tokenizer.decode(document.tokens).count("answer<|end|>") == 2


def test_an_end_that_a_template_writes_behind_the_last_answer_alone_is_a_label():
    tokenizer = phi_tokenizer(ONLY_AT_THE_END)
    first, second = documents_of(TWO_TURNS, tokenizer)
    assert written(first, tokenizer) == ["first answer<|endoftext|>"]
    assert written(second, tokenizer) == ["second answer<|endoftext|>"]


# Reasoning and tools, as the templates of Qwen3, DeepSeek-R1 and their like write them.
HYBRID = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}"
    "<think>\n{{ (message.reasoning_content or '').strip() }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}\n<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENING = HYBRID.replace("assistant\n{% if enable_thinking", "assistant\n<think>\n{% if enable_thinking")
WITH_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + HYBRID
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
THOUGHT = {"role": "assistant", "reasoning_content": "It rains.", "content": "Take a coat."}


def asked(*answers, **beside):
    return {"messages": [{"role": "user", "content": "A coat?"}, *answers], **beside}


def rendered(row, template):
    """The parts trained on, and what was left out."""
    tokenizer = chat_tokenizer(template)
    renderer = Renderer(tokenizer)
    documents = list(tokenise(tokenizer, renderer.render(parse_row(row, "data row 1"))))
    return [part for document in documents for part in written(document, tokenizer)], dict(renderer.skipped)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HYBRID, "<think>\nIt rains.\n</think>\n\nTake a coat.<|im_end|>"),
        (OPENING, "It rains.\n</think>\n\nTake a coat.<|im_end|>"),
    ],
    ids=["the model opens the reasoning", "the template does"],
)
def test_reasoning_is_trained_on_as_the_model_wrote_it(template, expected):
    assert rendered(asked(THOUGHT), template) == ([expected], {})
    as_vllm_says = {**THOUGHT, "reasoning": "It rains."}
    del as_vllm_says["reasoning_content"]
    assert rendered(asked(as_vllm_says), template) == ([expected], {})
    raw = {"role": "assistant", "content": expected.removesuffix("<|im_end|>")}
    assert rendered(asked(raw), template) == ([expected], {})


@pytest.mark.parametrize("template", [HYBRID, OPENING], ids=["the model opens the reasoning", "the template"])
def test_an_answer_whose_reasoning_is_missing_is_left_out_and_counted(template):
    row = asked({"role": "assistant", "content": "Take a coat."})
    why = {"skipped: an answer without the reasoning that the template opens": 1}
    assert rendered(row, template) == ([], why)


def test_an_answer_without_reasoning_is_trained_on_where_the_row_says_that_it_was_asked_for_so():
    row = asked({"role": "assistant", "content": "Yes."}, chat_template_kwargs={"enable_thinking": False})
    assert rendered(row, HYBRID) == (["Yes.<|im_end|>"], {})


def test_reasoning_that_was_cut_does_not_end():
    thought = {"role": "assistant", "reasoning_content": "It rains, and", "content": None}
    assert rendered(asked(thought, finish_reason="length"), OPENING) == (["It rains, and"], {})


def test_tool_calls_are_trained_on_as_the_template_writes_them():
    row = asked({"role": "assistant", "reasoning_content": "Look.", "content": None, "tool_calls": [CALL]})
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert rendered(row, HYBRID) == ([f"<think>\nLook.\n</think>\n\n{call}<|im_end|>"], {})


def test_tools_of_a_row_reach_the_template():
    (document,) = documents_of(asked(THOUGHT, tools=[CALL]), chat_tokenizer(WITH_TOOLS))
    assert "<|im_start|>tools" in chat_tokenizer().decode(document.tokens)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"content": "", "tool_calls": [CALL]}, "tool calls that the template does not show"),
        (THOUGHT, "reasoning that the template does not show"),
        ({"content": None}, "an empty answer"),
    ],
)
def test_what_a_plain_template_does_not_show_is_left_out_and_counted(answer, why):
    row = asked({"role": "assistant", **answer})
    if answer == {"content": None}:
        row["messages"][1]["tool_calls"] = []
    assert rendered(row, CHAT_TEMPLATE) == ([], {f"skipped: {why}": 1})


def test_what_a_user_says_of_tags_is_no_reasoning():
    row = asked({"role": "assistant", "content": "A tag."})
    row["messages"][0]["content"] = "What is <think>?"
    assert rendered(row, CHAT_TEMPLATE) == (["A tag.<|im_end|>"], {})
