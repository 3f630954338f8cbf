"""Libraries that are compiled for this processor and kept on disk.

They are kept in the user's cache directory, under a digest of all that a library depends on: torch and the
processor, and what its caller names.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from medusa import files
from medusa.assets import cache_home
from medusa.console import log_console
from medusa.hardware import processor_features

COMPILERS = ("g++", "clang++", "c++")
INSTALL_COMPILER = "`apt install g++`, `dnf install gcc-c++` or `xcode-select --install` installs one"
NO_COMPILER = (
    "what torch compiles for a model needs a C++ compiler (g++ or clang++), and none is installed "
    f"({INSTALL_COMPILER})"
)


class LibraryError(ValueError):
    """A library could not be compiled, kept or loaded. Slower code computes the same without it."""


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns whatever keeps a library from being compiled, kept or loaded into a LibraryError of one line.

    The system, the compiler and torch raise exceptions of many types, and what follows is the same for all:
    the next slower way. Errors that are in words already, ValueErrors, pass.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise LibraryError(
            f"{what} could not be compiled, kept or loaded: {in_a_line(error)}; MEDUSA_CACHE names a "
            "directory for libraries, which can be written and run from"
        ) from error


def in_a_line(error: Exception) -> str:
    """The line of an error that says most: a compiler's first that has the word."""
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line.strip() for line in str(output or error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return next((line for line in lines if "error:" in line), first)[:300]


def why_not_kept(error: Exception) -> str:
    """The line of an error that keeps nothing in the cache; with the next step where the disk raised it."""
    where = f"; MEDUSA_CACHE names another directory than {cache_home()}"
    return in_a_line(error) + (where if isinstance(error, OSError) else "")


def found_compiler() -> str | None:
    """The C++ compiler: what ``CXX`` names, else the first that is installed."""
    return next(filter(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS))), None)


def digest_of(*depends_on: Any) -> str:
    """A digest of ``depends_on`` as it prints, of the version of torch and of the processor."""
    instructions = (
        torch.backends.cpu.get_cpu_capability(),
        *(known() for known in (torch.cpu._is_vnni_supported, torch.cpu._is_amx_tile_supported)),
    )
    runs_on = torch.__version__, platform.machine(), instructions, processor_features()
    return hashlib.sha256(repr((runs_on, depends_on)).encode()).hexdigest()[:24]


def kept_library(name: str, digest: str) -> Path:
    """Where a library is, or will be."""
    return cache_home() / "compiled" / f"{name}-{digest}.so"


def check_library(path: Path) -> None:
    """Raise ValueError where a library was altered, for loading it would end the process; PermissionError
    where another user could have written it, for loading it would run that user's code."""
    files.check_trusted(path, *_directories(path))
    check_whole(path, "delete it (it is then made anew), and look whether the disk is full")


def check_whole(path: Path, advice: str) -> None:
    """Raise ValueError, which ends with ``advice``, where a library is not what the file beside it says."""
    facts = sealed_facts(path)
    if not facts or facts != {**facts, **_sealed(path)}:
        raise ValueError(
            f"the compiled library {path} is damaged: it is not the file that was written; {advice}"
        )


def sealed_facts(path: Path) -> dict[str, Any]:
    """What the file beside a library says of it; empty where there is none, or it is damaged itself."""
    seal = path.with_suffix(".json")
    try:
        return dict(files.read_json(seal)) if seal.exists() else {}
    except ValueError:
        return {}


def _directories(path: Path) -> tuple[Path, Path]:
    """The directory of a library, and the cache: who may write to them can put another in its place."""
    return path.parent, path.parent.parent


def _sealed(path: Path) -> dict[str, Any]:
    """What the file beside a library says of its content."""
    return {"bytes": path.stat().st_size, "sha256": files.digest_of(path)}


def compile_library(path: Path, text: str, make: Callable[[Path], Path]) -> None:
    """Make a library, and keep it as ``path``.

    Nothing is done where it is there. Another process that compiles the same is waited for.

    Raises:
        PermissionError: another user could write there.

    Args:
        text: tells the user what takes so long.
        make: compiles it in an empty directory, and says where it is.
    """
    if path.exists():
        return
    files.make_private_directory(path.parent)
    files.check_trusted(*_directories(path))
    console = log_console()
    partial = path.with_suffix(".partial")

    def say(text: str) -> None:
        console.print(text, style="dim", soft_wrap=True)

    with files.locked(path, math.inf, say, path.with_suffix(".lock")):
        if path.exists():
            return
        say(text)
        shutil.rmtree(partial, ignore_errors=True)  # leftovers of a killed process
        partial.mkdir()
        try:
            with console.status("compiling", spinner="dots"), files.disk_errors(path):
                library = make(partial)
                files.write_json(path.with_suffix(".json"), _sealed(library))
                library.chmod(0o755)
                files.sync(library)
                os.replace(library, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
