"""The commit that medusa says it was made from."""

from __future__ import annotations

import subprocess

import pytest

import medusa
from medusa import revision
from medusa.cli.main import main


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a directory of its own."""
    folder = tmp_path / "medusa"
    folder.mkdir()
    monkeypatch.setattr(revision, "PACKAGE", folder)
    revision.commit.cache_clear()
    yield folder
    revision.commit.cache_clear()


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_package_says_what_its_build_wrote_down(package, capsys):
    (package / revision.RECORD).write_text("0123abcd-dirty\n")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"medusa {medusa.__version__}, commit 0123abcd-dirty\n"


@pytest.mark.parametrize("text", [None, "\n"])
def test_where_nothing_is_known_the_version_stands_alone(package, capsys, text):
    if text is not None:
        (package / revision.RECORD).write_text(text)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"medusa {medusa.__version__}\n"


def test_a_checkout_asks_git_and_says_whether_files_differ(package):
    git(package.parent, "init", "--quiet")
    (package / "a.py").write_text("")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "--quiet", "-m", "one")
    head = git(package.parent, "rev-parse", "HEAD")
    assert revision.commit() == head
    (package / "a.py").write_text("a = 1")
    revision.commit.cache_clear()
    assert revision.commit() == f"{head}-dirty"


def test_a_repository_above_that_is_not_its_own_is_not_asked(package, monkeypatch):
    inside = package.parent / "venv" / "medusa"
    inside.mkdir(parents=True)
    git(package.parent, "init", "--quiet")
    git(package.parent, "commit", "--quiet", "--allow-empty", "-m", "of another project")
    monkeypatch.setattr(revision, "PACKAGE", inside)
    assert revision.commit() is None
