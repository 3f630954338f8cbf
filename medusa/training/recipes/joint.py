"""Joint training (Medusa-2): Medusa heads together with a LoRA adapter on the base, in two stages.

    first    L = lambda_0 * L_heads              the base as it was, no gradient beyond the heads
    then     L = L_base + lambda_0 * L_heads     arXiv 2401.10774, section 2.2.2

    L_base = sum over targets of KL(p || q) / num_targets

where q is the adapted base's distribution and p that of the same model with the adapter switched off
(self-distillation); or L_base is the cross-entropy with the text's own tokens. lambda_0 stands in the first
stage too, so that the second moments of the optimiser are of one scale throughout. The base runs once in the
first stage, and in the second once with the adapter and, for self-distillation, once without: there is one
base in memory. The second stage warms up like the first, for the adapter only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, hidden_states, vocab_size
from medusa.heads.adapter import Adapter
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import ConfigurationError
from medusa.training.data.batching import MicroBatch, collate, one_token
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.fused import FusedLoss, TargetBlock
from medusa.training.losses.objectives import ObjectiveName, objective_named
from medusa.training.losses.sums import LossSums, added
from medusa.training.losses.teacher import Teacher, expected, teacher_of
from medusa.training.recipes.lora import TrainedAdapter
from medusa.training.recipes.medusa_heads import HeadsLoss, new_heads
from medusa.training.run.metrics import metrics_of
from medusa.training.run.recipe import Feed, Recipe
from medusa.training.run.run_directory import RunState
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile


class JointRecipe(Recipe):
    """Medusa heads, and from some point on an adapter of the base with them."""

    loss: JointLoss
    result = "heads and adapter"

    def __init__(
        self,
        configuration: TrainingConfiguration,
        base: CausalLM,
        training: Documents,
        _stored: StateFile | None = None,
        _live: LiveStates | None = None,
    ):
        """``base`` gets the adapter into its layers."""
        options, heads = configuration.joint, new_heads(configuration, base, training)
        self.trained_adapter = TrainedAdapter(base, options, configuration.data.seed)
        block_elements = configuration.loss.block_elements
        base_loss = BaseLoss(teacher_of(base), vocab_size(base), options.base_objective, block_elements)
        heads_loss = HeadsLoss(heads, configuration.loss)
        loss = JointLoss(heads_loss, self.trained_adapter, base_loss, options.lambda_0)
        super().__init__(configuration, base, heads, loss)

    def describe(self, training: Documents) -> str:
        options = self.configuration.joint
        return (
            f"{super().describe(training)}, and a LoRA adapter of {self.trained_adapter.num_parameters:,} "
            f"parameters; heads alone for {options.joint_warmup_fraction:.0%} of the run, heads_weight "
            f"{options.lambda_0:g}"
        )

    def feed(self, documents: Documents, stored: StateFile | None) -> Feed:
        return JointFeed(self.base, documents, self.heads.num_heads, self.columns)

    def check_launch(self, accelerator: Accelerator) -> None:
        plugin = accelerator.state.deepspeed_plugin
        stage = 0 if plugin is None else plugin.zero_stage
        if accelerator.distributed_type == DistributedType.FSDP or stage == 3:
            raise ConfigurationError(
                "joint=true needs the adapter whole on every process, since the base that it sits in is; "
                "launch with plain data parallelism or DeepSpeed ZeRO-2 instead of FSDP or ZeRO-3"
            )

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Those of the heads, then those of the adapter."""
        return [list(self.heads.parameters()), list(self.trained_adapter.parameters.values())]

    def begin_step(
        self, optimiser: torch.optim.Optimizer, peak: float, progress: float, state: RunState
    ) -> str | None:
        """Once the second stage has begun it stays."""
        options, note = self.configuration.joint, None
        of_heads, of_adapter = optimiser.param_groups
        is_joint = state.adapter_steps > 0 or progress >= options.joint_warmup_fraction
        if is_joint and state.adapter_steps == 0:
            # The adapter's moments start here: the zeros of the first stage say nothing. They are kept under
            # what the optimiser steps: under ZeRO-2 a part of the adapter, in one piece.
            for each in of_adapter["params"]:
                optimiser.state.pop(each, None)
            note = f"step {state.step}: from here on the adapter is trained with the heads"
        warmup_steps = self.configuration.optimisation.warmup_steps
        rise = min(1.0, (state.adapter_steps + 1) / max(1, warmup_steps))
        of_heads["lr"] = peak * options.head_learning_rate_multiplier
        of_adapter["lr"] = peak * rise if is_joint else 0.0
        self.loss.is_joint = is_joint
        state.adapter_steps += is_joint
        return note

    def count_targets(self, documents: Documents) -> np.ndarray:
        """(n, K + 1) long: targets of the base's own row, then of each depth, in each document."""
        own = np.array([documents[index].is_label[1:].sum() for index in range(len(documents))], np.int64)
        return np.concatenate([own[:, None], super().count_targets(documents)], axis=1)

    def no_sums(self, device: torch.device) -> JointSums:
        return JointSums(LossSums.zeros(self.heads.num_heads, device), BaseSums.zeros(device))

    def metrics(self, name: str, sums: JointSums) -> dict[str, float]:
        return metrics_of(name, sums.heads) | base_metrics(name, sums.base)

    def adapter(self) -> Adapter:
        return self.trained_adapter.taken_out()

    def closing_report(self, metrics: Mapping[str, float]) -> str:
        return base_report(metrics)


class BaseTargets(NamedTuple):
    """Label tokens of a micro-batch, each with the state that the base predicts it from. S targets."""

    sources: Tensor  # (S,) long: indices of states
    tokens: Tensor  # (S,) long


class BaseSums(NamedTuple):
    """Sums over targets, () each."""

    cross_entropy: Tensor  # of the adapted base and the text
    reference_cross_entropy: Tensor  # of the base without the adapter and the text
    divergence: Tensor  # KL(without || with)
    num_agreeing: Tensor  # long; targets at which both have the same first guess
    num_targets: Tensor  # long
    num_compared: Tensor  # long; targets at which the base without the adapter was asked

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> BaseSums:
        sums = (torch.zeros((), device=device) for _ in range(3))
        counts = (torch.zeros((), dtype=torch.long, device=device) for _ in range(3))
        return cls(*sums, *counts)


class JointSums(NamedTuple):
    """What heads and base came to."""

    heads: LossSums
    base: BaseSums


@dataclass(frozen=True)
class BaseLoss:
    """The loss of the adapted base's own next-token row."""

    project: Teacher
    """States (C, D) -> the base's logits (C, V)."""
    vocab_size: int
    """V."""
    objective: ObjectiveName = "kl"
    block_elements: int = 2**24
    """Logits held at a time."""

    @property
    def needs_reference(self) -> bool:
        return self.objective == "kl"

    def __call__(
        self, hidden: Tensor, reference: Tensor | None, targets: BaseTargets, num_targets: Tensor
    ) -> tuple[Tensor, BaseSums]:
        """The loss, a scalar (), and its sums.

        Args:
            hidden: (P, D) states of the adapted base; gradients reach them.
            reference: (P, D) states of the same base with the adapter switched off; constants.
            num_targets: () targets of the whole optimisation step, all micro-batches and processes.
        """
        if reference is None and self.needs_reference:
            raise ValueError("base_objective 'kl' needs the states without the adapter: pass reference")
        sums, before = BaseSums.zeros(hidden.device), reference

        def observe(log_q: Tensor, seen: TargetBlock) -> None:
            nonlocal sums
            sums = added(sums, _compared(log_q, seen))

        work = FusedLoss(
            columns=targets.tokens,
            sources=targets.sources[None],
            weights=torch.ones_like(targets.sources[None], dtype=torch.float32),
            num_scored=num_targets[None],
            objective=objective_named(self.objective, kl_weight=1.0),
            block_elements=self.block_elements,
            num_columns=self.vocab_size,
            logits_of=lambda index, block, states: self.project(states),
            teacher=self.project,
            teacher_states=None if before is None else lambda block: before[targets.sources[block]],
            observe=observe,
        )
        return work(hidden), sums


def _compared(log_q: Tensor, targets: TargetBlock) -> BaseSums:
    """What one block shows of the adapted base, and of the difference that the adapter makes."""
    columns, sums = targets.columns[:, None], BaseSums.zeros(log_q.device)
    count = torch.tensor(len(columns), device=log_q.device)
    sums = sums._replace(cross_entropy=-log_q.gather(1, columns).sum(), num_targets=count)
    if targets.teacher_rows is None:
        return sums
    before = targets.teacher_rows
    return sums._replace(
        reference_cross_entropy=-before.log_probabilities.gather(1, columns).sum(),
        divergence=-(before.entropy + expected(before.probabilities, log_q)).sum(),
        num_agreeing=(before.probabilities.argmax(-1) == log_q.argmax(-1)).sum(),
        num_compared=count,
    )


class JointBatch(NamedTuple):
    """A micro-batch as the base reads it, and what its own row is measured on."""

    input_ids: Tensor  # (B, T) long
    positions: Tensor  # (B, T) long
    targets: BaseTargets  # sources count the B * T positions row by row


@dataclass(frozen=True)
class JointFeed:
    """Gives micro-batches of one set of documents as :class:`JointLoss` reads them."""

    base: CausalLM
    documents: Documents
    num_heads: int
    column_of: Tensor | None

    def __call__(self, batch: MicroBatch) -> tuple[JointBatch, Alignment]:
        """On the base's device. An empty batch is one token without targets, so that gradients are zeros."""
        return self.given(self.read(batch))

    def read(self, batch: MicroBatch) -> tuple[JointBatch, Alignment]:
        """What any thread can do beforehand, on the CPU."""
        padded = collate(self.documents, batch) if batch else one_token()
        own = padded.aligned(num_heads=0)  # the base has a column for every token
        targets = BaseTargets(own.sources[0], own.columns)
        rows = JointBatch(padded.input_ids, padded.positions, targets)
        return rows, padded.aligned(self.num_heads, self.column_of)

    def given(self, read: tuple[JointBatch, Alignment]) -> tuple[JointBatch, Alignment]:
        device, (rows, alignment) = self.base.device, read
        targets = BaseTargets(*(each.to(device) for each in rows.targets))
        moved = JointBatch(rows.input_ids.to(device), rows.positions.to(device), targets)
        return moved, alignment.to(device)


class JointLoss(nn.Module):
    """Heads, adapter and their loss.

    The base is no part of it: neither its weights nor its buffers are moved, synchronised or saved with it.
    """

    def __init__(self, heads_loss: HeadsLoss, adapter: TrainedAdapter, base_loss: BaseLoss, lambda_0: float):
        super().__init__()
        self.heads_loss = heads_loss
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): each for name, each in adapter.parameters.items()}
        )
        self.is_joint = False
        """Which stage this is; measuring, without gradients, is the same in both."""
        self._adapted = adapter
        self._base_loss, self._lambda_0 = base_loss, lambda_0
        self._layers, self._size = heads_loss.heads.reads_layers, heads_loss.heads.config.hidden_size

    def forward(
        self,
        rows: JointBatch,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, JointSums]:
        """The loss, a scalar, and its sums; gradients reach the heads, and in the second stage the adapter.

        Args:
            alignment: its sources count the B * T positions of ``rows`` row by row.
            output_embedding: the base's; never trained here.
            num_scored: (K + 1,) targets of the whole optimisation step, those of the base's own row first.
            teacher: needed by every objective of the heads but "ce". The adapted base is the heads'
                teacher: its text is what they have to guess.
        """
        is_measuring = not torch.is_grad_enabled()
        if not self.is_joint and not is_measuring:
            hidden = self._without_adapter(rows)
            loss, sums = self.heads_loss(hidden, alignment, output_embedding, num_scored[1:], teacher)
            loss = self._lambda_0 * loss + 0 * sum(each.sum() for each in self.adapter.values())
            return loss, JointSums(sums, BaseSums.zeros(hidden.device))
        is_compared = is_measuring or self._base_loss.needs_reference
        reference = self._without_adapter(rows) if is_compared else None
        hidden = self._with_adapter(rows)
        heads_loss, sums = self.heads_loss(hidden, alignment, output_embedding, num_scored[1:], teacher)
        own = (hidden[:, : self._size], None if reference is None else reference[:, : self._size])
        base_loss, base_sums = self._base_loss(*own, rows.targets, num_scored[0])
        return base_loss + self._lambda_0 * heads_loss, JointSums(sums, base_sums)

    def _with_adapter(self, rows: JointBatch) -> Tensor:
        """States (P, (1 + L) * D) of the adapted base."""
        if not torch.is_grad_enabled():
            return self._states(rows)
        with self._adapted.dropping_out():
            return self._states(rows)

    def _without_adapter(self, rows: JointBatch) -> Tensor:
        """States (P, (1 + L) * D) of the base as it was, without gradients."""
        with torch.no_grad(), self._adapted.switched_off():
            return self._states(rows)

    def _states(self, rows: JointBatch) -> Tensor:
        base = self._adapted.base
        states = hidden_states(base, rows.input_ids, position_ids=rows.positions, layers=self._layers)
        return states.flatten(0, 1)


def base_metrics(name: str, base: BaseSums) -> dict[str, float]:
    """What became of the base: perplexity on label tokens now and before, and how far its text has moved.

    Empty while the adapter is not trained.
    """
    metrics: dict[str, Any] = {}
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
