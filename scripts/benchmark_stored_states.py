"""How much faster do heads train from stored hidden states than with the base in the loop?

Takes the flags and files of `train/train_heads.py`. Micro-batches of the run's first epoch are trained on in
both ways in turn, so that a machine that slows down does so for both, each way with its own copy of the same
new heads: the losses must agree. Storing the states is timed too. Prints a table, and ends with one line of
JSON. --max_steps is how many micro-batches count, after one to warm up; without it 8.

    python scripts/benchmark_stored_states.py --config configs/smollm2_shipped.yaml --data FILE \\
        --output_dir runs/stored --max_steps 12
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, output_embedding
from medusa.cli.program import exit_status, log_console
from medusa.heads.medusa_heads import MedusaHeads
from medusa.training.config.configuration import TrainingConfiguration, read_configuration
from medusa.training.data.batching import MicroBatch, plan_epoch
from medusa.training.data.documents import Documents
from medusa.training.losses.loss import HeadsLoss
from medusa.training.losses.objectives import needs_teacher
from medusa.training.losses.teacher import teacher_of
from medusa.training.run import preparation
from medusa.training.run.progress import ProgressLine
from medusa.training.run.trainer import new_optimiser
from medusa.training.states.hidden_source import HiddenSource, LiveStates
from medusa.training.states.stored_states import StoredStates, states_size, store_states

NUM_STEPS = 8


def main() -> None:
    configuration = read_configuration(sys.argv[1:], __doc__ or "")
    base = preparation.load_base(configuration.base, torch.device("cpu"))
    tokenizer = preparation.load_tokenizer(configuration.base)
    data = preparation.load_data(configuration.data, tokenizer)
    heads = preparation.new_heads(configuration, base, data.training)
    if not isinstance(heads, MedusaHeads):
        raise ValueError(f"head_kind must be medusa here, got {configuration.heads.head_kind!r}")
    documents, batches = first_batches(configuration, data.training)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(configuration, base, heads, documents, batches, Path(folder))
    print_table(report, Console(highlight=False))
    sys.stdout.write(json.dumps(report) + "\n")


def first_batches(
    configuration: TrainingConfiguration, documents: Documents
) -> tuple[Documents, list[MicroBatch]]:
    """The documents of the first micro-batches of the run, and those batches of them."""
    options, seed = configuration.batch_options(), configuration.data.seed
    if configuration.data.train_on == "everything":
        documents = documents.labelled_everywhere()
    count = 1 + (configuration.optimisation.max_steps or NUM_STEPS)
    plan = plan_epoch(documents.lengths, options, seed, epoch=0)[:count]
    if len(plan) < count:
        raise ValueError(
            f"max_steps must be below the {len(plan)} micro-batches of the data, got {count - 1}"
        )
    chosen = sorted(index for batch in plan for index in documents_of(batch))
    place = {index: number for number, index in enumerate(chosen)}
    return documents.subset(chosen), [[[place[index] for index in row] for row in batch] for batch in plan]


class Run:
    """Training one copy of the heads from one source, timed."""

    def __init__(self, configuration: TrainingConfiguration, heads: MedusaHeads, source: HiddenSource):
        self.configuration, self.heads, self.source = configuration, copy.deepcopy(heads), source
        self.loss = HeadsLoss(self.heads, configuration.loss.loss_options())
        self.optimiser = new_optimiser([list(self.heads.parameters())], configuration.optimisation)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, batch: MicroBatch, output_embedding: nn.Module, num_scored: Tensor, teacher: Any) -> None:
        """One optimisation step on ``batch``."""
        began = time.perf_counter()
        with products(self.configuration):
            loss, _ = self.loss(*self.source(batch), output_embedding, num_scored, teacher)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(float(loss.detach()))


def measure(
    configuration: TrainingConfiguration,
    base: CausalLM,
    heads: MedusaHeads,
    documents: Documents,
    batches: Sequence[MicroBatch],
    folder: Path,
) -> dict[str, Any]:
    """The JSON object of this program."""
    columns, num_heads, layers = preparation.column_of(heads), heads.num_heads, heads.reads_layers
    storing = stored_in(folder, configuration, base, documents, heads)
    live = Run(configuration, heads, LiveStates(base, documents, num_heads, columns, layers))
    stored = Run(configuration, heads, StoredStates(folder, documents, num_heads, columns, base.device))
    is_soft = needs_teacher(configuration.loss.objective)
    teacher = teacher_of(base, heads.token_map) if is_soft else None
    scored = documents.num_scored(num_heads, None if columns is None else columns.numpy() >= 0)  # (n, K)
    for number, batch in enumerate(batches):
        num_scored = torch.from_numpy(scored[documents_of(batch)].sum(0))
        for run in (live, stored) if number % 2 else (stored, live):
            run.step(batch, output_embedding(base), num_scored, teacher)
    num_tokens = sum(int(documents.lengths[documents_of(batch)].sum()) for batch in batches[1:])
    speeds = {name: num_tokens / sum(run.seconds[1:]) for name, run in (("live", live), ("stored", stored))}
    gaps = [abs(a - b) / abs(a) for a, b in zip(live.losses, stored.losses, strict=True)]
    dtype = configuration.optimisation.cache_dtype
    return {
        "tokens_per_second": {**speeds, "storing": documents.num_tokens / storing},
        "speedup": speeds["stored"] / speeds["live"],
        "largest_relative_loss_gap": max(gaps),
        "last_loss": stored.losses[-1],
        "bytes_per_token": states_size(base, documents, num_heads, dtype, layers) / documents.num_tokens,
        "cache_dtype": dtype,
        "precision": configuration.optimisation.precision,
        "num_steps": len(batches) - 1,
        "num_tokens": num_tokens,
        "num_threads": torch.get_num_threads(),
    }


def stored_in(
    folder: Path,
    configuration: TrainingConfiguration,
    base: CausalLM,
    documents: Documents,
    heads: MedusaHeads,
) -> float:
    """Seconds that storing the states of ``documents`` in ``folder`` for ``heads`` takes."""
    dtype, batches = configuration.optimisation.cache_dtype, configuration.batch_options()
    num_heads, layers = heads.num_heads, heads.reads_layers
    began = time.perf_counter()
    with ProgressLine("hidden states", log_console()) as line, products(configuration):
        store_states(folder, base, documents, num_heads, dtype, batches, line, layers)
    return time.perf_counter() - began


def products(configuration: TrainingConfiguration) -> torch.autocast:
    """Around what the run's precision has a say in: matrix products, and no optimiser."""
    is_bfloat16 = configuration.optimisation.precision == "bf16"
    return torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16)


def documents_of(batch: MicroBatch) -> list[int]:
    """The documents in all rows of ``batch``."""
    return [index for row in batch for index in row]


def print_table(report: dict[str, Any], console: Console) -> None:
    """Tokens a second in either way."""
    table = Table(
        title=f"Training on {report['num_tokens']} tokens, {report['num_threads']} threads",
        title_justify="left",
        caption=f"losses differ by {report['largest_relative_loss_gap']:.1e} at most (relative); the file "
        f"holds {report['bytes_per_token']:.0f} bytes a token in {report['cache_dtype']}; products in "
        f"{report['precision']}",
        caption_justify="left",
    )
    table.add_column("hidden states")
    for name in ("tokens per second", "against live"):
        table.add_column(name, justify="right")
    speeds = report["tokens_per_second"]
    names = {"live": "from the base, every epoch", "stored": "stored", "storing": "storing them, once"}
    for key, name in names.items():
        table.add_row(name, f"{speeds[key]:.0f}", f"{speeds[key] / speeds['live']:.2f}x")
    console.print(table)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    sys.exit(exit_status(main, show_traceback=False))
