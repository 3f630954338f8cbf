"""Heads on a frozen base: Medusa heads, or an autoregressive head.

    L = sum over depths d of (sum over targets of decay^d * loss_d) / num_scored_d

which is eq. 1 of arXiv 2401.10774, averaged over targets.

An autoregressive head (an EAGLE-3 head, or the base's own layers for multi-token prediction) is unrolled to
the depth of its drafts (arXiv 2503.01840, training-time test). At depth d it has run d times, each time but
the first on its own output and the text's own token. ``loss_d`` is the objective on the last of these:
cross-entropy, or KL to the base's own distribution over the tokens that the head scores. The LM head's rows
are the base's and stay frozen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from medusa.base.causal_lm import lm_head
from medusa.heads.autoregressive_head import AutoregressiveHead, unroll
from medusa.heads.medusa_heads import MedusaHeads
from medusa.training.config import LossOptions, TrainingConfiguration
from medusa.training.data.dataset import Documents, trained_on
from medusa.training.losses import Alignment, FusedLoss, LossSums, SplitHeads, Teacher, needed_states
from medusa.training.recipes.recipe import Recipe, built_heads
from medusa.training.states.stored import HiddenStateSource, StateBatch

_SCALE_DOCUMENTS = 16
"""Documents in which the sizes of states are measured."""


class MedusaRecipe(Recipe):
    """Medusa heads on a frozen base."""

    loss: HeadsLoss

    def __init__(self, configuration: TrainingConfiguration, states: HiddenStateSource, training: Documents):
        heads = new_heads(configuration, states, training)
        super().__init__(configuration, states, heads, HeadsLoss(heads, configuration.loss))

    def shard(self, mesh: DeviceMesh) -> list[nn.Parameter]:
        self.loss.split = SplitHeads(self.loss.heads, mesh)
        return self.loss.split.parameters


def new_heads(
    configuration: TrainingConfiguration, states: HiddenStateSource, training: Documents
) -> MedusaHeads:
    """New Medusa heads on the base's device, in float32.

    They start as ``start_from`` says; without it as the base's own LM head.

    Raises:
        ValueError: the heads to start from have other options.
    """
    heads = built_heads(configuration, states.base, training)
    if configuration.heads.start_from is None:
        heads.initialise_from(lm_head(states.base))
    if heads.aux_layers and not heads.fusion.weight.any():
        documents = trained_on(training, configuration.data)
        found = []
        for index in documents.spread(_SCALE_DOCUMENTS):
            is_label = torch.from_numpy(documents[index].is_label)
            needed = needed_states(is_label, torch.arange(len(is_label)), heads.num_heads)
            given = states.of_document(documents, "training", index, heads.aux_layers)
            found.append(given[needed.to(given.device)].to(heads.layer_scale.device))
        heads.set_layer_scale(torch.cat(found))
    return heads


class HeadsLoss(nn.Module):
    """The heads and their loss."""

    def __init__(self, heads: MedusaHeads, options: LossOptions):
        super().__init__()
        self.heads, self.options = heads, options
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
        self.head, self.options = head, options
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
