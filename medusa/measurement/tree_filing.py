"""Files trees in a heads directory: tuned ones under what they are for, and the default where that is due.

The default tree serves a single row wherever nothing was tuned. So it changes only when batch size 1 is
tuned, and only if it was never timed, or timed on this very runtime: who adds a machine, an engine or a kind
of step to a directory leaves the rest as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.heads.checkpoint import HeadsCheckpoint, load_heads, save_tree
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.tuned_trees import DEFAULT_STEP, RUNTIME_KEYS, Runtime, TunedTree, merged


def file_tuned(directory: str | Path, tuned: Sequence[TunedTree], origin: Mapping[str, Any]) -> list[str]:
    """Write ``tuned``, of one runtime and kind of step; what was written and what was left, in sentences.

    ``origin`` says how the tree of batch size 1 came about, in plain JSON values, its runtime among them.
    """
    before = load_heads(directory)
    single = next((entry for entry in tuned if entry.batch_size == 1), None)
    reason = _why_default_stays(before, single)
    default = before.tree or CandidateTree.chain(before.heads.num_heads)
    if single is None or reason is not None:
        path = save_tree(directory, default, merged(before.tuned, tuned), **before.tree_origin)
        about_default = f"left as it was ({_nodes(default)}): {reason}"
    else:
        path = save_tree(directory, single.tree, merged(before.tuned, tuned), **origin)
        about_default = f"now that of batch size 1 ({_nodes(single.tree)}; before, {_nodes(default)})"
    entries = [f"{_nodes(entry.tree)} for {entry.in_words()}" for entry in tuned]
    others = len(merged(before.tuned, tuned)) - len(tuned)
    return [
        f"written to {path}: {'; '.join(entries)}",
        f"default tree: {about_default}",
        f"tuned trees for anything else, left as they were: {others}",
    ]


def file_asked_for(
    directory: str | Path, tree: CandidateTree, runtime: Runtime, origin: Mapping[str, Any]
) -> list[str]:
    """Write ``tree`` as the default; what was written and what was removed, in sentences.

    Trees tuned on ``runtime``, where ``tree`` is to be used, go: they would hide it.
    """
    before = load_heads(directory).tuned
    kept = [entry for entry in before if entry.runtime != runtime]
    path = save_tree(directory, tree, kept, **origin)
    return [
        f"written to {path}: {_nodes(tree)}, the default tree",
        f"tuned trees removed, since they would hide it on {runtime.in_words()}: {len(before) - len(kept)}",
        f"tuned trees for anything else, left as they were: {len(kept)}",
    ]


def _why_default_stays(before: HeadsCheckpoint, single: TunedTree | None) -> str | None:
    """What speaks against ``single`` as the default tree of ``before``; None when nothing."""
    if single is None:
        return "batch size 1 was not tuned"
    timed_at = _where_timed(before.tree_origin)
    if timed_at is None or timed_at == (single.runtime, single.step):
        return None
    runtime, step = timed_at
    return f"it was tuned on {runtime.in_words()}, {step} steps"


def _where_timed(origin: Mapping[str, Any]) -> tuple[Runtime, str] | None:
    """Where the default tree was tuned and in steps of which kind; None when it never was."""
    if not all(isinstance(origin.get(key), str) for key in RUNTIME_KEYS):
        return None
    return Runtime(*(origin[key] for key in RUNTIME_KEYS)), origin.get("step", DEFAULT_STEP)


def _nodes(tree: CandidateTree) -> str:
    return f"{tree.num_nodes} nodes" if tree.num_nodes > 1 else "the root alone"
