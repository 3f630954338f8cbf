import pytest
from tiny_chat import chat_model

from medusa.measurement.prompts import earlier_exchanges, lengthened, num_tokens_of
from medusa.prompts import Prompt


def prompt(text, answer=None, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    return Prompt((*messages, {"role": "user", "content": text}), answer=answer)


def test_a_prompt_is_filled_up_with_earlier_exchanges_about_other_questions():
    model = chat_model()
    prompts = [prompt("first", "one"), prompt("second", "two"), prompt("third", "three")]
    exchanges = earlier_exchanges(model, prompts, num_tokens=10_000)
    assert [(q["content"], a["content"]) for q, a in exchanges] == [
        ("first", "one"),
        ("second", "two"),
        ("third", "three"),
    ]
    asked = prompt("second", system="Be kind.")
    longer = lengthened(model, asked, exchanges, num_tokens=80)
    contents = [message["content"] for message in longer.messages]
    assert (contents[0], contents[-1]) == ("Be kind.", "second")
    assert contents.count("second") == 1, "the question itself is not asked before"
    assert contents[-3:-1] == ["first", "one"] and contents[1:-1].count("first") > 1, "they come around again"
    length = num_tokens_of(model, longer)
    assert 80 - len("third" + "three") - 4 <= length <= 80


def test_a_prompt_that_is_longer_by_itself_stays_as_it_is():
    model = chat_model()
    asked = prompt("a question of some length")
    assert lengthened(model, asked, earlier_exchanges(model, [prompt("x", "y")], 50), 12) == asked


def test_missing_answers_are_the_models_own_and_no_more_are_made_than_needed():
    model = chat_model()
    exchanges = earlier_exchanges(model, [prompt(text) for text in ("one", "two", "three")], num_tokens=20)
    assert len(exchanges) == 1
    assert exchanges[0][1]["role"] == "assistant"


def test_without_a_chat_template_there_is_no_conversation_to_lengthen():
    model = chat_model()
    model.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template to render them"):
        earlier_exchanges(model, [prompt("one")], 20)
