"""Files and directories that are written whole or not at all."""

from __future__ import annotations

import fcntl
import glob
import grp
import hashlib
import json
import os
import pwd
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from safetensors import SafetensorError


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` for a file that takes its place when the block ends well.

    It then has the rights that the umask leaves; safetensors lets nobody else read. Several processes may
    write ``path`` at once: the last one's file stays. A link is followed: its target is replaced.
    """
    path = _followed(path)
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        with disk_errors(path):
            partial.touch()
            rights = partial.stat().st_mode
            yield partial
            partial.chmod(rights)
            sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the disk, where it survives a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """:func:`sync` for all that is in ``directory``, and for itself."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what libraries raise when the disk refuses a write below ``path`` into an OSError in words."""
    try:
        yield
    except (SafetensorError, RuntimeError, OSError) as error:
        refusals = (
            "os error",
            "PytorchStreamWriter failed",
            "unexpected pos",
            "No space left",
            "File too large",
        )
        if not any(refusal in str(error) for refusal in refusals):
            raise
        room = shutil.disk_usage(_existing(path)).free
        raise OSError(
            f"{path} could not be written, and {room / 2**30:.1f} GiB are free there; make room and give the "
            f"same command again ({error})"
        ) from error


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def make_private_directory(directory: Path) -> None:
    """Make ``directory`` and those above it where they are not there, writable by nobody else."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)


def check_trusted(*paths: Path) -> None:
    """Raise PermissionError where another user could have written one of ``paths``, files of code and their
    directories: it belongs to someone else than this user and root, or others may write to it."""
    for path in paths:
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(
                f"{path} belongs to another user (number {status.st_uid}), whose code would run as you"
            )
        may_others_write = status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
        )
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if may_others_write and not is_sticky:  # there, nobody replaces what belongs to another
            raise PermissionError(
                f"other users may write to {path}, and code in it would run as you: chmod go-w {path}"
            )


def _is_own_group(number: int) -> bool:
    """Whether the group is the one that many systems give to this user alone, under the user's own name."""
    try:
        group = grp.getgrgid(number)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number without a name, as in containers
        return False
    return group.gr_name == user and {*group.gr_mem} <= {user}


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(
    path: Path,
    seconds: float = 0,
    say: Callable[[str], object] = lambda text: None,
    lock: Path | None = None,
) -> Iterator[None]:
    """Keeps ``path`` from all other processes that ask for it: by the file ``lock``, which is left there; by
    default ``.lock`` in the directory ``path``, which is made.

    If another process has the lock, this is reported, and waited for, at most ``seconds``.

    Raises:
        BlockingIOError: another process has it; the message says which.
        OSError: the lock is a link, which could lead to any file.
    """
    lock = lock or path / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    is_told = False
    if lock.is_symlink():
        raise OSError(
            f"the lock {lock} must be a file, got a link; remove it, and give the same command again"
        )
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "r+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                file.seek(0)
                in_use = f"{path} is in use by {file.read().strip() or 'another process'}"
                if time.monotonic() >= until:
                    raise BlockingIOError(
                        f"{in_use}; wait until it has ended, or choose another directory"
                    ) from error
            if not is_told:
                say(f"{in_use}; waiting until it has ended")
            is_told = True
            time.sleep(0.1)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path``, whole or not at all."""
    with replaced_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it does not hold a JSON object, or one too deeply nested to be read.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; its directory must hold config.json and model.safetensors: name "
            "another, or get it again"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON: {error}; mend it, or get it again") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read; write it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


class _EachKeyOnce(yaml.SafeLoader):
    """YAML forbids to give a key twice; the library would take the last value without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                problem=f"{', '.join(sorted(twice))} is given more than once", problem_mark=node.start_mark
            )
        return node


def read_yaml(path: Path) -> Any:
    """The JSON object in ``path``.

    Raises:
        ValueError: it is not YAML, gives a key twice, or is too deeply nested to be read.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _EachKeyOnce)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid YAML: it is nested too deeply to be read") from error


@contextmanager
def replaced_directory(directory: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory that takes the place of ``directory`` when the block ends well.

    When the block raises, ``directory`` is not changed and the temporary one is removed. A link is followed:
    its target is replaced.
    """
    target = _followed(Path(directory))
    if not overwrite:
        check_writable_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        with disk_errors(target):
            yield partial
            _as_open_makes_them(partial)
            sync_tree(partial)
        _take_the_place(partial, target)
        sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _followed(path: Path) -> Path:
    """The target of ``path`` where it is a link, else itself.

    Raises:
        OSError: it is a link that leads to itself.
    """
    if not path.is_symlink():
        return path
    end = Path(os.path.realpath(path))
    if end.is_symlink():  # realpath gives up on a circle, where Path.resolve may raise a RuntimeError
        raise OSError(f"{path} is a link that leads back to itself; choose another place, or remove the link")
    return end


def _as_open_makes_them(directory: Path) -> None:
    """Give the files in ``directory`` the rights that the umask leaves; safetensors lets nobody else read."""
    plain = directory / ".rights"
    plain.touch()
    rights = plain.stat().st_mode
    plain.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(rights)


def _take_the_place(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target``; the old content is restored when this fails, and removed when it
    succeeds."""
    if not target.exists():
        os.replace(partial, target)
        return
    retired = partial.with_name(partial.name.replace(".partial-", ".retired-"))
    os.replace(target, retired)
    try:
        os.replace(partial, target)
    except OSError:
        os.replace(retired, target)
        raise
    shutil.rmtree(retired)


def clear_interrupted(path: Path) -> None:
    """Remove leftovers of a killed :func:`replaced_directory` or :func:`replaced_file` beside ``path``; call
    it when no other process can be writing. A directory that was already moved away is restored."""
    path = _followed(path)
    name = glob.escape(path.name)
    for retired in sorted(path.parent.glob(f".{name}.retired-*")):
        if not path.exists():
            os.replace(retired, path)
    for left in (*path.parent.glob(f".{name}.partial-*"), *path.parent.glob(f".{name}.retired-*")):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def check_writable_target(directory: str | Path) -> None:
    """Raise FileExistsError when ``directory`` holds something, and OSError where it is a link that leads to
    itself; call it before long work, not after."""
    target = Path(directory)
    end = _followed(target)
    if end.exists() and (not end.is_dir() or any(end.iterdir())):
        raise FileExistsError(
            f"output directory {str(target)!r} exists and is not empty; choose another, or overwrite it "
            "(--overwrite)"
        )


@dataclass(frozen=True)
class Layout:
    """The marks of a directory that we wrote."""

    what: str
    """The kind of directory, for messages."""
    files: tuple[str, ...]
    """Every file that it may hold, by its relative path; ``*`` matches any part of a name."""
    is_signed: Callable[[Path], bool]
    """Whether the directory says itself that it is one; asked only where it holds no other file."""

    def knows(self, path: PurePath) -> bool:
        """Whether ``path``, in the directory, can be one of its files."""
        depths = [(pattern, pattern.count("/") + 1) for pattern in self.files]
        return any(len(path.parts) == depth and path.match(pattern) for pattern, depth in depths)


def replaceable_files(directory: str | Path, layout: Layout, sources: Iterable[str | Path] = ()) -> list[str]:
    """The files in ``directory`` that overwriting it removes; call it before long work, not after.

    Args:
        sources: the inputs of the output. Names that are no path here are ignored.

    Raises:
        FileExistsError: it holds something that we did not write; the message names it.
        ValueError: it is a source, or holds one.
    """
    target = Path(directory)
    end = _followed(target).resolve()
    for source in filter(os.path.exists, sources):
        if Path(source).resolve().is_relative_to(end):
            raise ValueError(
                f"the output {str(target)!r} must not contain its own inputs, got {str(source)!r}, which "
                "overwriting would remove; choose another output directory"
            )
    if target.exists() and not target.is_dir():
        raise FileExistsError(
            f"{target} is a file, and overwriting replaces only {layout.what}; move it away"
        )
    held = sorted(path.relative_to(target) for path in target.rglob("*") if _is_file(path))
    foreign = [str(path) for path in held if not layout.knows(path)]
    if foreign or (held and not layout.is_signed(target)):
        named = ", ".join((foreign or list(map(str, held)))[:4])
        raise FileExistsError(
            f"overwriting replaces only {layout.what}, and {str(target)!r} holds something else ({named}); "
            "choose another directory, or move that away"
        )
    return [str(target / path) for path in held]


def _is_file(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def has_keys(path: Path, *keys: str) -> bool:
    """Whether ``path`` is a JSON object with all of ``keys``."""
    try:
        return read_json(path).keys() >= set(keys)
    except (ValueError, OSError):
        return False
