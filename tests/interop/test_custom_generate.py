"""``base.generate(..., custom_generate=...)`` by a directory or hub id: the base's own text, with heads."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny_chat import chat_base, chat_heads, chat_tokenizer
from transformers import TextIteratorStreamer

from medusa import HeadsCheckpoint, MedusaModel, custom_generate, load_heads, save_heads
from medusa.interop import custom_generate as module
from medusa.interop.custom_generate import GENERATE_FILE, REQUIREMENTS_FILE

PROMPT = torch.tensor([[72, 105, 33, 40]])


def repository(directory, heads):
    """A heads directory with the file that transformers looks for."""
    save_heads(HeadsCheckpoint(heads, "someone/base"), directory)
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text(GENERATE_FILE)
    (directory / "custom_generate" / "requirements.txt").write_text(REQUIREMENTS_FILE)
    return str(directory)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return repository(tmp_path / "repository", chat_heads())


@pytest.fixture
def base():
    return chat_base()


def generate(base, directory, **arguments):
    return base.generate(
        PROMPT, custom_generate=directory, trust_remote_code=True, max_new_tokens=24, **arguments
    )


def test_a_directory_decodes_what_the_base_writes_and_with_the_heads(base, directory):
    plain = base.generate(PROMPT, max_new_tokens=24, do_sample=False)
    result = generate(base, directory, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(result.sequences, plain)
    assert result.statistics.num_steps < 24, "no guess was ever taken: the heads were not used"
    sampled = {"do_sample": True, "temperature": 0.8, "seed": 5}
    ours = MedusaModel.from_pretrained(base, directory).generate(PROMPT, max_new_tokens=24, **sampled)
    assert torch.equal(generate(base, directory, **sampled), ours)


def test_text_streams_through_the_directory(base, directory):
    tokenizer = chat_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    result = generate(base, directory, do_sample=False, streamer=streamer)
    pieces = list(streamer)
    assert "".join(pieces) == tokenizer.decode(result[0, PROMPT.shape[1] :])
    assert len(pieces) > 2


def test_stop_strings_stop_where_the_base_stops(base, directory):
    tokenizer = chat_tokenizer()
    whole = base.generate(PROMPT, max_new_tokens=24, do_sample=False)
    letter = next(each for each in tokenizer.decode(whole[0, 8:]) if each.isascii())
    stops = {"stop_strings": [letter], "tokenizer": tokenizer, "do_sample": False}
    plain = base.generate(PROMPT, max_new_tokens=24, **stops)
    assert plain.shape[1] < whole.shape[1]
    assert torch.equal(generate(base, directory, **stops), plain)


def test_heads_are_read_once_for_a_base(base, directory, monkeypatch):
    read = []

    def counted(source):
        read.append(source)
        return load_heads(source)

    monkeypatch.setattr(module, "load_heads", counted)
    for _ in range(2):
        generate(base, directory, do_sample=False)
    assert len(read) == 1


def test_a_base_that_was_decoded_with_heads_can_be_forgotten(directory):
    base = chat_base()
    generate(base, directory, do_sample=False)
    gone = weakref.ref(base)
    del base
    gc.collect()
    assert gone() is None


def test_a_caller_that_names_no_repository_is_told_to_name_the_heads(base, directory):
    with pytest.raises(ValueError, match="name them: heads=DIRECTORY"):
        custom_generate(base, PROMPT)
    plain = base.generate(PROMPT, max_new_tokens=8, do_sample=False)
    named = custom_generate(base, PROMPT, heads=directory, max_new_tokens=8, do_sample=False)
    assert torch.equal(named, plain)


def test_a_repository_of_the_hub_decodes_at_the_revision_asked_for(base, hub, tmp_path):
    for number in (2, 3):
        repository(tmp_path / str(number), chat_heads(num_heads=number))
        hub.put("ada/heads", tmp_path / str(number))
    hub.tags["ada/heads"] = {"v1": 0}
    plain = base.generate(PROMPT, max_new_tokens=24, do_sample=False)
    for revision, num_heads in ((None, 3), ("v1", 2)):
        asked = {} if revision is None else {"revision": revision}
        asked |= {"do_sample": False, "drafter": "heads", "return_dict_in_generate": True}
        result = generate(base, "ada/heads", **asked)
        assert torch.equal(result.sequences, plain)
        assert len(result.statistics.acceptance_rate) == num_heads
