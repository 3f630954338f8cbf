"""Labels are the ids that the model itself writes, for every kind of tokenizer, mark and chat template."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from template_kinds import END, EOS, STRIPS, TEMPLATES, TOKENIZERS, tokenizer_of

from medusa.prompts import encode_text, split_reasoning
from medusa.training.data.loading import Renderer, tokenise
from medusa.training.data.reading import parse_row

ANSWERS = ["Sure, here are three rivers.", "讨论翡翠和鳄鱼", "The Nile.\n\nIt is long.", "naïve café 🙂"]


def turns(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def documents_of(tokenizer, row: dict) -> list:
    return list(tokenise(tokenizer, Renderer(tokenizer).render(parse_row(row, "data row 1"))))


def labels(document) -> list[list[int]]:
    """The ids of each run of labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.is_label.astype(int), [0]])))
    return [document.tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]


def ids_of(tokenizer, messages: list[dict], **options) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def written_by_the_model(tokenizer, messages: list[dict]) -> list[int]:
    """What follows the prompt in the template's own text, up to the end of the turn."""
    prompt = ids_of(tokenizer, messages[:-1], add_generation_prompt=True)
    whole = ids_of(tokenizer, messages)
    assert whole[: len(prompt)] == prompt
    end = tokenizer.convert_tokens_to_ids(EOS if EOS in tokenizer.chat_template else END)
    written = whole[len(prompt) :]
    return written[: written.index(end) + 1]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("strips", STRIPS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_labels_are_the_ids_that_the_model_writes_in_every_turn(kind, strips, template):
    if (kind, template) == ("byte level without a pattern", "Vicuna"):
        pytest.skip("this tokenizer joins the prompt's last character and the answer's first")
    tokenizer = tokenizer_of(kind, strips, template)
    for first, second in itertools.product(ANSWERS, ANSWERS[:2]):
        messages = turns("Name three rivers.", first, "Which is longest?", second)
        (document,) = documents_of(tokenizer, {"messages": messages})
        expected = [written_by_the_model(tokenizer, messages[:end]) for end in (2, 4)]
        assert labels(document) == expected


@pytest.mark.parametrize("template", ["Llama 2", "GLM", "Vicuna"])
def test_an_answer_with_a_blank_of_its_own_is_as_the_model_wrote_it(template):
    tokenizer = tokenizer_of("byte level", "as they are", template)
    begins = "\n" if template == "GLM" else " "
    (document,) = documents_of(tokenizer, {"messages": turns("Name three rivers.", f"{begins}Sure.")})
    messages = turns("Name three rivers.", "Sure.")
    assert labels(document) == [written_by_the_model(tokenizer, messages)]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_how_a_model_continues_a_text_is_trained_on_as_it_was_written(kind):
    """Many tokenizers decode the first word of an answer without the space before it."""
    tokenizer = tokenizer_of(kind, "as they are", "ChatML")
    tokenizer.chat_template = None
    try:
        prompt = encode_text(tokenizer, "Name three")["input_ids"][0].tolist()
        whole = tokenizer("Name three rivers. The Nile is long.")["input_ids"]
        if whole[: len(prompt)] != prompt:
            pytest.skip("this tokenizer joins the prompt's last character and the answer's first")
        written = whole[len(prompt) :]
        _, answer = split_reasoning(tokenizer, prompt, written)
        row = {"messages": turns("Name three", answer), "finish_reason": "length"}
        (document,) = documents_of(tokenizer, row)
        assert labels(document) == [written]
    finally:
        tokenizer.chat_template = TEMPLATES["ChatML"]
