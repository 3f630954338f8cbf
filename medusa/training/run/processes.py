"""How the processes of a launch share one run: plain, DDP, DeepSpeed's ZeRO, FSDP2.

Only the heads and their optimiser are ever sharded. The frozen base is not wrapped, so every process holds
all of it.

A head's loss reads all parameters in one autograd function, past the forward passes of the modules that own
them. So all sharded parameters of the loss must be gathered when its forward pass begins: FSDP2 does this
when nothing below the root is wrapped, ZeRO-3 when the loss is a leaf module. Parameters of a single head are
not given to FSDP2: the loss shards and gathers them itself, head by head.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from transformers.integrations import unset_hf_deepspeed_config

from medusa.heads.protocol import Heads
from medusa.training.config import OptimisationOptions, RunOptions
from medusa.training.data.batching import MicroBatch

T = TypeVar("T")
STOPPED = 75
"""Exit status of a run that SIGTERM has stopped and that --resume continues: EX_TEMPFAIL of sysexits.h."""
_ON_CPU = 'accelerate launch --config_file "$(medusa configs accelerate_ddp)" --num_processes N'

_RESTARTED = "medusa-restarted"
"""Scheme of the address at which processes meet that a launcher has restarted."""


def new_accelerator(optimisation: OptimisationOptions, run: RunOptions) -> Accelerator:
    """An accelerator for the processes that were launched, with the run's precision; no tracker yet.

    Raises:
        ValueError: the launch does not fit this machine.
    """
    check_launch()
    has_device = torch.accelerator.is_available()
    is_deepspeed = _is_set("ACCELERATE_USE_DEEPSPEED")
    accelerator = Accelerator(
        mixed_precision={"fp32": "no", "bf16": "bf16"}[optimisation.precision],
        cpu=_num_launched() > 1 and not has_device and not is_deepspeed,
        log_with=None if run.tracker == "none" else run.tracker,
        project_dir=run.output_dir,
        # Left to itself accelerate counts one process where DeepSpeed runs on CPUs.
        kwargs_handlers=[
            InitProcessGroupKwargs(
                backend="gloo" if is_deepspeed and not has_device else None,
                init_method=f"{_RESTARTED}://" if _num_restarts() else None,
                timeout=timedelta(minutes=run.timeout_minutes),
            )
        ],
    )
    configured_steps = optimisation.gradient_accumulation_steps
    launched_steps = accelerator.gradient_accumulation_steps
    if launched_steps not in (1, configured_steps):
        raise ValueError(
            f"gradient_accumulation_steps must be the same everywhere, got {configured_steps} in the "
            f"configuration and {launched_steps} in the launch (ACCELERATE_GRADIENT_ACCUMULATION_STEPS); "
            f"pass --gradient_accumulation_steps {launched_steps} to medusa train, or leave it out of the "
            "launch"
        )
    accelerator.gradient_accumulation_steps = 1  # a step's sum is weighed here; it would divide it again
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # accelerate tells transformers, which under ZeRO-3 would load the frozen base in shards; its weights
        # are read outside of its forward pass too, and without gradients there is little to shard.
        unset_hf_deepspeed_config()
    if _is_set("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            "the launch asks for FSDP, which accelerate leaves out on "
            f"{accelerator.device.type}; launch with the configuration accelerate_ddp there"
        )
    if accelerator.num_processes != _num_launched():
        raise ValueError(
            f"{_num_launched()} processes were launched and {accelerator.num_processes} found each other; on "
            f"CPUs launch with: {_ON_CPU}"
        )
    return accelerator


def on_main_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """The result of ``work`` on the main process, broadcast to all; its exception ends all of them.

    The error itself is raised on the main process; the others end with status 1 and leave the word to it.
    """
    outcome: Any = None
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome = work()
        except (ValueError, OSError, ImportError) as error:
            failure = error
    if accelerator.num_processes > 1:
        outcome, has_failed = broadcast_object_list([outcome, failure is not None])
        if has_failed and not accelerator.is_main_process:
            raise SystemExit(1)
    if failure is not None:
        raise failure
    return outcome


class HostGroup:
    """All processes of the launch, exchanging numbers between the hosts: no device waits for it."""

    def __init__(self, accelerator: Accelerator, timeout_minutes: float):
        self._group = None
        if accelerator.num_processes > 1:
            timeout = timedelta(minutes=timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def maximum(self, *values: float) -> list[float]:
        """The largest of each number over all processes; all must call it."""
        if self._group is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=self._group)
        return numbers.tolist()


class StopSignal:
    """Whether SIGTERM has come, for a loop that leaves a checkpoint first; a context manager.

    Outside of :meth:`deferred` there is nothing to save, and the signal ends the process at once.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._is_deferred = False
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block the signal is only noted."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True
        if not self._is_deferred:
            raise SystemExit(STOPPED)


def check_launch() -> None:
    """Raise ValueError when the launch asked for more processes than there can be."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_devices = torch.accelerator.device_count()
    if not _is_set("ACCELERATE_USE_CPU") and 0 < num_devices < num_local:
        raise ValueError(
            f"num_processes must not be above the number of devices: the launch starts {num_local} processes "
            f"on a machine with {num_devices}; pass --num_processes {num_devices} to accelerate launch"
        )
    # Without several devices, or with --cpu, and without mpirun accelerate launch starts one process, however
    # many were asked for, and the address that they would have met at is all that says so.
    if "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "num_processes must be 1 where accelerate launch starts a single process whatever it is told, as "
            f"it does on a CPU; leave --num_processes out, or for N processes launch with: {_ON_CPU}"
        )


def shard_heads(accelerator: Accelerator, shard: Callable[[DeviceMesh], list[nn.Parameter]]) -> None:
    """Under FSDP2 let ``shard`` shard the parameters that FSDP2 then ignores; call it before there is an
    optimiser.

    FSDP2 then does not change types either: ignored parameters would have another type.
    """
    if accelerator.is_fsdp2:
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        accelerator.state.fsdp_plugin.ignored_modules = [nn.ParameterList(shard(mesh))]


def wrap(
    accelerator: Accelerator, loss: nn.Module, optimiser: torch.optim.Optimizer, max_grad_norm: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The loss and the optimiser, wrapped as the launch requires; the wrapped loss is called like the
    loss."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return accelerator.prepare(loss, optimiser)
    plugin = accelerator.state.deepspeed_plugin
    # Micro-batches are planned, summed and weighed here; DeepSpeed is to see one at a time.
    plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    plugin.deepspeed_config["gradient_clipping"] = max_grad_norm
    if plugin.zero_stage < 3:
        return accelerator.prepare(loss, optimiser)
    from deepspeed.utils import set_z3_leaf_modules

    anchored = _Anchored(loss)
    set_z3_leaf_modules(anchored, [_Anchored])
    module, optimiser = accelerator.prepare(anchored, optimiser)
    module.register_forward_pre_hook(_with_anchor)
    return module, optimiser


class _Anchored(nn.Module):
    """Adds a dummy input that requires grad: otherwise ZeRO-3 releases a leaf module's parameters before
    backward."""

    def __init__(self, loss: nn.Module):
        super().__init__()
        self.loss = loss

    def forward(self, anchor: Tensor, *arguments: Any) -> tuple[Tensor, Any]:
        loss, sums = self.loss(*arguments)
        return loss + anchor, sums


def _with_anchor(module: nn.Module, arguments: tuple) -> tuple:
    device = next(module.parameters()).device
    return (torch.zeros((), device=device, requires_grad=True), *arguments)


def local_shard(batches: list[MicroBatch], accelerator: Accelerator) -> list[MicroBatch]:
    """This process's share: the same number for each, some of them empty, since all take part in every
    forward pass."""
    share = batches[accelerator.process_index :: accelerator.num_processes]
    most = -(-len(batches) // accelerator.num_processes)
    return share + [[] for _ in range(most - len(share))]


def micro_batch(accelerator: Accelerator, module: nn.Module, is_last: bool) -> AbstractContextManager:
    """Around forward and backward of one micro-batch: gradients travel in the last of a step only."""
    accelerator.sync_gradients = is_last
    return nullcontext() if is_last else accelerator.no_sync(module)


def full_scalar(number: Tensor | float | None, device: torch.device) -> Tensor:
    """A gradient norm as a scalar (), however the wrapper gives it."""
    if not isinstance(number, Tensor):
        return torch.tensor(number or 0.0, device=device)
    return number.full_tensor() if hasattr(number, "full_tensor") else number


def gathered_heads(accelerator: Accelerator, module: nn.Module, heads: Heads) -> Heads | None:
    """The heads with all of their weights, on the main process; None on the others. All must call it.

    Raises:
        RuntimeError: a gathered tensor has not the shape that the heads' configuration asks for.
    """
    sharding = (DistributedType.DEEPSPEED, DistributedType.FSDP)
    if accelerator.distributed_type not in sharding:
        return heads if accelerator.is_main_process else None
    weights = accelerator.get_state_dict(module)
    if not accelerator.is_main_process:
        return None
    names = accelerator.unwrap_model(module).named_modules()
    (prefix,) = (f"{name}." for name, each in names if each is heads)
    whole = type(heads)(heads.config)
    whole.load_state_dict(
        {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
    )
    return whole.to(accelerator.device)


def _num_restarts() -> int:
    """How often the launcher has started these processes again, where it keeps the store they meet in."""
    keeps_store = _is_set("TORCHELASTIC_USE_AGENT_STORE")
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if keeps_store else 0


def _apart_from_earlier(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """A prefix of the launcher's store for this restart: it still holds the addresses of earlier processes,
    and PyTorch would connect to them (pytorch/pytorch issue 135712)."""
    for store, rank, world_size in rendezvous(url.replace(_RESTARTED, "env", 1), **options):
        yield PrefixStore(f"restart_{_num_restarts()}", store), rank, world_size


register_rendezvous_handler(_RESTARTED, _apart_from_earlier)


def _num_launched() -> int:
    """Processes of the launch, on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")
