"""Heads whose parameters processes share out: what is whole when, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_loss import NUM_HEADS, READING, Problem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from medusa import MedusaHeads
from medusa.training.config import LossOptions
from medusa.training.losses.fused import SplitHeads
from medusa.training.recipes.medusa_heads import HeadsLoss


@pytest.fixture
def mesh():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def split_loss(problem: Problem, mesh, objective: str) -> tuple[HeadsLoss, SplitHeads]:
    module = HeadsLoss(problem.heads, LossOptions(objective, block_elements=200))
    module.split = SplitHeads(problem.heads, mesh)
    return module, module.split


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("objective", ["ce", "blend"])
def test_split_heads_have_the_loss_and_the_gradients_of_whole_ones(mesh, objective, reading):
    problem = Problem("full", **READING[reading])
    problem.hidden.requires_grad_()
    expected, expected_sums = problem.fused(objective)
    theirs = problem.gradients(3 * expected)
    module, _ = split_loss(problem, mesh, objective)
    arguments = (problem.hidden, problem.alignment(), problem.embedding, problem.num_scored, problem.teacher)
    for _ in range(2):  # the second finds the parts as the first left them
        loss, sums = module(*arguments)
        torch.testing.assert_close(loss, expected)
        for our, their in zip(problem.gradients(3 * loss), theirs, strict=True):
            torch.testing.assert_close(whole(our), their)
    for our, their in zip(sums, expected_sums, strict=True):
        torch.testing.assert_close(our, their)
    with torch.no_grad():
        torch.testing.assert_close(module(*arguments)[0], expected.detach())


def test_only_the_head_whose_loss_runs_is_whole(mesh, monkeypatch):
    problem, seen, gathered = Problem("full", reads_path=True), [], []
    logits_of, full_tensor = MedusaHeads.logits_of, DTensor.full_tensor

    def noted(self, index, *arguments):
        is_whole = [
            {not isinstance(each, DTensor) for each in self.parameters_of(head)} for head in range(NUM_HEADS)
        ]
        seen.append((index, is_whole))
        return logits_of(self, index, *arguments)

    def counted(self):
        gathered.append(full_tensor(self))
        return gathered[-1]

    monkeypatch.setattr(MedusaHeads, "logits_of", noted)
    monkeypatch.setattr(DTensor, "full_tensor", counted)
    module, split = split_loss(problem, mesh, "ce")
    module(problem.hidden, problem.alignment(), problem.embedding, problem.num_scored, problem.teacher)
    assert len(seen) > NUM_HEADS, "a head has several blocks"
    for index, is_whole in seen:
        assert is_whole == [{head == index} for head in range(NUM_HEADS)]
    assert len(gathered) == len(split.parameters), (
        "each parameter travels once, however many blocks there are"
    )
    assert all(isinstance(each, DTensor) for each in split.parameters)


def test_a_head_is_split_again_after_an_error(mesh):
    problem = Problem("full")
    _, split = split_loss(problem, mesh, "ce")
    with pytest.raises(FloatingPointError), split.whole(0, {}):
        raise FloatingPointError
    assert all(isinstance(each, DTensor) for each in problem.heads.parameters_of(0))
