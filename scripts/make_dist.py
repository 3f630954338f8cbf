"""The files of a release in dist/: the source, and a wheel with the kernels compiled; checked, and tried.

python scripts/make_dist.py            builds, checks and tries both, as `make dist`
python scripts/make_dist.py --no-try   builds and checks them
python scripts/make_dist.py --here     with the kernels for this processor alone: a trial, and no release

The wheel is built from the unpacked source distribution, for this machine's architecture; compilers for
another one that are installed (aarch64-linux-gnu-g++) build its wheel too. Libraries are kept in
build/kernels until the source of the kernels changes. Each file is installed in an environment of its own,
which finds no compiler, and answers there with a small model, offline. Its requirements are links to those
of .venv, so that nothing is downloaded; `make dist` installs twine, which checks what the files say of
themselves.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from medusa.engine.building import levels_for
from medusa.engine.prebuilt import instruction_sets

CHECKOUT = Path(__file__).parent.parent
DIST = CHECKOUT / "dist"
KERNELS = CHECKOUT / "build" / "kernels"
BASE = CHECKOUT / "models" / "smollm2-135m-instruct"
TWINE = CHECKOUT / ".venv-dist" / "bin" / "twine"
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
"""Of each machine, the compiler for it on another one, as Debian names it."""
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""What the header of a library calls the machine that it is for."""
MOST_BYTES = 15_000_000
"""Of all that a wheel with kernels has more than one without."""
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0)}
"""The newest versions of symbols that manylinux_2_28 admits, which torch's own wheels are for."""
TAG = "manylinux_2_28"


def main(arguments: list[str]) -> int:
    """Builds and checks; then tries what was built, unless told otherwise."""
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    is_here = "--here" in arguments
    shutil.rmtree(DIST, ignore_errors=True)
    source = built("sdist", CHECKOUT, {})
    wheels = []
    with tempfile.TemporaryDirectory(prefix="medusa-dist-") as folder:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        pure = size_of_pure_wheel(unpacked)
        for machine, compiler in compilers(is_here).items():
            levels = (level_here(),) if is_here else ()
            wheels.append(built_for(machine, compiler, unpacked, levels))
    for wheel in wheels:
        check_wheel(wheel, pure)
    subprocess.run([TWINE, "check", "--strict", source, *wheels], check=True)
    if "--no-try" not in arguments:
        for path in (source, *(wheel for wheel in wheels if platform.machine() in wheel.name)):
            try_out(path)
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(CHECKOUT)}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


# ---------------------------------------------------------------- building


def built(kind: str, folder: Path, environment: dict[str, str]) -> Path:
    """The sdist or the wheel that ``folder`` builds, in dist/."""
    build = (
        "import sys; from setuptools import build_meta; "
        "print(getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2]))"
    )
    command = [sys.executable, "-c", build, kind, str(DIST)]
    print(f"building the {kind} {' '.join(environment.values())}", flush=True)
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the {kind} could not be built:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return DIST / done.stdout.splitlines()[-1]


def level_here() -> str:
    """The name of the level that this processor runs."""
    return levels_for(instruction_sets(), platform.machine())[0].name


def compilers(is_here: bool) -> dict[str, str]:
    """The machines that wheels can be built for, each with its compiler; this one alone if ``is_here``."""
    mine = os.environ.get("CXX", "g++")
    names = {**({} if is_here else COMPILERS), platform.machine(): mine}
    present = {machine: name for machine, name in names.items() if shutil.which(name)}
    for machine in names.keys() - present.keys():
        print(f"no wheel for {machine}: {names[machine]} is not installed", file=sys.stderr)
    if platform.machine() not in present:
        raise SystemExit(f"a wheel needs a compiler, and {mine} is not installed; CXX names another")
    return present


def size_of_pure_wheel(folder: Path) -> int:
    """Bytes of a wheel without kernels."""
    wheel = built("wheel", folder, {})
    size = wheel.stat().st_size
    wheel.unlink()
    return size


def built_for(machine: str, compiler: str, folder: Path, levels: Sequence[str]) -> Path:
    """The wheel for ``machine``, named for the systems that it runs on, with these levels or all."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    kept = folder / "build" / "kernels"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        kept.symlink_to(KERNELS)
    environment = {"MEDUSA_KERNELS": machine, "MEDUSA_PLATFORM": f"{TAG}_{machine}", "CXX": compiler}
    environment |= {"MEDUSA_LEVELS": " ".join(levels)} if levels else {}
    return built("wheel", folder, environment)


def check_symbols(library: Path, machine: str) -> None:
    """End the program where ``library`` needs what a system that the wheel is named for may not have."""
    text = subprocess.run(["objdump", "-p", library], check=True, capture_output=True, text=True).stdout
    if int.from_bytes(library.read_bytes()[18:20], "little") != ELF_MACHINES[machine]:
        raise SystemExit(f"{library.name} is of another machine than {machine}")
    for name, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", text):
        if tuple(map(int, version.split("."))) > NEWEST[name]:
            raise SystemExit(f"{library.name} needs {name}_{version}, which {TAG} does not admit")
    needed = set(re.findall(r"NEEDED\s+(\S+)", text))
    known = {
        "libtorch_cpu.so",
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libpthread.so.0",
    }
    unknown = {name for name in needed - known if not name.startswith("ld-linux")}
    if unknown:
        raise SystemExit(
            f"{library.name} needs {', '.join(sorted(unknown))}, which no package of ours brings"
        )


# ---------------------------------------------------------------- checking


def check_wheel(wheel: Path, pure: int) -> None:
    """End the program where something lacks in ``wheel``, or its kernels are too large."""
    (machine,) = [name for name in COMPILERS if wheel.stem.endswith(name)]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commit = archive.read("medusa/commit.txt").decode().strip()
        libraries = [name for name in names if name.endswith(".so")]
        with tempfile.TemporaryDirectory() as folder:
            archive.extractall(folder, libraries)
            for name in libraries:
                check_symbols(Path(folder, name), machine)
    checked_in = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "medusa").rglob("*.py")}
    lacking = sorted(checked_in - names)
    if lacking:
        raise SystemExit(f"{wheel.name} lacks {', '.join(lacking[:5])}")
    if not commit:
        raise SystemExit(f"{wheel.name} does not know its commit: build it in a checkout")
    more = wheel.stat().st_size - pure
    if not libraries or more > MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {len(libraries)} libraries, {more / 1e6:.1f} MB of them")
    print(f"{wheel.name}: {len(libraries)} libraries, {more / 1e6:.1f} MB of them, commit {commit}")


# ---------------------------------------------------------------- trying


def try_out(path: Path) -> None:
    """Install ``path`` in an environment of its own, and answer there with a small model: no compiler is
    found, nothing can be downloaded, and nothing of the checkout is seen."""
    if not (BASE / "config.json").exists():
        raise SystemExit(
            f"trying needs the small model in {BASE.relative_to(CHECKOUT)}: `make models` gets it"
        )
    with tempfile.TemporaryDirectory(prefix="medusa-try-") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
        link_requirements(packages)
        binaries = place / "venv" / "bin"
        environment = {
            "PATH": str(binaries),
            "HOME": str(place),
            "MEDUSA_CACHE": str(place / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        }

        def runs(*words: str | Path, typed: str = "") -> subprocess.CompletedProcess[str]:
            done = subprocess.run(
                [str(word) for word in words],
                cwd=place,
                env=environment,
                input=typed,
                text=True,
                capture_output=True,
            )
            if done.returncode:
                raise SystemExit(f"{path.name}: {words} ended with {done.returncode}\n{done.stderr[-3000:]}")
            return done

        install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        runs(binaries / "python", *install, path)
        models = place / "cache" / "models"
        models.mkdir(parents=True)
        (models / BASE.name).symlink_to(BASE.resolve())
        print(f"{path.name}: {runs(binaries / 'medusa', '--version').stdout.strip()}", flush=True)
        began = time.monotonic()
        chatted = runs(binaries / "medusa", "chat", "--max-new-tokens", "16", typed="Hello\n")
        seconds = time.monotonic() - began
        question = ("--max-new-tokens", "16", "Name three rivers.")
        answer = runs(binaries / "medusa", "generate", *question).stdout
        plain = runs(binaries / "medusa", "generate", "--plain", "--base", BASE.name, *question).stdout
        if path.suffix == ".whl" and "runs eager" in chatted.stderr:
            raise SystemExit(f"{path.name}: its kernels are not used\n{chatted.stderr[-3000:]}")
        if "> Hello" not in chatted.stdout or not answer.strip() or answer != plain:
            raise SystemExit(f"{path.name}: the answer {answer!r} is not that of plain decoding, {plain!r}")
        print(f"{path.name}: first chat {seconds:.1f} s after its start, without a compiler", flush=True)


def link_requirements(packages: Path) -> None:
    """Link into ``packages`` what medusa requires, and what that requires, from this environment."""
    for old in (
        *packages.glob("setuptools*"),
        *packages.glob("pkg_resources"),
        *packages.glob("_distutils*"),
    ):
        shutil.rmtree(old)  # Python 3.11 brings one that builds nothing here
    linked: set[str] = set()
    waiting = ["medusa-heads", "setuptools"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in linked:
            continue
        linked.add(name)
        source = distribution(name)
        if name != "medusa-heads":
            for top in {file.parts[0] for file in source.files or ()} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(Path(str(source.locate_file(top))))
        for required in map(Requirement, source.requires or ()):
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                waiting.append(required.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
