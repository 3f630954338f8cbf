"""The interface of a kind of training, and heads on a frozen base: Medusa heads, or an autoregressive head.

A new kind is a class in this folder, and one line in :data:`medusa.training.run.job.RECIPES`.

    L = sum over depths d of (sum over targets of decay^d * loss_d) / num_scored_d

which is eq. 1 of arXiv 2401.10774, averaged over targets.

An autoregressive head (an EAGLE-3 head, or the base's own layers for multi-token prediction) is unrolled to
the depth of its drafts (arXiv 2503.01840, training-time test). At depth d it has run d times, each time but
the first on its own output and the text's own token. ``loss_d`` is the objective on the last of these:
cross-entropy, or KL to the base's own distribution over the tokens that the head scores. The LM head's rows
are the base's and stay frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from medusa.base.causal_lm import CausalLM, HasQuantisedRows, lm_head
from medusa.heads.adapter import Adapter
from medusa.heads.autoregressive_head import AutoregressiveHead, unroll
from medusa.heads.checkpoint import HeadsCheckpoint, load_heads
from medusa.heads.draft_vocab import GatheredRows
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.protocol import Heads
from medusa.options import differences
from medusa.training.config import LossOptions, TrainingConfiguration
from medusa.training.data.batching import MicroBatch, PaddedBatch
from medusa.training.data.dataset import Documents, trained_on
from medusa.training.losses import (
    Alignment,
    FusedLoss,
    LossSums,
    SplitHeads,
    Teacher,
    needed_states,
    teacher_of,
)
from medusa.training.states.stored import HiddenStateSource, StateBatch

_SCALE_DOCUMENTS = 16
"""Documents in which the sizes of states are measured."""


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
    base: dict[str, str] = field(default_factory=dict)
    """Digests of the base's weights and configuration."""
    evaluated_step: int | None = None
    """The step of the last evaluation; None where it is not recorded."""
    most_tokens_per_step: float = 0.0
    """On held-out documents, of the heads in best/."""
    remedies: dict[str, Any] = field(default_factory=dict)
    """The values of :data:`medusa.training.config.REMEDY_KEYS`."""
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
        self.configuration = configuration
        self.states = states
        self.heads = heads
        self.loss = loss
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
            f"{self.heads.kind} heads for {self.heads.num_heads} tokens ahead, {num_parameters:,} parameters"
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
        rows, padded = self.states.of_batch(documents, name, batch, self.heads.fused_layers)
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
    """Heads on the base's device, in float32: as their kind begins or with the weights of ``start_from``, and
    the most frequent labels of ``training`` in their token map if any. A short text has few tokens: the rest
    of the map is that of the heads to start from.

    Raises:
        ValueError: the heads to start from have other options; or the base's files lack those it comes with.
    """
    config = configuration.heads_config(base)
    start = None
    if configuration.heads.start_from is not None:
        start = load_heads(configuration.heads.start_from)
    token_map = None
    if config.token_map_size is not None:
        before = None if start is None or start.heads.token_map is None else start.heads.token_map.numpy()
        most_frequent = training.most_frequent_labels(config.token_map_size, config.vocab_size, before)
        token_map = torch.from_numpy(most_frequent)
    with torch.random.fork_rng():
        torch.manual_seed(configuration.data.seed)
        heads: Any = configuration.heads_type(config, token_map)
    if start is None:
        heads.initialise(base)
    else:
        start_from(heads, start, configuration.heads.start_from)
    return heads.to(base.device).float().train()


def start_from(heads: Heads, checkpoint: HeadsCheckpoint, name: object) -> None:
    """Copy the weights of ``checkpoint``, which errors call ``name``, into ``heads``: all but the token map,
    whose size is free.

    They may have parts that those lack and that begin as the identity: see
    :meth:`medusa.heads.protocol.Heads.grown_from`.

    Raises:
        ValueError: those heads are of another configuration, or belong to an adapted base.
    """
    if checkpoint.adapter is not None:
        raise ValueError(
            f"start_from: the heads of {name} were trained with an adapter and belong to the base that "
            "carries it; start from heads of the base itself"
        )
    ours = asdict(heads.config)
    theirs = asdict(checkpoint.heads.config)
    if ours["token_map_size"] and theirs["token_map_size"]:  # the tokens of a map are rows of the base
        ours["token_map_size"] = theirs["token_map_size"]
    if heads.kind == checkpoint.heads.kind:
        ours |= heads.grown_from(theirs)
    differing = differences(theirs, ours)
    if differing:
        raise ValueError(f"start_from: the heads of {name} are others than asked for: {'; '.join(differing)}")
    heads.copy_weights(checkpoint.heads)


# ------------------------------------------------------------------ on a frozen base


class MedusaRecipe(Recipe):
    """Medusa heads on a frozen base."""

    loss: HeadsLoss

    def __init__(self, configuration: TrainingConfiguration, states: HiddenStateSource, training: Documents):
        heads = new_heads(configuration, states, training)
        head = lm_head(states.base)
        if heads.token_map is not None and isinstance(head, HasQuantisedRows):
            heads.scorer = GatheredRows(head, heads.token_map)  # widened once, and not for every block
        super().__init__(configuration, states, heads, HeadsLoss(heads, configuration.loss))

    def shard(self, mesh: DeviceMesh) -> list[nn.Parameter]:
        self.loss.split = SplitHeads(self.loss.heads, mesh)
        return self.loss.split.parameters


def new_heads(
    configuration: TrainingConfiguration, states: HiddenStateSource, training: Documents
) -> MedusaHeads:
    """New Medusa heads on the base's device, in float32: :func:`built_heads` that know the size of the layers
    that they fuse.

    Raises:
        ValueError: the heads to start from have other options.
    """
    heads = built_heads(configuration, states.base, training)
    if heads.fused_layers and not heads.fusion.weight.any():
        documents = trained_on(training, configuration.data)
        sampled_states = []
        for index in documents.spread(_SCALE_DOCUMENTS):
            is_label = torch.from_numpy(documents[index].is_label)
            needed = needed_states(is_label, torch.arange(len(is_label)), heads.num_heads)
            document_states = states.of_document(documents, "training", index, heads.fused_layers)
            sampled_states.append(
                document_states[needed.to(document_states.device)].to(heads.layer_scale.device)
            )
        heads.set_layer_scale(torch.cat(sampled_states))
    return heads


class HeadsLoss(nn.Module):
    """The heads and their loss."""

    def __init__(self, heads: MedusaHeads, options: LossOptions):
        super().__init__()
        self.heads = heads
        self.options = options
        self.split: SplitHeads | None = None

    def forward(
        self,
        states: Tensor | StateBatch,
        alignment: Alignment,
        lm_head: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The weighted loss, a scalar, and its sums.

        Args:
            states: rows of states that ``alignment`` counts row by row, or just the states, (P, (1 + L) * D);
                gradients reach them when they want them.
            lm_head: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        heads = self.heads
        hidden = states.hidden if isinstance(states, StateBatch) else states
        hidden = hidden.flatten(0, -2)  # (P, (1 + L) * D)
        fused = heads.fuse(hidden)  # (P, D)
        last = hidden.detach()[:, : heads.config.hidden_size]

        def logits_of(index: int, block: slice, states: Tensor) -> Tensor:
            path = alignment.path(index + 1, block) if heads.config.reads_path else None
            return heads.logits_of(index, states, lm_head, path)

        work = FusedLoss.of_heads(
            alignment,
            self.options,
            teacher,
            num_scored=num_scored,
            num_columns=heads.num_columns,
            logits_of=logits_of,
            parameters_of=heads.parameters_of,
            teacher_states=lambda block: last[alignment.sources[0, block]],
            split=self.split,
        )
        return work(fused, list(heads.parameters())), work.sums


class AutoregressiveRecipe(Recipe):
    """An autoregressive head on a frozen base."""

    def __init__(self, configuration: TrainingConfiguration, states: HiddenStateSource, training: Documents):
        head = built_heads(configuration, states.base, training)
        loss = AutoregressiveLoss(head, configuration.loss, states.base.get_input_embeddings())
        super().__init__(configuration, states, head, loss)


class AutoregressiveLoss(nn.Module):
    """The head and its loss."""

    def __init__(self, head: AutoregressiveHead, options: LossOptions, embed: Callable[[Tensor], Tensor]):
        """``embed``: tokens (B, T) long -> the base's own embeddings (B, T, D) of them."""
        super().__init__()
        self.head = head
        self.options = options
        self._embed = (embed,)  # the base's, and no part of this module

    def forward(
        self,
        batch: StateBatch,
        alignment: Alignment,
        lm_head: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The weighted loss, a scalar, and its sums; gradients reach the head's parameters only.

        Args:
            alignment: its sources count the B * T positions of ``batch`` row by row.
            lm_head: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        head = self.head
        truth = batch.hidden[..., : head.config.hidden_size].flatten(0, 1)  # unembedded, the targets' rows
        # The entry that ends at the token before the target is the one that depth 1 predicts it from.
        entries = alignment.sources[1].clamp(min=0)
        embedded = self._embed[0](batch.next_tokens).detach()
        by_depth = unroll(head, batch.hidden, embedded, batch.positions)
        drafted = torch.stack([each.flatten(0, 1)[entries] for each in by_depth])
        is_scored = alignment.sources[1:] >= 0  # (K, S)
        own = torch.arange(is_scored.numel(), device=is_scored.device).view_as(is_scored)
        work = FusedLoss.of_heads(
            alignment,
            self.options,
            teacher,
            sources=own.masked_fill(~is_scored, -1),
            num_scored=num_scored,
            num_columns=head.num_columns,
            logits_of=lambda index, block, states: head.unembedded(states, lm_head),
            teacher_states=lambda block: truth[alignment.sources[0, block]],
        )
        return work(drafted.flatten(0, 1)), work.sums  # of (K * S, D)
