"""Compiled libraries are whole or refused, and made by one process at a time."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import needs_kernels
from torch import nn

from medusa import files
from medusa.engine import libraries, programs
from medusa.engine.kernels import lanes
from medusa.engine.libraries import LibraryError, check_library, compile_library, digest_of
from medusa.engine.programs import Part, Program, code_of, compiled_program
from medusa.files import locked, write_json


@pytest.fixture
def compiler():
    """A compiler that writes 100 kB, and the libraries that it made."""
    made = []

    def make(directory):
        path = directory / "made.so"
        path.write_bytes(b"x" * 100_000)
        made.append(path)
        return path

    make.made = made
    return make


def compiled(path, compiler):
    compile_library(path, "compiling", compiler)
    return path


@pytest.mark.parametrize("size", [0, 1000, 99_999])
def test_a_library_that_is_not_what_was_written_is_refused_with_what_to_delete(tmp_path, compiler, size):
    path = compiled(tmp_path / "pass.so", compiler)
    check_library(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{path} is damaged.* delete it "):
        check_library(path)


def test_a_library_whose_bytes_have_changed_or_whose_seal_is_gone_is_refused(tmp_path, compiler):
    path = compiled(tmp_path / "pass.so", compiler)
    path.write_bytes(b"y" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        check_library(path)
    compiled_again = compiled(tmp_path / "other.so", compiler)
    compiled_again.with_suffix(".json").unlink()
    with pytest.raises(ValueError, match="is damaged"):
        check_library(compiled_again)
    compiled_again.with_suffix(".json").write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged"):
        check_library(compiled_again)


def given_away(path, monkeypatch):
    """Makes ``path`` another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("part", ["pass.so", "compiled", "cache"])
@pytest.mark.parametrize("whose", ["another user's", "writable by all", "writable by a group"])
def test_a_library_that_another_user_could_have_written_is_not_loaded(
    tmp_path, compiler, monkeypatch, part, whose
):
    path = compiled(tmp_path / "cache" / "compiled" / "pass.so", compiler)
    check_library(path)
    altered = next(each for each in (path, *path.parents) if each.name == part)
    if whose == "another user's":
        given_away(altered, monkeypatch)
    else:
        monkeypatch.setattr(files, "_is_own_group", lambda number: False)
        altered.chmod(0o777 if whose == "writable by all" else 0o775)
    with pytest.raises(PermissionError, match=rf"{altered}\b.* run as you"):
        check_library(path)


def test_nothing_is_compiled_where_another_user_may_write(tmp_path, compiler):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        compiled(tmp_path / "pass.so", compiler)
    assert not compiler.made


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_a_new_cache_is_writable_by_its_user_alone(tmp_path, compiler, umask):
    before = os.umask(umask)
    try:
        check_library(compiled(tmp_path / "cache" / "compiled" / "pass.so", compiler))
    finally:
        os.umask(before)


@pytest.mark.parametrize("whose", ["ours", "everyone's", "not there"])
def test_torchs_compiler_takes_no_files_that_another_user_could_have_prepared(tmp_path, monkeypatch, whose):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    (tmp_path / "inductor").mkdir(mode=0o755)
    if whose == "everyone's":
        (tmp_path / "inductor").chmod(0o777)
    used = []

    def compile_to(exported, directory):
        used.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (directory / "made.so").touch()
        return directory / "made.so"

    monkeypatch.setattr(programs, "_compiled_in", compile_to)
    if whose == "not there":
        monkeypatch.setattr(programs, "_inductor_cache", lambda: str(tmp_path / "inductor" / "later"))
    (tmp_path / "target").mkdir()
    assert compiled_program(None, tmp_path / "target").exists()
    assert (used == [str(tmp_path / "inductor")]) == (whose != "everyone's")


def test_a_full_disk_while_compiling_is_an_error_in_words_and_leaves_nothing(tmp_path, compiler):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"pass\.so could not be written, and .* GiB are free there"):
            compiled(tmp_path / "pass.so", compiler)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["pass.lock"]


def test_who_finds_another_compiling_waits_and_compiles_nothing(tmp_path, compiler, monkeypatch):
    path, said = tmp_path / "pass.so", SimpleQueue()
    console = SimpleNamespace(print=lambda text, **style: said.put(text))
    monkeypatch.setattr(libraries, "log_console", lambda: console)
    with locked(path, lock=path.with_suffix(".lock")):
        waiting = threading.Thread(target=compiled, args=(path, compiler))
        waiting.start()
        assert "waiting until it has ended" in said.get(timeout=60)
        path.write_bytes(b"made")
    waiting.join()
    assert not compiler.made and path.read_bytes() == b"made"


def test_what_a_killed_compiler_left_makes_way(tmp_path, compiler):
    left = tmp_path / "pass.partial"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    assert compiled(tmp_path / "pass.so", compiler).exists() and not left.exists()


CHANGES = {
    "another torch": (torch, "__version__", "2.0.0"),
    "no VNNI": (torch.cpu, "_is_vnni_supported", lambda: "other"),
    "no AMX": (torch.cpu, "_is_amx_tile_supported", lambda: "other"),
    "other instructions": (torch.backends.cpu, "get_cpu_capability", lambda: "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_digest_tells_apart_what_a_library_depends_on(monkeypatch, change):
    before = digest_of()
    monkeypatch.setattr(*CHANGES[change])
    assert digest_of() != before


def test_remote_code_counts_by_its_source(tmp_path, monkeypatch):
    source = tmp_path / "modeling_remote.py"
    source.write_text("first")
    module = ModuleType("transformers_modules.remote")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    remote = type("Remote", (nn.Module,), {"__module__": module.__name__})()
    before = code_of(nn.Sequential(remote))
    source.write_text("second")
    assert code_of(nn.Sequential(remote)) != before
    assert code_of(nn.Linear(2, 2)) == code_of(nn.Identity())


def test_a_seal_is_written_before_the_library_takes_its_name(tmp_path, compiler, monkeypatch):
    def fails(path, value):
        assert not (tmp_path / "pass.so").exists()
        write_json(path, value)
        raise KeyboardInterrupt

    monkeypatch.setattr(libraries.files, "write_json", fails)
    with pytest.raises(KeyboardInterrupt):
        compiled(tmp_path / "pass.so", compiler)
    monkeypatch.undo()


@pytest.mark.slow
@needs_kernels
def test_blanks_and_quotes_in_paths_are_none_for_torchs_compiler(tmp_path, monkeypatch):
    lanes()  # loads the kernels
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "it's a cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch's own"))
    module, given = nn.Linear(3, 2), torch.randn(5, 3)
    part = Part("blanks", _Listed(module), [[given], [given[:4]]])
    part.compile()
    assert part.path.parent == tmp_path / "it's a cache" / "compiled"
    torch.testing.assert_close(Program(part.module, part)([given])[0], module(given))


def test_the_line_about_compiling_counts_nothing_and_says_what_its_time_depends_on(monkeypatch, tmp_path):
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    lines = []
    monkeypatch.setattr(programs, "compile_library", lambda path, text, make: lines.append(text))
    rows = torch.zeros(2, 3)
    Part("heads", nn.Linear(3, 2), [[rows], [rows[:1]]]).compile()
    assert lines == [
        "compiling heads for this processor, once: some ten seconds on an idle machine, longer beside other "
        f"work; kept in {tmp_path / 'compiled'}"
    ]


class _Listed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, given):
        return [self.module(given)]


@pytest.mark.parametrize("what", ["torch", "temporary files"])
def test_blanks_where_torch_itself_lies_are_told(tmp_path, monkeypatch, what):
    (blank := tmp_path / "a b").mkdir()
    if what == "torch":
        monkeypatch.setattr(torch, "__file__", str(blank / "torch" / "__init__.py"))
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(blank))
    with pytest.raises(LibraryError, match=r"blanks or quotes .*/a b"):
        compiled_program(None, tmp_path)
