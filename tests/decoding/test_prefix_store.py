"""Prefixes on disk: a text that was read before is not read again after a restart, and its answer is the
same."""

import logging
import os
import shutil
import time

import pytest
import torch
from conftest import needs_newest, tiny_model
from mtp_models import save_base
from safetensors import SafetensorError
from stateful_models import stateful_model
from tiny_chat import chat_model, chat_tokenizer, save_chat_model
from tiny_server import chat, running

from medusa import MedusaModel
from medusa.base.known_models import digest_of_files
from medusa.decoding import prefix_store
from medusa.decoding.batch import BatchLimits, Row
from medusa.decoding.prefix_store import PrefixStore
from medusa.decoding.runners import Runner
from medusa.serving.settings import AccessOptions

TOKENS = [3 + (7 * place) % 50 for place in range(900)]
LIMITS = BatchLimits(max_rows=4, chunk=64)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(prefix_store, "BLOCK", 16)
    monkeypatch.setattr("medusa.decoding.prefix_cache.BLOCK", 16)
    monkeypatch.setattr(prefix_store, "SHORTEST", 40)


@pytest.fixture
def model():
    return MedusaModel(tiny_model("llama"))


class Run:
    """A batch, as of a process of its own, with the store in ``directory``."""

    def __init__(self, model, directory, max_bytes=2**30):
        self.model = model
        self.store = PrefixStore(directory, max_bytes)
        self.batch = model.continuous_batch(LIMITS)
        self.batch.prefixes.store = self.store

    def answer(self, tokens, owner=None, count=12):
        """The answer to a prompt, and how many tokens of that were not read."""
        row = Row(self.model.request(torch.tensor([tokens]), max_new_tokens=count), owner=owner)
        self.batch.add(row)
        while self.batch.is_busy:
            self.batch.step()
        self.store.wait()
        return row.tokens, row.num_reused

    @property
    def files(self):
        return sorted(self.store.directory.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi"])
def test_an_answer_after_a_restart_is_the_same_and_its_prompt_is_not_read_again(kind, tmp_path):
    model = MedusaModel(tiny_model(kind))
    expected = model.generate(torch.tensor([TOKENS[:100]]), max_new_tokens=12)[0, 100:].tolist()
    assert Run(model, tmp_path / "home" / "base").answer(TOKENS[:100]) == (expected, 0)
    assert Run(model, tmp_path / "home" / "base").answer(TOKENS[:100]) == (expected, 96)


def test_the_next_turn_adds_its_own_blocks_and_other_texts_share_the_first_ones(model, tmp_path):
    run = Run(model, tmp_path / "home" / "base")
    run.answer(TOKENS[:90])
    first = run.files
    assert len(first) == 6  # of 90 + 11 tokens
    numbers = [path.stat().st_ino for path in first]
    run.answer([*TOKENS[:90], *TOKENS[300:360]])
    assert len(run.files) > len(first)
    assert [path.stat().st_ino for path in first] == numbers, "they are not written again"
    other = [*TOKENS[:40], *TOKENS[500:560]]
    assert Run(model, tmp_path / "home" / "base").answer(other)[1] == 32


def test_short_texts_and_states_are_not_stored(model, tmp_path):
    run = Run(model, tmp_path / "home" / "base")
    run.answer(TOKENS[:20])
    assert not run.files
    run = Run(MedusaModel(stateful_model("lfm2")), tmp_path / "home" / "other")
    run.answer(TOKENS[:90])
    assert not run.files


def test_owners_do_not_share_them(model, tmp_path):
    Run(model, tmp_path / "home" / "base").answer(TOKENS[:90], owner="one")
    assert Run(model, tmp_path / "home" / "base").answer(TOKENS[:90], owner="two")[1] == 0
    assert Run(model, tmp_path / "home" / "base").answer(TOKENS[:90], owner="one")[1] == 80


def test_a_damaged_block_is_removed_and_read_again(model, tmp_path, caplog):
    run = Run(model, tmp_path / "home" / "base")
    expected, _ = run.answer(TOKENS[:90])
    *_, third = (path for path, _ in zip(run.store._paths(TOKENS[:90], None), range(3), strict=False))
    third.write_bytes(third.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "medusa.prefixes"):
        assert Run(model, tmp_path / "home" / "base").answer(TOKENS[:90]) == (expected, 32)
    assert "cannot be read and is removed" in caplog.text
    assert Run(model, tmp_path / "home" / "base").answer(TOKENS[:90]) == (expected, 80)


def test_nobody_else_can_read_them(model, tmp_path):
    run = Run(model, tmp_path / "home" / "base")
    run.answer(TOKENS[:90])
    for path in (run.store.directory, run.store.directory.parent, *run.files):
        assert path.stat().st_mode & 0o77 == 0


def test_the_least_recently_used_go_and_ends_before_beginnings(model, tmp_path):
    run = Run(model, tmp_path / "home" / "base")
    run.answer(TOKENS[:90])
    size = run.files[0].stat().st_size
    paths = list(run.store._paths(TOKENS[:90], None))
    long_ago = time.time() - 1000
    for path in run.files:
        os.utime(path, (long_ago, long_ago))
    later = Run(model, tmp_path / "home" / "base", max_bytes=round(9.5 * size))
    later.answer(TOKENS[:90])  # used again
    later.answer(TOKENS[410:500])
    assert later.store.num_bytes <= 9.5 * size
    left = [path.exists() for path in paths]
    assert left == sorted(left, reverse=True) and 0 < sum(left) < len(left)
    other = Run(model, tmp_path / "home" / "other", max_bytes=round(3.5 * size))
    other.answer(TOKENS[:90])
    assert other.store.num_bytes <= 3.5 * size, "of all bases together"


def test_a_full_disk_is_told_and_answers_go_on(model, tmp_path, caplog, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"begun")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    expected, _ = Run(model, tmp_path / "home" / "base").answer(TOKENS[:20])
    monkeypatch.setattr(prefix_store, "save_file", full)
    run = Run(model, tmp_path / "home" / "base")
    with caplog.at_level(logging.WARNING, "medusa.prefixes"):
        assert run.answer(TOKENS[:20])[0] == expected
        run.answer(TOKENS[:90])
    assert "No space left on device" in caplog.text
    assert not list(run.store.directory.iterdir())


def test_a_directory_that_was_removed_is_told_and_answers_go_on(model, tmp_path, caplog):
    run = Run(model, tmp_path / "home" / "base")
    shutil.rmtree(tmp_path / "home")
    with caplog.at_level(logging.WARNING, "medusa.prefixes"):
        run.answer(TOKENS[:90])
        run.answer(TOKENS[110:200])
    assert caplog.text.count("a prefix is not stored") == 2


def test_what_is_cut_in_the_middle_of_a_prompt_goes_on_after_a_restart(model, tmp_path):
    run = Run(model, tmp_path / "home" / "base")
    row = Row(model.request(torch.tensor([TOKENS[:400]]), max_new_tokens=4))
    run.batch.add(row)
    for _ in range(3):
        run.batch.step()
    run.batch.cancel(row)
    run.store.wait()
    assert Run(model, tmp_path / "home" / "base").answer(TOKENS[:400])[1] == 192


def test_a_conversation_reads_only_its_new_turn(monkeypatch, tmp_path):
    base, heads = save_chat_model(tmp_path)
    monkeypatch.setattr(prefix_store, "cache_home", lambda: tmp_path / "cache")
    question = chat_tokenizer()("x" * 100, return_tensors="pt")
    longer = chat_tokenizer()("x" * 100 + "y" * 50, return_tensors="pt")
    asked = {"max_new_tokens": 10, "seed": 3, "do_sample": True}
    expected = MedusaModel.from_pretrained(base).generate(**longer, **asked)
    read = []

    prefill = Runner.prefill

    def counted(runner, tokens, lengths, cache, *args, **kwargs):
        read.append(int(lengths[0]) - cache.longest)
        return prefill(runner, tokens, lengths, cache, *args, **kwargs)

    monkeypatch.setattr(Runner, "prefill", counted)

    def following():
        model = MedusaModel.from_pretrained(base, heads)
        model.keep_prefixes(2**20, model.prefix_store(2**30))
        return model

    model = following()
    model.generate(**question, **asked)
    assert sum(read) == 100
    assert model.generate(**longer, **asked).equal(expected)
    assert sum(read) == 150
    steps = model.stream(**chat_tokenizer()("z" * 100, return_tensors="pt"), max_new_tokens=10)
    next(steps)
    steps.close()  # stopped: what was read serves the next question
    read.clear()
    model.generate(**chat_tokenizer()("z" * 110, return_tensors="pt"), max_new_tokens=10)
    assert sum(read) < 20
    model.prefixes.store.wait()
    read.clear()
    model = following()
    assert model.generate(**longer, **asked).equal(expected)
    assert sum(read) == 150 - 144


@needs_newest
def test_calls_whose_drafters_read_states_of_the_text_go_on_from_each_other_alone(tmp_path):
    """Which prefixes hold those states is no matter of the caller."""
    model = MedusaModel.from_pretrained(str(save_base(tmp_path / "base", "glm4_moe")), "mtp")
    prompt = torch.tensor([[token % 13 for token in TOKENS[:80]]])
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20}
    expected = model.generate(prompt, **asked).tolist()
    model.keep_prefixes(2**24)
    for drafter in ("plain", "mtp", "plain", None, "mtp", "suffix"):
        assert model.generate(prompt, **asked, drafter=drafter).tolist() == expected
    assert len(model.prefixes) == 2


def test_a_server_finds_them_after_a_restart_by_the_key_of_the_client(monkeypatch, tmp_path):
    base, heads = save_chat_model(tmp_path)
    monkeypatch.setattr(prefix_store, "cache_home", lambda: tmp_path / "cache")
    messages = [{"role": "user", "content": "x" * 200}]

    def cached(keys, key):
        access = AccessOptions(api_key=keys)
        with running(MedusaModel.from_pretrained(base, heads), access) as server:
            reply = chat(server, key, messages=messages, max_tokens=4)
            metrics = server.service.metrics.exposed().decode()
            server.service.close()
        assert "medusa:prefix_store_bytes" in metrics
        return reply.usage.prompt_tokens_details.cached_tokens

    assert cached(("one", "two"), "two") == 0
    assert cached(("two",), "two") > 150
    assert cached(("one", "two"), "one") == 0


def test_other_weights_or_another_engine_have_a_store_of_their_own(monkeypatch, tmp_path):
    base, _ = save_chat_model(tmp_path)
    monkeypatch.setattr(prefix_store, "cache_home", lambda: tmp_path / "cache")
    before = MedusaModel.from_pretrained(base, engine="eager").prefix_store(2**20).directory
    assert MedusaModel.from_pretrained(base, engine="eager").prefix_store(2**20).directory == before
    assert MedusaModel.from_pretrained(base, engine="int8").prefix_store(2**20).directory != before
    digest = digest_of_files(base)
    chat_model(seed=1).base.save_pretrained(base)
    assert digest_of_files(base) != digest
    assert MedusaModel.from_pretrained(base, engine="eager").prefix_store(2**20).directory != before


def test_there_is_none_where_it_is_switched_off_or_no_file_tells_the_base(tmp_path):
    base, _ = save_chat_model(tmp_path)
    assert MedusaModel.from_pretrained(base).prefix_store(0) is None
    assert chat_model().prefix_store(2**20) is None
