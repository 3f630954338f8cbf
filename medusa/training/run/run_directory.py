"""What a training run leaves on disk.

    config.yaml      the resolved configuration; --config reads it back
    metrics.jsonl    every log entry, one JSON object a line
    training.png     what heads were worth on held-out documents, against the tokens they had seen
    checkpoints/     step-00000500/ ...: everything that --resume needs
    states/          hidden states of the frozen base, when they are cached
    heads/           the result

Everything that appears under its name is complete: it was written under another name and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from medusa.files import check_writable_target, read_json, write_json
from medusa.training.config.configuration import TrainingConfiguration, changed_keys
from medusa.training.config.options import ConfigurationError

STATE_FILE = "run.json"


@dataclass
class RunState:
    """Where a run stands."""

    step: int = 0
    """Optimiser steps done."""
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    """Spent in the training loop, earlier runs that this one resumes included."""
    num_tokens: int = 0
    """Tokens of the documents trained on, counted again in every epoch."""
    window: list[Any] = field(default_factory=list)
    """The loss sums of all processes since the last log entry."""
    adapter_steps: int = 0
    """Optimiser steps in which an adapter was trained too."""
    num_processes: int = 1
    sharding: str = ""
    """How the processes share the heads, in accelerate's words."""
    documents: str = ""
    """Digest of the training documents."""


class RunDirectory:
    """The files of one run. Methods that write are for the main process, :meth:`save_checkpoint` for all."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.picture = self.path / "training.png"
        self.checkpoints = self.path / "checkpoints"
        self.states = self.path / "states"
        self.heads = self.path / "heads"

    def check(self, configuration: TrainingConfiguration) -> None:
        """Look before any work is done; changes nothing.

        Raises:
            FileExistsError: something other than the data is here, and neither overwrite nor resume is set.
            FileNotFoundError: there is nothing to resume.
            ValueError: the run to resume had another configuration.
        """
        if configuration.run.resume:
            self._check_resumable(configuration)
        elif not configuration.run.overwrite and self._foreign_entries(configuration.data.data):
            check_writable_target(self.path)

    def begin(self, configuration: TrainingConfiguration) -> None:
        """Write the configuration; ``overwrite`` removes what an earlier run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        if configuration.run.overwrite:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            self.metrics.unlink(missing_ok=True)
            self.picture.unlink(missing_ok=True)
        partial = self.config.with_suffix(".partial")
        partial.write_text(configuration.as_yaml(), encoding="utf-8")
        os.replace(partial, self.config)

    def append_metrics(self, entry: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def logged_metrics(self) -> list[dict[str, Any]]:
        """Every log entry, in the order of writing."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []
        return [json.loads(line) for line in lines]

    def forget_metrics_after(self, step: int) -> None:
        """Drop the log entries that a resumed run writes again."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        partial = self.metrics.with_suffix(".partial")
        partial.write_text("".join(_entries_until(lines, step)), encoding="utf-8")
        os.replace(partial, self.metrics)

    def save_checkpoint(self, accelerator: Accelerator, state: RunState, keep: int) -> Path:
        """Write a checkpoint and remove all but the ``keep`` latest; a failed write leaves those there were.

        Raises:
            OSError: the disk refused.
        """
        target = self.checkpoints / f"step-{state.step:08d}"
        partial = self.checkpoints / f".{target.name}.partial"
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        try:
            accelerator.save_state(str(partial))
            if accelerator.is_main_process:
                write_json(partial / STATE_FILE, asdict(state))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            for old in self._checkpoints()[:-keep]:
                shutil.rmtree(old)
        return target

    def load_checkpoint(self, accelerator: Accelerator, now: RunState) -> RunState:
        """Put the latest checkpoint into everything that ``accelerator`` prepared.

        Raises:
            ValueError: it is of a run with other documents or another number of processes than ``now``.
        """
        latest = self._checkpoints()[-1]
        state = RunState(**read_json(latest / STATE_FILE))
        if state.num_processes != now.num_processes:
            raise ConfigurationError(
                f"{self.path} holds a run of {state.num_processes} processes, this one has "
                f"{now.num_processes}, so its batches would be others; launch as many"
            )
        if state.sharding != now.sharding:
            raise ConfigurationError(
                f"{self.path} holds a run under {state.sharding}, this one is under {now.sharding}, and "
                "neither reads the checkpoints of the other; launch it with the same accelerate configuration"
            )
        if state.documents != now.documents:
            raise ConfigurationError(
                f"the data is not what it was when the run in {self.path} began, so its batches would be "
                "others; bring the data back, or start anew with --overwrite"
            )
        accelerator.load_state(str(latest))
        return state

    def _checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if (path / STATE_FILE).exists())

    def _check_resumable(self, configuration: TrainingConfiguration) -> None:
        if not self._checkpoints():
            raise FileNotFoundError(
                f"{self.checkpoints} holds no checkpoint to resume from; start with --overwrite, and set "
                "checkpoint_steps"
            )
        earlier = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        changed = changed_keys(earlier, configuration)
        if changed:
            raise ConfigurationError(
                f"{self.path} holds a run of another configuration, which cannot be resumed with this one: "
                f"{'; '.join(changed)}. Change it back, or choose another output_dir"
            )

    def _foreign_entries(self, data: Iterable[str]) -> bool:
        """Whether anything is here apart from hidden files and the data files with their companions."""
        if not self.path.is_dir():
            return self.path.exists()
        stems = tuple(Path(each).name.split(".")[0] + "." for each in data if _is_inside(each, self.path))
        return any(not entry.name.startswith((".", *stems)) for entry in self.path.iterdir())


def _is_inside(file: str, directory: Path) -> bool:
    return Path(file).resolve().parent == directory.resolve()


def _entries_until(lines: Iterable[str], step: int) -> Iterable[str]:
    """The complete entries no later than ``step``; a killed run may leave half a line at the end."""
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            return
        if entry["step"] <= step:
            yield line
