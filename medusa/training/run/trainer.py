"""The training loop of every kind of training; what differs is in the recipe
(:class:`medusa.training.recipes.recipe.Recipe`).

An optimiser step trains on a group of micro-batches, ``gradient_accumulation_steps`` for each process. All
processes compute the same plan of groups, and each takes its own part of a group. The denominator of a step's
loss, the number of targets in the group, follows from the plan, so no communication is needed for it.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from medusa.base.causal_lm import lm_head
from medusa.base.profile import longrope_threshold
from medusa.console import ProgressReporter
from medusa.heads.checkpoint import HeadsCheckpoint, save_heads
from medusa.heads.fingerprint import BaseFingerprint
from medusa.heads.protocol import Heads
from medusa.training.config import REMEDY_KEYS, OptimisationOptions, TrainingConfiguration
from medusa.training.data.batching import MicroBatch, plan_epoch, plan_in_order
from medusa.training.data.dataset import Dataset, trained_on
from medusa.training.losses import add_metrics, from_lists, to_lists
from medusa.training.recipes.recipe import Recipe, RunState
from medusa.training.run.metrics import draw_training, is_stale, one_line, replayed_metrics
from medusa.training.run.processes import (
    STOPPED,
    HostGroup,
    StopSignal,
    full_scalar,
    gathered_heads,
    local_shard,
    micro_batch,
    on_main_process,
    shard_heads,
    wrap,
)
from medusa.training.run.run_directory import RunDirectory, provenance
from medusa.training.states.stored import written_identity
from medusa.trees.candidate_tree import CandidateTree

Position = tuple[list[MicroBatch], int, int]
"""A group of micro-batches, and where the run stands after its step: the epoch, and the steps done in it."""


@dataclass(frozen=True)
class _Schedule:
    """When a run ends, and its learning rate. It ends at the first of its limits, steps or time; the learning
    rate follows the limit that is closest to being reached."""

    total_steps: int | None
    """Optimiser steps of the whole run; None when only time limits it."""
    max_seconds: float | None
    warmup_steps: int
    final_fraction: float
    """Where the cosine ends, as a fraction of the peak."""

    @classmethod
    def of(cls, options: OptimisationOptions, steps_in_epoch: Callable[[int], int]) -> _Schedule:
        """The schedule of ``options``; ``steps_in_epoch`` gives the number of steps of an epoch, from 0."""
        limits = [] if options.max_steps is None else [options.max_steps]
        if options.num_epochs is not None:
            limits.append(sum(steps_in_epoch(epoch) for epoch in range(options.num_epochs)))
        seconds = None if options.max_minutes is None else 60 * options.max_minutes
        return cls(min(limits, default=None), seconds, options.warmup_steps, options.final_learning_rate)

    def progress(self, step: int, seconds: float) -> float:
        """The part of the run that is over, 0 to 1."""
        of_steps = 0.0 if self.total_steps is None else step / self.total_steps
        return min(1.0, max(of_steps, 0.0 if self.max_seconds is None else seconds / self.max_seconds))

    def learning_rate_factor(self, step: int, seconds: float) -> float:
        """Fraction of the peak learning rate after ``step`` steps: linear warm-up times cosine decay."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        decay = 0.5 * (1 + math.cos(math.pi * self.progress(step, seconds)))
        return warmup * (self.final_fraction + (1 - self.final_fraction) * decay)


class Trainer:
    """One run: its module, optimiser and progress."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, data: Dataset, console: Console):
        """
        Raises:
            ValueError: this kind of training cannot run as it was launched.
        """
        recipe.check_launch(accelerator)
        configuration = self.configuration = recipe.configuration
        self.recipe = recipe
        self.accelerator = accelerator
        self.data = data
        self.console = console
        self.base = recipe.states.base
        self.heads = recipe.heads
        self.loss = recipe.loss
        self.training = trained_on(data.training, configuration.data)
        """The training documents."""
        self.run = RunDirectory(configuration.run.output_dir)
        """The output directory: its paths, metrics file and checkpoints."""
        options = configuration.optimisation
        values = configuration.as_dict()
        self.state = RunState(
            num_processes=accelerator.num_processes,
            micro_batches=options.gradient_accumulation_steps,
            sharding=accelerator.distributed_type.value,
            documents=self.training.digest(),
            base=written_identity(self.base),
            evaluated_step=0,
            remedies={key: values[key] for key in REMEDY_KEYS},
        )
        self.hosts = HostGroup(accelerator, configuration.run.timeout_minutes)
        shard_heads(accelerator, recipe.shard)
        optimiser = torch.optim.AdamW(
            [
                {"params": [each for each in group if each.requires_grad]}
                for group in recipe.parameter_groups()
            ],
            lr=options.learning_rate,
            betas=(0.9, options.adam_beta2),
            weight_decay=options.weight_decay,
        )
        self.module, self.optimiser = wrap(accelerator, self.loss, optimiser, options.max_grad_norm)
        self.num_scored = recipe.count_targets(self.training)  # (n, K)
        self.schedule = _Schedule.of(options, lambda epoch: len(self._plan(epoch)))
        self.window = recipe.zero_metrics(accelerator.device)
        """The loss sums of this process since the last log entry."""
        self.watch = _FiniteWatch(accelerator.device, options.learning_rate)
        self.gradient_norm = torch.zeros((), device=accelerator.device)
        """Gradient norm of the last step, before clipping."""

    def train(self) -> dict[str, float]:
        """Train until a limit is reached and write the heads; returns the final metrics on the held-out
        documents.

        Raises:
            SystemExit: SIGTERM came; a checkpoint is written, and the status is
                :data:`medusa.training.run.processes.STOPPED`.
            FloatingPointError: a loss or gradient is not finite; no checkpoint is written after that.
            MemoryError: a batch does not fit; the message names what to lower.
        """
        self._begin()
        with _memory_advice(self.configuration):
            with StopSignal() as stop, ProgressReporter("training", self.console, self._is_main) as line:
                evaluated, metrics = self._loop(line, stop)
            self.watch.check()
            self.save(self.run.heads, self.gathered_heads(), metrics)  # first of all: the rest may fail
            if not on_main_process(self.accelerator, lambda: self.run.has_checkpoint(self.state.step)):
                self.checkpoint()  # so that a run with a later limit can resume from here
            return metrics if evaluated == self.state.step else self.evaluate()

    def _loop(self, line: ProgressReporter, stop: StopSignal) -> tuple[int, dict[str, float]]:
        """Step until a limit is reached; returns the step of the last evaluation, -1 for none, and its
        metrics."""
        options = self.configuration.run
        evaluated = -1
        metrics = dict[str, float]()
        spent_before = self.state.seconds
        began = time.monotonic()
        note = ""
        # Time and tokens at the last log entry, and time at the last checkpoint.
        logged_seconds = self.state.seconds
        logged_tokens = self.state.num_tokens
        checkpointed = self.state.seconds
        groups = self._groups()
        if self.state.evaluated_step is not None and self._is_evaluation_due:  # a signal took its place
            evaluated = self.state.step
            metrics = self.evaluate()
        with stop.deferred():
            while self._progress < 1:
                group, *position = next(groups)
                self._step(group)
                self.state.epoch, self.state.step_in_epoch = position
                # All processes must end in the same step, so the main process's clock counts for all.
                seconds = spent_before + time.monotonic() - began if self._is_main else 0.0
                self.state.seconds, is_stopped = self.hosts.maximum(seconds, stop.has_come)
                if self._is_due(options.logging_steps):
                    note = self._log(logged_seconds, logged_tokens)
                    logged_seconds = self.state.seconds
                    logged_tokens = self.state.num_tokens
                if self._is_evaluation_due and not is_stopped:
                    evaluated = self.state.step
                    metrics = self.evaluate()
                    line.say(f"step {evaluated}  {one_line('held_out', metrics)}")
                minutes = (self.state.seconds - checkpointed) / 60
                is_late = options.checkpoint_minutes is not None and minutes >= options.checkpoint_minutes
                if self._is_due(options.checkpoint_steps) or is_late or is_stopped:
                    self.checkpoint()
                    checkpointed = self.state.seconds
                if is_stopped:
                    line.say(f"stopped by SIGTERM at step {self.state.step}; --resume goes on from there")
                    raise SystemExit(STOPPED)
                line.show(self._progress, f"step {self.state.step}  {note}", self.state.seconds)
        return evaluated, metrics

    def evaluate(self) -> dict[str, float]:
        """Loss, top-1 and top-5 of each head on the held-out documents, and the tokens per step that decoding
        these would give; empty if there are none. The heads with most tokens per step so far are saved in
        ``best/``."""
        self.watch.check()
        self.state.evaluated_step = self.state.step
        plan = plan_in_order(
            self.data.held_out.lengths, self.configuration.data, longrope_threshold(self.base)
        )
        sums = self.recipe.zero_metrics(self.accelerator.device)
        ones = torch.ones(self.num_scored.shape[1], device=self.accelerator.device)  # only the sums are used
        for batch in local_shard(plan, self.accelerator):
            with torch.no_grad():
                sums = add_metrics(sums, self._loss("held-out", batch, ones)[1])
        at_most = self.configuration.run.replayed_documents
        heads, states = (self.gathered_heads(), self.held_out_states(at_most)) if at_most else (None, None)
        replayed = replayed_metrics(self.base, heads, self.data.held_out, at_most, states)
        metrics = self._record("held_out", sums, **replayed, num_tokens=self.state.num_tokens) | replayed
        tokens_per_step = replayed.get("held_out/tokens_per_step", 0.0)
        if self.state.step and tokens_per_step > self.state.most_tokens_per_step:
            self.state.most_tokens_per_step = tokens_per_step
            self.save(self.run.best, heads, metrics)
        if self._is_main and is_stale(self.run.picture):
            draw_training(self.run.logged_metrics(), self.run.picture)
        return metrics

    def save(
        self,
        directory: Path,
        heads: Heads | None,
        metrics: dict[str, float],
        tree: CandidateTree | None = None,
        is_finished: bool = False,
    ) -> None:
        """Write the heads directory, in place of an earlier one, with ``tree`` and ``metrics``.

        Nothing happens if ``heads`` is None, as it is on all processes but the main one
        (:meth:`gathered_heads`).

        ``is_finished`` says that these heads are the final result of the run.

        Raises:
            OSError: the disk refused; the old content of ``directory`` is untouched.
        """
        if heads is None:
            return
        checkpoint = HeadsCheckpoint(
            heads,
            self.configuration.base.base,
            tree,
            provenance(self.configuration, self.data.counts, self.state, metrics, is_finished),
            adapter=self.recipe.adapter(),
            fingerprint=BaseFingerprint.of(self.base),
            template_options=self.data.template_options,
        )
        save_heads(checkpoint, directory, overwrite=True)

    def held_out_states(self, at_most: int | None = None) -> Sequence[Tensor] | None:
        """The hidden states (T, (1 + L) * D) of the first ``at_most`` held-out documents, or of all, with L
        the number of ``fused_layers``. The list is empty on all processes but the main one.

        None if this process can run the base itself. All processes must call it.
        """
        states = self.recipe.states
        held_out = self.data.held_out
        if states.live.base is self.base and "held-out" not in states.stored:
            return None
        indices = range(len(held_out))[:at_most] if self._is_main else ()
        layers = self.heads.fused_layers
        hidden_states = [states.of_document(held_out, "held-out", index, layers).cpu() for index in indices]
        states.live.finish()
        return hidden_states

    def checkpoint(self) -> None:
        """Write everything that a resumed run needs to go on as if it had not stopped.

        Raises:
            OSError: the disk refused; earlier checkpoints are untouched.
        """
        self.watch.check()
        self.state.window = to_lists(self.accelerator.reduce(self.window, "sum"))
        self.run.save_checkpoint(self.accelerator, self.state, self.configuration.run.keep_checkpoints)

    def gathered_heads(self) -> Heads | None:
        """The trained heads, whole, on the main process; None on the others. All processes must call it."""
        return gathered_heads(self.accelerator, self.module, self.heads)

    def close(self) -> None:
        """End the tracker and the process group; the trainer cannot be used after that.

        The module's wrapper (DDP, ...) is freed first: it hangs if its process group ends before it.
        """
        self.module, self.optimiser = self.accelerator.free_memory(self.module, self.optimiser)
        self.accelerator.end_training()

    def _begin(self) -> None:
        """Resume from the latest checkpoint, if requested and there is one."""
        # For dropout in an adapter; loading a checkpoint restores the random state.
        torch.manual_seed(self.configuration.data.seed + self.accelerator.process_index)
        # Only the main process looks: on a shared file system the others may see an older directory.
        may_resume = self.configuration.run.resume != "never"
        if may_resume and on_main_process(self.accelerator, self.run.has_checkpoint):
            self.state, damage = self.run.load_checkpoint(self.accelerator, self.state)
            for note in (*damage, *self.state.changes, f"resumed at step {self.state.step}"):
                self.console.print(note, soft_wrap=True)
        if self._is_main:
            if self.state.window:
                self.window = from_lists(self.window, self.state.window)
            self.run.forget_metrics_after(self.state.step, is_over=self._progress >= 1)
        self.accelerator.wait_for_everyone()

    def _step(self, group: list[MicroBatch]) -> None:
        """One optimiser step on this process's share of a group of micro-batches."""
        state = self.state
        device = self.accelerator.device
        documents = [index for batch in group for row in batch for index in row]
        num_scored = torch.from_numpy(self.num_scored[documents].sum(0)).to(device)  # (K,)
        total = torch.zeros((), device=device)
        factor = self.schedule.learning_rate_factor(state.step, state.seconds)
        state.progress = self._progress
        learning_rate = self.configuration.optimisation.learning_rate * factor
        note = self.recipe.begin_step(self.optimiser, learning_rate, state)
        if note is not None:
            self.console.print(note, soft_wrap=True)
        batches = local_shard(group, self.accelerator)
        for number, batch in enumerate(batches, start=1):
            with micro_batch(self.accelerator, self.module, is_last=number == len(batches)):
                loss, sums = self._loss("training", batch, num_scored)
                # DDP averages gradients over the processes; here their sum is wanted, since the denominator
                # of the loss counts the targets of all.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
            self.window = add_metrics(self.window, sums)
        max_norm = self.configuration.optimisation.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), max_norm)
        self.gradient_norm = full_scalar(norm, device)
        self.optimiser.step()
        self.optimiser.zero_grad()
        state.step += 1
        state.num_tokens += int(self.training.lengths[documents].sum())
        self.watch.see(state.step, total + self.gradient_norm)

    def _loss(self, name: str, batch: MicroBatch, num_scored: Tensor) -> tuple[Tensor, Any]:
        """The loss, a scalar, of a micro-batch of the "training" or the "held-out" documents, and its sums.
        ``num_scored`` (K,) is the denominator of each depth."""
        documents = self.training if name == "training" else self.data.held_out
        with self.accelerator.autocast():  # for the base too, which is not part of the wrapped module
            inputs = self.recipe.read(documents, name, batch)
            return self.module(*inputs, lm_head(self.base), num_scored, self.recipe.teacher)

    def _groups(self) -> Iterator[Position]:
        """The groups from the current position on, epoch after epoch without end."""
        epoch = self.state.epoch
        done = self.state.step_in_epoch
        while True:
            groups = self._plan(epoch)
            for index in range(done, len(groups)):
                is_last = index + 1 == len(groups)
                yield groups[index], epoch + is_last, 0 if is_last else index + 1
            epoch = epoch + 1
            done = 0

    def _plan(self, epoch: int) -> list[list[MicroBatch]]:
        """The groups of micro-batches of one epoch."""
        batches = plan_epoch(
            self.training.lengths, self.configuration.data, epoch, longrope_threshold(self.base)
        )
        size = self.configuration.optimisation.gradient_accumulation_steps * self.accelerator.num_processes
        return [batches[start : start + size] for start in range(0, len(batches), size)]

    def _log(self, seconds_before: float, tokens_before: int) -> str:
        """Record the sums of the window and reset it; returns a note for the progress line."""
        self.watch.check()
        seconds = self.state.seconds - seconds_before
        tokens = self.state.num_tokens - tokens_before
        metrics = self._record(
            "train",
            self.window,
            epoch=self.state.epoch,
            num_tokens=self.state.num_tokens,
            minutes=self.state.seconds / 60,
            learning_rate=self.optimiser.param_groups[0]["lr"],
            gradient_norm=float(self.gradient_norm),
            tokens_per_second=tokens / seconds,
            peak_gib=_peak_memory(self.accelerator.device) / 2**30,
        )
        self.window = self.recipe.zero_metrics(self.accelerator.device)
        return f"{one_line('train', metrics)}  {tokens / seconds:.0f} tokens/s"

    def _record(self, name: str, sums: Any, **beside: float) -> dict[str, float]:
        """Add up ``sums`` over all processes, write their metrics to the tracker and the metrics file, and
        return them."""
        metrics = self.accelerator.reduce(sums, "sum").metrics(name)
        self.accelerator.log({**metrics, **beside}, step=self.state.step)
        if self._is_main and metrics:
            with self.run.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.state.step, **metrics, **beside}) + "\n")
        return metrics

    @property
    def _progress(self) -> float:
        return self.schedule.progress(self.state.step, self.state.seconds)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    @property
    def _is_evaluation_due(self) -> bool:
        return self._is_due(self.configuration.run.evaluation_steps) and (
            self.state.evaluated_step != self.state.step
        )

    @property
    def _is_main(self) -> bool:
        return self.accelerator.is_main_process


def _peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def _memory_advice(configuration: TrainingConfiguration) -> Iterator[None]:
    """Turns running out of memory, of a device's or the machine's, into a MemoryError that names the settings
    to lower."""
    try:
        yield
    except RuntimeError as error:  # on a CPU PyTorch tells out-of-memory only in the message
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise MemoryError(
            "there is not enough memory: lower tokens_per_batch (it is "
            f"{configuration.data.tokens_per_batch}; raise gradient_accumulation_steps to make up "
            f"for it) or block_elements (it is {configuration.loss.block_elements})"
        ) from error


class _FiniteWatch:
    """Remembers the first step whose loss or gradient was not finite, without waiting for the device at every
    step."""

    def __init__(self, device: torch.device, learning_rate: float):
        self._bad_step = torch.zeros((), dtype=torch.long, device=device)
        self._learning_rate = learning_rate

    def see(self, step: int, number: Tensor) -> None:
        """``number``, a scalar, is of ``step``, counted from 1; it is not read on the host."""
        is_first = ~torch.isfinite(number) & (self._bad_step == 0)
        self._bad_step = torch.where(is_first, step, self._bad_step)

    def check(self) -> None:
        """Raise FloatingPointError if a number so far was not finite; waits for the device."""
        step = int(self._bad_step)
        if step:
            raise FloatingPointError(
                f"loss or gradient of step {step} is not finite; lower learning_rate (it is "
                f"{self._learning_rate}), or train with precision=fp32 and base_dtype=float32; --resume "
                "takes such changes"
            )
