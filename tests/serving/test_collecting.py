"""`medusa serve --learn` keeps what it wrote, and answers go on where that cannot be kept."""

import logging
import shutil

import pytest
from tiny_chat import chat_model, chat_tokenizer
from tiny_server import chat, expected, running

from medusa.base.collected_texts import CollectedTexts
from medusa.cli.main import main

MODEL = chat_model()


@pytest.fixture
def server(tmp_path):
    with running(MODEL) as started:
        (tmp_path / "learned").mkdir()
        started.service.worker.collected = CollectedTexts(tmp_path / "learned", chat_tokenizer())
        yield started


def texts(server):
    return [row["text"] for row in server.service.worker.collected.newest_first()]


def test_each_answer_is_kept_with_its_prompt(server):
    tokens, _ = expected(MODEL, [{"role": "user", "content": "Hello"}], max_new_tokens=24)
    for _ in range(2):
        chat(server, max_tokens=24, temperature=0)
    text = chat_tokenizer().decode(tokens)
    assert texts(server) == [f"<|user|>Hello<|end|><|assistant|>{text}"] * 2


def test_answers_go_on_where_nothing_can_be_kept(server, caplog):
    shutil.rmtree(server.service.worker.collected.directory)
    with caplog.at_level(logging.WARNING, "medusa.serving"):
        for _ in range(2):
            assert chat(server, max_tokens=24, temperature=0).choices[0].finish_reason
    assert len(caplog.records) == 1 and "nothing more is kept for `medusa learn`" in caplog.text


def test_users_do_not_teach_each_other_s_heads_unless_told(capsys, monkeypatch):
    monkeypatch.setattr("medusa.serving.server.bound_socket", lambda *given: pytest.fail("began"))
    assert main(["serve", "--learn", "--api-key", "one", "--api-key", "two", "--port", "0"]) == 1
    assert "learn with 2 API keys" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--learn-from-all"])
    assert "learn_from_all goes with learn" in capsys.readouterr().err
