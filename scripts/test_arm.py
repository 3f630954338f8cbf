"""Tests of the kernels as compiled for 64-bit ARM, emulated on an x86-64 Debian or Ubuntu.

python scripts/test_arm.py                  all levels of instructions, as `make test-arm`
python scripts/test_arm.py armv8-a -k int8  one level, and options of pytest

An emulated Python (qemu, with all instructions that it knows) runs the tests, and a cross compiler, which is
not emulated, compiles the kernels for the instructions of a level. Everything is kept in .venv-arm: Debian's
packages of Python for ARM, unpacked, and the versions of the packages in .venv. The system is left as it is.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parent.parent
HOME = CHECKOUT / ".venv-arm"
ROOT = HOME / "root"
PACKAGES = HOME / "packages"
TORCH = PACKAGES / "torch" / "lib"
STAMP = HOME / ".installed"
BIN = HOME / "bin"

CROSS = "aarch64-linux-gnu-"
PROGRAMS = {
    "qemu-aarch64-static": "qemu-user-static",
    f"{CROSS}g++": "g++-aarch64-linux-gnu",
    f"{CROSS}nm": "binutils-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg": "dpkg",
}
"""What must be installed, and Debian's package of it."""
LEVELS = ("armv8.2-a+dotprod+i8mm", "armv8.2-a+dotprod", "armv8-a")
"""Instructions that the kernels are compiled for, as a compiler's ``-march`` names them."""
LEVEL_TESTS = (
    "tests/engine/weights/test_group_quantised.py",
    "tests/engine/weights/test_packed_experts.py",
    "tests/engine/weights/test_quantised_bases.py::test_no_draft_changes_the_text[llama-Q4_K_M-int8-greedy]",
)
"""Tests of what depends on the level: products with weights that a file has quantised."""
OTHER_TESTS = (
    "tests/engine/test_kernels.py",
    "tests/engine/test_kernel_bounds.py",
    "tests/engine/test_engine.py::test_decoding_with_heads_is_token_identical_on_an_engine",
)
"""Tests of what is the same on all levels, for the first one."""
EMULATED = """
import sys, pytest, torch
from medusa.engine import kernels
torch.cuda.is_current_stream_capturing = lambda: False
kernels._time_ratios = lambda: dict.fromkeys(map(str, (*kernels.TREE_ROWS, kernels.PROMPT_ROWS)), 0.9)
sys.exit(pytest.main(sys.argv[1:]))
"""
"""pytest, where no graph of CUDA is asked for (see :func:`leave_out_cuda`), and nothing is timed: emulated, a
start would take minutes for it."""
REQUIREMENTS = ("pytest", "hypothesis", "scipy", "sentencepiece", "setuptools")
"""What the tests import besides what medusa does."""


def main(arguments: list[str]) -> int:
    """Runs the tests of all levels, or of those that are named; the largest exit status."""
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
    if missing:
        print(f"the tests as on ARM need programs: sudo apt-get install {' '.join(missing)}", file=sys.stderr)
        return 1
    install()
    levels = [argument for argument in arguments if argument in LEVELS]
    options = [argument for argument in arguments if argument not in LEVELS]
    return max(run(level, options) for level in levels or LEVELS)


def run(level: str, options: list[str]) -> int:
    """pytest's exit status, with kernels for ``level``."""
    print(f"\nkernels for {level}", flush=True)
    tests: tuple[str, ...] = (*LEVEL_TESTS, *OTHER_TESTS) if level == LEVELS[0] else LEVEL_TESTS
    if any(option.startswith("tests/") for option in options):
        tests = ()
    environment = {**os.environ, "CXX": str(BIN / f"g++-{level}"), "OMP_NUM_THREADS": "1"}
    command = [BIN / "python", "-c", EMULATED, "-p", "no:cacheprovider", *tests, *options]
    return subprocess.run(command, cwd=CHECKOUT, env=environment).returncode


# ---------------------------------------------------------------- set-up


def install() -> None:
    """Fills .venv-arm, unless it has been filled with the same versions already."""
    versions = "\n".join(sorted(pinned("medusa-heads", *REQUIREMENTS)))
    if STAMP.exists() and STAMP.read_text() == versions:
        return
    shutil.rmtree(HOME, ignore_errors=True)
    BIN.mkdir(parents=True)
    unpack_python()
    python = next((ROOT / "usr/bin").glob("python3.[0-9]*"))
    install_packages(versions, python.name.removeprefix("python"))
    leave_out_cuda()
    for path, text in PROCESSOR.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    write_program(
        BIN / "python",
        f'exec qemu-aarch64-static -L "{ROOT}" -cpu max -0 "$0" '
        f'-E "PYTHONHOME={ROOT}/usr" -E "PYTHONPATH={CHECKOUT}:{PACKAGES}" "{python}" "$@"',
    )
    for level in LEVELS:
        write_program(BIN / f"g++-{level}", CROSS_COMPILER.format(level=level, compiler=f"{CROSS}g++"))
    STAMP.write_text(versions)


PROCESSOR = {
    "proc/cpuinfo": (
        "processor\t: 0\nFeatures\t: fp asimd aes sha1 sha2 crc32 atomics asimdrdm asimddp i8mm\n"
        "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n"
        "CPU revision\t: 1\n\n"
    ),
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
    "sys/devices/system/cpu/online": "0\n",
    "sys/devices/system/cpu/possible": "0\n",
    "sys/devices/system/cpu/present": "0\n",
}
"""What the emulated Python reads of its processor. It has one core: qemu may hang where two threads start
processes, as those that compile the kernels would."""

CROSS_COMPILER = """\
for argument do
  shift
  case $argument in -mcpu=native) argument=-march={level} ;; esac
  set -- "$@" "$argument"
done
exec {compiler} "$@"
"""
"""A compiler that takes the processor for one of ``level``: a cross compiler knows no native one."""


def write_program(path: Path, text: str) -> None:
    """A shell script that can be run."""
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def unpack_python() -> None:
    """Python for ARM and its libraries in ROOT, from where the system's own packages come."""
    apt = HOME / "apt"
    for part in ("lists/partial", "archives/partial"):
        (apt / part).mkdir(parents=True)
    (apt / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Dir::Cache": apt,
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    command = ["apt-get", "-qq", *options]
    subprocess.run([*command, "update"], check=True)
    command += ["--yes", "--no-install-recommends", "--download-only", "install", "python3", "libstdc++6"]
    if subprocess.run(command).returncode:
        raise SystemExit(
            "apt has no Python for arm64: Ubuntu keeps it beside the main archive, in its ports, and "
            "the sources of apt need an entry for these, with `Architectures: arm64`"
        )
    ROOT.mkdir()
    for package in sorted((apt / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, ROOT], check=True)
    shutil.rmtree(apt)


def pinned(*names: str) -> set[str]:
    """What these distributions of .venv need, each with its version; CUDA is left out."""
    versions: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in versions or name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        distribution = importlib.metadata.distribution(name)
        versions[name] = distribution.version.partition("+")[0]
        requirements = map(Requirement, distribution.requires or ())
        waiting += [
            each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})
        ]
    del versions["medusa-heads"]
    return {f"{name}=={version}" for name, version in versions.items()}


def install_packages(versions: str, python: str) -> None:
    """Wheels for ARM and this Python in PACKAGES."""
    platforms = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 40))]
    options = ["--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", python]
    options += [f"--platform={platform}" for platform in platforms]
    command = [sys.executable, "-m", "pip", "--quiet", "install", "--target", PACKAGES, *options]
    subprocess.run([*command, *versions.split()], check=True)


def leave_out_cuda() -> None:
    """Libraries in the place of NVIDIA's, whose functions only fail: torch for ARM does not start without
    them, they are 3 GB, and the tests have no device."""
    torch = sorted(TORCH.glob("*.so*"))
    system = [path for path in ROOT.glob("**/aarch64-linux-gnu/*.so*") if is_library(path)]
    present = {path.name for path in torch + system}
    exported = {name for path in torch + system for name, _ in symbols(path, "--defined-only")}
    missing = sorted({name for path in torch for name in needed(path)} - present)
    sources = {version: name for path in torch for version, name in versions(path) if name in missing}
    functions: dict[str, set[str]] = {"": set(), **{version: set() for version in sources}}
    for path in torch:
        for name, version in symbols(path, "--undefined-only"):
            is_python = name.startswith(("Py", "_Py"))
            if version in sources or not (version or name in exported or is_python):
                functions[version].add(name)
    for version, library in sources.items():
        write_failing(TORCH / library, version, functions[version])
    for library in set(missing) - set(sources.values()):
        write_failing(TORCH / library, "", functions.pop("", set()))


def is_library(path: Path) -> bool:
    """Whether it is one, and no link to what is not there."""
    return path.is_file() and path.read_bytes()[:4] == b"\x7fELF"


def needed(path: Path) -> list[str]:
    """The libraries that one asks the loader for."""
    return re.findall(r"NEEDED.*\[(.+)\]", output_of(f"{CROSS}readelf", "-d", path))


def versions(path: Path) -> Iterator[tuple[str, str]]:
    """The versions of symbols that a library needs, each with the library that has it."""
    library = ""
    for file, version in re.findall(
        r"File: (\S+)|Name: (\S+) +Flags", output_of(f"{CROSS}readelf", "-V", path)
    ):
        library = file or library
        if version:
            yield version, library


def symbols(path: Path, which: str) -> Iterator[tuple[str, str]]:
    """The names of a library's symbols and their versions, without those that it can do without."""
    for line in output_of(f"{CROSS}nm", "-D", which, path).splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        if (which, kind) != ("--undefined-only", "w"):
            yield name, version.removeprefix("@")


def output_of(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


FAILING = """\
.text
fails: mov x0, 100
  ret
"""
"""100 is ``cudaErrorNoDevice``."""


def write_failing(path: Path, version: str, functions: Iterable[str]) -> None:
    """A library of these functions, which are of this version."""
    lines = [f".globl {name}\n.type {name}, %function\n.set {name}, fails\n" for name in sorted(functions)]
    source = HOME / "failing.s"
    source.write_text(FAILING + "".join(lines))
    options = [f"-Wl,-soname,{path.name}"]
    if version:
        script = HOME / "failing.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script={script}")
    subprocess.run([f"{CROSS}g++", "-shared", "-nostartfiles", *options, source, "-o", path], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
