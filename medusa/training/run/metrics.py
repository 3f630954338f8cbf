"""The numbers that people read: of loss sums, and of replaying the decoding of held-out documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.heads.calibration import calibrate
from medusa.heads.eagle3 import Heads
from medusa.training.data.documents import Documents
from medusa.training.losses.sums import LossSums

NUM_NODES = 64
"""Of the tree whose tokens per step are reported: what a GPU verifies in about the time of one node."""


def metrics_of(name: str, sums: LossSums) -> dict[str, float]:
    """``name/loss``, what is minimised, and by depth d ``name/loss_d``, ``name/top1_d``, ``name/top5_d``.

    Empty when there are no labels.
    A target that the heads have no column for counts as a miss in the hit rates and not in the loss.
    """
    if not int(sums.num_labels.sum()):
        return {}
    metrics = {f"{name}/loss": float(sums.objective(sums.num_scored))}
    columns = {
        "loss": (sums.loss / sums.num_scored.clamp(min=1)).tolist(),
        "top1": (sums.top1 / sums.num_labels.clamp(min=1)).tolist(),
        "top5": (sums.top5 / sums.num_labels.clamp(min=1)).tolist(),
    }
    for key, values in columns.items():
        metrics |= {f"{name}/{key}_{depth}": value for depth, value in enumerate(values, start=1)}
    return metrics


def one_line(name: str, metrics: Mapping[str, float]) -> str:
    """The weighted loss, the hit rates by depth, and what else is measured: tokens per step, perplexity."""
    if not metrics:
        return f"{name}: no labels"
    rates = {
        key: "/".join(f"{metrics[each]:.2f}" for each in metrics if each.startswith(f"{name}/{key}_"))
        for key in ("top1", "top5")
    }
    line = f"{name}: loss {metrics[f'{name}/loss']:.3f}  top-1 {rates['top1']}  top-5 {rates['top5']}"
    for key in ("tokens_per_step", "base_perplexity"):
        if (value := metrics.get(f"{name}/{key}")) is not None:
            line += f"  {key.replace('_', ' ')} {value:.3f}"
    return line


def table(name: str, metrics: Mapping[str, float]) -> Table:
    """One row a head."""
    shown = Table("head", "loss", "top-1", "top-5", title=f"{name.replace('_', '-')} documents")
    depth = 1
    while f"{name}/loss_{depth}" in metrics:
        loss, top1, top5 = (metrics[f"{name}/{key}_{depth}"] for key in ("loss", "top1", "top5"))
        shown.add_row(str(depth), f"{loss:.3f}", f"{top1:.1%}", f"{top5:.1%}")
        depth += 1
    return shown


def replayed_metrics(
    base: CausalLM,
    heads: Heads | None,
    documents: Documents,
    at_most: int,
    states: Sequence[Tensor] | None = None,
) -> dict[str, float]:
    """``held_out/tokens_per_step`` of greedy decoding with a tree of :data:`NUM_NODES` nodes, by ``heads``;
    and ``held_out/tokens_per_step_d`` by the first d of them.

    Replayed, not decoded: each head's guesses are read once along the answers of ``at_most`` documents. Each
    half of the answers is judged with the tree of the other. ``states`` are those of these documents, where
    they are known: the base is then not run. Empty without heads, and where a half has no answer long enough
    to see every head guess.
    """
    rows = [(index, row) for index, row in enumerate(documents.answers(at_most)) if any(row.is_label[1:])]
    if heads is None or not rows:
        return {}
    known = None if states is None else [states[index] for index, _ in rows]
    counts = calibrate(base, heads, [row for _, row in rows], states=known)
    if len(counts.ranks) < 2 or not all(half.num_positions for half in counts.halves()):
        return {}
    key, depths = "held_out/tokens_per_step", range(1, heads.num_heads + 1)
    by_head = {f"{key}_{depth}": counts.held_out_tokens_per_step(NUM_NODES, depth) for depth in depths}
    return {key: by_head[f"{key}_{heads.num_heads}"], **by_head}
