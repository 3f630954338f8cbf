"""What pyproject.toml cannot say: configs/, at the top of a checkout, is medusa/configs/ in the wheel; a
build writes its commit down; and a wheel for one machine brings the kernels compiled.

MEDUSA_KERNELS=x86_64 (or aarch64) builds such a wheel: the compiler that CXX names, g++ by default, compiles
the kernels for each level of that machine, with the headers of the torch that is installed, so
``pip wheel --no-build-isolation``. Those that are in build/kernels already are taken. MEDUSA_PLATFORM is the
wheel's platform tag, where somebody has checked which systems it runs on; else it is that of this system.
MEDUSA_LEVELS names some of the levels. Without MEDUSA_KERNELS the wheel is for any machine, and the kernels
are compiled where they are first used.
"""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
MACHINE = os.environ.get("MEDUSA_KERNELS")


def module(name: str):
    """A module of medusa by its path, which imports nothing but Python's own."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look there
    spec.loader.exec_module(loaded)
    return loaded


def write_commit(package: Path) -> None:
    """Write the commit down in ``package``, a copy of medusa/; of an sdist, the one that it has."""
    revision = module("medusa/revision.py")
    (package / revision.RECORD).write_text(f"{revision.commit() or ''}\n", encoding="utf-8")


def write_kernels(package: Path) -> None:
    """Compile the kernels for all levels of MACHINE into ``package``."""
    building = module("medusa/engine/building.py")
    named = os.environ.get("MEDUSA_LEVELS", "").split()
    levels = [level for level in building.LEVELS if level.machine == MACHINE]
    if not levels:
        machines = sorted({level.machine for level in building.LEVELS})
        raise SystemExit(f"MEDUSA_KERNELS must be one of {', '.join(machines)}, got {MACHINE!r}")
    torch = importlib.util.find_spec("torch")
    if torch is None:
        raise SystemExit(
            "MEDUSA_KERNELS needs torch, for its headers: pip install torch setuptools, and then "
            "pip wheel --no-build-isolation"
        )
    made = ROOT / "build" / "kernels"
    made.mkdir(parents=True, exist_ok=True)
    binaries = package / "engine" / "binaries"
    shutil.rmtree(binaries, ignore_errors=True)  # of another machine, of an earlier build
    binaries.mkdir(parents=True, exist_ok=True)
    for level in levels:
        if named and level.name not in named:
            continue
        library = made / f"{level.name}.so"
        if not building.is_built(level, library):
            print(f"compiling the kernels for {level.name}", flush=True)
            building.build_level(level, os.environ.get("CXX", "g++"), made, Path(torch.origin).parent)
            library.with_suffix(".json").write_text(json.dumps(building.seal(level, library)))
        for path in (library, library.with_suffix(".json")):
            (binaries / path.name).write_bytes(path.read_bytes())


class BuildPackages(build_py):
    """Adds the commit, and the kernels if they are wanted."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "medusa"
        write_commit(package)
        if MACHINE:
            write_kernels(package)


class SourceDistribution(sdist):
    """Adds the commit."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "medusa")


class Wheel(bdist_wheel):
    """A wheel with kernels is for one machine and any Python: they are no extension modules."""

    def finalize_options(self):
        if MACHINE:
            self.plat_name = os.environ.get("MEDUSA_PLATFORM", f"linux_{MACHINE}")
        super().finalize_options()

    def get_tag(self):
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if MACHINE else tag


class PackageOfOneMachine(Distribution):
    """What has kernels is installed where libraries of one machine belong."""

    def has_ext_modules(self):
        return bool(MACHINE)


setup(
    packages=[*find_packages(include=["medusa", "medusa.*"]), "medusa.configs"],
    package_dir={"medusa.configs": "configs"},
    distclass=PackageOfOneMachine,
    cmdclass={"build_py": BuildPackages, "sdist": SourceDistribution, "bdist_wheel": Wheel},
)
