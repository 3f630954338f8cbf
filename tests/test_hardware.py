import os
import sys

import pytest
import torch
from conftest import tiny_model

from medusa import MedusaModel, hardware
from medusa.engine import libraries
from medusa.hardware import DeviceRates, device_name, measured_rates, release_threads


def test_a_processor_is_named_with_its_cores():
    assert device_name(torch.device("cpu")).startswith("cpu: ")
    assert device_name(torch.device("cpu")).endswith(" cores")


def test_rates_are_measured_and_a_step_takes_the_longer_of_reading_and_computing():
    rates = measured_rates(torch.device("cpu"), torch.float32, num_bytes=2**22, width=128)
    assert rates.bytes_per_second > 1e8
    assert rates.operations_per_second > 1e8
    assert DeviceRates(100.0, 10.0).floor_seconds(num_bytes=50, num_operations=1) == 0.5
    assert DeviceRates(100.0, 10.0).floor_seconds(num_bytes=50, num_operations=20) == 2.0


def test_rates_count_the_bytes_read_and_the_operations_done(monkeypatch):
    monkeypatch.setattr("medusa.hardware._best_seconds", lambda work, device: 0.5)
    rates = measured_rates(torch.device("cpu"), torch.float32, num_bytes=4000, width=10)
    assert rates == DeviceRates(8000.0, 4000.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(hardware._openmp_release() is None, reason="torch computes with another OpenMP")
def test_a_thread_that_has_decoded_keeps_no_threads_of_openmp_for_itself():

    def num_threads():
        return len(os.listdir("/proc/self/task"))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        release_threads()
        alone = num_threads()
        torch.ones(1 << 20).add_(1)
        assert num_threads() > alone
        model = MedusaModel(tiny_model("llama"))
        assert num_threads() <= alone
        for use in (model.generate, lambda *a, **k: list(model.stream(*a, **k))):
            torch.ones(1 << 20).add_(1)
            use(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
            assert num_threads() <= alone
    finally:
        torch.set_num_threads(before)


V2, V1 = "0::/", "0::/\n4:memory:{0}\n2:cpu,cpuacct:{0}"
MOUNTED_V2 = "30 1 0:1 {root} {place} rw - cgroup2 cgroup2 rw"
MOUNTED_V1 = (
    "31 1 0:2 {root} {place}/memory rw - cgroup cgroup rw,memory\n"
    "32 1 0:3 {root} {place}/cpu rw - cgroup cgroup rw,cpu,cpuacct"
)
STAT = "{total}active_file 30\n{total}inactive_file 20\nfile 999\nshmem 949"


def grouped(monkeypatch, tmp_path, cgroup, mounts, files, root="/"):
    """A process whose control groups hold ``files``, by path below where they are mounted."""
    (process := tmp_path / "process").mkdir()
    (process / "cgroup").write_text(cgroup + "\n")
    (process / "mountinfo").write_text(mounts.format(root=root, place=tmp_path / "groups") + "\n")
    for name, text in files.items():
        (path := tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(hardware, "PROCESS", process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)


def memory(limit, used):
    return {"memory.max": limit, "memory.current": used, "memory.stat": STAT.format(total="")}


def memory_of_v1(limit, used):
    known = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": STAT.format(total="total_")}
    return {f"memory.{name}": text for name, text in known.items()}


def below(group, files):
    return {f"{group}/{name}": text for name, text in files.items()}


GROUPS = {
    "of its own": (V2, MOUNTED_V2, {**memory("1000", "400"), "cpu.max": "200000 100000"}, "/", 650, 2),
    "none": (V2, MOUNTED_V2, {**memory("max", "400"), "cpu.max": "max 100000"}, "/", None, 64),
    "nested": (
        "0::/a/b",
        MOUNTED_V2,
        {
            **below("a/b", memory("max", "9")),
            **below("a", memory("700", "400")),
            "a/cpu.max": "350000 100000",
        },
        "/",
        350,
        3,
    ),
    "half a core": (V2, MOUNTED_V2, {"cpu.max": "50000 100000"}, "/", None, 1),
    "version 1": (
        V1.format("/a"),
        MOUNTED_V1,
        {**below("memory/a", memory_of_v1("1000", "400")),
         "cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"},
        "/", 650, 4,
    ),
    "version 1, without limits": (
        V1.format("/a"),
        MOUNTED_V1,
        {**below("memory/a", memory_of_v1(str(2**63 - 4096), "400")),
         "cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
        "/", None, 64,
    ),
    "version 1, in a container": (
        V1.format("/docker/1234"),
        MOUNTED_V1,
        {**below("memory", memory_of_v1("800", "400")),
         "cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"},
        "/docker/1234", 450, 1,
    ),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", GROUPS)
def test_the_limits_of_control_groups_hold_for_memory_and_cores(monkeypatch, tmp_path, case):
    free = hardware.available_memory()
    cgroup, mounts, files, root, left, cores = GROUPS[case]
    grouped(monkeypatch, tmp_path, cgroup, mounts, files, root)
    found = hardware.available_memory()
    assert found == left if left is not None else found > free // 4
    assert hardware.available_cores() == cores


@pytest.mark.parametrize(
    ("named", "wanted", "expected"), [(None, None, 1), ("3", None, 7), (None, 5, 5), ("3", 5, 5)]
)
def test_threads_are_those_of_the_container_unless_somebody_names_another_number(
    monkeypatch, named, wanted, expected
):
    set_to = [7]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if named:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    monkeypatch.setattr(hardware, "available_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_to[-1])
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    hardware.use_threads(wanted)
    assert set_to[-1] == expected


@pytest.mark.parametrize("line", ["CPU part\t: 0xd0c", "Features\t: fp asimd sve", "flags\t: fpu avx2 amx"])
def test_processors_of_one_name_are_told_apart_by_what_they_can_do(monkeypatch, line):
    name = line.partition(":")[0]
    found = set()
    for lines in ([line], [line + "1"], [f"{name}: other"]):
        monkeypatch.setattr(hardware, "_processor_lines", lambda lines=lines: ["model name: QEMU", *lines])
        hardware.processor_features.cache_clear()
        found.add(libraries.digest_of())
    hardware.processor_features.cache_clear()
    assert len(found) == 3
