"""``medusa train``: a training run, from its configuration to the heads it leaves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from transformers.utils.logging import disable_progress_bar

from medusa.base.loading import load_tokenizer
from medusa.cli.options import answer_command, command, to_argv
from medusa.hardware import use_threads
from medusa.training.config import TrainingConfiguration, launched_precision
from medusa.training.run import job


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingConfiguration):
    """Train heads on a frozen base model: Medusa heads, with or without a LoRA adapter, or an EAGLE-3 head.

        medusa train --config smollm2_demo
        medusa train --config smollm2 --learning_rate 5e-4
        medusa train --config smollm2_eagle3
        medusa train --config smollm2_joint
        medusa train --config smollm2 --resume auto
        medusa train --config smollm2_demo --inspect

    Several processes, here one for each of two GPUs:

        accelerate launch --num_processes 2 -m medusa train --config smollm2

    Every key below can be given in the YAML file and on the command line, which overrides the file; `--key
    none` takes a key of the file back. --inspect shows the tokens that would be trained on, and stops. The
    heads end up in output_dir/heads, and `medusa chat --heads output_dir/heads` chats with them. With
    --resume auto one command starts a run and goes on with it. A run that SIGTERM stops leaves a checkpoint
    and ends with status 75.
    """

    PARSING: ClassVar[Mapping[str, Any]] = {
        "presets": lambda: {"precision": launched_precision()},
    }


def train(configuration: TrainOptions) -> list[str]:
    """Train, and leave the heads with their tree, their provenance and a picture of the run."""
    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()
    use_threads()
    return next_steps(configuration) if job.train(configuration) else []


def next_steps(configuration: TrainOptions) -> list[str]:
    """The run itself where it was only looked at or stopped; else what to do with its heads."""
    run = configuration.run
    if run.inspect or run.stop_after is not None:
        resume = run.resume if run.inspect else "auto"
        optimisation = configuration.optimisation
        if not optimisation.has_limit:  # nothing asked how long to train before the data was looked at
            optimisation = replace(optimisation, num_epochs=1)
        go_on = replace(run, inspect=False, stop_after=None, resume=resume)
        again = replace(configuration, optimisation=optimisation, run=go_on)
        return [command("train", *to_argv(again))]
    heads = Path(run.output_dir, "heads")
    base = configuration.base.base
    tokenizer = load_tokenizer(configuration.base.tokenizer or base)
    steps = [
        command("tune", "--base", base, "--heads", heads),
        answer_command(tokenizer, "--base", base, "--heads", heads),
    ]
    export_format = configuration.heads_type.exported_as
    if export_format is not None:
        steps.append(command("export", heads, "--to", export_format, "--output", heads.with_name("export")))
    return steps
