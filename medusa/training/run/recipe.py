"""What the trainer asks of a kind of training.

A new kind is one file in ``medusa/training/recipes`` and one line in its registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from medusa.base.causal_lm import CausalLM
from medusa.heads.adapter import Adapter
from medusa.heads.eagle3 import Heads
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.data.batching import MicroBatch
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.objectives import needs_teacher
from medusa.training.losses.sums import LossSums
from medusa.training.losses.teacher import teacher_of
from medusa.training.run.metrics import metrics_of
from medusa.training.run.run_directory import RunState
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile


class Feed(Protocol):
    """Gives what the loss reads of a micro-batch, in two steps. An empty batch has no targets."""

    def read(self, batch: MicroBatch) -> Any:
        """What needs no base, by any thread."""

    def given(self, read: Any) -> tuple[Any, Alignment]:
        """What the loss reads, on the base's device."""


class Recipe(ABC):
    """A kind of training: its heads, loss, feed, sums and metrics, learning rates, and what is saved.

    What is not abstract here suits heads that are trained alone, on a frozen base.
    """

    result: str = "heads"
    """What ends up in the heads directory, in words."""

    def __init__(
        self,
        configuration: TrainingConfiguration,
        base: CausalLM,
        heads: Heads,
        loss: nn.Module,
        live: LiveStates | None = None,
    ):
        """``loss`` is what is wrapped and optimised. It is called with what the feed gives, the base's output
        embedding, the targets of the whole step (K,) and the teacher; the loss () and its sums come back.
        ``live`` computes hidden states where ``base`` has no layers."""
        self.configuration, self.base, self.heads, self.loss = configuration, base, heads, loss
        self.live = live or LiveStates(base)
        is_soft = needs_teacher(configuration.loss.objective)
        self.teacher = teacher_of(base, heads.token_map) if is_soft else None
        self.columns = column_of(heads)

    def describe(self, training: Documents) -> str:
        """What is trained, for people."""
        num_parameters = sum(each.numel() for each in self.heads.parameters())
        text = (
            f"{self.configuration.heads.head_kind} heads for {self.heads.num_heads} tokens ahead, "
            f"{num_parameters:,} parameters"
        )
        if self.columns is not None and training.num_labels:
            labels = training.tokens[training.is_label].astype(np.int64)
            is_mapped = self.columns.numpy() >= 0
            coverage = is_mapped[labels].mean()
            text += f", which can guess {is_mapped.sum():,} tokens: {coverage:.1%} of the training labels"
        return text

    @abstractmethod
    def feed(self, documents: Documents, stored: StateFile | None) -> Feed:
        """What the loss reads of ``documents``, from their ``stored`` states where there are any."""

    def check_launch(self, accelerator: Accelerator) -> None:
        """Raise ConfigurationError when this kind of training cannot run as it was launched."""
        return None

    def split(self, mesh: DeviceMesh) -> list[nn.Parameter]:
        """Split those parameters of the loss among the processes that it needs a part of at a time; which.

        To be called before an optimiser knows them.
        """
        return []

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each learning rate."""
        return [list(self.heads.parameters())]

    def begin_step(
        self, optimiser: torch.optim.Optimizer, peak: float, progress: float, state: RunState
    ) -> str | None:
        """Set the learning rates of the next step; the note that comes back is shown to the user.

        ``peak`` is what the schedule gives for now, and ``progress`` the part of the run that is over.
        """
        for group in optimiser.param_groups:
            group["lr"] = peak
        return None

    def count_targets(self, documents: Documents) -> np.ndarray:
        """(n, K) long: targets of each depth in each document; what a step's loss divides by."""
        has_column = None if self.columns is None else self.columns.numpy() >= 0
        return documents.num_scored(self.heads.num_heads, has_column)

    def no_sums(self, device: torch.device) -> Any:
        """The sums of no target."""
        return LossSums.zeros(self.heads.num_heads, device)

    def metrics(self, name: str, sums: Any) -> dict[str, float]:
        """``sums`` as numbers that people read, under ``name``."""
        return metrics_of(name, sums)

    def adapter(self) -> Adapter | None:
        """What was trained beside the heads, as it is saved."""
        return None

    def closing_report(self, metrics: Mapping[str, float]) -> str | None:
        """What a user of the result has to know, given the last metrics."""
        return None


def column_of(heads: Heads) -> Tensor | None:
    """(V,) long on the CPU: each token's logits column, -1 where it has none; None without a token map."""
    if heads.token_map is None:
        return None
    columns = torch.full((heads.config.vocab_size,), -1)
    columns[heads.token_map.cpu()] = torch.arange(len(heads.token_map))
    return columns
