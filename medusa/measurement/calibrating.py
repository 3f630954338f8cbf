"""Calibration in the programs: with progress, and of a tree that the flags ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

from medusa.cli.flags import TreeOptions
from medusa.cli.program import answered_tokens, encode_prompts, heads_of, log_console
from medusa.heads.calibration import AnsweredTokens, calibrate_each
from medusa.heads.eagle import Heads
from medusa.model import MedusaModel
from medusa.progress import track
from medusa.prompts import read_prompts
from medusa.trees.rank_counts import RankCounts


def ranked(model: MedusaModel, rows: Sequence[AnsweredTokens], max_rank: int) -> RankCounts:
    """The ranks of the tokens of ``rows``, counted with a progress bar."""
    return ranked_each(model, [heads_of(model)], rows, max_rank)[0]


def ranked_each(
    model: MedusaModel,
    sets: Sequence[Heads],
    rows: Sequence[AnsweredTokens],
    max_rank: int,
    rows_per_pass: int = 1,
) -> list[RankCounts]:
    """:func:`ranked` for several sets of heads; the base reads the rows once, ``rows_per_pass`` together."""
    batches = [rows[start : start + rows_per_pass] for start in range(0, len(rows), rows_per_pass)]
    found = [
        calibrate_each(model.base, sets, batch, max_rank=max_rank) for batch in track(batches, "ranking")
    ]
    return [reduce(add, each) for each in zip(*found, strict=True)]


def use_tree_asked_for(model: MedusaModel, options: TreeOptions, max_rank: int = 16) -> None:
    """Let ``model`` decode with the tree of --tree-nodes, if it is given.

    Raises:
        ValueError: one of --tree-nodes and --calibrate-on is given without the other.
    """
    if options.tree_nodes is None and options.calibrate_on is None:
        return
    if options.tree_nodes is None or options.calibrate_on is None:
        raise ValueError(
            "--tree-nodes and --calibrate-on go together: a tree of another size is chosen on conversations, "
            "which must not be the prompts that it is measured on; give both, or neither"
        )
    prompts = read_prompts(options.calibrate_on)
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    pairs = list(zip(prompts, encoded, strict=True))
    rows = [answered_tokens(model, *pair, options) for pair in track(pairs, "answering to calibrate")]  # type: ignore[arg-type]
    counts = ranked(model, rows, max_rank)
    model.use_tree(counts.best_tree(options.tree_nodes))
    log_console().print(
        f"tree of {model.tree.num_nodes} nodes, {model.tree.depth} deep, chosen on {len(rows)} conversations "
        f"of {options.calibrate_on}",
        style="dim",
        soft_wrap=True,
    )
