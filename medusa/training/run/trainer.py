"""The training loop: the base stays frozen, the heads are optimised, the rest is bookkeeping.

An optimisation step is a group of micro-batches, ``gradient_accumulation_steps`` for each process. All
processes see the same plan of groups and take their own part of it. What a step divides by, the number
of targets in the group, is known from the plan, so no process has to ask another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from rich.console import Console
from torch import nn

from medusa.base.causal_lm import CausalLM, output_embedding
from medusa.heads.eagle import EagleHead, Heads
from medusa.progress import ProgressReporter
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.data.batching import MicroBatch, plan_epoch, plan_in_order
from medusa.training.data.documents import Documents
from medusa.training.data.loading import TrainingData
from medusa.training.losses.eagle_loss import EagleLoss
from medusa.training.losses.joint_loss import JointRows, JointSums
from medusa.training.losses.loss import HeadsLoss, LossSums
from medusa.training.losses.objectives import needs_teacher
from medusa.training.losses.saved_sums import as_numbers, from_numbers
from medusa.training.losses.teacher import teacher_of
from medusa.training.run.curve import draw_training, is_stale
from medusa.training.run.failures import FiniteWatch, memory_advice
from medusa.training.run.metrics import metrics_of, one_line
from medusa.training.run.optimiser import new_optimiser
from medusa.training.run.preparation import column_of
from medusa.training.run.processes import gathered_heads, micro_batch, prepare, read, share_of, whole_number
from medusa.training.run.replay import replayed_metrics
from medusa.training.run.run_directory import RunDirectory, RunState
from medusa.training.run.schedule import schedule_of
from medusa.training.states.hidden_source import HiddenSource, LiveFeatures, LiveStates
from medusa.training.states.stored_states import StateFile, StoredFeatures, StoredStates, store_states

Source = HiddenSource | LiveFeatures | JointRows
"""Gives what a loss reads of a micro-batch: that of Medusa heads, of an EAGLE-style head, of both stages of
joint training."""
Sums = LossSums | JointSums
"""What losses come to."""


class Trainer:
    """One run: heads, optimiser, and where the run stands."""

    def __init__(
        self,
        configuration: TrainingConfiguration,
        accelerator: Accelerator,
        base: CausalLM,
        heads: Heads,
        data: TrainingData,
        console: Console,
    ):
        self.configuration, self.accelerator, self.console = configuration, accelerator, console
        self.base, self.heads, self.data = base, heads, data
        on_everything = configuration.data.train_on == "everything"
        self.training = data.training.labelled_everywhere() if on_everything else data.training
        self.run = RunDirectory(configuration.run.output_dir)
        self.state = RunState(
            num_processes=accelerator.num_processes,
            sharding=accelerator.distributed_type.value,
            documents=self.training.digest(),
        )
        self.columns = column_of(heads)
        is_soft = needs_teacher(configuration.loss.objective)
        self.teacher = teacher_of(base, heads.token_map) if is_soft else None
        self.loss = self._new_loss()
        self.module, self.optimiser = prepare(
            accelerator, self.loss, self._new_optimiser(), configuration.optimisation.max_grad_norm
        )
        self.num_scored = self._count_targets(self.training)  # (n, K)
        self.schedule = schedule_of(configuration.optimisation, lambda epoch: len(self._plan(epoch)))
        self.window = self._no_sums()
        self.watch = FiniteWatch(accelerator.device)

    def train(self) -> dict[str, float]:
        """Train until a limit is reached; the metrics on the held-out documents at the end come back.

        Raises:
            FloatingPointError: a loss or gradient is not finite; no checkpoint is written after that.
            MemoryError: a batch does not fit; the message names what to lower.
        """
        self._begin()
        with memory_advice(self.configuration):
            return self._train()

    def _train(self) -> dict[str, float]:
        training = self._source(self.training, "training")
        held_out = self._source(self.data.held_out, "held-out")
        evaluated, metrics = -1, dict[str, float]()
        with ProgressReporter("training", self.console, self.accelerator.is_main_process) as line:
            spent_before, began = self.state.seconds, time.monotonic()
            logged, note = (self.state.seconds, self.state.num_tokens), ""
            for group in self._groups():
                self._step(training, group)
                self.state.seconds = self._agreed(spent_before + time.monotonic() - began)
                if self._is_due(self.configuration.run.logging_steps):
                    note, logged = self._log(*logged), (self.state.seconds, self.state.num_tokens)
                if self._is_due(self.configuration.run.evaluation_steps):
                    evaluated, metrics = self.state.step, self.evaluate(held_out)
                    line.say(f"step {evaluated}  {one_line('held_out', metrics)}")
                if self._is_due(self.configuration.run.checkpoint_steps):
                    self.checkpoint()
                line.show(self._progress, f"step {self.state.step}  {note}", self.state.seconds)
        return metrics if evaluated == self.state.step else self.evaluate(held_out)

    def evaluate(self, source: Source) -> dict[str, float]:
        """Loss, top-1 and top-5 of each head on the held-out documents, and the tokens per step that decoding
        them would have had; empty when there are none."""
        self.watch.check(self.configuration)
        plan = plan_in_order(self.data.held_out.lengths, self.configuration.batch_options())
        sums, embedding = self._no_sums(), output_embedding(self.base)
        no_matter = torch.ones(self.num_scored.shape[1], device=self.accelerator.device)
        for batch in self._share(plan):
            given = read(source, batch, self.accelerator)
            with torch.no_grad():
                sums = sums.plus(self.module(*given, embedding, no_matter, self.teacher)[1])
        at_most = self.configuration.run.replayed_documents
        heads = self.gathered_heads() if at_most else None
        replayed = replayed_metrics(self.base, heads, self.data.held_out, at_most)
        metrics = self._record("held_out", sums, **replayed, num_tokens=self.state.num_tokens)
        if self.accelerator.is_main_process and is_stale(self.run.picture):
            draw_training(self.run.logged_metrics(), self.run.picture)
        return metrics | replayed

    def checkpoint(self) -> None:
        """Write everything that a resumed run needs to go on as if it had not stopped.

        Raises:
            OSError: the disk refused; earlier checkpoints are untouched.
        """
        self.watch.check(self.configuration)
        self.state.window = as_numbers(self.accelerator.reduce(self.window, "sum"))
        self.run.save_checkpoint(self.accelerator, self.state, self.configuration.run.keep_checkpoints)

    def gathered_heads(self) -> Heads | None:
        """The trained heads, whole, on the main process; None on the others. All processes must call it."""
        return gathered_heads(self.accelerator, self.module, self.heads)

    def close(self) -> None:
        """End the tracker and the process group; the trainer is of no use after that.

        What wraps the module goes first: a wrapper that outlives its process group hangs as it is freed.
        """
        self.module, self.optimiser = self.accelerator.free_memory(self.module, self.optimiser)
        self.accelerator.end_training()

    def _begin(self) -> None:
        if self.configuration.run.resume:
            self.state = self.run.load_checkpoint(self.accelerator, self.state)
        if self.accelerator.is_main_process:
            if self.state.window:
                self.window = from_numbers(self.window, self.state.window)
            self.run.begin(self.configuration)
            self.run.forget_metrics_after(self.state.step)
        self.accelerator.wait_for_everyone()

    def _step(self, source: Source, group: list[MicroBatch]) -> None:
        """One optimisation step on a group of micro-batches."""
        documents = [index for batch in group for row in batch for index in row]
        num_scored = torch.from_numpy(self.num_scored[documents].sum(0)).to(self.accelerator.device)
        embedding = output_embedding(self.base)
        total = torch.zeros((), device=self.accelerator.device)
        self._set_learning_rate()
        mine = self._share(group)
        for number, batch in enumerate(mine, start=1):
            with micro_batch(self.accelerator, self.module, is_last=number == len(mine)):
                given = read(source, batch, self.accelerator)
                loss, sums = self.module(*given, embedding, num_scored, self.teacher)
                self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged
            total += loss.detach()
            self.window = self.window.plus(sums)
        norm = self.accelerator.clip_grad_norm_(
            self.module.parameters(), self.configuration.optimisation.max_grad_norm
        )
        total += whole_number(norm, total.device)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.state.step += 1
        self.state.step_in_epoch += 1
        self.state.num_tokens += int(self.training.lengths[documents].sum())
        self.watch.see(self.state.step, total)

    def _groups(self) -> Iterator[list[MicroBatch]]:
        """The groups that remain, epoch after epoch, until the schedule is over."""
        while self._progress < 1:
            groups = self._plan(self.state.epoch)
            while self.state.step_in_epoch < len(groups) and self._progress < 1:
                yield groups[self.state.step_in_epoch]
            if self.state.step_in_epoch == len(groups):
                self.state.epoch, self.state.step_in_epoch = self.state.epoch + 1, 0

    def _plan(self, epoch: int) -> list[list[MicroBatch]]:
        batches = plan_epoch(
            self.training.lengths,
            self.configuration.batch_options(),
            self.configuration.data.seed,
            epoch,
        )
        size = self.configuration.optimisation.gradient_accumulation_steps * self.accelerator.num_processes
        return [batches[start : start + size] for start in range(0, len(batches), size)]

    def _share(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        return share_of(batches, self.accelerator)

    def _source(self, documents: Documents, name: str) -> Source:
        num_heads, is_eagle = self.heads.num_heads, isinstance(self.heads, EagleHead)
        if not self.configuration.optimisation.cache_hidden_states or not len(documents):
            if is_eagle:
                return LiveFeatures(self.base, documents, num_heads, self.columns)
            return LiveStates(self.base, documents, num_heads, self.columns, self.heads.reads_layers)
        directory = self._stored(documents, name, None if is_eagle else num_heads)
        if is_eagle:
            file = StateFile(directory, documents, None)
            return StoredFeatures(self.base, documents, num_heads, self.columns, file=file)
        return StoredStates(directory, documents, num_heads, self.columns, self.accelerator.device)

    def _stored(self, documents: Documents, name: str, num_heads: int | None) -> Path:
        """Where the hidden states of ``documents`` are kept, once they are."""
        directory, dtype = self.run.states / name, self.configuration.optimisation.cache_dtype
        if self.accelerator.is_main_process:
            batches, layers = self.configuration.batch_options(), self.heads.reads_layers
            with ProgressReporter("hidden states", self.console) as line, self.accelerator.autocast():
                store_states(directory, self.base, documents, num_heads, dtype, batches, line, layers)
        self.accelerator.wait_for_everyone()
        return directory

    def _log(self, seconds_before: float, tokens_before: int) -> str:
        """Record what was summed since then and empty the window; a note for the progress line."""
        self.watch.check(self.configuration)
        seconds, tokens = self.state.seconds - seconds_before, self.state.num_tokens - tokens_before
        metrics = self._record(
            "train",
            self.window,
            epoch=self.state.epoch,
            num_tokens=self.state.num_tokens,
            minutes=self.state.seconds / 60,
            learning_rate=self.optimiser.param_groups[0]["lr"],
            tokens_per_second=tokens / seconds,
        )
        self.window = self._no_sums()
        return f"{one_line('train', metrics)}  {tokens / seconds:.0f} tokens/s"

    def _record(self, name: str, sums: Sums, **beside: float) -> dict[str, float]:
        """Metrics of the sums of all processes, to the tracker and the metrics file."""
        sums = self.accelerator.reduce(sums, "sum")
        metrics = self._metrics_of(name, sums)
        self.accelerator.log({**metrics, **beside}, step=self.state.step)
        if self.accelerator.is_main_process and metrics:
            self.run.append_metrics({"step": self.state.step, **metrics, **beside})
        return metrics

    @property
    def _progress(self) -> float:
        return self.schedule.progress(self.state.step, self.state.seconds)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def _agreed(self, seconds: float) -> float:
        """The main process's clock, where time decides anything: all processes must stop together."""
        if self.accelerator.num_processes == 1 or self.schedule.max_seconds is None:
            return seconds
        return float(broadcast(torch.tensor(seconds, device=self.accelerator.device)))

    def _set_learning_rate(self) -> None:
        factor = self.schedule.learning_rate_factor(self.state.step, self.state.seconds)
        for group in self.optimiser.param_groups:
            group["lr"] = self.configuration.optimisation.learning_rate * factor

    def _new_loss(self) -> nn.Module:
        """The module that is wrapped and optimised: (source's two, output embedding, num_scored, teacher) ->
        the loss and its sums."""
        heads, options = self.heads, self.configuration.loss.loss_options()
        return EagleLoss(heads, options) if isinstance(heads, EagleHead) else HeadsLoss(heads, options)

    def _new_optimiser(self) -> torch.optim.Optimizer:
        return new_optimiser([list(self.heads.parameters())], self.configuration.optimisation)

    def _count_targets(self, documents: Documents) -> np.ndarray:
        """(n, K) long: targets of each depth in each document."""
        has_column = None if self.columns is None else self.columns.numpy() >= 0
        return documents.num_scored(self.heads.num_heads, has_column)

    def _no_sums(self) -> Sums:
        return LossSums.zeros(self.heads.num_heads, self.accelerator.device)

    def _metrics_of(self, name: str, sums: Any) -> dict[str, float]:
        return metrics_of(name, sums)
