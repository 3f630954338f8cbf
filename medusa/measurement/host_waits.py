"""What the host waits for while a device decodes: data that is brought to it, synchronisations, a trace.

A step that is to be captured in a CUDA graph may do none of it, and every other step is slower for it: the
device stands idle until the host has seen the answer and sent more work.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.hardware import wait_for

READ_BY_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")
"""Operations whose result, or its shape, the host has to know."""
MOST_LISTED = 12
"""Operations that a trace is summed up by."""
CALLS = ("cuda", "cu", "hip")
"""What the names of calls into a device's driver begin with."""


class HostTraffic(TorchDispatchMode):
    """Counts the operations that bring data to or from ``device``, or a number to the host."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
        kinds = {each.device.type for each in leaves if torch.is_tensor(each) and each.dim() > 0}
        is_written = func is torch.ops.aten.lift_fresh.default and self.device.type != "cpu"  # torch.tensor
        if len(kinds) > 1 or is_written or func.name().partition(".")[0] in READ_BY_HOST:
            self.found[str(func)] += 1
        return out


@contextmanager
def synchronisations(device: torch.device) -> Iterator[Counter[str]]:
    """Counts, by the line of Python that asked, where torch makes the host wait for a CUDA ``device``.

    Nothing is counted on other devices. Other threads are counted too.
    """
    found: Counter[str] = Counter()
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if "synchronizing" in str(each.message):
            where = "/".join(Path(each.filename).parts[-2:])
            found[f"{where}:{each.lineno}"] += 1


def host_waits(run: Callable[[], int], device: torch.device, trace: Path | None = None) -> dict[str, Any]:
    """What the host did, and waited for, while ``run`` ran so many steps as it returns; it has run before.

    Runs it three times: timed, with synchronisations counted, and traced. ``trace`` is where the trace goes,
    for chrome://tracing or ui.perfetto.dev.

    Returns:
        By step: ``milliseconds``; ``synchronisations`` by line of Python; ``driver_calls`` and
        ``operations``, name -> calls and milliseconds of the host, the longest first; ``device_busy``, the
        share of the time in which the device computed, None where no device was traced.
    """
    wait_for(device)
    began = time.perf_counter()
    num_steps = run()
    wait_for(device)
    milliseconds = 1000 * (time.perf_counter() - began) / num_steps
    with synchronisations(device) as found:
        counted_steps = run()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        traced_steps = run()
        wait_for(device)
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    events = list(profiled.key_averages())
    on_host = [each for each in events if each.device_type == torch.autograd.DeviceType.CPU]
    computed = (
        sum(each.self_device_time_total for each in events if each not in on_host) / 1000 / traced_steps
    )
    driver = [each for each in on_host if each.key.startswith(CALLS)]
    return {
        "milliseconds": milliseconds,
        "num_steps": num_steps,
        "synchronisations": {name: count / counted_steps for name, count in found.most_common()},
        "driver_calls": _longest(driver, traced_steps),
        "operations": _longest([each for each in on_host if each not in driver], traced_steps),
        "device_milliseconds": computed if device.type == "cuda" else None,
        "device_busy": computed / milliseconds if device.type == "cuda" else None,
    }


def _longest(events: list[Any], num_steps: int) -> dict[str, dict[str, float]]:
    """[name] = calls and milliseconds of the host by step, the longest first."""
    ordered = sorted(events, key=lambda each: -each.self_cpu_time_total)[:MOST_LISTED]
    return {
        each.key: {
            "calls": each.count / num_steps,
            "milliseconds": each.self_cpu_time_total / 1000 / num_steps,
        }
        for each in ordered
    }
