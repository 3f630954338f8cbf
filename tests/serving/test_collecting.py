"""`medusa serve --learn` keeps what it wrote, and takes better heads into use between requests."""

import random
import threading

import pytest
import torch
from tiny_chat import HIDDEN_SIZE, VOCAB_SIZE, chat_model, chat_tokenizer
from tiny_server import HELLO, chat, client_of, expected, running, wait_until

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, save_heads
from medusa.cli.main import main
from medusa.learning.idle_learning import IdleLearning
from medusa.learning.learned_heads import LearnedHeads

MODEL = chat_model()


@pytest.fixture
def server(tmp_path):
    learned = LearnedHeads(tmp_path / "learned")
    with learned.locked():
        learned.begin("base")
    model = chat_model()
    model.learning = IdleLearning(learned, chat_tokenizer(), ["false"], True, lambda: False, print)
    with running(model) as started:
        yield started


def texts(server):
    return [row["text"] for row in server.service.model.learning.collected.newest_first()]


def test_each_answer_is_kept_once_with_its_prompt(server):
    tokens, _ = expected(MODEL, HELLO, max_new_tokens=24)
    for length in (24, 20, 24):
        chat(server, max_tokens=length, temperature=0)
    kept = [chat_tokenizer().decode(tokens[:length]) for length in (20, 24)]
    assert texts(server) == [f"<|user|>Hello<|end|><|assistant|>{text}" for text in kept]


def test_learning_stands_still_from_the_request_to_the_end_of_the_answer(server, monkeypatch):
    learning = server.service.model.learning
    calls = []
    monkeypatch.setattr(learning, "pause", lambda: calls.append(learning.is_busy()))
    assert not learning.is_busy()
    chat(server, max_tokens=24)
    assert calls == [True]
    wait_until(lambda: not learning.is_busy())


def test_users_do_not_teach_each_other_s_heads_unless_told(capsys, monkeypatch):
    monkeypatch.setattr("medusa.serving.server.bound_socket", lambda *given: pytest.fail("began"))
    assert main(["serve", "--learn", "--api-key", "one", "--api-key", "two", "--port", "0"]) == 1
    assert "learn with 2 API keys" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--learn-from-all"])
    assert "learn_from_all goes with learn" in capsys.readouterr().err


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Heads of several depths and trees, that read several layers."""
    folder = tmp_path_factory.mktemp("swapped")
    made = []
    for number, layers in enumerate([(), (1,), (1, 2)]):
        torch.manual_seed(number)
        heads = MedusaHeads(HeadsConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=number + 2, fused_layers=layers))
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        paths = [(0,), (1,), (0, 0), (0, 1)]
        tree = CandidateTree.chain(number + 1) if number else CandidateTree.from_paths(paths)
        save_heads(HeadsCheckpoint(heads, "tiny", tree), folder / str(number))
        made.append(folder / str(number))
    return made


def test_answers_are_those_of_plain_decoding_whenever_heads_are_swapped(server, directories):
    order = random.Random(0)
    questions = [[{"role": "user", "content": f"Question {number}"}] for number in range(6)]
    settings = {"max_new_tokens": 40}
    right = [expected(MODEL, messages, **settings)[1] for messages in questions]
    ended = threading.Event()
    num_swaps = 0

    def ask(number):
        for _ in range(6):
            reply = chat(server, messages=questions[number], max_tokens=40, temperature=0)
            assert reply.choices[0].message.content == right[number]

    failures = []

    def asking(number):
        try:
            ask(number)
        except Exception as error:
            failures.append(error)

    clients = [threading.Thread(target=asking, args=(number,)) for number in range(len(questions))]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        server.service.use_heads(order.choice(directories))
        num_swaps += 1
        ended.wait(order.random() / 20)
    assert not failures and num_swaps > 3
    server.service.use_heads(directories[2])
    wait_until(lambda: server.service.model.heads.num_heads == 4)
    ask(0)
    body = client_of(server).get("/heads", cast_to=object)
    assert body["in_use"] == {"num_heads": 4, "num_nodes": 4} and body["learning"]["state"] == "collecting"
    metrics = client_of(server).get(f"{server.url}/metrics", cast_to=str)
    assert "medusa:learned_version 0.0" in metrics and "medusa:learning_new_bytes" in metrics


def test_what_was_read_is_not_read_again_after_a_swap(server, directories):
    chat(server, messages=[{"role": "user", "content": "x" * 200}], max_tokens=8)
    server.service.use_heads(directories[0])
    wait_until(lambda: server.service.model.heads is not None)
    reply = chat(server, messages=[{"role": "user", "content": "x" * 200}], max_tokens=8)
    assert reply.usage.prompt_tokens_details.cached_tokens > 100


def test_a_server_without_learning_says_so():
    with running(MODEL) as started:
        body = client_of(started).get("/heads", cast_to=object)
    assert body == {"object": "heads", "in_use": {"num_heads": 3, "num_nodes": 13}, "learning": None}
