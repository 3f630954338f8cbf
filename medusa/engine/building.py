"""How a compiler makes a library of the kernels: for the processor that it runs on, or for a level of
instructions that many processors have.

``setup.py`` builds the libraries of a wheel with this module, one for each of :data:`LEVELS`, so it imports
nothing but Python's own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CPP = Path(__file__).with_name("cpp")
"""The folder of the C++ files: each source is compiled by itself, beside the others."""
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w")
"""A multiplication and an addition are fused only where the source says so, so that all bits are
reproducible."""
OLDEST_TORCH = (2, 11)
"""The oldest version of torch that a library of a wheel runs with: of its stable interface, it uses what that
version has. Every newer one has that too."""


@dataclass(frozen=True)
class Level:
    """Instructions that one library of a wheel is compiled for."""

    name: str
    machine: str
    """As ``platform.machine`` calls it on Linux."""
    options: tuple[str, ...]
    """Of g++."""
    needs: frozenset[str]
    """What the processor must have, as ``/proc/cpuinfo`` calls it."""


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4_VNNI = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_AMX = {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}
_VBMI_OPTIONS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi")
_DOTPROD = frozenset({"asimd", "atomics", "asimdrdm", "crc32", "asimddp"})

LEVELS = (
    Level(
        "x86-64-v4-amx",
        "x86_64",
        (*_VBMI_OPTIONS, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        _V4_VNNI | {"avx512vbmi"} | _AMX,
    ),
    Level(
        "x86-64-v4-vnni-vbmi",
        "x86_64",
        _VBMI_OPTIONS,
        _V4_VNNI | {"avx512vbmi"},
    ),
    Level("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4_VNNI),
    Level("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("armv8.2-i8mm", "aarch64", ("-march=armv8.2-a+dotprod+i8mm",), _DOTPROD | {"i8mm"}),
    Level("armv8.2-dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), _DOTPROD),
)
"""Of each machine, the levels of a wheel: the one with the most instructions first."""
CHOSEN_BY = frozenset(
    {"avx2", "avx512bw", "avx512_vnni", "avx512vbmi", "avx_vnni", "amx_int8", "asimddp", "i8mm"}
)
"""Features by which the kernels' source chooses its code."""


def levels_for(features: frozenset[str], machine: str) -> list[Level]:
    """The levels that a processor with these ``features`` runs, the one with the most instructions first."""
    return [level for level in LEVELS if level.machine == machine and level.needs <= features]


def uses_all_of(level: Level, features: frozenset[str]) -> bool:
    """Whether kernels for ``level`` are those that a compiler would make for a processor with these
    ``features``."""
    unused = (features & CHOSEN_BY) - level.needs
    return not unused - ({"avx_vnni"} if "avx512_vnni" in level.needs else set())  # vectors of 256 bits


def source_text() -> str:
    """The source of the kernels, all files of it."""
    files = sorted(path for path in CPP.iterdir() if path.suffix in (".cpp", ".h"))
    return "".join(path.name + path.read_text() for path in files)


def source_digest(flags: Iterable[str] = FLAGS) -> str:
    """A digest of the source, and of the flags that it is compiled with for any processor."""
    return hashlib.sha256(repr((source_text(), *flags)).encode()).hexdigest()


def native_options() -> list[str]:
    """A compiler's options for the processor that it runs on."""
    is_arm = os.uname().machine in ("aarch64", "arm64")  # the second on macOS
    return ["-mcpu=native" if is_arm else "-march=native"]


def build(
    compiler: str,
    path: Path,
    options: Sequence[str],
    torch_home: Path,
    linked: Sequence[str],
) -> Path:
    """The library at ``path``; its sources are compiled side by side, as many as there are cores, the longest
    first.

    Args:
        options: all of the compiler's, beside those that name directories.
        torch_home: where the package of torch is, for its headers.
        linked: options of the linker.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
    """
    includes = [f"-I{torch_home / 'include'}", f"-I{torch_home / 'include/torch/csrc/api/include'}"]
    sources = sorted(CPP.glob("*.cpp"), key=lambda source: source.stat().st_size, reverse=True)
    objects = [path.with_name(f"{path.stem}-{source.stem}.o") for source in sources]
    commands = [
        [compiler, *options, *includes, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(run, commands))
    run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(path), *linked])
    for target in objects:
        target.unlink()
    return path


def run(command: list[str]) -> None:
    """Run a compiler, silently.

    Raises:
        subprocess.CalledProcessError: it failed; its errors are in ``stderr``.
    """
    subprocess.run(command, check=True, capture_output=True, text=True)


def build_level(level: Level, compiler: str, directory: Path, torch_home: Path) -> Path:
    """The library for ``level`` in ``directory``, as a wheel has it: for every torch since
    :data:`OLDEST_TORCH`, and every Linux that torch's own wheels run on.

    It asks the loader for torch's library by its name alone, which is loaded before.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
    """
    major, minor = OLDEST_TORCH
    options = [
        *level.options,
        *FLAGS,
        f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000",
        "-include",
        str(CPP / "older_systems.h"),
    ]
    stand_in = directory / "libtorch_cpu.so"
    empty = ["-shared", "-nostdlib", "-Wl,-soname,libtorch_cpu.so", "-xc++", os.devnull]
    run([compiler, *empty, "-o", str(stand_in)])
    linked = [f"-L{directory}", "-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,--as-needed", "-s"]
    try:
        return build(compiler, directory / f"{level.name}.so", options, torch_home, linked)
    finally:
        stand_in.unlink()


def seal(level: Level, library: Path) -> dict[str, object]:
    """What the file beside a library of a wheel says of it."""
    return {
        "bytes": library.stat().st_size,
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "source": source_digest(),
        "level": level.name,
        "torch": ".".join(map(str, OLDEST_TORCH)),
    }


def is_built(level: Level, library: Path) -> bool:
    """Whether ``library`` is the one of this source for ``level``, by the file beside it."""
    facts = library.with_suffix(".json")
    return library.exists() and facts.exists() and json.loads(facts.read_text()) == seal(level, library)
