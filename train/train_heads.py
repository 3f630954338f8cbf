"""Train heads on a frozen base model: Medusa heads, alone or with a LoRA adapter, or an EAGLE-style one.

    accelerate launch train/train_heads.py --config configs/smollm2_demo.yaml
    accelerate launch train/train_heads.py --config configs/smollm2.yaml --learning_rate 5e-4
    accelerate launch train/train_heads.py --config configs/smollm2_eagle.yaml
    accelerate launch train/train_heads.py --config configs/smollm2_joint.yaml
    accelerate launch train/train_heads.py --config configs/smollm2.yaml --resume auto
    python train/train_heads.py --config configs/smollm2_demo.yaml --inspect

Every key below can stand in the YAML file and on the command line, which overrides the file; `--key none`
takes a key of the file back. --inspect shows which tokens would be trained on, and stops. The heads end up in
output_dir/heads, and `medusa chat --heads output_dir/heads` chats with them. With --resume auto one command
starts a run and goes on with it. A run that SIGTERM stops leaves a checkpoint and ends with status 75.
"""

from __future__ import annotations

import logging
import sys

import transformers

from medusa.cli.options import parse
from medusa.cli.reporting import exit_status
from medusa.training.config.configuration import REMOVED, TrainingConfiguration, launched_precision
from medusa.training.run.job import train


def main() -> None:
    train(configuration_of(sys.argv[1:]))


def configuration_of(arguments: list[str]) -> TrainingConfiguration:
    presets = {"precision": launched_precision()}
    return parse(TrainingConfiguration, arguments, description=__doc__, presets=presets, removed=REMOVED)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    sys.exit(exit_status(main, show_traceback=False))
