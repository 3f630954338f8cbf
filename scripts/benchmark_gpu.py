"""What a decode step costs on a graphics card: at 1 node and at 64, however it is run, against its limits.

Takes SmolLM2 and randomly initialised Llama models of known shapes (the weights do not matter to time), with
random heads, and times decode steps as `medusa tune` does: sizes interleaved, medians over rounds,
the first step and the prefill left out, the device waited for. `--step` says how steps are run: by the
general loop, with static shapes, compiled, captured as a CUDA graph; set-up is what the first answer spends
on compiling or capturing. overhead is the step time at N nodes over the one at 1 node. f_hw is the least time
the device needs for the step over the time it took; bandwidth and arithmetic are measured first, by a sum
over a large buffer and a large matrix product. What cannot run is listed with the reason. Prints a table and
ends with a JSON report. Run it with nothing else running.

    python scripts/benchmark_gpu.py
    python scripts/benchmark_gpu.py --shapes llama-8b --context-lengths 128,4096 --batch-sizes 1,8
    python scripts/benchmark_gpu.py --step general static compiled captured --shapes smollm2
    python scripts/benchmark_gpu.py --device cpu --dtype float32 --shapes tiny
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import medusa
from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.base.loading import load_base
from medusa.choices import Dtype, Engine, StepKind
from medusa.cli.options import GrowingInts, ReportOptions, check_at_least, parse
from medusa.cli.reporting import exit_status, report_json, table_console
from medusa.decoding.static_loop import DEFAULT_HOST_SYNC_INTERVAL
from medusa.decoding.statistics import DecodingStatistics
from medusa.hardware import DeviceRates, device_name, measured_rates
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.measurement.bounds import step_floor_seconds
from medusa.measurement.tuning import measure_step_seconds
from medusa.model import MedusaModel
from medusa.places import EMBEDDED_BASE
from medusa.progress import log_console
from medusa.tables import print_table
from medusa.trees.candidate_tree import CandidateTree, best_tree, independent_path_values

NUM_HEADS = 4
WIDTH = 10
"""Guesses of a head that the tree may hold."""
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
SMOLLM2 = "smollm2"
Shape = Literal["smollm2", "tiny", "llama-1b", "llama-8b"]


@dataclass(frozen=True)
class StepOptions:
    """The options of this program."""

    device: str = "cuda"
    """cuda, cuda:1, cpu."""
    dtype: Dtype = "bfloat16"
    """Precision."""
    shapes: tuple[Literal["smollm2", "tiny", "llama-1b", "llama-8b"], ...] = (
        "smollm2",
        "llama-1b",
        "llama-8b",
    )
    """Models to take."""
    engines: tuple[Engine, ...] = tuple(name for name in get_args(Engine) if name != "auto")
    """Engines to take."""
    step: tuple[StepKind, ...] = ("general", "captured")
    """How to run steps."""
    base: str = EMBEDDED_BASE
    """The model called smollm2."""
    nodes: GrowingInts = (1, 64)
    """Tree sizes; 1 always takes part."""
    batch_sizes: GrowingInts = (1,)
    """Rows decoded together."""
    context_lengths: GrowingInts = (128,)
    """Tokens before the answer."""
    rounds: int = 8
    """Rounds of timing."""
    steps: int = 16
    """Steps of a round."""
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rounds", "steps")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parse(StepOptions, arguments, description=__doc__)
    return exit_status(lambda: benchmark(options), options.report.traceback)


def benchmark(options: StepOptions) -> None:
    """Time every shape on every engine, print the table, and report."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda needs a CUDA device, and torch sees none; run this where there is one, or try it "
            "out with --device cpu --dtype float32 --shapes tiny"
        )
    log_console().print(f"medusa {medusa.__version__} from {Path(medusa.__file__).parent}", style="dim")
    rates = measured_rates(device, dtype)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for shape in options.shapes:
        base = base_of(shape, options, device, dtype)
        for engine, step in product(options.engines, options.step):
            try:
                rows += list(timed_steps(shape, base, engine, step, rates, options))
            # What lacks something must not cost the others their figures; the report says why.
            except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                skipped[f"{shape}, {engine}, {step}"] = reason
        del base
        gc.collect()
    report = {
        "rows": rows,
        "skipped": skipped,
        "device": device_name(device),
        "dtype": options.dtype,
        "device_rates": asdict(rates),
        "torch": torch.__version__,
        "medusa": medusa.__version__,
    }
    print_report(report, table_console())
    if not rows:
        raise ValueError("no engine could run any of the shapes; the reasons stand above")
    report_json(report, options.report)


def base_of(shape: str, options: StepOptions, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The model of a shape, on the device; random but for SmolLM2, and never ending its answer."""
    if shape == SMOLLM2:
        base: Any = load_base(options.base, dtype=dtype).to(device)
    else:
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192)
        with torch.device(device):
            base = LlamaForCausalLM._from_config(config, dtype=dtype)
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    return base.eval()


def timed_steps(
    shape: str, base: CausalLM, engine: Engine, step: StepKind, rates: DeviceRates, options: StepOptions
) -> Iterator[dict[str, Any]]:
    """Step time, overhead and f_hw at every size, for every batch size and context length."""
    heads = MedusaHeads(HeadsConfig(hidden_size(base), vocab_size(base), num_heads=NUM_HEADS)).to(base.dtype)
    model = MedusaModel(base, heads, engine=engine, step=step)
    trees = {size: tree_of(size) for size in {1, *options.nodes}}
    for batch_size, context in product(options.batch_sizes, options.context_lengths):
        inputs = [random_prompts(base, batch_size, context)] * (1 + options.rounds)
        label = f"{shape}, {engine}, {step}, {batch_size} x {context}"
        setups = {size: setup_seconds(model, tree, inputs[0]) for size, tree in trees.items()}
        seconds = measure_step_seconds(model, trees, inputs, num_steps=options.steps, label=label)
        for size, taken in seconds.items():
            cached = context + options.steps / 2
            floor = step_floor_seconds(model, rates, size, batch_size, cached, with_heads=size > 1)
            yield {
                "shape": shape,
                "engine": engine,
                "step": step,
                "batch_size": batch_size,
                "context_length": context,
                "num_nodes": size,
                "step_milliseconds": 1000 * taken,
                "floor_milliseconds": 1000 * floor,
                "overhead": taken / seconds[1],
                "f_hw": floor / taken,
                "setup_seconds": setups[size],
            }


def setup_seconds(model: MedusaModel, tree: CandidateTree, batch: Mapping[str, Any]) -> float:
    """What a first short answer spends on compiling or capturing."""
    counted = DecodingStatistics()
    num_tokens = 2 * DEFAULT_HOST_SYNC_INTERVAL
    for _ in model.stream(**batch, tree=tree, max_new_tokens=num_tokens, do_sample=False, statistics=counted):
        pass
    return counted.setup_seconds


def tree_of(num_nodes: int) -> CandidateTree:
    """A tree like those that get tuned: heads right less and less often, by depth and by rank."""
    rates = [[0.5 * 0.8**depth / (1 + rank) ** 1.3 for rank in range(WIDTH)] for depth in range(NUM_HEADS)]
    return best_tree(independent_path_values(rates), num_nodes)


def random_prompts(base: CausalLM, num_rows: int, num_tokens: int) -> dict[str, Any]:
    """``input_ids`` and ``attention_mask``, (B, T) long."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size(base), (num_rows, num_tokens), generator=generator).to(base.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """The table, then who could not run."""
    rates = report["device_rates"]
    read, multiplied = rates["bytes_per_second"] / 1e9, rates["operations_per_second"] / 1e12
    title = (
        f"Decode steps on {report['device']}, {report['dtype']}: {read:.0f} GB/s, {multiplied:.2f} TFLOP/s"
    )
    rows = [
        [
            row["shape"],
            row["engine"],
            row["step"],
            *(str(row[key]) for key in ("batch_size", "context_length", "num_nodes")),
            f"{row['step_milliseconds']:.2f}",
            f"{row['floor_milliseconds']:.2f}",
            f"{row['overhead']:.2f}",
            f"{row['f_hw']:.2f}",
            f"{row['setup_seconds']:.1f}",
        ]
        for row in report["rows"]
    ]
    headers = ["shape", "engine", "step", "rows", "context", "nodes", "ms/step", "floor", "overhead", "f_hw"]
    note = "floor: the least ms that the device needs for a step. set-up: seconds of compiling or capturing."
    print_table(console, title, [*headers, "set-up"], rows, num_labels=3, note=note)
    for name, reason in report["skipped"].items():
        console.print(f"{name} did not run: {reason}", style="yellow", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
