"""An EAGLE-style head on a frozen base, unrolled as deep as it will draft.

    L = sum over depths d of (sum over targets of decay^d * (f * smooth_l1_d + loss_d)) / num_scored_d

At depth d the head has predicted d features, each but the first from its own last prediction and the
text's own token. ``smooth_l1_d`` compares the last of them with the base's true feature, averaged over
dimensions, each in units of its size; ``loss_d`` is the objective on its unembedding, KL to the base's own
distribution for EAGLE's recipe (arXiv 2401.15077, section 3.2: the two weigh 1 to 0.1, f = 10). The paper
trains depth 1 alone and adds noise to the features; here the head meets its own errors instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import CausalLM
from medusa.heads.eagle import EagleHead, drafted_features
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import LossOptions
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.fused import FusedLoss, checked_teacher, decay_weights
from medusa.training.losses.objectives import objective_named
from medusa.training.losses.sums import LossSums
from medusa.training.losses.teacher import Teacher
from medusa.training.recipes.new_heads import built_heads, sampled_states, some_rows, start_from
from medusa.training.run.recipe import Feed, Recipe
from medusa.training.states.feeds import FeatureBatch, FeatureFeed
from medusa.training.states.stored_states import StateFile


class EagleRecipe(Recipe):
    """An EAGLE-style head alone."""

    stores_every_state = True  # its entries attend to all before them

    def __init__(
        self,
        configuration: TrainingConfiguration,
        base: CausalLM,
        training: Documents,
        stored: StateFile | None = None,
    ):
        head = new_head(configuration, base, training, stored)
        loss = EagleLoss(head, configuration.loss, configuration.eagle.feature_weight)
        super().__init__(configuration, base, head, loss)

    def feed(self, documents: Documents, stored: StateFile | None) -> Feed:
        return FeatureFeed(self.base, documents, self.heads.num_heads, self.columns, stored)


def new_head(
    configuration: TrainingConfiguration,
    base: CausalLM,
    training: Documents,
    stored: StateFile | None = None,
) -> EagleHead:
    """A new head on the base's device, in float32, with random weights or those of ``start_from``.

    Raises:
        ConfigurationError: the head to start from has other options.
    """
    head = built_heads(EagleHead, configuration, base, training)
    if configuration.heads.start_from is not None:
        start_from(head, configuration.heads.start_from)
    else:
        padded, is_inside = some_rows(training)
        embeddings = base.get_input_embeddings()(padded.input_ids.to(base.device))
        head.set_scales(sampled_states(base, training, (), stored), embeddings[is_inside])
    return head.to(base.device).float().train()


class EagleLoss(nn.Module):
    """The head and its loss."""

    def __init__(self, head: EagleHead, options: LossOptions, feature_weight: float = 10.0):
        super().__init__()
        self.head = head
        self.options, self.feature_weight = options, feature_weight

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
        truth = batch.features.flatten(0, 1)[alignment.sources[0]]  # (S, D); unembedded, the target's row
        # The entry that ends at the token before the target is the one that depth 1 predicts it from.
        entries = alignment.sources[1].clamp(min=0)
        predicted = torch.stack(
            [each.flatten(0, 1)[entries] for each in drafted_features(head, *batch)]
        )  # (K, S, D)
        is_scored = alignment.sources[1:] >= 0  # (K, S)
        own = torch.arange(is_scored.numel(), device=is_scored.device).view_as(is_scored)
        weights = decay_weights(alignment, options.decay)
        work = FusedLoss(
            columns=alignment.columns,
            sources=own.masked_fill(~is_scored, -1),
            weights=weights,
            num_scored=num_scored,
            objective=objective_named(options.objective, options.kl_weight),
            block_elements=options.block_elements,
            num_columns=head.config.token_map_size or head.config.vocab_size,
            logits_of=lambda index, block, states: head.unembedded(states, output_embedding),
            teacher=checked_teacher(options.objective, teacher),
            teacher_states=lambda block: truth[block],
        )
        loss = work(predicted.flatten(0, 1))
        regression = self.feature_weight * self._regression(predicted, truth)  # (K, S)
        regression = regression.masked_fill(~is_scored, 0.0)
        weighted = (weights * regression).sum(1)
        sums = work.sums._replace(
            loss=work.sums.loss + regression.detach().sum(1),
            weighted=work.sums.weighted + weighted.detach(),
            num_labels=work.sums.num_scored + alignment.num_unmapped,
        )
        return loss + (weighted / num_scored.clamp(min=1)).sum(), sums

    def _regression(self, predicted: Tensor, truth: Tensor) -> Tensor:
        """(K, S): how far predicted features (K, S, D) are from the true ones (S, D)."""
        scale = self.head.feature_scale
        ours, theirs = predicted.float() / scale, (truth.float() / scale).expand_as(predicted)
        return F.smooth_l1_loss(ours, theirs, reduction="none").mean(-1)
