"""Files and directories that are whole or not there, for whom the umask lets read them."""

from __future__ import annotations

import json
import os
import resource
import stat
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from medusa import HeadsCheckpoint, HeadsConfig, MedusaHeads, save_heads
from medusa.files import (
    check_writable_target,
    clear_interrupted,
    disk_errors,
    locked,
    read_yaml,
    replaceable_files,
    replaced_directory,
    replaced_file,
    write_json,
)
from medusa.heads.checkpoint import HEADS_LAYOUT


@pytest.fixture
def set_umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("umask", "file", "directory"), [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)])
def test_a_heads_directory_has_the_rights_that_the_umask_leaves(tmp_path, set_umask, umask, file, directory):
    set_umask(umask)
    heads = MedusaHeads(HeadsConfig(8, 20, 2))
    target = save_heads(HeadsCheckpoint(heads, base_model="tiny"), tmp_path / "heads")
    assert stat.S_IMODE(target.stat().st_mode) == directory
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()}
    assert rights["model.safetensors"] == file
    assert set(rights.values()) == {file}


@pytest.fixture
def small_disk():
    """Lets no file grow beyond 20 kB, as a disk with no more room does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_that_names_the_directory_and_leaves_what_was_there(tmp_path, small_disk):
    small = HeadsCheckpoint(MedusaHeads(HeadsConfig(8, 20, 2)), base_model="tiny")
    large = HeadsCheckpoint(MedusaHeads(HeadsConfig(128, 20, 2)), base_model="tiny")
    save_heads(small, tmp_path / "heads")
    before = (tmp_path / "heads" / "model.safetensors").read_bytes()
    with pytest.raises(OSError, match=r"heads could not be written, and .* GiB are free there; make room"):
        save_heads(large, tmp_path / "heads", overwrite=True)
    assert (tmp_path / "heads" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_other_errors_of_a_library_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="shapes do not match"), replaced_directory(tmp_path / "new"):
        raise RuntimeError("shapes do not match")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    (tmp_path / ".lock").symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(OSError, match=r"\.lock must be a file, got a link; remove it"), locked(tmp_path):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_a_directory_that_one_holds_is_refused_to_others_with_the_holder(tmp_path):
    with (
        locked(tmp_path / "run"),
        pytest.raises(BlockingIOError, match=rf"run is in use by process {os.getpid()} on .*; wait until"),
        locked(tmp_path / "run"),
    ):
        pass
    with locked(tmp_path / "run"):
        pass


def test_what_a_killed_write_left_goes_and_a_directory_that_made_way_comes_back(tmp_path):
    for name in (".heads.partial-1a", ".heads.retired-1a", ".other.partial-1a"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(1)}, tmp_path / name / "model.safetensors")
    clear_interrupted(tmp_path / "heads")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.partial-1a", "heads"]
    (tmp_path / ".heads.retired-2b").mkdir()
    clear_interrupted(tmp_path / "heads")
    assert (tmp_path / "heads" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.partial-1a", "heads"]


def test_what_a_killed_write_of_a_file_left_goes_and_nothing_of_another_name(tmp_path):
    for name in (".a[1].json.partial-1a", ".a1.json.partial-1a", ".notes.partial-1a"):
        (tmp_path / name).touch()
    clear_interrupted(tmp_path / "a[1].json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a1.json.partial-1a", ".notes.partial-1a"]


@pytest.mark.parametrize(
    "write",
    [
        check_writable_target,
        lambda path: write_json(path, {}),
        lambda path: replaceable_files(path, HEADS_LAYOUT, [path.parent]),
    ],
    ids=["directory", "file", "overwriting"],
)
def test_a_link_that_leads_to_itself_is_named(tmp_path, write):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match=r"circle is a link that leads back to itself; choose another place"):
        write(tmp_path / "circle")


def test_a_file_lies_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_ino))
    write_json(tmp_path / "a.json", {"a": 1})
    assert events == [(tmp_path / "a.json").stat().st_ino, tmp_path.stat().st_ino]


def test_two_that_write_a_file_at_once_both_end_well(tmp_path):
    path = tmp_path / "a.json"
    with replaced_file(path) as first, replaced_file(path) as second:
        first.write_text("1")
        second.write_text("2")
    assert path.read_text() == "1", "the last one that ended"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_what_a_link_points_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "disk" / "heads").mkdir(parents=True)
    (tmp_path / "disk" / "heads" / "old").write_text("old")
    (tmp_path / "disk" / "a.json").write_text("{}")
    for name in ("heads", "a.json"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    with replaced_directory(tmp_path / "heads", overwrite=True) as partial:
        (partial / "new").write_text("new")
    write_json(tmp_path / "a.json", {"a": 1})
    assert (tmp_path / "heads").is_symlink() and (tmp_path / "a.json").is_symlink()
    assert [each.name for each in (tmp_path / "disk" / "heads").iterdir()] == ["new"]
    assert json.loads((tmp_path / "disk" / "a.json").read_text()) == {"a": 1}


def test_one_that_waits_for_a_directory_says_for_whom_and_gets_it(tmp_path):
    said, has_it = [], threading.Event()

    def hold() -> None:
        with locked(tmp_path):
            has_it.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait()
    with locked(tmp_path, 20, said.append):
        pass
    thread.join()
    (text,) = said
    assert f"is in use by process {os.getpid()} on" in text and "waiting until it has ended" in text


def test_every_way_in_which_a_full_disk_shows_in_torch_is_told_in_words(tmp_path):
    for text in ("PytorchStreamWriter failed writing file", "unexpected pos 320 vs 218"):
        with (
            pytest.raises(OSError, match=r"could not be written, and .* GiB are free"),
            disk_errors(tmp_path),
        ):
            raise RuntimeError(f"[enforce fail at inline_container.cc:664] . {text}")


def test_a_key_that_yaml_gives_twice_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_steps: 3\nseed: 1\nmax_steps: 5\n")
    with pytest.raises(ValueError, match=r"run.yaml is not valid YAML: max_steps is given more than once"):
        read_yaml(path)
    path.write_text("a: &base {x: 1}\nb: {<<: *base, x: 2}\n")
    assert read_yaml(path) == {"a": {"x": 1}, "b": {"x": 2}}
