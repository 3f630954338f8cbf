"""train/train_heads.py as the tests launch it: killed at a step, or told that a CPU is a device to shard on.

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

sys.argv[0] = str(PROGRAM)
runpy.run_path(str(PROGRAM), run_name="__main__")
