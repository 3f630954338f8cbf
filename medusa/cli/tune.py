"""``medusa tune``: the tree that is fastest for these heads on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from medusa.cli.loading import (
    answered_prompts,
    encode_prompts,
    heads_of,
    load_model,
    load_prompts,
    measured_on,
)
from medusa.cli.options import GrowingInts, ProgramOptions, command, to_argv
from medusa.console import TIMES, Column, counted, log_console
from medusa.heads.calibration import AnsweredTokens
from medusa.measurement.comparison import ranked
from medusa.measurement.report import Report
from medusa.measurement.tuning import (
    TUNED_SIZES,
    TreeSize,
    fastest,
    file_asked_for,
    file_tuned,
    measure_step_seconds,
    plot_tuning,
    trees_by_size,
)
from medusa.model import MedusaModel
from medusa.options import check_at_least
from medusa.plots import short_name
from medusa.prompts import padded_batch
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.rank_counts import RankCounts
from medusa.trees.tuned_trees import TunedTree

Tables = Mapping[int, Sequence[TreeSize]]
"""Tokens per step and step time of each tree size, by batch size."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ProgramOptions):
    """Choose the tree for these heads on this machine, and write it into the heads directory.

    Reads answers (the model's own to the prompts, or the answers in the file), counts which guesses of the
    heads would have been right, builds the best tree of each size, times a decode step with each, and keeps
    the size with the most tokens per second: for each of --batch-sizes by itself, filed under this device,
    precision, engine and --step. Size 1 is plain decoding and takes part. A model loaded here then uses the
    tree of its batch size. Everywhere else the directory's default tree is used, which the tree of batch size
    1 replaces, unless the default was tuned elsewhere. With --num-nodes nothing is timed: the best tree of
    that size becomes the default, and trees tuned here are removed. Run it with nothing else running.

        medusa tune
        medusa tune --heads HEADS --prompts FILE --limit 64 --max-new-tokens 256
        medusa tune --batch-sizes 1,2,4,8,16 --engine eager --step captured --device cuda
        medusa tune --num-nodes 64 --no-save
    """

    num_nodes: int | None = None
    """Take this size, root included, and time nothing."""
    sizes: GrowingInts = TUNED_SIZES
    """Sizes to compare; 1 always takes part."""
    batch_sizes: GrowingInts = (1,)
    """Rows decoded together; each gets its own tree."""
    max_depth: int | None = None
    """No deeper than this; none is as deep as the heads guess."""
    max_rank: int = 16
    """Guesses of each head to consider."""
    rounds: int = 6
    """Rounds of timing."""
    no_save: bool = False
    """Leave the heads directory as it is."""
    plot: Path = Path("runs/plots/tune_tree.png")
    """Where the picture goes."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_nodes", "max_depth", "max_rank", "rounds")
        heads = None if self.no_save else self.model.required_heads
        if heads is not None and not Path(heads).is_dir():
            raise ValueError(
                f"heads must be a directory that is there, to write the tree into, got {heads!r}; train some "
                "with `medusa train`, copy those that ship or are on the hub, or give --no-save"
            )


def tune(options: TuneOptions) -> list[str]:
    """Calibrate, choose, print, draw, and write the tree."""
    model = load_model(options.model, template=options.prompts)
    prompts = load_prompts(options.prompts)
    encoded = encode_prompts(model, prompts, options.answers.max_new_tokens)
    rows = answered_prompts(model, prompts, options.answers)
    (counts,) = ranked(model, [heads_of(model)], rows, options.max_rank)
    tables = {} if options.num_nodes else _measure_sizes(model, counts, encoded, rows, options)
    chosen = {batch: fastest(table).num_nodes for batch, table in tables.items()}
    num_nodes = options.num_nodes or chosen[min(chosen)]
    tree = counts.best_tree(num_nodes, options.max_depth)
    values = _tuning_values(model, counts, tree, tables, options)
    report = Report(values)
    runtime = ", ".join(values[key] for key in ("device", "dtype", "engine"))
    where = f"{runtime}, {model.step_for()} steps, {values['num_threads']} threads"
    for batch_size, entry in values["by_batch_size"].items():
        _add_sizes(report, entry, f"batch size {batch_size}, {where}")
    if tables:
        title = f"{short_name(options.model.required_heads)} on {where}"
        report.add_picture(options.plot, partial(plot_tuning, values["by_batch_size"], title=title))
    else:
        report.add_line(
            f"best tree of {counted(tree.num_nodes, 'node')}: depth {tree.depth}, "
            f"{values['tokens_per_step']:.2f} tokens per step expected"
        )
    if not options.no_save:
        save(model, counts, tree, tables, values, options)
    report.publish(options.report.json)
    return [command("benchmark", *to_argv(options.model))]


def save(
    model: MedusaModel,
    counts: RankCounts,
    tree: CandidateTree,
    tables: Tables,
    values: dict[str, Any],
    options: TuneOptions,
) -> None:
    """Write the fastest tree of each batch size, or ``tree`` of --num-nodes as the default."""
    origin = {key: value for key, value in values.items() if key != "by_batch_size"}
    tuned = []
    for batch_size, table in tables.items():
        best = fastest(table)
        measured = {"num_nodes": best.num_nodes, **values["by_batch_size"][str(batch_size)]}
        measured |= {key: values[key] for key in ("num_threads", "medusa", "made")}
        fitting = counts.best_tree(best.num_nodes, options.max_depth)
        tuned.append(TunedTree(model.runtime, batch_size, fitting, measured, model.step_for()))
    if tuned:
        sentences = file_tuned(options.model.required_heads, tuned, origin)
    else:
        sentences = file_asked_for(options.model.required_heads, tree, model.runtime, origin)
    for sentence in sentences:
        log_console().print(sentence, soft_wrap=True)


def _measure_sizes(
    model: MedusaModel,
    counts: RankCounts,
    encoded: Sequence[dict[str, Any]],
    rows: Sequence[AnsweredTokens],
    options: TuneOptions,
) -> dict[int, list[TreeSize]]:
    """Tokens per step and step time of each size, by batch size; timed on the prompts with the longest
    answers."""
    trees = trees_by_size(counts, {1, *options.sizes}, options.max_depth)
    gains = {size: counts.held_out_tokens_per_step(size, options.max_depth) for size in trees}
    by_length = sorted(range(len(rows)), key=lambda i: -sum(rows[i].is_label))
    tables = {}
    for batch_size in options.batch_sizes:
        places = range((1 + options.rounds) * batch_size)
        ordered = [encoded[by_length[place % len(by_length)]] for place in places]
        batches = [padded_batch(ordered[start : start + batch_size]) for start in places[::batch_size]]
        label = "timing steps" if len(options.batch_sizes) == 1 else f"timing steps, {batch_size} rows"
        seconds = measure_step_seconds(model, trees, batches, tokens_per_step=gains, label=label)
        tables[batch_size] = [
            TreeSize(size, trees[size].depth, gains[size], taken, batch_size)
            for size, taken in seconds.items()
        ]
    return tables


def _tuning_values(
    model: MedusaModel,
    counts: RankCounts,
    tree: CandidateTree,
    tables: Tables,
    options: TuneOptions,
) -> dict[str, Any]:
    """The JSON object of this program, which also says in ``tree.json`` where the tree came from."""
    by_batch = {
        str(batch): {
            "chosen": fastest(table).num_nodes,
            "by_num_nodes": [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in table],
        }
        for batch, table in tables.items()
    }
    return {
        "num_nodes": tree.num_nodes,
        "depth": tree.depth,
        "tokens_per_step": counts.held_out_tokens_per_step(tree.num_nodes, options.max_depth),
        "by_num_nodes": next(iter(by_batch.values()))["by_num_nodes"] if by_batch else [],
        "by_batch_size": by_batch,
        "num_prompts": len(counts.ranks),
        "num_positions": counts.num_positions,
        **measured_on(model),
        "step": model.step_for(),
        "batch_size": options.batch_sizes[0],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _add_sizes(report: Report, entry: Mapping[str, Any], where: str) -> None:
    """Every size that was compared at one batch size, the chosen one marked."""
    rows = entry["by_num_nodes"]
    columns: dict[str, Column] = {
        "nodes": ("num_nodes", "{}"),
        "depth": ("depth", "{}"),
        "tok/step": ("tokens_per_step", "{:.2f}"),
        "ms/step": (lambda row: 1000 * row["step_seconds"], "{:.1f}"),
        "tokens/s": ("tokens_per_second", "{:.1f}"),
        "x plain": (lambda row: row["tokens_per_second"] / rows[0]["tokens_per_second"], TIMES),
    }
    chosen = [row["num_nodes"] for row in rows].index(entry["chosen"])
    report.add_table(f"Trees at {where}", columns, rows, styles={chosen: "bold green"})
