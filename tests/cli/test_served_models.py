"""``medusa serve --models``: which models there are, what each is called, and what it will take."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch
from quantised_files import write_model
from tiny_chat import chat_model, save_chat_model
from tiny_server import HELLO, expected

from medusa.base.loading import find_base
from medusa.cli.main import main
from medusa.engine.weights import load, plan
from medusa.engine.weights.plan import held_bytes
from medusa.serving import server
from medusa.serving.chat_requests import ChatRequest

MIB = 2**20


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with a model directory, two GGUF files, one of them in parts, and what is no model."""
    folder = tmp_path_factory.mktemp("models")
    base, heads = save_chat_model(tmp_path_factory.mktemp("chat"))
    shutil.copytree(base, folder / "chat")
    shutil.copytree(heads, folder / "heads")
    write_model(folder / "small.gguf")
    write_model(folder / "parts.gguf", num_files=2)
    (folder / "mmproj-small.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("nothing")
    return folder


@pytest.fixture
def pool_of(monkeypatch, capsys):
    """The pool that flags give."""
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)

    def pool(*flags):
        pools = []
        monkeypatch.setattr(server, "run_server", lambda pool, *_: pools.append(pool))
        status = main(["serve", "--port", "0", *map(str, flags)])
        assert status == 0 or not pools
        return pools[0] if pools else " ".join(capsys.readouterr().err.split())

    return pool


def test_all_models_of_a_directory_are_served_by_the_names_of_their_files(home, pool_of, caplog):
    pool = pool_of("--models", home)
    assert {model.names for model in pool.models} == {("chat",), ("small",), ("parts-00001-of-00002",)}
    assert "heads is left out" in caplog.text and not pool.loaded
    chat, small = pool.named("chat"), pool.named("small")
    assert pool.named("small.gguf") is small
    assert (chat.family, chat.context) == ("llama", 512)
    assert chat.tokenized().capabilities == ["completion"] and chat.service is None


def test_models_are_named_one_by_one_and_the_first_answers_where_none_is(home, pool_of):
    pool = pool_of("--models", f"mine={home / 'small.gguf'}", home / "chat")
    assert [model.names for model in pool.models] == [("mine",), ("chat",)]
    assert pool.named(None) is pool.named("small.gguf") is pool.models[0]
    assert "two called 'mine'" in pool_of("--models", f"mine={home}/chat", f"mine={home}/small.gguf")


def test_a_model_that_is_asked_for_answers_as_generate_does(home, pool_of):
    pool = pool_of("--models", home / "chat", "--heads", "none", "--cache-mib", "4", "--step", "general")

    async def ask():
        lease = await pool.lease(pool.named("chat"))
        request = ChatRequest(messages=HELLO, max_tokens=8, temperature=0)
        prompts = lease.service.prompts(request)
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        tokens = []

        def listener_of(_number):
            def listen(update):
                if update.finish_reason is not None:
                    tokens.extend(answers[0].row.tokens)
                    loop.call_soon_threadsafe(done.set)

            return listen

        answers = lease.service.answers(request, prompts, listener_of)
        lease.service.submit(answers)
        await asyncio.wait_for(done.wait(), 60)
        assert lease.service.names == ("chat",)
        lease.release()
        return tokens

    tokens = asyncio.run(ask())
    pool.close()
    assert tokens == expected(chat_model(), HELLO, do_sample=False, max_new_tokens=8)[0]


def test_the_memory_of_a_model_is_its_weights_a_start_and_its_caches(home, pool_of):
    spare = plan.SPARE_BYTES // MIB
    one = held_bytes(find_base(home / "small.gguf"), "auto")
    weights = -(-one // MIB)
    flags = ["--models", home / "small.gguf", "--memory-mib", "8192"]
    assert pool_of(*flags).models[0].num_bytes == MIB * (weights + spare + 1024 + 256)
    sized = [*flags, "--cache-mib", "100", "--prefix-mib", "10"]
    assert pool_of(*sized).models[0].num_bytes == MIB * (weights + spare + 110)
    assert pool_of(*sized, "--allow-plain").models[0].num_bytes == MIB * (weights + spare + 210)
    assert pool_of(*sized, "--suffix-cache-mib", "5").models[0].num_bytes == MIB * (weights + spare + 115)
    assert pool_of(*sized, "--learn").models[0].num_bytes == MIB * (2 * (weights + spare) + 110)
    tight = pool_of("--models", home / "small.gguf", "--memory-mib", spare + weights + 100)
    assert 0 < tight.models[0].num_bytes <= tight.budget, "caches are smaller where there is less"
    full = pool_of("--models", home / "small.gguf", "--memory-mib", spare)
    assert full.models[0].num_bytes > full.budget


def test_the_weights_are_those_that_loading_counts(home, monkeypatch):
    for name, engine in (
        ("chat", "packed"),
        ("chat", "eager"),
        ("small.gguf", "auto"),
        ("small.gguf", "eager"),
    ):
        counted = []
        monkeypatch.setattr(
            load,
            "check_fits",
            lambda weights, kind, sizes=counted: sizes.append(plan.num_bytes(plan.planned(weights, kind))),
        )
        load.load_base(find_base(home / name), engine)
        assert held_bytes(find_base(home / name), engine) == counted[0] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--base", "x"], "base is for one model, and models serves several, got base='x'"),
        (["--tokenizer", "x"], "tokenizer is for one model"),
        (["--served-model-name", "x"], "--models NAME=BASE gives a name"),
        (["--heads", "x"], "heads must be default or none with models"),
    ],
)
def test_flags_of_one_model_are_refused(home, pool_of, flags, words):
    assert words in pool_of("--models", home / "chat", *flags)


def test_what_is_no_model_is_refused_at_the_start(home, pool_of, tmp_path):
    assert "in which there is no GGUF file" in pool_of("--models", tmp_path)
    assert "models must be bases, or NAME=BASE, got '=x'" in pool_of("--models", "=x")
    assert "mmproj-small.gguf" in pool_of("--models", home / "mmproj-small.gguf")
    assert "no GGUF file at" in pool_of("--models", home / "no.gguf")


@pytest.mark.parametrize("flag", ["--memory-mib", "--idle-minutes"])
def test_limits_of_several_models_want_models(flag, capsys):
    with pytest.raises(SystemExit):
        main(["serve", flag, "5"])
    assert "goes with models" in capsys.readouterr().err


def test_idle_minutes_are_seconds_of_the_pool(home, pool_of):
    assert pool_of("--models", home / "chat").keep_seconds == 900
    assert pool_of("--models", home / "chat", "--idle-minutes", "0.5").keep_seconds == 30
    assert torch.device("cpu") == torch.empty(0, device="cpu").device, "by which a card is told"
