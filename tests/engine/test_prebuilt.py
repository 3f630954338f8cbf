"""The kernels that a wheel brings: which library is chosen, what refuses one, and what runs instead."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from conftest import needs_kernels, random_prompts, tiny_model

from medusa import MedusaModel
from medusa.engine import building, engine_state, kernels, libraries, prebuilt
from medusa.engine.building import LEVELS, levels_for, uses_all_of
from medusa.engine.kernels import kernels_unsupported_reason, lanes

V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
DOTPROD = "fp asimd aes crc32 atomics asimdrdm asimddp"
PROCESSORS = {
    "Nehalem": ("x86_64", "sse4_2 popcnt", None, False),
    "Haswell, Zen 3": ("x86_64", V3, "x86-64-v3", True),
    "Alder Lake": ("x86_64", f"{V3} avx_vnni", "x86-64-v3-vnni", True),
    "Skylake-X": ("x86_64", V4, "x86-64-v3", False),
    "Cascade Lake": ("x86_64", f"{V4} avx512_vnni", "x86-64-v4-vnni", True),
    "Ice Lake": ("x86_64", f"{V4} avx512_vnni avx512vbmi", "x86-64-v4-vnni-vbmi", True),
    "Zen 5": ("x86_64", f"{V4} avx512_vnni avx512vbmi avx512_bf16 avx_vnni", "x86-64-v4-vnni-vbmi", True),
    "Sapphire Rapids": (
        "x86_64",
        f"{V4} avx512_vnni avx512vbmi avx512_bf16 avx_vnni amx_tile amx_int8 amx_bf16",
        "x86-64-v4-amx",
        True,
    ),
    "Cortex-A72": ("aarch64", "fp asimd aes crc32", None, False),
    "Graviton 2": ("aarch64", DOTPROD, "armv8.2-dotprod", True),
    "Graviton 3": ("aarch64", f"{DOTPROD} i8mm bf16 sve", "armv8.2-i8mm", True),
    "x86 flags elsewhere": ("riscv64", V3, None, False),
}
"""The machine, its flags, the level of a wheel, and whether that is all that the kernels can use."""


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_gets_the_level_with_the_most_of_its_instructions(name):
    machine, flags, level, is_all = PROCESSORS[name]
    features = frozenset(flags.split())
    best = next(iter(levels_for(features, machine)), None)
    assert (None if best is None else best.name) == level
    assert best is None or uses_all_of(best, features) == is_all


def test_what_the_cores_of_a_processor_do_not_share_is_left_out(monkeypatch):
    lines = ("Features: asimd asimddp i8mm", "Features: asimd asimddp", "CPU part: 0xd0c", "sve: False")
    monkeypatch.setattr(prebuilt, "processor_features", lambda: lines)
    prebuilt.instruction_sets.cache_clear()
    assert prebuilt.instruction_sets() == {"asimd", "asimddp"}
    monkeypatch.setattr(prebuilt, "processor_features", lambda: ("sve: False",))
    prebuilt.instruction_sets.cache_clear()
    assert prebuilt.instruction_sets() == frozenset()


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """A package with a library for AVX2 that is a text, on a pretended processor; the library."""
    library = tmp_path / "x86-64-v3.so"
    library.write_bytes(b"a library")
    (level,) = [each for each in LEVELS if each.name == "x86-64-v3"]
    library.with_suffix(".json").write_text(json.dumps(building.seal(level, library)))
    monkeypatch.setattr(prebuilt, "BINARIES", tmp_path)
    monkeypatch.setattr(prebuilt, "processor_features", lambda: (f"flags: {V3} avx512bw",))
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    prebuilt.instruction_sets.cache_clear()
    yield library
    prebuilt.instruction_sets.cache_clear()


def chosen(has_compiler=False):
    return prebuilt.prebuilt_kernels(kernels.FLAGS, has_compiler)


def test_the_library_is_taken_without_a_compiler_and_with_one_that_would_make_no_other(wheel, monkeypatch):
    assert chosen() == wheel
    assert chosen(has_compiler=True) is None, "a compiler uses vectors of 512 bits"
    monkeypatch.setattr(prebuilt, "processor_features", lambda: (f"flags: {V3}",))
    prebuilt.instruction_sets.cache_clear()
    assert chosen(has_compiler=True) == wheel
    monkeypatch.setattr(prebuilt, "processor_features", lambda: ("flags: sse2",))
    prebuilt.instruction_sets.cache_clear()
    assert chosen() is None, "it would end the process"


def test_an_edited_source_is_compiled_and_without_a_compiler_refused(wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "processor_features", lambda: (f"flags: {V3}",))
    prebuilt.instruction_sets.cache_clear()
    flags = (*kernels.FLAGS, "-O1")
    assert prebuilt.prebuilt_kernels(flags, True) is None
    with pytest.raises(ValueError, match=r"was compiled from another source .* install medusa again"):
        prebuilt.prebuilt_kernels(flags, False)


def test_a_checkout_has_no_libraries(monkeypatch, tmp_path):
    assert not prebuilt.BINARIES.exists()
    assert chosen() is None and chosen(has_compiler=True) is None


def damage_library(path):
    path.write_bytes(b"another")


def damage_seal(path):
    path.with_suffix(".json").write_text("{")


def name_newer_torch(path):
    seal = path.with_suffix(".json")
    seal.write_text(json.dumps({**json.loads(seal.read_text()), "torch": "99.1"}))


BROKEN = {
    "damaged": (damage_library, r"x86-64-v3.so is damaged: .* install medusa again"),
    "without its facts": (damage_seal, "is damaged"),
    "of a newer torch": (name_newer_torch, f"needs torch 99.1 or newer, got {re.escape(torch.__version__)}"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_library_that_is_not_to_be_loaded_is_refused_in_words(wheel, what):
    breaks, words = BROKEN[what]
    breaks(wheel)
    with pytest.raises(ValueError, match=words):
        chosen()


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """Kernels that count as not loaded; the libraries that are loaded from here on."""
    lanes()
    loaded = []
    monkeypatch.setattr(kernels, "_load", loaded.append)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    for function in (kernels_unsupported_reason, engine_state._say_once):
        function.cache_clear()
    yield loaded
    monkeypatch.undo()
    for function in (kernels_unsupported_reason, engine_state._say_once):
        function.cache_clear()


@needs_kernels
def test_without_a_compiler_the_kernels_of_the_wheel_compute_the_text_of_plain_decoding(
    wheel, unloaded, monkeypatch, capsys
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    base = tiny_model("llama")
    model = MedusaModel(base, engine="auto")
    assert model.engine_base is not base and model.runtime.engine == "packed" and unloaded == [wheel]
    assert not capsys.readouterr().err
    call = {"max_new_tokens": 12, "do_sample": False}
    prompt = random_prompts(1, 9)
    reference = base.generate(prompt, **call, attention_mask=torch.ones_like(prompt))
    assert model.generate(prompt, **call).tolist() == reference.tolist()


@needs_kernels
@pytest.mark.parametrize("what", ["damaged", "of a newer torch", "that the system refuses"])
def test_after_a_refusal_the_next_way_is_taken_and_a_line_says_why(
    wheel, unloaded, monkeypatch, capsys, what
):
    if what in BROKEN:
        BROKEN[what][0](wheel)
    else:

        def refuses(path):
            raise OSError(f"{path}: undefined symbol: aoti_torch_abi_version")

        monkeypatch.setattr(kernels, "_load", refuses)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "a C++ compiler" in kernels_unsupported_reason(), "and there is none"
    said = capsys.readouterr().err
    assert said.count("the kernels that came with medusa are not used: ") == 1
    monkeypatch.undo()


def test_kernels_are_built_for_a_level_with_its_instructions_and_asked_for_by_torchs_name(
    monkeypatch, tmp_path
):
    commands = []

    def runs(command):
        commands.append(command)
        target = command[command.index("-o") + 1]
        open(target, "w").close()

    monkeypatch.setattr(building, "run", runs)
    (level,) = [each for each in LEVELS if each.name == "x86-64-v4-amx"]
    library = building.build_level(level, "g++", tmp_path, tmp_path / "torch")
    assert [path.name for path in tmp_path.iterdir()] == [library.name], "nothing else is left"
    compiling = [command for command in commands if "-c" in command]
    assert len(compiling) == len([*building.CPP.glob("*.cpp")])
    for command in compiling:
        assert "-mamx-int8" in command and "-ffp-contract=off" in command
        assert "-march=native" not in command and "-DTORCH_TARGET_VERSION=0x020b000000000000" in command
    assert "-Wl,-soname,libtorch_cpu.so" in commands[0] and "-ltorch_cpu" in commands[-1]


def test_what_a_wheel_was_built_of_is_known(wheel):
    (level,) = [each for each in LEVELS if each.name == "x86-64-v3"]
    assert building.is_built(level, wheel)
    damage_library(wheel)
    assert not building.is_built(level, wheel)
    assert libraries.sealed_facts(wheel)["level"] == "x86-64-v3"
