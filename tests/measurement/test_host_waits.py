"""What brings data to the host is found, in a loop that does it and not in one that must not."""

from __future__ import annotations

import pytest
import torch
from conftest import random_prompts, tiny_model

from medusa import CandidateTree, DecodingStatistics, HeadsConfig, MedusaHeads, MedusaModel
from medusa.decoding.loop import begin
from medusa.decoding.step_runners import StepRunner
from medusa.drafters.heads import drafter_of_heads
from medusa.measurement.host_waits import HostTraffic, host_waits, synchronisations

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0)])


@pytest.fixture(scope="module")
def model():
    return MedusaModel(tiny_model("llama"), MedusaHeads(HeadsConfig(32, 61, num_heads=2)), TREE)


def test_the_general_loop_reads_numbers_and_a_static_step_reads_none(model):
    prompt = random_prompts(1, 9)
    with HostTraffic("cpu") as general:
        model.generate(prompt, tree=TREE, max_new_tokens=12, do_sample=False)
    assert general.found["aten._local_scalar_dense.default"] > 0
    request = model.request(prompt, max_new_tokens=20, do_sample=False)
    drafter = drafter_of_heads(model.heads, model.base, TREE)
    with torch.no_grad():
        rows, _ = begin(model.base, request, drafter.reads_layers)
        runner = StepRunner(model.base, drafter, rows, 8)
        runner.state.reserve(256)
        runner.state.load(rows, 19)
        with HostTraffic("cpu") as static:
            runner.run(4)
    assert not static.found


def test_what_ran_is_summed_up_by_step_and_traced(model, tmp_path):
    def run() -> int:
        counted = DecodingStatistics()
        prompt = random_prompts(1, 9)
        list(model.stream(prompt, tree=TREE, max_new_tokens=6, do_sample=False, statistics=counted))
        return counted.num_passes

    trace = tmp_path / "trace.json.gz"
    found = host_waits(run, torch.device("cpu"), trace)
    assert found["milliseconds"] > 0 and found["num_steps"] == run()
    products = found["operations"].get("aten::mm") or found["operations"]["aten::addmm"]
    assert products["calls"] >= 8 and products["milliseconds"] > 0
    assert found["device_busy"] is None and found["driver_calls"] == {}
    assert trace.stat().st_size > 1000


def test_nothing_is_counted_where_there_is_no_cuda_device():
    with synchronisations(torch.device("cpu")) as found:
        torch.ones(3).sum().item()
    assert not found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_waiting_is_counted_by_the_line_that_waits():
    device = torch.device("cuda")
    there = torch.ones(3, device=device)
    with synchronisations(device) as found:
        there.sum().item()
        there + 1
    (line,) = found
    assert line.startswith("measurement/test_host_waits.py:") and found[line] >= 1
