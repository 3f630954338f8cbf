"""Memory of weights: huge pages for what is packed, and the pages of files, which are given back to the
system once their weights are packed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

Release = Callable[[Tensor], None]
"""Gives back the pages of a file that a tensor is a view of; other tensors stay as they are."""


class HugePages:
    """Memory for weights, in pages of 2 MB if the system provides them on request.

    A pass reads every weight once, and asks the page tables for every page: in pages of 4 kB two cores read
    29 GB/s, in these 41. The pages of a tensor that is gone go back to the system at once, and addresses
    once all tensors of their part are gone.
    """

    PART = 64 * 2**20
    """Least bytes of one allocation; bytes that are never written take no memory."""
    LINE = 64
    """Bytes of a cache line; every tensor starts at one."""

    def __init__(self) -> None:
        self._part = _in_huge_pages(self.PART)
        self._taken = 0
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of this shape."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // self.LINE) * self.LINE
        with self._lock:
            if self._taken + size > len(self._part):
                self._part = _in_huge_pages(max(size, self.PART))
                self._taken = 0
            memory = memoryview(self._part)[self._taken : self._taken + size]
            weakref.finalize(memory, _give_back, self._part, self._taken, size).atexit = False
            self._taken += size
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)  # which owns ``memory``


def _in_huge_pages(size: int) -> mmap.mmap:
    part = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without them small pages hold the same
            part.madvise(mmap.MADV_HUGEPAGE)
    return part


def _give_back(part: mmap.mmap, start: int, size: int) -> None:
    """Let the system have the whole pages of so many bytes from ``start`` on."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if whole > 0 and hasattr(mmap, "MADV_DONTNEED"):
        part.madvise(mmap.MADV_DONTNEED, first, whole)


weight_memory = HugePages()
"""Where packed weights lie."""


def packed_memory(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """An uninitialised tensor for a packed weight; without memory where ``like``, which is packed, has
    none."""
    return (
        torch.empty(shape, dtype=dtype, device="meta") if like.is_meta else weight_memory.empty(shape, dtype)
    )


# ------------------------------------------------------------------ pages of files


def placeholder(weight: Tensor) -> Tensor:
    """A tensor of the shape of ``weight`` that takes no memory: each number of it is none."""
    return torch.full((), float("nan"), dtype=torch.float32).expand(weight.shape)


def is_placeholder(tensor: Tensor) -> bool:
    """Whether ``tensor`` takes the memory of one number."""
    return tensor.numel() > 1 and not any(tensor.stride())


def released_pages() -> Release:
    """A function that gives back the pages of the files that are mapped now."""
    files = list(_mapped_files())
    advise = ctypes.CDLL(None, use_errno=True).madvise if files else None

    def release(weight: Tensor) -> None:
        start = weight.data_ptr()
        size = weight.nbytes
        if advise is not None and any(low <= start and start + size <= high for low, high in files):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if whole > 0:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)

    return release


def give_back_freed_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps what lies between blocks in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _mapped_files() -> Iterator[tuple[int, int]]:
    """The addresses of mapped files in this process; empty on systems that do not report them.

    A file that comes from the hub is named by its checksum there, so names tell nothing."""
    listing = Path("/proc/self/maps")
    if sys.platform != "linux" or not listing.exists():
        return
    for line in listing.read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5) if line.count(" ") >= 5 else (line, "")
        if path.startswith("/"):
            low, high = (int(each, 16) for each in addresses.split("-"))
            yield low, high
