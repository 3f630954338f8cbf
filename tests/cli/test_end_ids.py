"""Whoever answers ends at the same tokens: those of the generation configuration, else the tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_chat import chat_base, chat_tokenizer, save_chat_model
from tiny_server import tiny_service
from transformers import T5Config

from medusa import MedusaModel
from medusa.base.causal_lm import end_ids
from medusa.cli.chat import ChatSession
from medusa.cli.info import describe_base
from medusa.cli.loading import load_model
from medusa.cli.option_types import ChatOptions
from medusa.cli.options import AnswerOptions, ModelOptions
from medusa.serving.chat_requests import ChatRequest
from medusa.training.distillation.answering import LocalAnswerer

QUESTION = [{"role": "user", "content": "why"}]
OF_TOKENIZER = 256


def answer_without_end(base, tokenizer):
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    base.generation_config.eos_token_id = None
    return base.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("names", ["another token", "several", "none"])
def test_a_chat_a_server_and_a_distilled_answer_end_where_generate_ends(names):
    base, tokenizer = chat_base(), chat_tokenizer()
    free = answer_without_end(base, tokenizer)
    third = free[2]
    ids = {"another token": third, "several": [third, 5], "none": None}[names]
    if names == "none":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(third)
    base.generation_config.eos_token_id = ids
    ends = {third, 5} if names == "several" else {third}
    expected = free[: next(at for at, token in enumerate(free, start=1) if token in ends)]
    assert end_ids(base, tokenizer) == ends and OF_TOKENIZER not in ends

    model = MedusaModel(base, tokenizer=tokenizer)
    session = ChatSession(model, None, ChatOptions(answers=AnswerOptions(max_new_tokens=12)))
    list(session.reply("why"))
    assert session.answers[0].ended_by == "end" and session.answers[0].statistics.num_tokens == len(expected)
    assert LocalAnswerer(model, 1, 12).stop_ids == ends
    service = tiny_service(model)
    asked = ChatRequest(messages=QUESTION, max_tokens=12, temperature=0)
    (answer,) = service.answers(asked, [[1, 2, 3]], lambda choice: lambda update: None)
    assert answer.row.request.eos_ids == ends


def test_a_command_loads_a_base_that_ends_where_its_tokenizer_says_if_it_says_nothing_itself(tmp_path):
    base, heads = save_chat_model(tmp_path)
    loaded = chat_base()
    loaded.generation_config.eos_token_id = loaded.config.eos_token_id = None
    loaded.save_pretrained(base)
    model = load_model(ModelOptions(base=base, heads=heads, device="cpu"))
    assert model.base.generation_config.eos_token_id == [OF_TOKENIZER]


@pytest.mark.parametrize("named", [3, [3, 4], (3, 4), torch.tensor([3, 4]), torch.tensor(3)])
def test_all_that_a_generation_configuration_takes_names_tokens(named):
    base = chat_base()
    base.generation_config.eos_token_id = named
    assert end_ids(base) == set(torch.as_tensor(named).flatten().tolist())


def test_beams_of_a_generation_configuration_are_left_out_with_a_word(tmp_path, capsys):
    base, heads = save_chat_model(tmp_path)
    path = Path(base) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 4}))
    model = load_model(ModelOptions(base=base, heads=heads, device="cpu", step="general"))
    assert "asks for num_beams=4" in capsys.readouterr().err
    assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3).shape == (1, 6)
    with pytest.raises(ValueError, match=r"generation mode 'beam_search'; where .* pass num_beams=1"):
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, num_beams=4)


def test_info_of_a_model_of_another_kind_names_it_without_the_list_of_all_others():
    with pytest.raises(ValueError, match="of type 't5', of which transformers has no causal") as refused:
        describe_base(T5Config())
    assert len(str(refused.value)) < 300
