"""Choose the tree for these heads on this machine, and write it into the heads directory.

Reads answers (the model's own to the prompts, or those in the file), counts which guesses of the
heads would have been right, builds the best tree of each size, times a decode step with each, and
keeps the size with the most tokens per second. Size 1 is plain decoding and takes part. With
--num-nodes nothing is timed: the best tree of that size is kept. Run it with nothing else running.

    python inference/tune_tree.py
    python inference/tune_tree.py --heads HEADS --prompts FILE --limit 64 --max-new-tokens 256
    python inference/tune_tree.py --num-nodes 64 --no-save
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import medusa
from medusa.calibration import AnsweredTokens, RankCounts, calibrate
from medusa.checkpoint import save_tree
from medusa.flags import ProgramOptions, positive_int, program_parser
from medusa.model import MedusaModel
from medusa.plots import check_matplotlib, plot_tree_sizes
from medusa.programs import (
    decode_prompt,
    encode_prompts,
    exit_status,
    heads_of,
    load_model,
    load_prompts,
    log_console,
    report_json,
    track,
)
from medusa.prompts import Prompt
from medusa.tree import CandidateTree
from medusa.tuning import (
    NUM_NODES,
    TreeSize,
    fastest,
    held_out_tokens_per_step,
    measure_step_seconds,
    trees_by_size,
)


class TuneOptions(ProgramOptions):
    """The flags, parsed."""

    num_nodes: int | None
    sizes: tuple[int, ...]
    max_depth: int | None
    max_rank: int
    rounds: int
    no_save: bool
    plot: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "")
    group = parser.add_argument_group("tree")
    group.add_argument(
        "--num-nodes", type=positive_int, metavar="N", help="take this size, root included; time nothing"
    )
    group.add_argument(
        "--sizes",
        type=_sizes,
        default=NUM_NODES,
        metavar="N,N,...",
        help=f"sizes to compare; 1 always takes part (default: {','.join(map(str, NUM_NODES))})",
    )
    group.add_argument(
        "--max-depth", type=positive_int, metavar="D", help="no deeper than this (default: all heads)"
    )
    group.add_argument(
        "--max-rank",
        type=positive_int,
        default=16,
        metavar="R",
        help="guesses of each head to consider (default: %(default)s)",
    )
    group.add_argument(
        "--rounds", type=positive_int, default=6, metavar="N", help="rounds of timing (default: %(default)s)"
    )
    group.add_argument("--no-save", action="store_true", help="leave the heads directory as it is")
    group.add_argument(
        "--plot",
        type=Path,
        default=Path("runs/plots/tune_tree.png"),
        metavar="FILE",
        help="where the picture of the comparison goes (default: %(default)s)",
    )
    options = parser.parse_args(arguments, namespace=TuneOptions())
    return exit_status(lambda: tune(options), options.traceback)


def tune(options: TuneOptions) -> None:
    """Calibrate, choose, print, draw, and write the tree."""
    check_matplotlib()
    if not options.no_save and not Path(options.heads).is_dir():
        raise ValueError(
            f"--heads must be a directory to write the tree into, got {options.heads!r}; copy the heads "
            "to one, or give --no-save"
        )
    model = load_model(options)
    prompts = load_prompts(options)
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    pairs = list(zip(prompts, encoded, strict=True))
    rows = [answered(model, *pair, options) for pair in track(pairs, "answering")]
    heads = heads_of(model)
    counted = [
        calibrate(model.base, heads, [row], max_rank=options.max_rank) for row in track(rows, "ranking")
    ]
    counts, table = reduce(add, counted), []
    num_nodes = options.num_nodes
    if num_nodes is None:
        table = measure_sizes(model, counts, encoded, rows, options)
        num_nodes = fastest(table).num_nodes
    tree = counts.best_tree(num_nodes, options.max_depth)
    report = make_report(model, counts, tree, table, options)
    print_report(report, Console(highlight=False))
    if table:
        title = f"{options.heads} on {report['device']}, {report['dtype']}"
        plot_tree_sizes(report["by_num_nodes"], tree.num_nodes, options.plot, title)
        log_console().print(f"picture: {options.plot}", soft_wrap=True)
    if not options.no_save:
        path = save_tree(options.heads, tree, **report)
        log_console().print(f"tree written to {path}", soft_wrap=True)
    report_json(report, options)


def answered(
    model: MedusaModel, prompt: Prompt, inputs: dict[str, Any], options: TuneOptions
) -> AnsweredTokens:
    """Prompt and answer as tokens: the answer in the file where there is one, else the model's own."""
    prompt_tokens = inputs["input_ids"][0].tolist()
    if prompt.answer is None:
        tokens, _ = decode_prompt(model, inputs, options)
    else:
        answer = model.tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
        tokens = prompt_tokens + answer[: options.max_new_tokens]
    return AnsweredTokens.after_prompt(tokens, len(prompt_tokens))


def measure_sizes(
    model: MedusaModel,
    counts: RankCounts,
    encoded: Sequence[dict[str, Any]],
    rows: Sequence[AnsweredTokens],
    options: TuneOptions,
) -> list[TreeSize]:
    """What each size gives and costs; timed on the prompts with the longest answers."""
    trees = trees_by_size(counts, {1, *options.sizes}, options.max_depth)
    by_length = sorted(range(len(rows)), key=lambda i: -sum(rows[i].is_label))
    inputs = [encoded[by_length[number % len(by_length)]] for number in range(1 + options.rounds)]
    seconds = measure_step_seconds(model, trees, track(inputs, "timing steps"))
    return [
        TreeSize(size, tree.depth, held_out_tokens_per_step(counts, size, options.max_depth), seconds[size])
        for size, tree in trees.items()
    ]


def make_report(
    model: MedusaModel,
    counts: RankCounts,
    tree: CandidateTree,
    table: Sequence[TreeSize],
    options: TuneOptions,
) -> dict[str, Any]:
    """The JSON object of this program, which also says in ``tree.json`` where the tree came from."""
    return {
        "num_nodes": tree.num_nodes,
        "depth": tree.depth,
        "tokens_per_step": held_out_tokens_per_step(counts, tree.num_nodes, options.max_depth),
        "by_num_nodes": [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in table],
        "num_prompts": len(counts.ranks),
        "num_positions": counts.num_positions,
        "device": device_name(model.device),
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "batch_size": 1,
        "base": options.base,
        "medusa": medusa.__version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """The device in words: a graphics card's name, or the processor's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def print_report(report: dict[str, Any], console: Console) -> None:
    """Every size that was compared, the chosen one marked; or the chosen one alone."""
    if not report["by_num_nodes"]:
        console.print(
            f"best tree of {report['num_nodes']} nodes: depth {report['depth']}, "
            f"{report['tokens_per_step']:.2f} tokens per step expected"
        )
        return
    table = Table(
        title=f"Trees on {report['device']}, {report['dtype']}, {report['num_threads']} threads",
        title_justify="left",
    )
    for name in ("nodes", "depth", "tokens per step", "ms per step", "tokens per second", "against plain"):
        table.add_column(name, justify="right")
    plain = report["by_num_nodes"][0]["tokens_per_second"]
    for row in report["by_num_nodes"]:
        table.add_row(
            str(row["num_nodes"]),
            str(row["depth"]),
            f"{row['tokens_per_step']:.2f}",
            f"{1000 * row['step_seconds']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / plain:.2f}x",
            style="bold green" if row["num_nodes"] == report["num_nodes"] else "",
        )
    console.print(table)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
