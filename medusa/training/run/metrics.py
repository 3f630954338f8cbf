"""Loss sums as the numbers that people read."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from medusa.training.losses.loss import LossSums


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
