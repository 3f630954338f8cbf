"""Chat templates are programs from a model's file: they write what they should, and stop no server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
from template_kinds import TEMPLATES
from tiny_chat import TOOL_TEMPLATE, chat_tokenizer, tool_model
from tiny_server import HELLO, TOOL, chat, client_of, running, wait_until

from medusa.serving import chat_template
from medusa.serving.chat_template import BoundedChatTemplate, TemplateLimitError

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
UNBOUNDED = {
    "endless": ENDLESS,
    "a text that fills the memory": "{{ 'a' * 10**10 }}",
    "a number that fills the memory": "{{ 10 ** (10 ** 9) }}",
    "a text that doubles": "{% set n = namespace(a='a') %}"
    "{% for _ in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(chat_template.rendering_process(), "seconds", 0.5)


def template_of(text) -> BoundedChatTemplate:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = text
    return BoundedChatTemplate(tokenizer)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), TOOL_TEMPLATE, {"default": "d", "tool_use": "t"}])
@pytest.mark.parametrize("arguments", [{}, {"add_generation_prompt": True, "extra": ["ä", 1.5, None]}])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_the_text_is_that_of_transformers(template, arguments, tools):
    bounded = template_of(template)
    own = bounded._tokenizer.apply_chat_template(HELLO, tools=tools, tokenize=False, **arguments)
    assert bounded.apply_chat_template(HELLO, tools, **arguments) == own


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_template_without_end_is_refused_and_the_next_one_is_rendered(impatient, kind):
    with pytest.raises(TemplateLimitError, match=r"more than 0\.5 seconds, 1024 MiB"):
        template_of(UNBOUNDED[kind]).apply_chat_template(HELLO)
    assert template_of("hello").apply_chat_template(HELLO) == "hello"


def pid_of_rendering() -> int:
    process = chat_template.rendering_process()._process
    assert process is not None
    return process.pid


def test_a_process_that_is_killed_from_outside_is_asked_once_more(monkeypatch):
    monkeypatch.setattr(chat_template.rendering_process(), "seconds", 30)
    template_of("hello").apply_chat_template(HELLO)
    os.kill(pid_of_rendering(), signal.SIGKILL)
    assert template_of("hello").apply_chat_template(HELLO) == "hello"
    long = "{% for a in range(4000) %}{% for b in range(4000) %}{% endfor %}{% endfor %}hello"
    killed = pid_of_rendering()
    killing = threading.Timer(0.2, os.kill, [killed, signal.SIGKILL])
    killing.start()
    assert template_of(long).apply_chat_template(HELLO) == "hello"
    assert pid_of_rendering() != killed


def test_a_template_that_never_ends_does_not_outlive_a_server_that_is_killed():
    lines = ["import sys", "from medusa.serving.chat_template import rendering_process as process"]
    lines += ["process().start(); print(process()._process.pid, flush=True)"]
    lines += ["messages = [{'role': 'user', 'content': 'a'}]"]
    lines += ["process().ask({'conversation': messages, 'tools': None, 'chat_template': sys.argv[1]})"]
    command = [sys.executable, "-c", "\n".join(lines), ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        rendering = Path("/proc", parent.stdout.readline().decode().strip())
        time.sleep(0.5)
        assert rendering.exists()
        parent.kill()
    wait_until(lambda: not rendering.exists(), seconds=5)


def test_a_text_that_is_longer_than_any_model_reads_is_refused():
    with pytest.raises(chat_template.TemplateError, match="it writes 20000000 characters, at most 16777216"):
        template_of("{{ 'a' * 20000000 }}").apply_chat_template(HELLO)


def test_a_template_that_never_ends_costs_a_chat_an_error_and_others_nothing(impatient):
    model = tool_model("{% if tools %}" + ENDLESS + "{% endif %}" + TOOL_TEMPLATE)
    with running(model) as server:
        for _ in range(5):
            with pytest.raises(openai.BadRequestError, match="no place for tools"):
                chat(server, tools=[TOOL], max_tokens=4)
        assert chat(server, max_tokens=4).usage.completion_tokens > 0
    model = tool_model("{% if messages[0].content == 'end' %}" + ENDLESS + "{% endif %}" + TOOL_TEMPLATE)
    with running(model) as server:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="does not come to an end with these messages"):
                chat(server, messages=[{"role": "user", "content": "end"}], max_tokens=4)
        assert chat(server, max_tokens=4).usage.completion_tokens > 0
        assert client_of(server).completions.create(model="tiny", prompt="a", max_tokens=2).choices


def test_a_tokenizers_own_code_renders_its_own_way():
    class Own(type(chat_tokenizer())):
        def apply_chat_template(self, conversation, **arguments):
            assert arguments == {"tools": None, "tokenize": False, "extra": 1}
            return f"{len(conversation)} messages"

    tokenizer = Own(tokenizer_object=chat_tokenizer().backend_tokenizer)
    assert BoundedChatTemplate(tokenizer).apply_chat_template(HELLO, extra=1) == "1 messages"
