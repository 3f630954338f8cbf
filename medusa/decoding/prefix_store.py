"""Prefixes on disk: a prompt that was read before is not read again, also after a restart.

Keys and values of a text are kept in blocks of :data:`BLOCK` tokens, a file each. A block is called by a
digest of its tokens, of all tokens before them and of the owner, so texts that begin alike share their first
blocks, and the next turn of a conversation adds those of its own tokens. (Prefix caches of servers are built
so in memory: vLLM's automatic prefix caching.) What is stored belongs to one base as one engine computes it,
bit by bit: :func:`medusa.engine.identity.identity_of` names the directory.

A thread writes; reading takes about a second for ten thousand tokens of a base of 1.5B. The files are the
user's alone (0600). The blocks that were used least recently go first, the ends of texts before their
beginnings. Several processes may use one directory. States of recurrent layers are not stored: they belong to
one length of a text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medusa.assets import cache_home
from medusa.base.cache import TreeCache
from medusa.files import make_private_directory

log = logging.getLogger("medusa.prefixes")

BLOCK = 64
"""Tokens of a file."""
SHORTEST = 1024
"""Tokens of a text that is stored: shorter ones are read in seconds."""
MOST_WAITING = 4
"""Texts that wait to be written; while there are as many, others are not stored."""
LOW_PRIORITY = 10
CLOSING_SECONDS = 10.0


def prefix_home() -> Path:
    """The directory of all stored prefixes; perhaps it does not exist."""
    return cache_home() / "prefixes"


def stored_bytes() -> int:
    """Room on the disk, of all bases."""
    return sum(size for _, size, _ in _files(prefix_home()))


def _files(home: Path) -> Iterator[tuple[float, int, Path]]:
    """(last use, bytes, path) of each block below ``home``."""
    for path in home.glob("*/*.safetensors"):
        with suppress(FileNotFoundError):  # another process has removed it
            status = path.stat()
            yield status.st_mtime, status.st_size, path


def _mark_used(paths: Sequence[Path]) -> None:
    """Note that the blocks of a text were used now, the first of them last."""
    now = time.time_ns()
    for place, path in enumerate(paths):
        with suppress(FileNotFoundError):
            os.utime(path, ns=(now, now - 1000 * place))


class PrefixStore:
    """The blocks of one base in ``directory``, with those of other bases ``max_bytes`` in all: they lie in
    directories beside it.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, directory: Path, max_bytes: int):
        make_private_directory(directory)
        for private in (directory.parent, directory):
            private.chmod(0o700)
        self.directory = directory
        self.max_bytes = max_bytes
        self._texts: queue.Queue[tuple[tuple[int, ...], TreeCache, Hashable] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="medusa-prefixes", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Room on the disk, of all bases."""
        return sum(size for _, size, _ in _files(self.directory.parent))

    def longest(
        self,
        ids: Sequence[int],
        owner: Hashable,
        at_least: int,
        new_cache: Callable[[], TreeCache],
    ) -> TreeCache | None:
        """The longest beginning of ``ids`` that is stored for ``owner``, as a cache of one row; None where it
        has fewer than ``at_least`` tokens."""
        paths = []
        for path in self._paths(ids, owner):
            if not path.exists():
                break
            paths.append(path)
        if len(paths) * BLOCK < at_least:
            return None
        parts = []
        for path in paths:
            try:
                with safe_open(path, "pt") as file:
                    parts.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                log.warning("the stored prefix %s cannot be read and is removed: %s", path, error)
                path.unlink(missing_ok=True)
                break
        if not parts or len(parts) * BLOCK < at_least:
            return None
        _mark_used(paths)
        cache = new_cache()
        cache.load_row({name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]})
        return cache

    def keep(self, ids: Sequence[int], prefix: TreeCache, owner: Hashable) -> None:
        """Have ``prefix``, the cache of exactly ``ids``, which nobody changes any more, written where that is
        worth it."""
        is_stored = not self.max_bytes or len(ids) < SHORTEST or prefix.bytes_per_row
        if not is_stored and self._texts.qsize() < MOST_WAITING:
            self._texts.put((tuple(ids), prefix, owner))

    def close(self) -> None:
        """Write what waits, for some seconds."""
        self._texts.put(None)
        self._thread.join(CLOSING_SECONDS)

    def wait(self) -> None:
        """Until all that was to be kept is written."""
        self._texts.join()

    # -------------------------------------------------------------- on the thread

    def _write(self) -> None:
        with suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        while (text := self._texts.get()) is not None:
            try:
                self._store(*text)
            except (OSError, SafetensorError) as error:  # a full disk, a directory that was removed
                log.warning("a prefix is not stored: %s", error)
            finally:
                del text
                self._texts.task_done()
        self._texts.task_done()

    def _store(self, ids: tuple[int, ...], prefix: TreeCache, owner: Hashable) -> None:
        paths = list(self._paths(ids, owner))
        for number, path in enumerate(paths):
            if path.exists():
                continue
            block = slice(number * BLOCK, (number + 1) * BLOCK)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                save_file(prefix.row_tensors(block), partial)
                partial.chmod(0o600)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
        _mark_used(paths)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        files = sorted(_files(self.directory.parent))
        surplus = sum(size for _, size, _ in files) - self.max_bytes
        for _, size, path in files:
            if surplus <= 0:
                return
            path.unlink(missing_ok=True)
            surplus -= size

    def _paths(self, ids: Sequence[int], owner: Hashable) -> Iterator[Path]:
        """The files of the whole blocks of ``ids``, in their order."""
        digest = hashlib.sha256(repr(owner).encode())
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            digest.update(np.asarray(ids[start : start + BLOCK], dtype="<i4").tobytes())
            yield self.directory / f"{digest.hexdigest()[:40]}.safetensors"
