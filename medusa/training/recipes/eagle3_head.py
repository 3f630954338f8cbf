"""An EAGLE-3 head on a frozen base, unrolled as deep as it will draft (arXiv 2503.01840, training-time test).

    L = sum over depths d of (sum over targets of decay^d * loss_d) / num_scored_d

At depth d the head has run d times, each time but the first on what it gave itself and the text's own token.
``loss_d`` is the objective on the last of these: cross-entropy, or KL to the base's own distribution over the
tokens that the head scores. The rows that score them are the base's and stay frozen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM
from medusa.heads.eagle3 import Eagle3Head, drafted_states
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import LossOptions
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.fused import FusedLoss, checked_teacher, decay_weights
from medusa.training.losses.objectives import objective_named
from medusa.training.losses.sums import LossSums
from medusa.training.losses.teacher import Teacher
from medusa.training.recipes.new_heads import built_heads, start_from
from medusa.training.run.recipe import Feed, Recipe
from medusa.training.states.feeds import FeatureBatch, FeatureFeed
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile


class Eagle3Recipe(Recipe):
    """An EAGLE-3 head alone."""

    def __init__(
        self,
        configuration: TrainingConfiguration,
        base: CausalLM,
        training: Documents,
        stored: StateFile | None = None,
        live: LiveStates | None = None,
    ):
        """``stored`` is not read: no size of states is measured before the first step."""
        head = new_head(configuration, base, training)
        loss = Eagle3Loss(head, configuration.loss, base.get_input_embeddings())
        super().__init__(configuration, base, head, loss, live)

    def feed(self, documents: Documents, stored: StateFile | None) -> Feed:
        layers = self.heads.reads_layers
        return FeatureFeed(
            self.base, documents, self.heads.num_heads, self.columns, layers, stored, self.live
        )


def new_head(configuration: TrainingConfiguration, base: CausalLM, training: Documents) -> Eagle3Head:
    """A new head on the base's device, in float32, with random weights or those of ``start_from``.

    Raises:
        ConfigurationError: the head to start from has other options.
    """
    head = built_heads(Eagle3Head, configuration, base, training)
    if configuration.heads.start_from is not None:
        start_from(head, configuration.heads.start_from)
    return head.to(base.device).float().train()


class Eagle3Loss(nn.Module):
    """The head and its loss."""

    def __init__(self, head: Eagle3Head, options: LossOptions, embed: Callable[[Tensor], Tensor]):
        """``embed``: tokens (B, T) long -> the base's own embeddings (B, T, D) of them."""
        super().__init__()
        self.head, self.options = head, options
        self._embed = (embed,)  # the base's, and no part of this module

    def forward(
        self,
        batch: FeatureBatch,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The weighted loss, a scalar, and its sums; gradients reach the head's parameters only.

        Args:
            alignment: its sources count the B * T positions of ``batch`` row by row.
            output_embedding: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        head, options = self.head, self.options
        truth = batch.hidden[..., : head.config.hidden_size].flatten(0, 1)  # unembedded, the targets' rows
        # The entry that ends at the token before the target is the one that depth 1 predicts it from.
        entries = alignment.sources[1].clamp(min=0)
        embedded = self._embed[0](batch.next_tokens).detach()
        by_depth = drafted_states(head, batch.hidden, embedded, batch.positions)
        drafted = torch.stack([each.flatten(0, 1)[entries] for each in by_depth])
        is_scored = alignment.sources[1:] >= 0  # (K, S)
        own = torch.arange(is_scored.numel(), device=is_scored.device).view_as(is_scored)
        work = FusedLoss(
            columns=alignment.columns,
            sources=own.masked_fill(~is_scored, -1),
            weights=decay_weights(alignment, options.decay),
            num_scored=num_scored,
            objective=objective_named(options.objective, options.kl_weight),
            block_elements=options.block_elements,
            num_columns=head.num_columns,
            logits_of=lambda index, block, states: head.unembedded(states, output_embedding),
            teacher=checked_teacher(options.objective, teacher),
            teacher_states=lambda block: truth[alignment.sources[0, block]],
        )
        loss = work(drafted.flatten(0, 1))  # (K * S, D)
        return loss, work.sums._replace(num_labels=work.sums.num_scored + alignment.num_unmapped)
