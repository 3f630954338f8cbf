"""A model that learns keeps what it writes, and other heads at any moment leave its text as it is."""

import gc
import random
import threading
import weakref

import pytest
import torch
from tiny_chat import HIDDEN_SIZE, VOCAB_SIZE, chat_base, chat_tokenizer, save_chat_model

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel
from medusa.decoding import executor
from medusa.decoding.batch import Row
from medusa.heads.checkpoint import load_heads

PLAIN = CandidateTree.chain(0)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The directories of a base and of its heads, in a cache of its own."""
    monkeypatch.setattr("medusa.learning.learned_heads.cache_home", lambda: tmp_path / "cache")
    return save_chat_model(tmp_path)


def prompts(count=1, length=20):
    ids = torch.randint(0, 250, (count, length), generator=torch.Generator().manual_seed(count))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_what_is_generated_or_streamed_is_kept_and_learning_stands_still_meanwhile(place):
    base, heads = place
    model = MedusaModel.from_pretrained(base, heads, learn=True)
    learning = model.learning
    pauses = []
    learning.pause = lambda: pauses.append(learning.is_busy())
    one = model.generate(**prompts(), max_new_tokens=20)
    model.generate(**prompts(2), max_new_tokens=20, do_sample=True, seed=3)
    for _ in model.stream(**prompts(), max_new_tokens=21):
        assert learning.is_busy()
    assert pauses == [True] * 3 and not learning.is_busy()
    rows = list(learning.collected.newest_first())
    assert len(rows) == 4 and rows[0]["text"].startswith(rows[3]["text"])
    text = chat_tokenizer().decode(one[0])
    assert rows[3]["text"] == text
    assert rows[3]["answer_from"] == len(chat_tokenizer().decode(prompts()["input_ids"][0]))
    assert f"learn {base} --collected" in " ".join(learning.command)


def test_what_was_streamed_before_it_was_stopped_is_kept(place):
    model = MedusaModel.from_pretrained(place[0], learn=True)
    steps = model.stream(**prompts(), max_new_tokens=40)
    next(steps)
    steps.close()
    assert len(list(model.learning.collected.newest_first())) == 1 and not model.learning.is_busy()


def test_learning_ends_with_the_model(place):
    model = MedusaModel.from_pretrained(place[0], learn=True)
    thread = model.learning._thread
    assert thread.is_alive()
    del model
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_model_that_no_file_tells_from_others_learns_nothing():
    model = MedusaModel(chat_base(), tokenizer=chat_tokenizer())
    with pytest.raises(ValueError, match="a GGUF file, a directory or a hub id"):
        model.learn()


def random_checkpoint(number):
    torch.manual_seed(number)
    layers = ((), (1,), (1, 2))[number % 3]
    heads = MedusaHeads(HeadsConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=1 + number % 4, fused_layers=layers))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tree = None if number % 2 else CandidateTree.from_paths([(0,), (1,), (2,)])
    return HeadsCheckpoint(heads, "tiny", tree)


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
@pytest.mark.parametrize("step", ["general", "static"])
def test_text_is_that_of_plain_decoding_whenever_heads_are_swapped(engine, step):
    model = MedusaModel(chat_base(), tokenizer=chat_tokenizer(), engine=engine, step=step)
    order = random.Random(engine)
    sampling = {"do_sample": True, "temperature": 0.8, "seed": 5}
    for number in range(6):
        settings = {**prompts(1 + number % 3), "max_new_tokens": 30, **(sampling if number % 2 else {})}
        expected = model.generate(**settings, tree=PLAIN)
        moments = {order.randrange(1, 20) for _ in range(3)}
        answers = [[] for _ in expected]
        for moment, result in enumerate(model.stream(**settings)):
            for answer, new in zip(answers, result.tokens, strict=True):
                answer += new
            if moment in moments:
                model.use_heads(random_checkpoint(order.randrange(12)))
        for answer, row in zip(answers, expected[:, 20:].tolist(), strict=True):
            assert answer == row[: len(answer)] and set(row[len(answer) :]) <= {256}
        assert model.generate(**settings).tolist() == expected.tolist()


def test_heads_are_swapped_while_other_threads_decode():
    model = MedusaModel(chat_base(), tokenizer=chat_tokenizer(), engine="packed")
    expected = model.generate(**prompts(2), max_new_tokens=40, tree=PLAIN).tolist()
    failures = []
    is_over = threading.Event()

    def decode():
        try:
            while not is_over.is_set():
                assert model.generate(**prompts(2), max_new_tokens=40).tolist() == expected
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(100):
        model.use_heads(random_checkpoint(number))
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
@pytest.mark.parametrize("step", ["general", "static"])
def test_heads_in_whose_place_others_are_used_are_gone_at_once(engine, step):
    model = MedusaModel(chat_base(), tokenizer=chat_tokenizer(), engine=engine, step=step)
    gc.collect()
    gc.disable()  # a server collects garbage in full after hours
    try:
        before = []
        for number in range(3):
            checkpoint = random_checkpoint(number)
            before.append(weakref.ref(checkpoint.heads))
            model.use_heads(checkpoint)
            del checkpoint
            model.generate(**prompts(), max_new_tokens=8)
            list(model.stream(**prompts(2), max_new_tokens=8))
        assert [heads() is not None for heads in before] == [False, False, True]
    finally:
        gc.enable()


def test_each_heads_are_compiled_once_and_the_pass_is_kept(monkeypatch):
    compiled = []
    monkeypatch.setattr(executor, "CompiledPass", lambda base: compiled.append("pass") or base)
    monkeypatch.setattr(executor, "compile_heads", lambda heads, lm_head: compiled.append("heads"))
    model = MedusaModel(chat_base(), tokenizer=chat_tokenizer(), engine="packed")
    for number in range(2):
        model.use_heads(random_checkpoint(number))
        for _ in range(2):
            model.compile()
    assert compiled == ["heads", "pass", "heads"]


def test_heads_that_do_not_fit_change_nothing(place):
    model = MedusaModel.from_pretrained(*place)
    before = model.heads
    others = HeadsCheckpoint(MedusaHeads(HeadsConfig(HIDDEN_SIZE + 1, VOCAB_SIZE, num_heads=2)), "tiny")
    with pytest.raises(ValueError, match="hidden_size"):
        model.use_heads(others)
    assert model.heads is before
    model.use_heads(load_heads(place[1]))
    assert model.tree == load_heads(place[1]).tree


def test_a_batch_of_before_goes_on_with_its_heads():
    model = MedusaModel(chat_base(), tokenizer=chat_tokenizer())
    prompt = torch.tensor([[5, 6]])
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False, tree=PLAIN)[0, 2:].tolist()
    batch = model.continuous_batch()
    model.use_heads(random_checkpoint(1))
    rows = [Row(model.request(prompt, max_new_tokens=9, do_sample=False)) for _ in range(2)]
    for row in rows:
        batch.add(row)
    while batch.is_busy:
        batch.step()
    assert [row.tokens for row in rows] == [expected, expected]
