"""Which tests a change asks for: prints their files, for `make test-changed`.

    python scripts/changed_tests.py            # since this branch left origin/main, or since HEAD
    python scripts/changed_tests.py --since v0.2.0

For each module of medusa/ that has changed: the tests of its innermost room, those that import it, and the
text against plain decoding; for anything else that has changed, the tests beside the rooms. All tests stay
the rule before a merge: a room may break one that is far away.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALWAYS = ("tests/decoding/test_exactness.py", "tests/test_architecture.py", "tests/test_shape.py")
BESIDE = ("tests/test_documentation.py", "tests/test_contributing.py", "tests/test_packaging.py")
"""The tests of documents and of what is packed."""


def changed_files(since: str | None) -> list[str]:
    """Paths that differ from ``since``, or from where this branch left origin/main; and what is untracked."""
    if since is None:
        main = _git("rev-parse", "--verify", "--quiet", "origin/main", check=False)
        since = _git("merge-base", "HEAD", main[0])[0] if main else "HEAD"
    return sorted({*_git("diff", "--name-only", since), *_git("ls-files", "--others", "--exclude-standard")})


def _git(*words: str, check: bool = True) -> list[str]:
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if check and ran.returncode:
        raise SystemExit(f"error: git {' '.join(words)} failed: {ran.stderr.strip()}")
    return ran.stdout.splitlines()


@functools.cache
def parsed(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere; "from a import b" may mean a or a.b."""
    found: set[str] = set()
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def tested(path: Path) -> frozenset[str]:
    """The modules that a file of tests imports, or that a file does which it runs in a process of its own:
    one in tests/ that it names."""
    names = {node.value for node in parsed(path) if isinstance(node, ast.Constant)}
    run = [file for file in (ROOT / "tests").rglob("*.py") if file.name in names]
    return imported(path).union(*map(imported, run))


def innermost_room(module: Path) -> str | None:
    """The folder of tests that lies nearest to a module of medusa/, as its folders do."""
    for above in module.parents:
        room = ROOT.joinpath("tests", *above.parts[1:])
        if len(above.parts) > 1 and room.is_dir():
            return room.relative_to(ROOT).as_posix()
    return None


def tests_for(changed: list[str]) -> list[str]:
    """The files and folders of tests that the paths ``changed`` ask for."""
    test_files = sorted((ROOT / "tests").rglob("test_*.py"))
    imports = {path.relative_to(ROOT).as_posix(): tested(path) for path in test_files}
    chosen: set[str] = set()
    for name in changed:
        path = Path(name)
        if path.parts[0] == "tests":
            # a helper is imported by its name: tests/ is on the path
            chosen |= {test for test, names in imports.items() if test == name or path.stem in names}
        elif path.parts[0] == "medusa" and len(path.parts) > 1:
            module = ".".join(path.with_suffix("").parts)
            chosen |= {room for room in [innermost_room(path)] if room is not None}
            chosen |= {test for test, names in imports.items() if module in names}
            chosen |= set(ALWAYS)
        elif path.parts[0] in ("train", "inference", "scripts"):
            chosen.add("tests/programs")
        chosen |= set(BESIDE)
    folders = {each for each in chosen if not each.endswith(".py")}
    return sorted(folders | {each for each in chosen if not any(each.startswith(f"{at}/") for at in folders)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", metavar="COMMIT", help="what to compare with")
    tests = tests_for(changed_files(parser.parse_args().since))
    if not tests:
        sys.stderr.write("nothing has changed\n")
    print("\n".join(tests))


if __name__ == "__main__":
    main()
