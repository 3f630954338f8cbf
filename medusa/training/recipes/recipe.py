"""The interface of a kind of training, and the initialisation of new heads.

A new kind is a class in this folder, and one line in :data:`medusa.training.run.job.RECIPES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from medusa.base.causal_lm import CausalLM, logit_scale
from medusa.heads.adapter import Adapter
from medusa.heads.autoregressive_head import Heads
from medusa.heads.checkpoint import KINDS, load_heads
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.heads.mtp import MtpHead, own_head
from medusa.options import differences
from medusa.training.config import TrainingConfiguration
from medusa.training.data.batching import MicroBatch, PaddedBatch
from medusa.training.data.dataset import Documents
from medusa.training.losses import Alignment, LossSums, teacher_of
from medusa.training.states.stored import HiddenStateSource


@dataclass
class RunState:
    """The progress of a run: the part of its checkpoints besides the tensors."""

    step: int = 0
    """Optimiser steps done."""
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    """Spent in the training loop, earlier runs that this one resumes included."""
    progress: float = 0.0
    """The part of the run that is over, 0 to 1."""
    num_tokens: int = 0
    """Tokens of the documents trained on, counted again in every epoch."""
    window: list[Any] = field(default_factory=list)
    """The loss sums of all processes since the last log entry."""
    adapter_steps: int = 0
    """Optimiser steps in which an adapter was trained too."""
    num_processes: int = 1
    micro_batches: int = 1
    """Micro-batches of each process in a step."""
    sharding: str = ""
    """How the processes share the heads, in accelerate's words."""
    documents: str = ""
    """Digest of the training documents."""
    most_tokens_per_step: float = 0.0
    """On held-out documents, of the heads in best/."""
    remedies: dict[str, Any] = field(default_factory=dict)
    """The values of :data:`medusa.training.config.MEMORY_KEYS`."""
    changes: list[str] = field(default_factory=list)
    """Changes of these by resumed runs, with the step."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each other file of the checkpoint."""


class Recipe:
    """A kind of training: its heads, loss and inputs, sums and metrics, learning rates, saved files.

    The defaults suit heads on a frozen base.
    """

    result: str = "heads"
    """The content of the heads directory, in words."""

    def __init__(
        self, configuration: TrainingConfiguration, states: HiddenStateSource, heads: Heads, loss: nn.Module
    ):
        """``loss`` is the module that is wrapped and optimised. It is called with the result of :meth:`read`,
        the base's LM head, the targets of the whole step (K,) and the teacher; it returns the loss () and its
        sums."""
        self.configuration, self.states, self.heads, self.loss = configuration, states, heads, loss
        self.teacher = teacher_of(states.base, heads.token_map) if configuration.loss.needs_teacher else None
        self.columns: Tensor | None = None
        """(V,) long on the CPU: each token's logits column, -1 without one; None where there is no map."""
        if heads.token_map is not None:
            self.columns = torch.full((heads.config.vocab_size,), -1)
            self.columns[heads.token_map.cpu()] = torch.arange(len(heads.token_map))

    def describe(self, training: Documents) -> str:
        """A description of the training, for people."""
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

    def read(self, documents: Documents, name: str, batch: MicroBatch) -> tuple[Any, Alignment]:
        """The loss's input for a micro-batch of ``documents``, whose states are stored under ``name`` if at
        all, and its alignment, which counts the B * T positions row by row."""
        rows, padded = self.states.of_batch(documents, name, batch, self.heads.aux_layers)
        return rows, self.aligned(padded)

    def aligned(self, padded: PaddedBatch) -> Alignment:
        """The targets of the heads in a micro-batch, on the base's device."""
        return padded.aligned(self.heads.num_heads, self.columns).to(self.states.base.device)

    def check_launch(self, accelerator: Accelerator) -> None:
        """Raise ValueError when this kind of training cannot run as it was launched."""

    def shard(self, mesh: DeviceMesh) -> list[nn.Parameter]:
        """Split those parameters of the loss among the processes that it needs a part of at a time; which.

        To be called before an optimiser knows them.
        """
        return []

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each learning rate."""
        return [list(self.heads.parameters())]

    def begin_step(self, optimiser: torch.optim.Optimizer, peak: float, state: RunState) -> str | None:
        """Set the learning rates of the step after ``state``; the returned note is shown to the user.

        ``peak`` is the current value of the schedule.
        """
        for group in optimiser.param_groups:
            group["lr"] = peak
        return None

    def count_targets(self, documents: Documents) -> np.ndarray:
        """(n, K) long: targets of each depth in each document, the denominator of a step's loss."""
        has_column = None if self.columns is None else self.columns.numpy() >= 0
        return documents.num_scored(self.heads.num_heads, has_column)

    def zero_metrics(self, device: torch.device) -> Any:
        """The sums of no target: a named tuple of tensors, or of such tuples, with ``metrics(name)``."""
        return LossSums.zeros(self.heads.num_heads, device)

    def adapter(self) -> Adapter | None:
        """The adapter that was trained with the heads, in saved form."""
        return None

    def closing_report(self, metrics: Mapping[str, float]) -> str | None:
        """A note for users of the result, from the last metrics."""
        return None


def built_heads(configuration: TrainingConfiguration, base: CausalLM, training: Documents) -> Any:
    """Heads on the base's device, in float32: with random weights, the base's own layers or the weights of
    ``start_from``, and the most frequent labels of ``training`` in their token map if any.

    Raises:
        ValueError: the heads to start from have other options; or the base's files lack those it comes with.
    """
    config = configuration.heads_config(base)
    if isinstance(config, HeadsConfig):
        config = replace(config, logit_scale=logit_scale(base))
    token_map = None
    if config.token_map_size is not None:
        most_frequent = training.most_frequent_labels(config.token_map_size, config.vocab_size)
        token_map = torch.from_numpy(most_frequent)
    with torch.random.fork_rng():
        torch.manual_seed(configuration.data.seed)
        heads: Any = KINDS[configuration.heads.head_kind][0](config, token_map)
    if configuration.heads.start_from is not None:
        start_from(heads, configuration.heads.start_from)
    elif isinstance(heads, MtpHead):
        heads.copy_weights(own_head(base))
    return heads.to(base.device).float().train()


def start_from(heads: Heads, source: str) -> None:
    """Copy the weights of the heads in ``source`` into ``heads``, all but the token map, whose size is free.

    Heads that fuse layers or have more residual blocks may start from heads that do not: they
    begin as those, since all of that begins as the identity.

    Raises:
        ValueError: those heads are of another configuration, or belong to an adapted base.
    """
    given = load_heads(source)
    if given.adapter is not None:
        raise ValueError(
            f"start_from: the heads in {source!r} were trained together with an adapter and belong to the "
            "base that carries it; start from heads of the base itself"
        )
    ours, theirs = asdict(heads.config), asdict(given.heads.config)
    if ours["token_map_size"] and theirs["token_map_size"]:  # the tokens of a map are rows of the base
        ours["token_map_size"] = theirs["token_map_size"]
    if isinstance(heads, MedusaHeads) and isinstance(given.heads, MedusaHeads):
        if not given.heads.aux_layers:
            ours["fused_layers"] = ()
        ours["num_layers"] = min(ours["num_layers"], theirs["num_layers"])
    if differing := differences(theirs, ours):
        raise ValueError(
            f"start_from: the heads in {source!r} are others than asked for: {'; '.join(differing)}"
        )
    heads.copy_weights(given.heads)
