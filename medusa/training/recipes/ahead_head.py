"""A head that runs ahead on a frozen base, unrolled as deep as it will draft (arXiv 2503.01840, training-time
test): an EAGLE-3 head, or the layers for multi-token prediction that the base comes with.

    L = sum over depths d of (sum over targets of decay^d * loss_d) / num_scored_d

At depth d the head has run d times, each time but the first on what it gave itself and the text's own token.
``loss_d`` is the objective on the last of these: cross-entropy, or KL to the base's own distribution over the
tokens that the head scores. The rows that score them are the base's and stay frozen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medusa.heads.ahead import AheadHead, drafted_states
from medusa.training.config import LossOptions, TrainingConfiguration
from medusa.training.data.dataset import Documents
from medusa.training.losses.fused import FusedLoss, LossSums
from medusa.training.losses.targets import Alignment, Teacher
from medusa.training.recipes.recipe import Recipe, built_heads
from medusa.training.states.stored import BaseStates, StateBatch


class AheadRecipe(Recipe):
    """Such a head alone."""

    def __init__(self, configuration: TrainingConfiguration, states: BaseStates, training: Documents):
        head = built_heads(configuration, states.base, training)
        loss = AheadLoss(head, configuration.loss, states.base.get_input_embeddings())
        super().__init__(configuration, states, head, loss)


class AheadLoss(nn.Module):
    """The head and its loss."""

    def __init__(self, head: AheadHead, options: LossOptions, embed: Callable[[Tensor], Tensor]):
        """``embed``: tokens (B, T) long -> the base's own embeddings (B, T, D) of them."""
        super().__init__()
        self.head, self.options = head, options
        self._embed = (embed,)  # the base's, and no part of this module

    def forward(
        self,
        batch: StateBatch,
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
        head = self.head
        truth = batch.hidden[..., : head.config.hidden_size].flatten(0, 1)  # unembedded, the targets' rows
        # The entry that ends at the token before the target is the one that depth 1 predicts it from.
        entries = alignment.sources[1].clamp(min=0)
        embedded = self._embed[0](batch.next_tokens).detach()
        by_depth = drafted_states(head, batch.hidden, embedded, batch.positions)
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
            logits_of=lambda index, block, states: head.unembedded(states, output_embedding),
            teacher_states=lambda block: truth[alignment.sources[0, block]],
        )
        return work(drafted.flatten(0, 1)), work.sums  # of (K * S, D)
