"""train/train_heads.py as the tests launch it: killed at a step, told that a CPU is a device to shard on, or
with small shards of states.

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

from accelerate import DistributedType, PartialState

from medusa.training.run.trainer import Trainer
from medusa.training.states import format as states_format
from medusa.training.states import stored_states

PROGRAM = Path(__file__).parent.parent / "train" / "train_heads.py"

if "PRETEND_DEVICES" in os.environ:
    PartialState(backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

if "KILL_AT_STEP" in os.environ:
    do_step = Trainer._step

    def mortal(self: Trainer, *arguments: Any) -> None:
        if self.state.step == int(os.environ["KILL_AT_STEP"]):
            os.kill(os.getpid(), signal.SIGKILL)
        do_step(self, *arguments)

    Trainer._step = mortal

if "SHARD_BYTES" in os.environ:
    states_format.SHARD_BYTES = int(os.environ["SHARD_BYTES"])
    write = stored_states.StateFile.compute

    def told(self: stored_states.StateFile, shards: list[int], *arguments: Any) -> None:
        write(self, shards, *arguments)
        sys.stderr.write(f"rank {os.environ['RANK']} wrote {len(shards)} shards of {self.directory.name}\n")

    stored_states.StateFile.compute = told

sys.argv[0] = str(PROGRAM)
runpy.run_path(str(PROGRAM), run_name="__main__")
