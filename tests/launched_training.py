"""train/train_heads.py as the tests launch it: sent a signal at a step, told that a CPU is a device to shard
on, or with small shards of states.

accelerate turns FSDP on for types of devices only. PyTorch's FSDP2 itself runs on CPUs, so with
PRETEND_DEVICES the launch is taken for one of several devices, which are CPUs.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState

from medusa.training.run import job
from medusa.training.run.trainer import Trainer
from medusa.training.states import format as states_format
from medusa.training.states import stored as stored_states
from medusa.training.states.base import OnlineHiddenStates

PROGRAM = Path(__file__).parent.parent / "train" / "train_heads.py"

if "PRETEND_DEVICES" in os.environ:
    PartialState(backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

if "KILL_AT_STEP" in os.environ:
    do_step = Trainer._step

    def mortal(self: Trainer, *arguments: Any) -> None:
        once = os.environ.get("KILL_ONCE")
        if self.state.step == int(os.environ["KILL_AT_STEP"]) and not (once and Path(once).exists()):
            torch.distributed.is_initialized() and torch.distributed.barrier()
            if once:
                Path(once).touch()
            os.kill(os.getpid(), getattr(signal, os.environ.get("KILL_BY", "SIGKILL")))
        do_step(self, *arguments)

    Trainer._step = mortal

if "SHARD_BYTES" in os.environ:
    states_format.SHARD_BYTES = int(os.environ["SHARD_BYTES"])
    write = stored_states.CachedHiddenStates.compute

    def told(self: stored_states.CachedHiddenStates, shards: list[int], *arguments: Any) -> None:
        write(self, shards, *arguments)
        sys.stderr.write(f"rank {os.environ['RANK']} wrote {len(shards)} shards of {self.directory.name}\n")

    stored_states.CachedHiddenStates.compute = told

if "FORBID_BASE" in os.environ:
    job.live_states = None  # type: ignore[assignment]

if "SAY_LOADED" in os.environ:
    live_states = job.live_states

    def said(*arguments: Any) -> OnlineHiddenStates:
        live = live_states(*arguments)
        layers = live.base.model.layers.parameters()
        parameters = [getattr(each, "_local_tensor", each) for each in layers]
        held = sum(each.numel() for each in parameters)
        sys.stderr.write(f"rank {os.environ['RANK']} holds parameters: {held}\n")
        return live

    job.live_states = said

sys.argv[0] = str(PROGRAM)
runpy.run_path(str(PROGRAM), run_name="__main__")
