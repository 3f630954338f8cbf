"""The wheel that a fresh copy of the source builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FOLDERS = ("medusa", "train", "inference", "scripts", "tests", "configs", "docs")


def built_wheel(folder: Path, libraries: Path | None = None, **variables: str) -> Path:
    """Copies the source to ``folder`` and builds it there, with these variables of the environment and the
    kernels that ``libraries`` has; the wheel."""
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if libraries is not None:
        shutil.copytree(libraries, folder / "build" / "kernels")
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder / "dist")],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path
