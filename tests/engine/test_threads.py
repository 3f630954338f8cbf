"""Threads of the kernels: the same bits with any number of them, beside other work, for several callers, and
in a forked process."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import gguf
import pytest
import torch
from conftest import needs_kernels
from test_group_quantised import NUM_INPUTS, quantised

from medusa.base.attention import seen_slots
from medusa.engine import kernels
from medusa.engine.weights.products import GroupQuantisedMatmul, PackedMatmul
from medusa.trees.candidate_tree import TreeTopology

pytestmark = needs_kernels
NUM_OUTPUTS = 2048


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=[False, True], ids=["of torch", "of our own"])
def own_threads(request):
    """Whose threads compute. Unasked, ours do only in a compiled pass, where others were seen to compute."""
    torch.ops.medusa.force_own_threads(request.param)
    yield request.param
    torch.ops.medusa.force_own_threads(False)


@contextmanager
def busy_processes(count):
    """Processes that take the cores away from this one, again and again."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def operators():
    """A product of each kind, and attention: from rows (N, NUM_INPUTS) to results."""
    torch.manual_seed(0)
    weight, bias = torch.randn(NUM_OUTPUTS, NUM_INPUTS), torch.randn(NUM_OUTPUTS)
    four_bits = quantised(gguf.GGMLQuantizationType.Q4_K, NUM_OUTPUTS)
    key, value = torch.randn(2, 1, 4, 600, 64).unbind()

    def attention(x):
        chain = TreeTopology.chain(len(x), "cpu")
        seen = seen_slots(torch.tensor([400]), chain, {"full_attention": None})
        query = x.view(1, len(x), 8, 64).transpose(1, 2)
        return kernels.tree_attention(torch.nn.Module(), query, key, value, seen, 0.3)[0]

    return {
        "twelve bits": PackedMatmul([weight.bfloat16().float()], bias),
        "int8": PackedMatmul([weight], bias, int8=True),
        "four bits": GroupQuantisedMatmul([four_bits], bias, in_whole_numbers=True),
        "four bits, float32": GroupQuantisedMatmul([four_bits], None, in_whole_numbers=False),
        "attention": attention,
    }


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("rows", [1, 5, 17, 130])
def test_any_number_of_threads_gives_the_same_bits(rows):
    x = torch.randn(rows, NUM_INPUTS)
    for name, operator in operators().items():
        alone = operator(x)
        for count in (2, 3, 5):
            with threads(count):
                assert torch.equal(operator(x), alone), name


@pytest.mark.parametrize("own_threads", [True], indirect=True)
def test_threads_that_lose_their_core_change_nothing(own_threads):
    x = torch.randn(4, NUM_INPUTS)
    made = operators()
    alone = {name: operator(x) for name, operator in made.items()}
    with busy_processes(2 * (os.cpu_count() or 1)), threads(4):
        for _ in range(150):
            for name, operator in made.items():
                assert torch.equal(operator(x), alone[name]), name


@pytest.mark.usefixtures("own_threads")
def test_several_callers_at_once_get_their_own_results():
    inputs = torch.randn(8, 4, NUM_INPUTS)
    operator = operators()["four bits"]
    alone = [operator(x) for x in inputs]
    with threads(2), ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(2,)) as callers:
        for _ in range(20):
            for mine, expected in zip(callers.map(operator, inputs), alone, strict=True):
                assert torch.equal(mine, expected)


@pytest.mark.parametrize("own_threads", [True], indirect=True)
def test_a_forked_process_has_threads_of_its_own(own_threads):
    x = torch.randn(4, NUM_INPUTS)
    operator = operators()["four bits"]
    with threads(2):
        expected = operator(x)
        if not (child := os.fork()):
            signal.alarm(60)  # one that waits for threads which it does not have would wait for ever
            os._exit(0 if torch.equal(operator(x), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
