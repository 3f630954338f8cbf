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
from rich.console import Console

import medusa
from medusa.base.causal_lm import CausalLM
from medusa.cli.program import exit_status, log_console
from medusa.heads.adapter import peft_library
from medusa.heads.eagle import Heads
from medusa.heads.fingerprint import BaseFingerprint
from medusa.heads.medusa_heads import MedusaHeads
from medusa.plots import check_matplotlib
from medusa.training.config.configuration import TrainingConfiguration, read_configuration
from medusa.training.data import loading
from medusa.training.run import metrics, preparation, processes, result
from medusa.training.run.curve import draw_training
from medusa.training.run.joint_trainer import JointTrainer, base_report
from medusa.training.run.lora import TrainedAdapter
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.trainer import Trainer


def main() -> None:
    configuration = read_configuration(sys.argv[1:], __doc__ or "")
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

    tokenizer = preparation.load_tokenizer(configuration.base)
    data = loading.load_data(configuration.data, tokenizer)
    console.print(", ".join(f"{count:,} {name}" for name, count in data.counts.items()), soft_wrap=True)
    base = preparation.load_base(configuration.base, accelerator.device)
    heads = preparation.new_heads(configuration, base, data.training)
    num_parameters = sum(each.numel() for each in heads.parameters())
    console.print(
        f"{configuration.heads.head_kind} heads for {heads.num_heads} tokens ahead, "
        f"{num_parameters:,} parameters, on {configuration.base.base} in {base.dtype}, "
        f"{configuration.optimisation.precision} products, "
        f"{accelerator.num_processes} x {accelerator.device.type}",
        soft_wrap=True,
    )
    if heads.token_map is not None:
        coverage = preparation.map_coverage(heads, data.training)
        console.print(
            f"the {len(heads.token_map):,} tokens of the map are {coverage:.1%} of the training labels"
        )

    trainer = new_trainer(configuration, accelerator, base, heads, data, console)
    try:
        measured = trainer.train()
        heads = trainer.gathered_heads()
        if heads is not None:
            tree = result.calibrated_tree(base, heads, data.held_out, configuration.run.tree_nodes)
            record = result.provenance(configuration, data.counts, trainer.state, measured)
            adapter = trainer.adapter.taken_out() if isinstance(trainer, JointTrainer) else None
            result.save_result(
                run.heads, heads, configuration.base.base, tree, record, adapter, BaseFingerprint.of(base)
            )
            console.print(metrics.table("held_out", measured))
            if adapter is not None:
                console.print(base_report(measured), soft_wrap=True)
            what = "heads" if adapter is None else "heads and adapter"
            console.print(f"{what} written to {run.heads}", soft_wrap=True)
            if draw_training(run.logged_metrics(), run.picture):
                console.print(f"picture: {run.picture}", soft_wrap=True)
    finally:
        trainer.close()


def new_trainer(
    configuration: TrainingConfiguration,
    accelerator: Accelerator,
    base: CausalLM,
    heads: Heads,
    data: loading.TrainingData,
    console: Console,
) -> Trainer:
    """The trainer that the configuration asks for; for joint training the base gets its adapter here."""
    if not isinstance(heads, MedusaHeads) or not configuration.joint.joint:
        return Trainer(configuration, accelerator, base, heads, data, console)
    adapter = TrainedAdapter(base, configuration.joint, configuration.data.seed)
    options = configuration.joint
    console.print(
        f"joint training: a LoRA adapter of {adapter.num_parameters:,} parameters, heads alone for "
        f"{options.joint_warmup_fraction:.0%} of the run, heads_weight {options.lambda_0:g}",
        soft_wrap=True,
    )
    return JointTrainer(configuration, accelerator, base, heads, data, console, adapter)


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
    tokenizer = preparation.load_tokenizer(configuration.base)
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
