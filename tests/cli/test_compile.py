"""``medusa compile``, and what commands compile by themselves."""

from __future__ import annotations

import json

import pytest
from conftest import tiny_model
from reported import ran
from tiny_chat import HIDDEN_SIZE, VOCAB_SIZE, save_chat_model

from medusa import HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel, save_heads
from medusa.cli import loading
from medusa.cli.loading import set_step
from medusa.cli.main import main
from medusa.decoding import executor
from medusa.decoding.executor import Executor
from medusa.engine.kernels import kernels_unsupported_reason


@pytest.fixture
def compiling(monkeypatch, tmp_path):
    """Compiling leaves an empty library; the directories that it was asked for."""
    made = []
    kernels_unsupported_reason()  # in the user's own cache
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))

    def compiled_pass(self):
        made.extend(self.library_paths())
        for path in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"12345")
        return self.base, 321.0

    monkeypatch.setattr(Executor, "compiled_pass", compiled_pass)
    return made


def test_what_is_compiled_is_known_by_its_libraries(compiling):
    model = MedusaModel(tiny_model("llama"), engine="packed")
    assert not model.is_compiled
    assert model.compile() == 321.0 and model.is_compiled


def test_commands_compile_where_they_can_unless_told_otherwise(
    monkeypatch, nothing_is_compiled_unasked, compiling, capsys
):
    monkeypatch.setattr(loading, "default_step", nothing_is_compiled_unasked)
    packed, eager = (MedusaModel(tiny_model("llama"), engine=engine) for engine in ("packed", "eager"))
    for model, asked, step in (
        (packed, None, "compiled"),
        (packed, "general", "general"),
        (eager, None, "auto"),
    ):
        set_step(model, asked)
        assert model.step == step
    with pytest.raises(ValueError, match="step='compiled' needs engine='packed' or 'int8'"):
        set_step(eager, "compiled")


def test_where_compiled_passes_are_refused_steps_run_general_and_the_user_is_told_why(
    monkeypatch, nothing_is_compiled_unasked, capsys
):
    def refused(self):
        raise ValueError("compiled passes of LlamaForCausalLM give other logits")

    monkeypatch.setattr(loading, "default_step", nothing_is_compiled_unasked)
    monkeypatch.setattr(Executor, "compiled_pass", refused)
    model = MedusaModel(tiny_model("llama"), engine="packed")
    set_step(model, None)
    assert model.step == "general"
    assert "steps run general, which is slower: compiled passes of Llama" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError(30, "Read-only file system"),
        PermissionError(13, "Permission denied"),
        OSError("libmade.so: failed to map segment from shared object"),
        OSError(37, "No locks available"),
        KeyError("getpwuid(): uid not found: 4242"),
        RuntimeError("C++ compile error\n\nCommand:\ng++ a b\n\nOutput:\na.cpp:1:1: error: it is wrong"),
    ],
    ids=lambda error: type(error).__name__ + str(error)[:12],
)
def test_whatever_keeps_a_library_from_its_use_is_one_line_and_steps_run_general(
    monkeypatch, nothing_is_compiled_unasked, capsys, error
):
    def fails(*given):
        raise error

    monkeypatch.setattr(loading, "default_step", nothing_is_compiled_unasked)
    monkeypatch.setattr(executor, "CompiledPass", fails)
    model = MedusaModel(tiny_model("llama"), engine="packed")
    set_step(model, None)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert model.step == "general"
    assert "steps run general, which is slower: compiled steps could not be compiled, kept or loaded" in line
    assert "MEDUSA_CACHE" in line and "Command" not in line


def test_the_command_says_what_it_lacks_where_no_compiler_is_installed(
    monkeypatch, nothing_is_compiled_unasked, capsys, tmp_path
):
    kernels_unsupported_reason()
    monkeypatch.setattr(loading, "default_step", nothing_is_compiled_unasked)
    of_operators = None, 0.1  # which leave nothing on the disk
    monkeypatch.setattr(Executor, "compiled_pass", lambda self: of_operators)
    monkeypatch.setattr(loading, "found_compiler", lambda: None)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    base, _ = save_chat_model(tmp_path)
    assert main(["compile", "--base", base, "--engine", "packed", "--heads", "none"]) == 1
    assert "needs a C++ compiler (g++ or clang++), and none is installed" in capsys.readouterr().err


def test_an_engine_that_keeps_no_library_is_refused(compiling):
    model = MedusaModel(tiny_model("llama"), engine="eager")
    assert not model.is_compiled
    with pytest.raises(ValueError, match="step='compiled' needs engine='packed' or 'int8'"):
        model.compile()


def test_the_command_compiles_and_says_how_long_it_took(
    monkeypatch, nothing_is_compiled_unasked, compiling, capsys, tmp_path
):
    monkeypatch.setattr(loading, "default_step", nothing_is_compiled_unasked)
    base, _ = save_chat_model(tmp_path)
    fusing = MedusaHeads(HeadsConfig(HIDDEN_SIZE, VOCAB_SIZE, 3, reads_path=True, fused_layers=(1,)))
    heads = save_heads(HeadsCheckpoint(fusing, base), tmp_path / "fusing")
    words = ["compile", "--base", base, "--heads", str(heads), "--engine", "int8"]
    assert main(words) == 0
    out, said = capsys.readouterr()
    assert "compiled, ready after 321.0 s" in said
    assert json.loads(out.splitlines()[-1]) == {"was_there": False, "seconds": 321.0, "bytes": 25}
    names = [path.name.rsplit("-", 1)[0] for path in compiling]
    assert sorted(names) == ["heads", "heads-fuse", "llama-after", "llama-before", "llama-layers"]
    assert "was there" in ran(capsys, words).err
