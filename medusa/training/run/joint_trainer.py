"""Joint training: the loop of ``trainer.py`` with an adapter on the base and two stages.

Everything about groups of micro-batches, processes, checkpoints and resuming is the other module's. Here
is what differs: the loss, two learning rates, and when the second stage begins. The second stage warms up
like the first, for the adapter only: the heads are in full swing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from rich.console import Console
from torch import nn

from medusa.base.causal_lm import CausalLM, vocab_size
from medusa.heads.medusa_heads import MedusaHeads
from medusa.training.config.configuration import ConfigurationError, TrainingConfiguration
from medusa.training.data.batching import MicroBatch
from medusa.training.data.documents import Documents
from medusa.training.data.loading import TrainingData
from medusa.training.losses.base_loss import BaseLoss
from medusa.training.losses.joint_loss import JointLoss, JointRows, JointSums
from medusa.training.losses.loss import HeadsLoss
from medusa.training.losses.teacher import teacher_of
from medusa.training.run.lora import TrainedAdapter
from medusa.training.run.optimiser import new_optimiser
from medusa.training.run.trainer import Source, Sums, Trainer


class JointTrainer(Trainer):
    """One run that trains heads, and from some point on an adapter of the base with them."""

    heads: MedusaHeads
    loss: JointLoss

    def __init__(
        self,
        configuration: TrainingConfiguration,
        accelerator: Accelerator,
        base: CausalLM,
        heads: MedusaHeads,
        data: TrainingData,
        console: Console,
        adapter: TrainedAdapter,
    ):
        """``adapter`` is in the layers of ``base`` already.

        Raises:
            ValueError: the processes share out parameters among them.
        """
        _check_whole_parameters(accelerator)
        self.adapter = adapter
        super().__init__(configuration, accelerator, base, heads, data, console)

    @property
    def is_joint(self) -> bool:
        """Whether the next step trains the adapter too. Once it has begun the second stage stays."""
        return self.state.adapter_steps > 0 or (
            self._progress >= self.configuration.joint.joint_warmup_fraction
        )

    def _step(self, source: Source, group: list[MicroBatch]) -> None:
        self.loss.is_joint = self.is_joint
        if self.is_joint and self.state.adapter_steps == 0:
            self._begin_second_stage()
        super()._step(source, group)
        self.state.adapter_steps += self.loss.is_joint

    def _begin_second_stage(self) -> None:
        """The adapter's moments start here: the zeros of the first stage say nothing.

        They are filed under what the optimiser steps: under ZeRO-2 a part of the adapter, in one piece.
        """
        _, of_adapter = self.optimiser.param_groups
        for each in of_adapter["params"]:
            self.optimiser.state.pop(each, None)
        self.console.print(
            f"step {self.state.step}: from here on the adapter is trained with the heads", soft_wrap=True
        )

    def _set_learning_rate(self) -> None:
        options = self.configuration.optimisation
        peak = options.learning_rate * self.schedule.learning_rate_factor(self.state.step, self.state.seconds)
        rise = min(1.0, (self.state.adapter_steps + 1) / max(1, options.warmup_steps))
        for_heads, for_adapter = self.optimiser.param_groups
        for_heads["lr"] = peak * self.configuration.joint.head_learning_rate_multiplier
        for_adapter["lr"] = peak * rise if self.loss.is_joint else 0.0

    def _source(self, documents: Documents, name: str) -> Source:
        return JointRows(self.base, documents, self.heads.num_heads, self.columns)

    def _new_loss(self) -> nn.Module:
        options = self.configuration.joint
        base_loss = BaseLoss(
            teacher_of(self.base),
            vocab_size(self.base),
            options.base_objective,
            self.configuration.loss.block_elements,
        )
        heads_loss = HeadsLoss(self.heads, self.configuration.loss.loss_options())
        return JointLoss(heads_loss, self.adapter, base_loss, options.lambda_0)

    def _new_optimiser(self) -> torch.optim.Optimizer:
        groups = [list(self.heads.parameters()), list(self.adapter.parameters.values())]
        return new_optimiser(groups, self.configuration.optimisation)

    def _count_targets(self, documents: Documents) -> np.ndarray:
        """(n, K + 1) long: targets of the base's own row, then of each depth, in each document."""
        own = np.array([documents[index].is_label[1:].sum() for index in range(len(documents))], np.int64)
        return np.concatenate([own[:, None], super()._count_targets(documents)], axis=1)

    def _no_sums(self) -> Sums:
        return JointSums.zeros(self.heads.num_heads, self.accelerator.device)

    def _metrics_of(self, name: str, sums: Any) -> dict[str, float]:
        return super()._metrics_of(name, sums.heads) | base_metrics(name, sums)


def base_metrics(name: str, sums: JointSums) -> dict[str, float]:
    """What became of the base: perplexity on label tokens now and before, and how far its text has moved.

    Empty while the adapter is not trained.
    """
    base, metrics = sums.base, dict[str, float]()
    if int(base.num_targets):
        metrics[f"{name}/base_perplexity"] = float((base.cross_entropy / base.num_targets).exp())
    if num_compared := int(base.num_compared):
        before = (base.reference_cross_entropy / num_compared).exp()
        metrics[f"{name}/base_perplexity_before"] = float(before)
        metrics[f"{name}/base_divergence"] = float(base.divergence / num_compared)
        metrics[f"{name}/base_agreement"] = float(base.num_agreeing / num_compared)
    return metrics


def base_report(metrics: Mapping[str, float]) -> str:
    """What the user of a jointly trained base has to know about its text."""
    if "held_out/base_perplexity" not in metrics:
        return "no held-out documents, so what became of the base was not measured"
    before, now, divergence, agreement = (
        metrics[f"held_out/base_{each}"]
        for each in ("perplexity_before", "perplexity", "divergence", "agreement")
    )
    return (
        f"the base's perplexity on held-out answers: {before:.4f} before, {now:.4f} with the adapter; its "
        f"first choice is the same at {agreement:.1%} of their tokens, KL {divergence:.4f}. With the adapter "
        "the model writes its own text, not the base's: decoding is exact with respect to the adapted model"
    )


def _check_whole_parameters(accelerator: Accelerator) -> None:
    plugin = accelerator.state.deepspeed_plugin
    stage = 0 if plugin is None else plugin.zero_stage
    if accelerator.distributed_type == DistributedType.FSDP or stage == 3:
        raise ConfigurationError(
            "joint=true needs the adapter whole on every process, since the base that it sits in is; launch "
            "with plain data parallelism or DeepSpeed ZeRO-2 instead of FSDP or ZeRO-3"
        )
