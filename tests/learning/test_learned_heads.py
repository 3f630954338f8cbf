"""The store of learned heads: versions, what a kill leaves, and by what a base is known."""

import os
from dataclasses import replace

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file, save_file

from medusa.base.known_models import learned_for, signature_of
from medusa.learning import learned_heads
from medusa.learning.learned_heads import KEPT_VERSIONS, LearnedHeads, LearnedVersion

VERSION = LearnedVersion(1, "2026-11-29T10:00:00+00:00", ["notes.md"], True, 30_000, 12.5, 2.1, 1.4)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(learned_heads, "cache_home", lambda: tmp_path / "cache")
    learned = LearnedHeads.of_signature("0123456789abcdef" * 4)
    with learned.locked():
        learned.begin("model.gguf")
    return learned


def ended_round(learned, number, is_better=True):
    """A round that left heads whose only file says its number."""
    heads = learned.round / "run" / "heads"
    heads.mkdir(parents=True)
    (heads / "config.json").write_text(str(number))
    answers = learned.round / "answers.jsonl"
    answers.write_text(f"{number}\n")
    learned.end_round(replace(VERSION, number=number), heads if is_better else None, answers)


def test_the_newest_versions_and_answers_are_kept(store):
    for number in range(1, 6):
        ended_round(store, number)
    kept = [3, 4, 5]
    assert len(kept) == KEPT_VERSIONS and [version.number for version in store.versions] == kept
    assert sorted(path.name for path in store.directory.glob("heads-*")) == ["heads-3", "heads-4", "heads-5"]
    assert [path.read_text() for path in store.answers] == ["3\n", "4\n", "5\n"]
    assert (store.in_use / "config.json").read_text() == "5"
    assert LearnedHeads.all() == [store] and store.base == "model.gguf"


def test_a_round_without_better_heads_is_counted_and_changes_nothing(store):
    ended_round(store, 1)
    ended_round(store, 2, is_better=False)
    assert store.version == VERSION and store.last_number == 2 and not store.round.exists()


def test_undo_goes_back_version_by_version(store):
    for number in (1, 2):
        ended_round(store, number)
    assert store.undo() == VERSION and (store.in_use / "config.json").read_text() == "1"
    assert store.undo() is None and store.in_use is None
    assert store.undo() is None


@pytest.mark.parametrize("killed_in", ["copytree", "copyfile", "write_json", "replace", "rmtree"])
def test_a_kill_while_a_round_ends_leaves_the_old_heads_or_the_new(store, monkeypatch, killed_in):
    ended_round(store, 1)

    def kill(*given, **more):
        raise KeyboardInterrupt

    place = (
        learned_heads if killed_in == "write_json" else os if killed_in == "replace" else learned_heads.shutil
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, killed_in, kill)
        ended_round(store, 2)
    assert (store.in_use / "config.json").read_text() == str(store.version.number)
    heads = store.round / "run" / "heads"
    if heads.exists():  # the command goes on with it
        store.end_round(replace(VERSION, number=2), heads, store.round / "answers.jsonl")
    assert store.version.number == 2 and (store.in_use / "config.json").read_text() == "2"
    assert not store.round.exists()


def saved(folder, **weights):
    base = tiny_model("llama")
    base.save_pretrained(folder, **weights)
    return folder


def test_a_directory_is_known_by_its_weights_wherever_it_lies(tmp_path):
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b" / "c")
    signature = signature_of(str(first))
    assert signature is not None and signature_of(str(second)) == signature
    tensors = load_file(second / "model.safetensors")
    name = next(name for name in tensors if tensors[name].dim() == 1)
    tensors[name][0] += 1
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    assert signature_of(str(second)) != signature


def test_other_files_of_weights_are_known_by_their_beginning(tmp_path):
    for name, fill in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        torch.save({"weight": torch.full((64,), fill)}, tmp_path / name / "pytorch_model.bin")
    first, same, other = (signature_of(str(tmp_path / name)) for name in "abc")
    assert first == same != other


def test_without_weights_nothing_is_known(tmp_path, store):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    for base in (str(tmp_path / "empty"), str(tmp_path / "none"), "someone/not-cached", "none.gguf"):
        assert signature_of(base) is None and learned_for(base) is None
