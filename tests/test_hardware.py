import os
import sys

import pytest
import torch
from conftest import tiny_model

from medusa import MedusaModel, hardware
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
