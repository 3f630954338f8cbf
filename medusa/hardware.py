"""The device at hand: its name, when it has finished, its threads, how fast it reads memory and multiplies.

Two short probes replace a data sheet. Bandwidth: how many bytes a second a sum over a large buffer reads.
Arithmetic: how many operations a second a large square matrix product does. Both take the best of several
runs, because everything that disturbs a run makes it slower. A model's weights are read once and multiplied
once a forward pass, so its step time is compared with these two (the roofline).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

PROBE_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Size of the buffer that is read: far beyond any cache."""
PROBE_WIDTH = {"cpu": 1536, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied."""
PROBE_RUNS = 5


@dataclass(frozen=True)
class DeviceRates:
    """The measured speed of a device."""

    bytes_per_second: float
    operations_per_second: float
    """Multiplications and additions, each counted as one."""

    def floor_seconds(self, num_bytes: float, num_operations: float) -> float:
        """The least time in which the device can read so much and compute so much, at once."""
        return max(num_bytes / self.bytes_per_second, num_operations / self.operations_per_second)


def device_name(device: torch.device) -> str:
    """The device in words: a graphics card's name, or the processor's and how many cores it shows."""
    if is_card(device):
        return torch.cuda.get_device_name(device)
    return f"{device.type}: {_processor_name()}, {os.cpu_count()} cores"


def is_cpu(device: torch.device) -> bool:
    """Whether ``device`` is the memory and the processor of the host."""
    return device.type == "cpu"


def is_card(device: torch.device) -> bool:
    """Whether ``device`` is a CUDA card."""
    return device.type == "cuda"


def release_threads() -> None:
    """Let go of the threads that computed for the calling one; it gets new ones in a tenth of a millisecond.

    Torch computes with OpenMP, which keeps threads for every thread that has ever computed. When GNU's
    OpenMP keeps more of them than there are cores, idle ones counted, they all sleep while they wait for work
    (``gomp_managed_threads`` in libgomp). Waking them takes as long as a small loop, so a decode step, which
    has two hundred of these, takes twice as long. So a thread that has computed lets go of its own when
    another one may compute next.
    """
    release = _openmp_release()
    if release is not None:
        release(_SOFTLY)


_SOFTLY = 1
"""``omp_pause_soft`` (OpenMP 5.0, section 3.2.44): settings stay."""


@functools.cache
def _openmp_release() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the OpenMP that torch computes with, where that is GNU's."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))  # loaded already; its dependencies are searched too
    is_gnu = hasattr(library, "GOMP_offload_register_ver")
    return getattr(library, "omp_pause_resource_all", None) if is_gnu else None


def available_memory(device: torch.device | None = None) -> int | None:
    """Bytes of memory that this process may still take, of a CUDA ``device`` or of the system: free memory,
    or the rest of the control groups' limits; None where the system does not report it."""
    if device is not None and is_card(device):
        held_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held_by_torch
    listing = Path("/proc/meminfo")
    if not listing.exists():
        return None
    for line in listing.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
            return min([free, *_left_in_control_groups()])
    return None


PROCESS = Path("/proc/self")
"""What the system says of this process."""


def _control_groups(controller: str) -> list[Path]:
    """The directories of the process's control groups that may limit ``controller``, outwards: of version 2,
    and of version 1 where that is mounted. A container sees them from its own on."""
    try:
        groups = [line.split(":", 2) for line in (PROCESS / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (PROCESS / "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    inside = {name: path for _, names, path in groups for name in names.split(",")}  # "" is version 2
    directories = []
    for place, kind in ((left.split(), right.split()) for left, right in mounts):
        is_second = kind[0] == "cgroup2"
        if not is_second and not (kind[0] == "cgroup" and controller in kind[-1].split(",")):
            continue
        path = inside.get("" if is_second else controller, "/")
        root = place[3]
        below = PurePosixPath(path)
        below = below.relative_to(root) if below.is_relative_to(root) else PurePosixPath()
        mounted = Path(place[4])
        directories += [mounted / part for part in (below, *below.parents)]
    return directories


def _number_in(path: Path) -> int | None:
    """The number in a file of a control group; None where there is none, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def _left_in_control_groups() -> list[int]:
    """Memory left below each limit of the process's control groups, without cached files."""
    left = []
    for group in _control_groups("memory"):
        for limit, used, total in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            most = _number_in(group / limit)
            taken = _number_in(group / used)
            if most is not None and taken is not None:
                details = (group / "memory.stat").read_text().splitlines()
                cached = (f"{total}active_file ", f"{total}inactive_file ")
                files = sum(int(line.split()[1]) for line in details if line.startswith(cached))
                left.append(max(0, most - taken + files))
    return left


def is_on_battery() -> bool:
    """Whether this machine runs on a battery now, as Linux says; false where nothing says so."""
    for status in Path("/sys/class/power_supply").glob("*/status"):
        with suppress(OSError):  # taken out meanwhile
            if status.read_text().strip() == "Discharging":
                return True
    return False


def available_cores() -> int:
    """Cores that this process may use: those of its affinity, or the whole ones of its control groups'
    share."""
    cores = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group in _control_groups("cpu"):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = (str(_number_in(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(quota) > 0:
            cores.append(max(1, int(quota) // int(period)))
    return min(cores)


def use_threads(wanted: int | None = None) -> None:
    """Have torch compute with ``wanted`` threads. None leaves torch's own number, which is that of
    OMP_NUM_THREADS, or of the cores of the machine; it is lowered to those that a container may use."""
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = available_cores()
        if cores < torch.get_num_threads():
            torch.set_num_threads(cores)


FEATURES = (
    "vendor_id", "cpu family", "model", "flags",
    "CPU implementer", "CPU part", "CPU variant", "Features", "isa",
)  # fmt: skip
"""Lines of /proc/cpuinfo on which compiled code depends."""


@functools.cache
def processor_features() -> tuple[str, ...]:
    """What the processor can do, as the system and torch say it: names are the same for very different ones
    on ARM and in virtual machines."""
    features = {
        f"{name.strip()}: {' '.join(sorted(value.split()))}"
        for name, _, value in (line.partition(":") for line in _processor_lines())
        if name.strip() in FEATURES
    }
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return (*sorted(features), *sorted(f"{name}: {value}" for name, value in known.items()))


def multiplies_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of ``dtype`` round as float32 does on ``device``: not on a card that is let compute
    them in TF32, which keeps 11 bits of a number."""
    is_rounded = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return dtype == torch.float32 and not is_rounded


def sent(values: Tensor | Sequence[Any], device: torch.device | str) -> Tensor:
    """``values`` of the host on ``device``; the host does not wait for it."""
    values = torch.as_tensor(values)
    return values.to(device, non_blocking=values.device.type == "cpu")


def read_columns(columns: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """Tensors (B, W) long or bool, each with a W of its own, on the host, in one copy: it waits once."""
    on_host = torch.cat([part.long() for part in columns.values()], dim=1).tolist()
    by_name: dict[str, list[list[int]]] = {}
    start = 0
    for name, part in columns.items():
        end = start + part.shape[1]
        by_name[name] = [row[start:end] for row in on_host]
        start = end
    return by_name


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if is_card(device):
        torch.cuda.synchronize(device)


def measured_rates(
    device: torch.device,
    dtype: torch.dtype,
    num_bytes: int | None = None,
    width: int | None = None,
) -> DeviceRates:
    """The rates of ``device`` computing in ``dtype``, measured now; a second or so.

    Args:
        num_bytes: how much to read; by default enough to outgrow every cache.
        width: of the square matrices to multiply.
    """
    kind = device.type if device.type in PROBE_BYTES else "cuda"
    num_bytes = num_bytes or PROBE_BYTES[kind]
    width = width or PROBE_WIDTH[kind]
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    reading = _best_seconds(buffer.sum, device)
    multiplying = _best_seconds(lambda: torch.mm(left, right, out=out), device)
    return DeviceRates(buffer.nbytes / reading, 2 * width**3 / multiplying)


def _best_seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    taken = []
    for _ in range(1 + PROBE_RUNS):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _processor_name() -> str:
    """The name of the processor; its architecture where the system does not report it."""
    for line in _processor_lines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _processor_lines() -> list[str]:
    listing = Path("/proc/cpuinfo")
    return listing.read_text(encoding="utf-8", errors="replace").splitlines() if listing.exists() else []
