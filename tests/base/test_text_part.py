"""The text part of models that read images: what is let go, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_kinds import OF_IMAGES, OF_TEXT, TINY
from conftest import random_prompts
from tiny_chat import chat_tokenizer
from transformers import AutoConfig, AutoTokenizer

from medusa import MedusaModel
from medusa.base.loading import load_tokenizer
from medusa.base.text_part import LetGo, text_part, writes_text
from medusa.engine.weights.load import load_base


@pytest.fixture
def llava(tmp_path):
    torch.manual_seed(5)
    OF_IMAGES["LLaVA"](TINY).save_pretrained(tmp_path)
    return tmp_path


def test_what_reads_images_is_let_go_and_says_so_where_it_is_asked(llava):
    base = load_base(llava)
    assert isinstance(base.model.vision_tower, LetGo)
    assert not [name for name, _ in base.named_parameters() if "vision" in name]
    image = torch.zeros(1, 3, 8, 8)
    with pytest.raises(
        ValueError, match="CLIPVisionModel, which reads images or sound, is let go; give text"
    ):
        base.model.vision_tower(image)
    with pytest.raises(ValueError, match=r"CLIPVisionModel, .* is let go|pixel_values not supported"):
        MedusaModel(base).generate(random_prompts(1, 5), pixel_values=image, max_new_tokens=2)


def test_a_model_without_such_parts_stays_as_it_is():
    base = OF_TEXT["Granite 4.0 of attention"](TINY)
    modules = list(base.modules())
    assert all(a is b for a, b in zip(text_part(base).modules(), modules, strict=True))


@pytest.mark.parametrize("kind, is_one", [("llava", True), ("llama", True), ("udop", False), ("clip", False)])
def test_models_that_write_text_from_text_alone_are_bases(kind, is_one):
    assert writes_text(AutoConfig.for_model(kind)) is is_one


def test_the_chat_template_of_a_processor_is_the_tokenizers_where_it_has_none(tmp_path):
    """As the repositories of LLaVA and Idefics3 were first saved."""
    tokenizer = chat_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template is None
    assert load_tokenizer(tmp_path).chat_template == template
