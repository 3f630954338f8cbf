"""Part 4: how fast do heads train, with what memory, and do bfloat16 and DeepSpeed learn the same?

In: a random model of 8B shape with random documents, for rates; SmolLM2 with its own answers, for losses.
Out: tokens per second, peak memory, MFU and waiting of the one; loss by step of the other, run beside run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from gpu_parts.lab import Lab, flagged
from medusa.base.causal_lm import CausalLM, vocab_size
from medusa.base.loading import load_tokenizer
from medusa.cli.program import load_base_on
from medusa.measurement.parts import Case, Part, Results, Skipped
from medusa.measurement.steps import random_base
from medusa.places import shipped_files
from medusa.tables import number, percent, print_table
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import (
    BaseOptions,
    DataOptions,
    LossOptions,
    OptimisationOptions,
    RunOptions,
)
from medusa.training.data.batching import collate
from medusa.training.data.documents import Document, Documents
from medusa.training.data.loading import TrainingData, load_data
from medusa.training.recipes.registry import new_recipe
from medusa.training.run.processes import new_accelerator
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.trainer import Trainer
from medusa.training.states.live import LiveStates

DOCUMENTS_OF_A_STEP = 8


def cases(lab: Lab) -> Iterator[Case]:
    shape = lab.scale.trained_shape

    def large() -> CausalLM:
        return random_base(shape, lab.device, torch.bfloat16).requires_grad_(False)

    def small() -> CausalLM:
        return load_base_on(lab.device, lab.options.base, "float32").requires_grad_(False).eval()

    def rates(is_stored: bool) -> Results:
        return trained_large(lab, lab.only_base(shape, large), is_stored)

    yield Case(f"{shape}, live states", lambda: rates(is_stored=False), 1.5)
    yield Case(f"{shape}, stored states", lambda: rates(is_stored=True), 1.5)
    yield Case("SmolLM2, bf16 against fp32", lambda: precisions(lab, lab.only_base("SmolLM2", small)), 1.5)
    yield Case("SmolLM2, DeepSpeed ZeRO-2", lambda: sharded(lab), 1.5)


# ------------------------------------------------------------------ runs in this process


def run_training(
    lab: Lab, base: CausalLM, data: TrainingData, configuration: TrainingConfiguration
) -> tuple[list[Results], float]:
    """The log entries of a run on a base and documents in memory, and the seconds that storing states took.

    Its directory is emptied first.
    """
    AcceleratorState._reset_state(True)  # it keeps the precision of the first run of a process
    RunDirectory(configuration.run.output_dir).begin(configuration)
    accelerator = new_accelerator(configuration.optimisation, configuration.run)
    recipe = new_recipe(configuration, base, data.training)
    trainer = Trainer(configuration, accelerator, recipe, data, lab.log)
    if lab.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(lab.device)
    began = time.monotonic()
    trainer.feed(trainer.training, "training")
    storing = time.monotonic() - began
    try:
        trainer.train()
    finally:
        trainer.close()
    return logged(trainer.run.path), storing


def short_run(directory: Path, logging_steps: int) -> RunOptions:
    """A run that leaves its log and its heads."""
    return RunOptions(
        str(directory),
        overwrite=True,
        logging_steps=max(1, logging_steps),
        replayed_documents=0,
        checkpoint_minutes=None,
    )


def logged(directory: Path, key: str = "train/loss") -> list[Results]:
    """The log entries of a run that have ``key``."""
    return [entry for entry in RunDirectory(directory).logged_metrics() if key in entry]


def learnt(entries: Sequence[Results]) -> Results:
    """The loss by step, and the speed after the first entry, which holds the warm-up."""
    return {
        "losses": {entry["step"]: entry["train/loss"] for entry in entries},
        "tokens_per_second": median(entry["tokens_per_second"] for entry in entries[1:]),
    }


# ------------------------------------------------------------------ rates at a large shape


def trained_large(lab: Lab, base: CausalLM, is_stored: bool) -> Results:
    """Heads at a large shape: tokens a second, peak memory, the share of the measured arithmetic that is used
    (MFU), and the share of the time spent on waiting for what is read. Warm-up is left out."""
    scale, name = lab.scale, "stored" if is_stored else "live"
    documents = random_documents(
        base, DOCUMENTS_OF_A_STEP * scale.trained_steps, scale.trained_tokens // DOCUMENTS_OF_A_STEP
    )
    data = TrainingData(documents, documents.subset([]), {"documents": len(documents)})
    configuration = large_configuration(lab, lab.folder / name, is_stored, scale.trained_steps)
    entries, storing = run_training(lab, base, data, configuration)
    one = TrainingData(documents.subset(range(DOCUMENTS_OF_A_STEP)), data.held_out, data.counts)
    operations = operations_of_a_step(lab, base, one, is_stored)
    shutil.rmtree(lab.folder / name)  # heads and states of random weights, gigabytes of them
    speed = median(entry["tokens_per_second"] for entry in entries[1:])
    rate = lab.rates(torch.bfloat16).operations_per_second
    per_token = operations / one.training.num_tokens
    return {
        "training": {
            "states": name,
            "tokens_per_second": speed,
            "operations_per_token": per_token,
            "mfu": per_token * speed / rate,
            "peak_gib": max(entry["peak_gib"] for entry in entries),
            "waiting_share": median(entry["waiting_share"] for entry in entries[1:]),
            "storing_seconds": storing if is_stored else None,
            "log": entries,
        }
    }


def random_documents(base: CausalLM, count: int, length: int) -> Documents:
    """Documents of random tokens, the second half of each an answer."""
    drawn = np.random.default_rng(0)
    labels = np.arange(length) >= length // 2
    tokens = drawn.integers(vocab_size(base), size=(count, length), dtype=np.int32)
    return Documents.of(Document(row, labels) for row in tokens)


def large_configuration(lab: Lab, directory: Path, is_stored: bool, num_steps: int) -> TrainingConfiguration:
    """Of ``configs/medusa1_8b.yaml``, but for heads that read their path, on documents in memory."""
    num_tokens = lab.scale.trained_tokens
    return TrainingConfiguration(
        base=BaseOptions(f"{lab.scale.trained_shape}, random"),
        data=DataOptions(
            ["random tokens"],
            max_length=num_tokens // DOCUMENTS_OF_A_STEP,
            tokens_per_batch=num_tokens,
            held_out_fraction=0.0,
        ),
        loss=LossOptions(objective="blend", block_elements=2**27),
        optimisation=OptimisationOptions(
            max_steps=num_steps, precision="bf16", cache_hidden_states=is_stored, cache_dtype="bfloat16"
        ),
        run=short_run(directory, num_steps // 3),
    )


def operations_of_a_step(lab: Lab, base: CausalLM, one: TrainingData, is_stored: bool) -> float:
    """What a step on all documents of ``one`` computes, counted; without the base's pass if ``is_stored``."""
    directory, documents = lab.folder / "counted", one.training
    with FlopCounterMode(display=False) as counter:
        run_training(lab, base, one, large_configuration(lab, directory, False, 1))
    operations = counter.get_total_flops()
    if is_stored:
        with FlopCounterMode(display=False) as of_base:
            LiveStates(base).of(collate(documents, [[index] for index in range(len(documents))]))
        operations -= of_base.get_total_flops()
    shutil.rmtree(directory)
    return float(operations)


# ------------------------------------------------------------------ losses on SmolLM2


def precisions(lab: Lab, base: CausalLM) -> Results:
    """The same run with products in float32 and in bfloat16: their losses, step by step and held out."""
    tokenizer, found = load_tokenizer(lab.options.base), {}
    for precision in ("fp32", "bf16"):
        configuration = small_configuration(lab, precision)
        data = load_data(configuration.data, tokenizer)
        entries, _ = run_training(lab, base, data, configuration)
        last = logged(lab.folder / precision, "held_out/loss")[-1]
        held_out = {key: value for key, value in last.items() if key.startswith("held_out/")}
        found[precision] = {**learnt(entries), "held_out": held_out}
    return {"precisions": found}


def small_configuration(lab: Lab, precision: Literal["fp32", "bf16"]) -> TrainingConfiguration:
    """A short run on SmolLM2's own answers."""
    scale = lab.scale
    return TrainingConfiguration(
        base=BaseOptions(lab.options.base),
        data=DataOptions([str(lab.answers)], tokens_per_batch=scale.compared_batch, held_out_fraction=0.2),
        loss=LossOptions(objective="kl"),
        optimisation=OptimisationOptions(max_steps=scale.compared_steps, precision=precision, warmup_steps=5),
        run=short_run(lab.folder / precision, scale.compared_steps // 12),
    )


def sharded(lab: Lab) -> Results:
    """The same run by ``accelerate launch`` under DeepSpeed ZeRO-2, and without: their losses.

    Raises:
        Skipped: deepspeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise Skipped("deepspeed is not installed: pip install deepspeed")
    found, config = {}, shipped_files() / "accelerate_zero2.yaml"
    zero2 = ["accelerate.commands.launch", "--num_processes=1", f"--config_file={config}", "-m", "medusa"]
    for name, launch in (("one process", ["medusa"]), ("ZeRO-2", zero2)):
        directory = lab.folder / name.replace(" ", "-")
        words = flagged(
            "train",
            base=lab.options.base,
            data=lab.answers,
            output_dir=directory,
            overwrite="true",
            max_steps=lab.scale.compared_steps,
            logging_steps=max(1, lab.scale.compared_steps // 12),
            tokens_per_batch=lab.scale.compared_batch,
            replayed_documents=0,
            precision="bf16",
            objective="kl",
        )
        environment = os.environ | ({"DS_ACCELERATOR": "cpu"} if lab.device.type == "cpu" else {})
        line, seconds = [sys.executable, "-m", *launch, *words], max(30.0, 60 * lab.minutes_left)
        done = subprocess.run(line, env=environment, timeout=seconds)
        if done.returncode != 0:
            raise RuntimeError(f"{name}: medusa train ended with status {done.returncode}; see the log")
        entries = logged(directory)
        found[name] = {**learnt(entries), "peak_gib": max(entry["peak_gib"] for entry in entries)}
    return {"sharded": found}


# ------------------------------------------------------------------ tables


def tables(measured: Mapping[str, Results], console: Console) -> None:
    rows = [
        [name, f"{found['tokens_per_second']:.0f}", percent(found["mfu"]), f"{found['peak_gib']:.1f}",
         percent(found["waiting_share"]), number(found["storing_seconds"], ".0f")]
        for name, each in measured.items()
        if (found := each.get("training"))
    ]  # fmt: skip
    if rows:
        headers = ["heads at", "tokens/s", "MFU", "peak GiB", "waiting", "storing, s"]
        note = "MFU: of the rate of a large bfloat16 product, measured on this device."
        print_table(console, "Training heads", headers, rows, note=note)
    for key in ("precisions", "sharded"):
        for each in measured.values():
            if key in each:
                print_losses(each[key], console)


def print_losses(runs: Mapping[str, Results], console: Console) -> None:
    """Loss by step, the runs beside each other."""
    steps = list(next(iter(runs.values()))["losses"])
    rows = [[str(step), *(number(run["losses"].get(step), ".4f") for run in runs.values())] for step in steps]
    rows.append(["tokens/s", *(f"{run['tokens_per_second']:.0f}" for run in runs.values())])
    print_table(console, "Loss by step", ["step", *runs], rows)


PART = Part(4, "training", 9.5, cases, tables)
