"""What is shipped, and with what it works. Nothing here needs the network."""

import importlib
import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import needs_kernels
from make_dist import NEWEST
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from wheels import built_wheel

import medusa
from medusa.engine.building import LEVELS, OLDEST_TORCH, seal
from medusa.engine.kernels import kept_kernels, kernels_unsupported_reason
from medusa.engine.libraries import found_compiler

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(text) for text in texts] for name, texts in PROJECT["optional-dependencies"].items()
}
INSTALLED_BY_MAKE = ("train", "docs", "grammar", "dev")
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def plain_name(requirement):
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that a fresh copy of the source builds, as (names in it, its metadata)."""
    path = built_wheel(tmp_path_factory.mktemp("source"))
    with zipfile.ZipFile(path) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        entries = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        return archive.namelist(), archive.read(metadata).decode(), archive.read(entries).decode()


def test_the_wheel_holds_the_library_and_no_program(wheel):
    names, metadata, _ = wheel
    assert {name.partition("/")[0] for name in names} == {
        "medusa",
        f"medusa_heads-{medusa.__version__}.dist-info",
    }
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_every_module_of_the_library(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "medusa").rglob("*.py")}
    page = {"medusa/serving/page.html"} | {
        f"medusa/serving/vendor/{name}"
        for name in ("marked.umd.js", "marked.LICENSE", "purify.min.js", "purify.LICENSE")
    }
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "medusa/engine/cpp").glob("[!.]*")}
    assert modules | page | kernels <= set(wheel[0])


def test_the_wheel_of_a_checkout_without_git_is_for_any_machine_and_knows_no_commit(wheel):
    assert "medusa/commit.txt" in wheel[0]
    assert not [name for name in wheel[0] if name.endswith(".so")]


def test_a_wheel_for_a_machine_holds_the_kernels_of_its_levels_and_is_for_any_python(tmp_path):
    machine = "aarch64"
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for level in LEVELS:
        library = libraries / f"{level.name}.so"
        library.write_bytes(level.name.encode())
        library.with_suffix(".json").write_text(json.dumps(seal(level, library)))
    source = tmp_path / "source"
    source.mkdir()
    path = built_wheel(source, libraries, MEDUSA_KERNELS=machine)
    assert path.name.endswith(f"-py3-none-linux_{machine}.whl")
    with zipfile.ZipFile(path) as archive:
        binaries = {name for name in archive.namelist() if "/binaries/" in name}
        assert "Root-Is-Purelib: false" in archive.read(metadata_of(archive, "WHEEL")).decode()
    mine = [level.name for level in LEVELS if level.machine == machine]
    expected = {f"medusa/engine/binaries/{name}.{kind}" for name in mine for kind in ("so", "json")}
    assert binaries == expected and len(mine) > 1


@needs_kernels
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no binutils are installed")
def test_the_kernels_need_no_newer_system_than_the_wheel_is_named_for():
    assert kernels_unsupported_reason() is None
    library = kept_kernels(found_compiler())
    symbols = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(GLIBC_([0-9.]+)\)\s+(\w+)", symbols)
    newer = {name for version, name in needed if tuple(map(int, version.split("."))) > NEWEST["GLIBC"]}
    replaced = (ROOT / "medusa/engine/cpp/older_systems.h").read_text()
    assert needed and not [name for name in newer if name not in replaced]


def metadata_of(archive, name):
    return next(path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))


def test_the_builders_of_wheels_agree_on_the_systems_that_they_are_for():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    tag = re.search(r'TAG = "(\w+)"', (ROOT / "scripts" / "make_dist.py").read_text())[1]
    assert {settings[f"manylinux-{machine}-image"] for machine in ("x86_64", "aarch64")} == {tag}
    assert settings["environment"] == {"MEDUSA_KERNELS": "$(uname -m)"}
    oldest = next(each for each in CORE if each.name == "torch").specifier
    assert str(oldest) == f">={'.'.join(map(str, OLDEST_TORCH))}"


def test_type_checkers_of_other_projects_read_the_types_of_the_wheel(wheel):
    assert "medusa/py.typed" in wheel[0]


def test_the_wheel_holds_every_configuration_once(wheel):
    files = {f"medusa/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert files == {name for name in wheel[0] if "configs/" in name}


def test_the_console_command_is_there(wheel):
    assert "medusa = medusa.cli.main:main" in wheel[2]
    module, _, function = PROJECT["scripts"]["medusa"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_version_is_said_once():
    assert PROJECT["version"] == medusa.__version__


@pytest.mark.parametrize("version", ["3.11.0", "3.12.4", "3.13.1"])
def test_the_supported_pythons_are_admitted(version):
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert "3.10.9" not in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize(
    ("name", "admitted", "refused"),
    [("torch", ("2.11.0", "2.13.0"), "2.6.0"), ("transformers", ("5.17.0", "5.24.0"), "5.25.0")],
)
def test_the_supported_versions_are_admitted(name, admitted, refused):
    (requirement,) = [each for each in CORE if each.name == name]
    assert all(version in requirement.specifier for version in admitted)
    assert refused not in requirement.specifier


def test_make_installs_pinned_versions_that_lie_in_the_ranges():
    ranges = {plain_name(each): each.specifier for each in CORE}
    for extra in INSTALLED_BY_MAKE:
        ranges |= {plain_name(each): each.specifier for each in EXTRAS[extra] if each.name != PROJECT["name"]}
    pinned = {plain_name(each): next(iter(each.specifier)) for each in PINS}
    assert sorted(pinned) == sorted(ranges)
    for name, pin in pinned.items():
        assert pin.operator == "=="
        assert pin.version in ranges[name], name


def test_no_transformers_is_admitted_that_is_newer_than_the_one_that_was_tried():
    (admitted,) = [each.specifier for each in CORE if each.name == "transformers"]
    (tried,) = [next(iter(each.specifier)).version for each in PINS if each.name == "transformers"]
    major, minor, _ = map(int, tried.split("."))
    assert f"{major}.{minor}.99" in admitted
    assert f"{major}.{minor + 1}.0" not in admitted


def test_no_file_says_where_packages_come_from():
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        text = (ROOT / name).read_text()
        assert "index-url" not in text
        assert "find-links" not in text
        assert "://" not in text


def test_continuous_integration_holds_lint_format_types_and_tests_each_once():
    lines = re.findall(r"^make ([^#\n]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    words = [word for line in lines for word in line.split()]
    targets = [word for word in words if re.fullmatch(r"[a-z]+", word)]
    assert {"test-oldest", "test-newest", "dist"} <= {*words}
    shown = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True).stdout
    for command in ("ruff check", "ruff format --check", "/mypy", "pytest -n"):
        assert shown.count(command) == 1, command
