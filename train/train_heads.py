"""Train heads on a frozen base model: Medusa heads, alone or with a LoRA adapter, or an EAGLE-style one.

    accelerate launch train/train_heads.py --config configs/smollm2_demo.yaml
    accelerate launch train/train_heads.py --config configs/smollm2.yaml --learning_rate 5e-4
    accelerate launch train/train_heads.py --config configs/smollm2_eagle.yaml
    accelerate launch train/train_heads.py --config configs/smollm2_joint.yaml
    accelerate launch train/train_heads.py --config configs/smollm2.yaml --resume
    python train/train_heads.py --config configs/smollm2_demo.yaml --inspect

Every key below can stand in the YAML file and on the command line, which overrides the file; `--key none`
takes a key of the file back. --inspect shows which tokens would be trained on, and stops. The heads end up in
output_dir/heads, and `medusa chat --heads output_dir/heads` chats with them.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import transformers
from accelerate import Accelerator

import medusa
from medusa.cli.options import parse
from medusa.cli.reporting import exit_status
from medusa.heads.adapter import peft_library
from medusa.heads.fingerprint import BaseFingerprint
from medusa.plots import check_matplotlib
from medusa.progress import log_console
from medusa.training.config.configuration import REMOVED, TrainingConfiguration, launched_precision
from medusa.training.data import loading
from medusa.training.recipes.registry import new_recipe
from medusa.training.run import metrics, processes, result
from medusa.training.run.base import load_base, load_tokenizer
from medusa.training.run.curve import draw_training
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.trainer import Trainer


def main() -> None:
    configuration = configuration_of(sys.argv[1:])
    run = RunDirectory(configuration.run.output_dir)
    if configuration.run.inspect:
        return inspect(configuration)
    run.check(configuration)
    check_matplotlib()
    if configuration.joint.joint:
        peft_library()
    accelerator = started(configuration)
    console = log_console()
    console.quiet = not accelerator.is_main_process
    console.print(f"medusa {medusa.__version__} from {Path(medusa.__file__).parent}", soft_wrap=True)

    data = loading.load_data(configuration.data, load_tokenizer(configuration.base))
    console.print(", ".join(f"{count:,} {name}" for name, count in data.counts.items()), soft_wrap=True)
    base = load_base(configuration.base, accelerator.device)
    recipe = new_recipe(configuration, base, data.training)
    console.print(recipe.describe(data.training), soft_wrap=True)
    console.print(
        f"on {configuration.base.base} in {base.dtype}, {configuration.optimisation.precision} products, "
        f"{accelerator.num_processes} x {accelerator.device.type}",
        soft_wrap=True,
    )
    trainer = Trainer(configuration, accelerator, recipe, data, console)
    try:
        measured = trainer.train()
        heads = trainer.gathered_heads()
        if heads is not None:
            tree = result.calibrated_tree(base, heads, data.held_out, configuration.run.tree_nodes)
            record = result.provenance(configuration, data.counts, trainer.state, measured)
            made_for = (recipe.adapter(), BaseFingerprint.of(base))
            result.save_result(run.heads, heads, configuration.base.base, tree, record, *made_for)
            console.print(metrics.table("held_out", measured))
            if (report := recipe.closing_report(measured)) is not None:
                console.print(report, soft_wrap=True)
            console.print(f"{recipe.result} written to {run.heads}", soft_wrap=True)
            if draw_training(run.logged_metrics(), run.picture):
                console.print(f"picture: {run.picture}", soft_wrap=True)
    finally:
        trainer.close()


def configuration_of(arguments: list[str]) -> TrainingConfiguration:
    presets = {"precision": launched_precision()}
    return parse(TrainingConfiguration, arguments, description=__doc__, presets=presets, removed=REMOVED)


def started(configuration: TrainingConfiguration) -> Accelerator:
    """An accelerator with the run's precision and its tracker started."""
    options = configuration.run
    accelerator = processes.new_accelerator(configuration.optimisation, options)
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    values = {key: value if value is None else str(value) for key, value in configuration.as_dict().items()}
    accelerator.init_trackers(options.project, values, {"wandb": {"dir": options.output_dir}})
    return accelerator


def inspect(configuration: TrainingConfiguration) -> None:
    """Show what became of the data, and some documents with the tokens trained on in colour."""
    tokenizer = load_tokenizer(configuration.base)
    data = loading.load_data(configuration.data, tokenizer)
    console = log_console()
    for document in map(data.training.__getitem__, data.training.spread(3)):
        console.rule(f"{len(document.tokens)} tokens")
        console.print(loading.coloured(document, tokenizer))
    console.rule()
    console.print(loading.legend())
    console.print(", ".join(f"{count:,} {name}" for name, count in data.counts.items()))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    sys.exit(exit_status(main, show_traceback=False))
