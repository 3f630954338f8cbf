"""Labels lie on what the model wrote, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_training import CHAT_TEMPLATE, chat_tokenizer, conversation

from medusa.training.data.reading import parse_row
from medusa.training.data.rendering import Renderer, tokenise

TWO_TURNS = {
    "messages": [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer"},
    ]
}
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


def test_special_characters_and_repeated_text_do_not_move_the_labels():
    answer = "system\n🙂 first question — ünï"
    (document,) = documents_of(conversation("first question 🙂", answer))
    assert written(document) == [f"{answer}<|im_end|>"]


def test_a_plain_text_is_trained_on_as_a_whole():
    (document,) = documents_of({"text": "Once upon a time"})
    assert written(document) == ["Once upon a time"]


def test_conversations_need_a_chat_template():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(
        ValueError, match=r"data row 1 is a conversation and the tokenizer.*has no chat template"
    ):
        documents_of(TWO_TURNS, tokenizer)


def test_a_template_that_refuses_a_conversation_names_the_row():
    with pytest.raises(ValueError, match=r"data row 1: the chat template refuses.*roles must alternate"):
        documents_of(TWO_TURNS, chat_tokenizer(REFUSING))


def test_a_tokenizer_without_character_ranges_is_refused():
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match="cannot tell which characters a token covers"):
        list(tokenise(SlowTokenizer(), []))


def test_the_template_used_here_adds_a_system_prompt_by_itself():
    assert "machine" in chat_tokenizer(CHAT_TEMPLATE).apply_chat_template(
        TWO_TURNS["messages"], tokenize=False
    )


def test_labels_of_the_embedded_model_end_with_its_end_of_turn(real_tokenizer):
    (document,) = documents_of(TWO_TURNS, real_tokenizer)
    assert written(document, real_tokenizer) == ["first answer<|im_end|>", "second answer<|im_end|>"]
    assert document.tokens[-1] == real_tokenizer.eos_token_id
