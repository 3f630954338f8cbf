"""The tests that a change asks for."""

import runpy
import subprocess
import sys

import pytest
from conftest import CHECKOUT

PROGRAM = runpy.run_path(str(CHECKOUT / "scripts/changed_tests.py"))


@pytest.mark.parametrize(
    ("changed", "expected", "others"),
    [
        ("medusa/trees/candidate_tree.py", "tests/trees", "tests/serving"),
        ("medusa/trees/candidate_tree.py", "tests/decoding/test_exactness.py", "tests/cli"),
        ("medusa/heads/mtp.py", "tests/engine/weights/test_converted_files.py", "tests/interop"),
        ("medusa/engine/weights/forms.py", "tests/engine/weights", "tests/engine"),
        ("medusa/base/attention.py", "tests/decoding/test_on_a_pretended_card.py", "tests/serving"),
        ("medusa/text_stream.py", "tests/test_text_stream.py", "tests/training"),
        ("tests/tiny_server.py", "tests/serving/test_server.py", "tests/trees"),
        ("docs/guides/serving.md", "tests/test_documentation.py", "tests/decoding/test_exactness.py"),
        ("scripts/sizes.py", "tests/programs", "tests/heads"),
    ],
)
def test_a_change_asks_for_the_tests_of_its_room_and_of_what_imports_it(changed, expected, others):
    tests = PROGRAM["tests_for"]([changed])
    assert expected in tests and others not in tests
    assert all((CHECKOUT / each).exists() for each in tests)


def test_nothing_is_asked_for_where_nothing_has_changed_and_a_file_once():
    assert PROGRAM["tests_for"]([]) == []
    tests = PROGRAM["tests_for"](["medusa/heads/mtp.py", "tests/heads/test_mtp.py"])
    assert "tests/heads" in tests and "tests/heads/test_mtp.py" not in tests


def test_what_is_not_committed_and_what_git_does_not_know_has_changed(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True
        )

    monkeypatch.setitem(PROGRAM["changed_files"].__globals__, "ROOT", tmp_path)
    git("init", "-q")
    for name in ("kept.py", "edited.py"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "edited.py").write_text("2")
    (tmp_path / "new.py").write_text("3")
    assert PROGRAM["changed_files"](None) == ["edited.py", "new.py"]
    with pytest.raises(SystemExit, match="error: git diff --name-only gone failed"):
        PROGRAM["changed_files"]("gone")


def test_the_program_says_what_it_is_for():
    shown = subprocess.run(
        [sys.executable, "scripts/changed_tests.py", "--help"], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert "--since" in shown.stdout
