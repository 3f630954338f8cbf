"""What a launch may ask for, and what is gathered."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType, InitProcessGroupKwargs
from accelerate.commands import launch

from medusa import HeadsConfig, MedusaHeads
from medusa.training.config import LossOptions, OptimisationOptions, RunOptions
from medusa.training.recipes.recipe import HeadsLoss
from medusa.training.run import processes


@pytest.fixture
def launch_of(monkeypatch):
    """Sets what launchers leave in the environment, and how many devices there are."""

    def set_up(num_devices: int, **environment: str) -> None:
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_PORT", "ACCELERATE_USE_CPU"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)

    return set_up


def test_more_processes_than_devices_are_refused(launch_of):
    launch_of(2, LOCAL_WORLD_SIZE="4", WORLD_SIZE="4")
    message = r"the launch starts 4 processes on a machine with 2; pass --num_processes 2"
    with pytest.raises(ValueError, match=message):
        processes.check_launch()


@pytest.mark.parametrize(
    ("num_devices", "environment"),
    [
        (2, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "16"}),
        (0, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}),
        (1, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "True"}),
        (0, {"ACCELERATE_USE_CPU": "true"}),
        (0, {}),
    ],
    ids=["several machines", "on a CPU", "a CPU beside a device", "one on a CPU", "no launcher"],
)
def test_what_can_be_launched_is_not_refused(launch_of, num_devices, environment):
    launch_of(num_devices, **environment)
    processes.check_launch()


@pytest.mark.parametrize("asked", ["1", "3"])
def test_a_launch_divides_no_gradient_that_the_run_has_divided(monkeypatch, asked):
    """accelerate divides every loss by what the launch asks for."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", asked)
    options = OptimisationOptions(gradient_accumulation_steps=3, max_steps=1)
    accelerator = processes.new_accelerator(options, RunOptions("out"))
    weight = torch.ones((), requires_grad=True)
    accelerator.backward(2 * weight)
    assert weight.grad == 2


def test_a_launch_that_accumulates_otherwise_than_the_run_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    message = "got 1 in the configuration and 4 in the launch .*pass --gradient_accumulation_steps 4"
    with pytest.raises(ValueError, match=message):
        processes.new_accelerator(OptimisationOptions(max_steps=1), RunOptions("out"))


@pytest.mark.parametrize("on_cpu", ["True", "False"], ids=["with --cpu", "without"])
def test_a_launcher_that_starts_one_process_instead_of_several_is_found_out(launch_of, on_cpu):
    """`accelerate launch --num_processes 2` leaves an address to meet at, and starts one process on a CPU."""
    launch_of(0, ACCELERATE_USE_CPU=on_cpu, MASTER_PORT="29500")
    with pytest.raises(ValueError, match=r"starts a single process.*configs accelerate_ddp"):
        processes.check_launch()


def test_a_launch_whose_processes_do_not_find_each_other_is_refused(launch_of, monkeypatch):
    launch_of(0, LOCAL_WORLD_SIZE="1", WORLD_SIZE="2")
    with pytest.raises(ValueError, match="2 processes were launched and 1 found each other"):
        new_accelerator(monkeypatch)


def test_sharding_that_accelerate_leaves_out_is_refused(launch_of, monkeypatch):
    """On CPUs accelerate turns a launch with FSDP into DDP, or nothing, without a word."""
    launch_of(0, ACCELERATE_USE_FSDP="true")
    with pytest.raises(ValueError, match="asks for FSDP, which accelerate leaves out on cpu"):
        new_accelerator(monkeypatch)


def test_processes_wait_for_each_other_as_long_as_the_run_says(launch_of, monkeypatch):
    launch_of(0)
    assert [each.timeout for each in new_accelerator(monkeypatch)] == [timedelta(minutes=77)]


def new_accelerator(monkeypatch) -> list[InitProcessGroupKwargs]:
    """Start a run where accelerate finds one process on a CPU; how it was to let processes meet."""
    alone = SimpleNamespace(
        distributed_type=DistributedType.NO,
        num_processes=1,
        device=torch.device("cpu"),
        gradient_accumulation_steps=1,
    )
    given: list[InitProcessGroupKwargs] = []

    def accelerator(kwargs_handlers, **_):
        given.extend(kwargs_handlers)
        return alone

    monkeypatch.setattr(processes, "Accelerator", accelerator)
    run = SimpleNamespace(tracker="none", output_dir="out", timeout_minutes=77)
    options: Any = (OptimisationOptions(max_steps=1), run)
    processes.new_accelerator(*options)
    return given


class Sharding:
    """An accelerator that gathers what it is told."""

    def __init__(self, weights, is_main_process: bool = True):
        self.weights, self.is_main_process = weights, is_main_process
        self.distributed_type, self.device = DistributedType.FSDP, torch.device("cpu")

    def get_state_dict(self, module):
        return self.weights

    def unwrap_model(self, module):
        return module


def sharded_heads() -> tuple[HeadsLoss, dict[str, torch.Tensor]]:
    heads = MedusaHeads(HeadsConfig(8, 20, 2, 1, "token_map", token_map_size=5), torch.arange(5))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    loss = HeadsLoss(heads, LossOptions())
    whole = {name: tensor.clone() for name, tensor in loss.state_dict().items()}
    for parameter in heads.parameters():
        parameter.data = torch.empty(0)
    return loss, whole


def test_gathered_heads_are_whole_and_only_on_the_main_process():
    loss, whole = sharded_heads()
    gathered = processes.gathered_heads(Sharding(whole), loss, loss.heads)
    for name, tensor in gathered.state_dict().items():
        assert torch.equal(tensor, whole[f"heads.{name}"])
    assert processes.gathered_heads(Sharding({}, is_main_process=False), loss, loss.heads) is None


def test_a_shard_is_never_taken_for_a_whole_tensor():
    loss, whole = sharded_heads()
    whole["heads.blocks.1.0.linear.weight"] = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"blocks.1.0.linear.weight.*torch.Size\(\[0\]\)"):
        processes.gathered_heads(Sharding(whole), loss, loss.heads)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(None, 0.0), (2.5, 2.5), (torch.tensor(1.5), 1.5)],
    ids=["none", "float", "tensor"],
)
def test_a_gradient_norm_is_a_number_however_it_is_given(number, expected):
    assert float(processes.full_scalar(number, torch.device("cpu"))) == expected


@pytest.mark.parametrize("num_batches", [1, 2, 5, 6])
def test_every_process_gets_as_many_micro_batches_and_none_gets_lost(num_batches):
    batches = [[[index]] for index in range(num_batches)]
    processes_of_two = (SimpleNamespace(process_index=index, num_processes=2) for index in (0, 1))
    shares: Any = [processes.local_shard(batches, each) for each in processes_of_two]
    assert len(shares[0]) == len(shares[1])
    assert sorted(batch for share in shares for batch in share if batch) == batches


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a card it starts as many as it is told")
@pytest.mark.parametrize(("num_processes", "refusal"), [("1", None), ("2", "starts a single process")])
def test_accelerate_launch_of_two_processes_on_a_cpu_says_that_it_starts_one(
    launch_of, monkeypatch, num_processes, refusal
):
    """What the launcher itself decides, since nothing but its environment tells; it starts nothing here."""
    launch_of(0)
    started: list[Any] = []
    monkeypatch.setattr(launch, "simple_launcher", started.append)
    words = ["--num_processes", num_processes, "program.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    _, environment = launch.prepare_simple_launcher_cmd_env(*started)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        processes.check_launch()
