"""The output directory of a training run.

    config.yaml      the resolved configuration; --config reads it back
    metrics.jsonl    every log entry, one JSON object a line
    training.png     what heads were worth on held-out documents, against the tokens they had seen
    checkpoints/     step-00000500/ ...: everything that --resume needs
    documents/       the tokenised data
    states/          hidden states of the frozen base, when they are cached
    best/            the heads that had most tokens per step on held-out documents
    heads/           the result
    tracker.json     by which the tracker knows the run when it goes on

Everything that appears under its name is complete: it was written under another name, and flushed to disk
before it was renamed.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate import Accelerator

import medusa
from medusa.files import (
    Layout,
    check_writable_target,
    clear_interrupted,
    digest_of,
    disk_errors,
    read_json,
    read_yaml,
    replaceable_files,
    replaced_file,
    sync,
    sync_tree,
    write_json,
)
from medusa.heads.checkpoint import HEADS_LAYOUT, PROVENANCE_FILE, heads_directory
from medusa.options import differences
from medusa.revision import commit
from medusa.training.config import TrainingConfiguration, changed_keys
from medusa.training.recipes.recipe import RunState
from medusa.training.run.processes import on_main_process

_STATE_FILE = "run.json"
_RUN_KEYS = {"base", "data", "output_dir"}
"""Keys by which the configuration of a run is known."""
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Kinds of launches, in accelerate's words, in which every process has all weights."""
_CHECKPOINTS_LAYOUT = Layout(
    "the checkpoints of a run",
    tuple(f"{name}{'/*' * depth}" for name in ("step-*", ".step-*.partial") for depth in (1, 2, 3)),
    lambda directory: all((each / _STATE_FILE).exists() for each in directory.glob("step-*")),
)


class RunDirectory:
    """The files of one run. Methods that write are for the main process; methods with an accelerator are for
    all."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.picture = self.path / "training.png"
        self.checkpoints = self.path / "checkpoints"
        self.documents = self.path / "documents"
        self.states = self.path / "states"
        self.best = self.path / "best"
        self.heads = self.path / "heads"
        self.tracker = self.path / "tracker.json"

    def check(self, configuration: TrainingConfiguration) -> None:
        """Look before any work is done; changes nothing.

        Raises:
            FileExistsError: something other than the data is here, and neither overwrite nor resume is set;
                or heads that only a run from the start could follow.
            FileNotFoundError: there is nothing to resume.
            ValueError: the run to resume had another configuration; or overwrite would remove an input; or
                states or documents would be in a place of other outputs.
        """
        self._check_shared(configuration)
        resume = configuration.run.resume
        if resume == "always" and not self._checkpoints():
            raise FileNotFoundError(
                f"{self.checkpoints} holds no checkpoint to resume from; start with --overwrite, or with "
                "--resume auto, which goes on where there is one"
            )
        entries = self._foreign_entries(configuration.data.data)
        if self._is_not_begun(entries):
            return
        if resume != "never" and self.config.exists():
            earlier = self._configuration()
            if not earlier.keys() >= _RUN_KEYS:
                raise ValueError(
                    f"{self.config} is not the configuration of a run; bring it back, or choose another "
                    "output_dir"
                )
            changed = changed_keys(earlier, configuration)
            if changed:
                raise ValueError(
                    f"{self.path} holds a run of another configuration, which cannot be resumed with this "
                    f"one: {'; '.join(changed)}. Change it back, or choose another output_dir"
                )
            if self.heads.exists() and not self._checkpoints() and not self.is_finished(configuration):
                raise FileExistsError(
                    f"{self.path} holds the heads of a run and no checkpoint to go on from, so they would be "
                    "trained again from the start; choose another output_dir, or start anew with --overwrite"
                )
        elif configuration.run.overwrite:
            self._earlier_run(configuration)
        elif entries:
            try:
                check_writable_target(self.path)
            except FileExistsError as error:
                raise FileExistsError(f"{error}, or go on with the run in it (--resume auto)") from error

    def _check_shared(self, configuration: TrainingConfiguration) -> None:
        """Raise ValueError where directories that runs may share would be replaced by this run."""
        replaced = [os.path.realpath(each) for each in (self.heads, self.best, self.checkpoints)]
        for name in ("states_dir", "documents_dir"):
            directory = getattr(configuration.run, name)
            where = Path(os.path.realpath(directory or self.states))
            if where == Path(os.path.realpath(self.path)) or any(map(where.is_relative_to, replaced)):
                raise ValueError(
                    f"{name} must be a directory of its own, got {directory!r}, where the run in {self.path} "
                    "puts something else; leave it out, or choose another"
                )

    def is_finished(self, configuration: TrainingConfiguration) -> bool:
        """Whether the run that ``configuration`` resumes has its result already, for limits no higher."""
        record = self.heads / PROVENANCE_FILE
        if configuration.run.resume == "never" or not record.exists():
            return False
        done = read_json(record).get("training", {})
        limits = configuration.optimisation
        reached = (
            (limits.max_steps, done.get("steps", 0)),
            (limits.num_epochs, done.get("epochs", 0)),
            (limits.max_minutes and round(limits.max_minutes, 2), done.get("minutes", 0)),  # as recorded
        )
        return bool(done.get("is_finished")) and any(
            limit is not None and limit <= number for limit, number in reached
        )

    def start(self, configuration: TrainingConfiguration) -> list[Path]:
        """Write the configuration; ``overwrite`` removes the files of an earlier run, except stored states.

        Returns the removed paths.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        removed = self._earlier_run(configuration) if configuration.run.overwrite else []
        for path in removed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in (self.heads, self.best, self.config, self.metrics, self.tracker):
            clear_interrupted(path)
        for left in self.checkpoints.glob(".step-*.partial"):  # of a run that was killed
            shutil.rmtree(left)
        with replaced_file(self.config) as partial:
            partial.write_text(configuration.as_yaml(), encoding="utf-8")
        return removed

    def _earlier_run(self, configuration: TrainingConfiguration) -> list[Path]:
        """The files of an earlier run that ``overwrite`` removes."""
        sources = (configuration.base.base, configuration.heads.start_from, *configuration.data.data)
        layouts = {self.heads: HEADS_LAYOUT, self.best: HEADS_LAYOUT, self.checkpoints: _CHECKPOINTS_LAYOUT}
        for directory, layout in layouts.items():
            replaceable_files(directory, layout, filter(None, sources))
        files = [path for path in (self.metrics, self.picture, self.tracker) if os.path.lexists(path)]
        is_run = not self.config.exists() or self._configuration().keys() >= _RUN_KEYS
        if not is_run or (files and not self.config.exists()):
            foreign = ", ".join(path.name for path in (self.config, *files) if path.exists())
            raise FileExistsError(
                f"overwrite replaces only an earlier run, and {self.path} holds {foreign} of something else; "
                "choose another output_dir, or move that away"
            )
        return [path for path in layouts if path.exists()] + files

    def _configuration(self) -> dict[str, Any]:
        """The config.yaml of the run; empty where it is no configuration."""
        try:
            configuration = read_yaml(self.config)
        except ValueError:
            return {}
        return configuration if isinstance(configuration, dict) else {}

    def tracker_id(self) -> str:
        """By which a tracker knows this run: the same each time it goes on."""
        if not self.tracker.exists():
            write_json(self.tracker, {"id": uuid.uuid4().hex[:12]})
        return read_json(self.tracker)["id"]

    def logged_metrics(self) -> list[dict[str, Any]]:
        """Every whole log entry, in the order of writing; a killed run may leave half a line at the end."""
        entries = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else ():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return entries

    def forget_metrics_after(self, step: int, is_over: bool = False) -> None:
        """Drop the log entries that a resumed run writes again: of an evaluation at ``step`` only where the
        run ``is_over`` there, since it then ends with one."""
        if not self.metrics.exists():
            return
        with replaced_file(self.metrics) as partial, partial.open("w", encoding="utf-8") as file:
            for entry in self.logged_metrics():
                is_evaluation = any(key.startswith("held_out/") for key in entry)
                if entry["step"] < step or (entry["step"] == step and not (is_over and is_evaluation)):
                    file.write(json.dumps(entry) + "\n")

    def save_checkpoint(self, accelerator: Accelerator, state: RunState, keep: int) -> Path:
        """Write a checkpoint and remove all but the ``keep`` latest; a failed write leaves those there were.

        Raises:
            OSError: the disk refused.
        """
        target = self._checkpoint_at(state.step)
        partial = self.checkpoints / f".{target.name}.partial"
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        try:
            with disk_errors(target):
                accelerator.save_state(str(partial))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    files = sorted(path for path in partial.rglob("*") if path.is_file())
                    state.files = {str(path.relative_to(partial)): digest_of(path) for path in files}
                    write_json(partial / _STATE_FILE, asdict(state))
                    sync_tree(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if accelerator.is_main_process:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            sync(self.checkpoints)
            for old in self._checkpoints()[:-keep]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()  # a launcher stops the others soon after the first process that ends
        return target

    def load_checkpoint(self, accelerator: Accelerator, now: RunState) -> tuple[RunState, list[str]]:
        """Put the latest whole checkpoint into everything that ``accelerator`` prepared.

        Returns the progress of the run, and the faults of later checkpoints, which are removed.

        Raises:
            ValueError: none is whole; or it is of a run with other documents, another base or another number
                of processes than ``now``.
        """
        latest, damage = on_main_process(accelerator, self._latest_whole)
        state = RunState(**read_json(latest / _STATE_FILE))
        before = state.num_processes
        after = now.num_processes
        replicated = set(_REPLICATED)
        per_step = before * state.micro_batches
        advice = ""
        known = state.base.keys() & now.base.keys()
        if state.sharding != now.sharding and not {state.sharding, now.sharding} <= replicated:
            raise ValueError(
                f"{self.path} holds a run under {state.sharding}, this one is under {now.sharding}, and "
                "neither reads the checkpoints of the other; launch it with the same accelerate configuration"
            )
        if per_step % after:
            advice = f"whose {per_step} micro-batches a step they cannot share evenly; launch {before}"
        elif per_step != after * now.micro_batches:
            advice = (
                "and a step would take other batches than it did; pass --gradient_accumulation_steps "
                f"{per_step // after}"
            )
        elif before != after and now.sharding not in replicated:
            advice = f"its checkpoints under {now.sharding} are split among {before}; launch as many"
        if advice:
            raise ValueError(f"{self.path} holds a run of {before} processes, this one has {after}, {advice}")
        if state.documents != now.documents:
            raise ValueError(
                f"the data has changed since the run in {self.path} began, so its batches would be "
                "others; bring the data back, or start anew with --overwrite"
            )
        changed = differences(*({key: each.base[key] for key in known} for each in (state, now)))
        if changed:
            raise ValueError(
                f"the base has changed since the run in {self.path} began, so its heads would go on with the "
                f"hidden states of another model: {changed[0]}; bring the base back, or start anew with "
                "--overwrite"
            )
        for key, value in now.remedies.items():
            if state.remedies.get(key, value) != value:
                state.changes.append(f"from step {state.step} on {key}: {state.remedies[key]!r} -> {value!r}")
        state.remedies = now.remedies
        accelerator.load_state(str(latest))
        return state, damage

    def has_checkpoint(self, step: int | None = None) -> bool:
        """Whether there is something to resume, at ``step`` where one is given."""
        return any(step is None or path == self._checkpoint_at(step) for path in self._checkpoints())

    def _checkpoint_at(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def _checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if (path / _STATE_FILE).exists())

    def _latest_whole(self) -> tuple[Path, list[str]]:
        """The latest intact checkpoint, and the faults of later ones, which are removed."""
        damage: dict[Path, str] = {}
        for path in reversed(self._checkpoints()):
            fault = _damage(path)
            if fault is None:
                for later in damage:
                    shutil.rmtree(later)
                return path, [f"{each}; going on from {path.name}" for each in reversed(damage.values())]
            damage[path] = fault
        raise ValueError(
            f"no checkpoint in {self.checkpoints} is whole: {'; '.join(reversed(damage.values()))}. "
            "Start anew with --overwrite"
        )

    def _foreign_entries(self, data: Iterable[str]) -> set[str]:
        """The names of what is here except hidden files and the data files with their companions; that of the
        directory where it is none."""
        if not self.path.is_dir():
            return {self.path.name} if self.path.exists() else set()
        # realpath goes on where Path.resolve raises a RuntimeError: at a link that leads to itself
        own_path = os.path.realpath(self.path)
        inside = [Path(each).name for each in data if os.path.dirname(os.path.realpath(each)) == own_path]
        stems = tuple(name.split(".")[0] + "." for name in inside)
        return {entry.name for entry in self.path.iterdir() if not entry.name.startswith((".", *stems))}

    def _is_not_begun(self, entries: Collection[str]) -> bool:
        """Whether ``entries`` are of a run that ended before its first step, such as one whose data could not
        be used: any other run may take its place, and find its documents and states."""
        kept = {each.name for each in (self.config, self.documents, self.states, self.tracker)}
        return (
            self.config.name in entries
            and kept.issuperset(entries)
            and (self._configuration().keys() >= _RUN_KEYS)
        )


def _damage(checkpoint: Path) -> str | None:
    """The faults of a checkpoint's files, in words."""
    try:
        recorded = RunState(**read_json(checkpoint / _STATE_FILE)).files
    except (ValueError, TypeError) as error:
        return f"{checkpoint / _STATE_FILE} is damaged ({error})"
    for name, digest in recorded.items():
        path = checkpoint / name
        if not path.exists() or digest_of(path) != digest:
            return f"{path} is {'cut short or changed' if path.exists() else 'missing'}"
    return None


_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "numpy")


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
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "command": shlex.join(sys.orig_argv),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "medusa": {"version": medusa.__version__, "commit": commit()},
        "versions": versions,
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
        **_inherited(configuration.heads.start_from),
    }


def _inherited(start_from: str | None) -> dict[str, Any]:
    """What heads keep of those that they began as: that these were learned from a user's own texts."""
    path = None if start_from is None else heads_directory(start_from) / PROVENANCE_FILE
    learned = read_json(path).get("learned") if path is not None and path.exists() else None
    return {} if learned is None else {"learned": learned}
