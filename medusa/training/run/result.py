"""The end of a run: a candidate tree for the heads, a record of how they came about, the heads directory."""

from __future__ import annotations

import functools
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

import medusa
from medusa.base.causal_lm import CausalLM
from medusa.heads.adapter import Adapter
from medusa.heads.calibration import calibrate
from medusa.heads.checkpoint import HeadsCheckpoint, save_heads
from medusa.heads.eagle3 import Heads
from medusa.heads.fingerprint import BaseFingerprint
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.data.documents import Documents
from medusa.training.run.run_directory import RunState
from medusa.trees.candidate_tree import CandidateTree

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "numpy")


def calibrated_tree(
    base: CausalLM,
    heads: Heads,
    held_out: Documents,
    num_nodes: int,
    states: Sequence[Tensor] | None = None,
) -> CandidateTree | None:
    """The best tree of ``num_nodes`` nodes on the held-out documents; None when no answer among them
    is long enough to see every head guess. ``states`` are those of each document, where they are known."""
    answers = held_out.answers()
    if not any(sum(row.is_label) > heads.num_heads + 1 for row in answers):
        return None
    return calibrate(base, heads.eval(), answers, states=states).best_tree(num_nodes)


def provenance(
    configuration: TrainingConfiguration,
    counts: Mapping[str, int],
    state: RunState,
    metrics: Mapping[str, float],
    is_finished: bool = False,
) -> dict[str, Any]:
    """How heads were made: command, configuration, versions, data, measurements. Plain JSON values.

    ``is_finished`` marks a run's result, to which nothing is to be added.
    """
    return {
        "command": shlex.join(sys.orig_argv),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "medusa": {"version": medusa.__version__, "commit": _commit(Path(medusa.__file__).parent)},
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"system": platform.platform(), "processor": platform.machine()},
        "configuration": configuration.as_dict(),
        "data": dict(counts),
        "training": {
            "steps": state.step,
            "epochs": state.epoch,
            "tokens": state.num_tokens,
            "minutes": round(state.seconds / 60, 2),
            "seconds_per_step": round(state.seconds / max(1, state.step), 4),
            "changes": list(state.changes),
            "is_finished": is_finished,
        },
        "metrics": dict(metrics),
    }


def save_result(
    directory: Path,
    heads: Heads,
    base_name: str,
    tree: CandidateTree | None,
    record: dict[str, Any],
    adapter: Adapter | None = None,
    fingerprint: BaseFingerprint | None = None,
) -> Path:
    """Write the heads directory in place of an earlier one of the same run.

    Raises:
        OSError: the disk refused; what was there before is untouched.
    """
    checkpoint = HeadsCheckpoint(heads, base_name, tree, record, adapter=adapter, fingerprint=fingerprint)
    return save_heads(checkpoint, directory, overwrite=True)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def _commit(checkout: Path) -> str | None:
    """The git commit of a checkout, with "-dirty" when files differ from it; None outside of one."""
    try:
        described = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
