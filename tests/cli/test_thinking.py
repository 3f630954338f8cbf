"""What the chat template is told reaches it in every command; reasoning is kept apart, and heads remember."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from tiny_training import chat_tokenizer, counting_rows, save_tiny_base, tiny_base, write_rows

from medusa import MedusaModel
from medusa.cli.chat import ChatSession
from medusa.cli.distill import DistillOptions, summarise, wanted_prompts
from medusa.cli.loading import load_model, load_prompts
from medusa.cli.main import main
from medusa.cli.option_types import ChatOptions
from medusa.cli.options import ModelOptions, PromptOptions, parse, to_argv
from medusa.console import log_console
from medusa.heads.checkpoint import load_heads
from medusa.options import TemplateOptions
from medusa.prompts import split_reasoning
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.service import Service
from medusa.serving.settings import ServiceOptions
from medusa.training.data.loading import Renderer
from medusa.training.data.reading import parse_row
from medusa.training.distillation.answering import LocalAnswerer
from medusa.training.distillation.distill import DistillationReport

THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last and message.reasoning_content %}"
    "<think>\n{{ message.reasoning_content.strip() }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENING = THINKING.replace("assistant\n{% if enable", "assistant\n<think>\n{% if enable")
FORGETTING = "{% for message in messages %}<|im_start|>{{ message.role }}\n" + (
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Of DeepSeek-R1: what the model thought is taken out of what it has said."""
OFF = {"enable_thinking": False}


def split(template: str, text: str, tokenizer=None) -> tuple[str, str]:
    tokenizer = tokenizer or chat_tokenizer(template)
    asked = [{"role": "user", "content": "a"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    return split_reasoning(tokenizer, prompt, tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (THINKING, "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (OPENING, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (OPENING, "Hm, and", ("Hm, and", "")),
        (THINKING, "Yes. <think> is a tag </think>.", ("", "Yes. <think> is a tag </think>.")),
        (THINKING, "<think>\n\n</think>\n\nYes.", ("", "<think>\n\n</think>\n\nYes.")),
        (THINKING.replace("think>", "thought>"), "<think>Hm.</think>", ("", "<think>Hm.</think>")),
    ],
)
def test_reasoning_is_told_apart_from_what_is_said(template, text, expected):
    assert split(template, text) == expected


def test_marks_may_be_special_tokens():
    tokenizer = chat_tokenizer(THINKING)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|im_end|>"]})
    assert split(THINKING, "<think>Hm.</think>Yes.<|im_end|>", tokenizer) == ("Hm.", "Yes.")


@pytest.mark.parametrize("template", [THINKING, OPENING, FORGETTING])
def test_an_answer_that_was_split_is_trained_on_as_it_was_written(template):
    text = "It rains.\n</think>\n\nTake a coat."
    text = text if "<think>\n{%" in template and template != THINKING else f"<think>\n{text}"
    text = text.removeprefix("<think>\n") if template == FORGETTING else text
    reasoning, content = split(template, text)
    assert reasoning and content
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    row = {"messages": [{"role": "user", "content": "A coat?"}, message]}
    renderer = Renderer(chat_tokenizer(template))
    (document,) = renderer.render(parse_row(row, "row 1"))
    ((start, end),) = document.written
    assert document.text[start:end] == text + "<|im_end|>" and not renderer.skipped


def test_the_renderer_is_told_what_rows_do_not_say_and_remembers_both():
    renderer = Renderer(chat_tokenizer(THINKING), OFF)
    row = counting_rows(1)[0]
    template_kwargs = [row, {**row, "chat_template_kwargs": {"enable_thinking": True}, "tools": []}, row]
    texts = [renderer.render(parse_row(each, "row"))[0].text for each in template_kwargs]
    assert ["<think>\n\n</think>" in text for text in texts] == [True, False, True]
    assert renderer.template_options == [OFF, {"enable_thinking": True}]
    with pytest.raises(ValueError, match=r"variables of the model's chat template, got \['tokenize'\]"):
        Renderer(chat_tokenizer(THINKING), {"tokenize": True})


def test_a_run_says_how_much_is_reasoning(tmp_path, capsys):
    model = MedusaModel(tiny_base(), tokenizer=chat_tokenizer(OPENING))
    answerer, report = LocalAnswerer(model, 1, 8), DistillationReport()
    prompt = model.tokenizer("<|im_start|>assistant\n<think>\n")["input_ids"]
    for text in ("123456789</think>x", "12345</think>12345", "12345"):
        tokens = [*model.tokenizer(text)["input_ids"], 1]
        reply = answerer._reply(SimpleNamespace(finish_reason="stop", tokens=tokens, prompt=prompt))
        report.count(reply)
    assert reply.message == {"role": "assistant", "content": "", "reasoning_content": "12345"}
    (tmp_path / "rows").write_text("x")
    summarise(report, 1.0, tmp_path / "rows", log_console())
    assert (
        "3 answers reason first: 76% of all text, kept apart in reasoning_content" in capsys.readouterr().err
    )


def test_prompts_and_conversations_are_told(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "chat_template_kwargs": {"enable_thinking": True}}]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    expected = [OFF, {"enable_thinking": True}]
    options = PromptOptions(prompts=path, enable_thinking=False)
    assert [each.template_options for each in load_prompts(options)] == expected
    asked = DistillOptions(output=tmp_path / "a", prompts=path, template=TemplateOptions(False))
    assert [each.template_options for each in wanted_prompts(asked)] == expected
    model = MedusaModel(tiny_base(), tokenizer=chat_tokenizer(THINKING))
    session = ChatSession(model, None, ChatOptions(prompts=options))
    session.template_options["x"] = 1
    session.reset()
    assert session.template_options == OFF


def test_a_server_tells_the_template_what_a_request_does_not_say():
    model = MedusaModel(tiny_base(), tokenizer=chat_tokenizer(THINKING))
    service = Service(model, ServiceOptions(), OFF)
    messages = [{"role": "user", "content": "a"}]
    for given, is_off in (({}, True), ({"enable_thinking": True}, False)):
        tokens = service.chat_prompt(ChatRequest(model="tiny", messages=messages, **given))
        assert ("</think>" in model.tokenizer.decode(tokens)) is is_off


def test_heads_remember_what_they_were_trained_on_and_one_warning_says_where_it_differs(tmp_path, capsys):
    base = save_tiny_base(tmp_path / "base")
    chat_tokenizer(THINKING).save_pretrained(base)
    data, run = write_rows(tmp_path / "data.jsonl", counting_rows(20)), tmp_path / "run"
    words = ["--base", str(base), "--data", str(data), "--output_dir", str(run), "--no-enable-thinking"]
    assert main(["train", *words, "--max_steps", "1", "--num_heads", "2", "--tree_nodes", "4"]) == 0
    assert load_heads(run / "heads").template_options == [OFF]
    options = ModelOptions(heads=str(run / "heads"), engine="eager", step="general")
    known = {"chat_template_kwargs": '{"unknown": 3}'}  # the template does not ask for it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(options, template=TemplateOptions(enable_thinking=False, **known))
        load_model(options, False, TemplateOptions())
    with pytest.warns(
        UserWarning, match=r'tell the chat template \{"enable_thinking": false\}, and .* told \{\}'
    ):
        load_model(options, template=TemplateOptions())


@dataclass(frozen=True)
class Asked:
    template: TemplateOptions = TemplateOptions()
    raw: bool = False


@pytest.mark.parametrize(
    ("words", "template_kwargs"),
    [
        ([], {}),
        (["--enable-thinking"], {"enable_thinking": True}),
        (["--no-enable-thinking", "--raw"], OFF),
        (["--enable-thinking", "false"], OFF),
        (["--enable_thinking=none"], {}),
        (
            ["--chat-template-kwargs", '{"effort": "low"}', "--enable-thinking"],
            {"effort": "low", "enable_thinking": True},
        ),
    ],
)
def test_the_template_is_told_by_flags(words, template_kwargs):
    options = parse(Asked, words)
    assert options.template.template_kwargs == template_kwargs
    assert parse(Asked, to_argv(options)) == options


def test_a_file_tells_the_template(tmp_path):
    (tmp_path / "a.yaml").write_text("enable_thinking: false\n")
    assert parse(Asked, ["--config", str(tmp_path / "a.yaml")]).template.template_kwargs == OFF
