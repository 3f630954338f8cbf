"""Step times of models of known shapes, and the parts of a step."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import MedusaModel
from medusa.hardware import DeviceRates
from medusa.measurement import steps
from medusa.measurement.steps import (
    random_base,
    random_heads,
    random_prompts,
    step_parts,
    timed_steps,
    tree_of,
)

CPU = torch.device("cpu")
RATES = DeviceRates(bytes_per_second=1e9, operations_per_second=1e12)


@pytest.fixture(scope="module")
def model():
    base = random_base("tiny", CPU, torch.float32)
    return MedusaModel(base, random_heads(base, 128), step="static")


def test_every_size_is_timed_and_held_against_its_floor(model):
    found = list(timed_steps(model, RATES, [6], 2, 20, rounds=1, num_steps=2))
    assert [row["num_nodes"] for row in found] == [1, 6]
    assert {(row["batch_size"], row["context_length"]) for row in found} == {(2, 20)}
    one, six = found
    assert one["overhead"] == 1.0
    assert six["overhead"] == pytest.approx(six["step_milliseconds"] / one["step_milliseconds"])
    assert six["f_hw"] == pytest.approx(six["floor_milliseconds"] / six["step_milliseconds"])
    assert six["floor_milliseconds"] > one["floor_milliseconds"] > 0
    assert one["setup_seconds"] == six["setup_seconds"] == 0


def test_the_parts_of_a_step_are_less_than_the_whole_and_leave_the_model_as_it_was(model, monkeypatch):
    """The clock counts operations, so that a busy machine changes nothing."""
    with OperationClock() as clock:
        monkeypatch.setattr(steps.time, "perf_counter", lambda: clock.count)
        parts = step_parts(model, tree_of(16), random_prompts(model.base, 2, 20), num_steps=2, rounds=1)
    assert 0 < parts.draft < parts.forward < parts.step
    assert parts.forward + parts.draft < parts.step
    assert 0 < parts.around < 1
    assert parts.around == 1 - parts.forward / parts.step


class OperationClock(torch.utils._python_dispatch.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_random_heads_guess_the_first_tokens_of_the_vocabulary_or_all(model):
    assert random_heads(model.base, 128).token_map.tolist() == list(range(128))
    assert len(random_heads(model.base, 10**6).token_map) == 512
    assert random_heads(model.base, None).token_map is None


def test_the_tree_has_as_many_nodes_as_asked_and_no_more_depths_than_heads():
    assert tree_of(1).depth == 0
    tree = tree_of(64)
    assert (tree.num_nodes, tree.depth) == (64, steps.NUM_HEADS)


def test_the_shapes_have_the_sizes_they_are_named_after():
    for name, billions in (("llama-1b", 1.24), ("llama-8b", 8.03)):
        with torch.device("meta"):
            base = LlamaForCausalLM(LlamaConfig(**steps.SHAPES[name]))
        assert sum(each.numel() for each in base.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_on_a_card_captured_steps_are_timed_and_taken_apart():
    base = random_base("tiny", torch.device("cuda"), torch.bfloat16)
    model = MedusaModel(base, random_heads(base, 128), step="captured")
    rows = list(timed_steps(model, RATES, [1, 64], 1, 128, rounds=2, num_steps=4))
    assert [row["num_nodes"] for row in rows] == [1, 64]
    assert all(row["setup_seconds"] > 0 for row in rows)
    parts = step_parts(model, tree_of(64), random_prompts(base, 2, 20))
    assert 0 < parts.forward < parts.step
