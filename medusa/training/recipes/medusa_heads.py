"""Medusa heads on a frozen base.

    L = sum over depths d of (sum over targets of decay^d * loss_d) / num_scored_d

which is eq. 1 of arXiv 2401.10774, averaged over targets.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from medusa.base.causal_lm import CausalLM, output_embedding
from medusa.heads.causal_layer import document_mask
from medusa.heads.medusa_heads import MedusaHeads
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import LossOptions
from medusa.training.data.documents import Documents, trained_on
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.fused import FusedLoss, checked_teacher, decay_weights
from medusa.training.losses.objectives import objective_named
from medusa.training.losses.split_heads import SplitHeads
from medusa.training.losses.sums import LossSums
from medusa.training.losses.teacher import Teacher
from medusa.training.recipes.new_heads import built_heads, sampled_states, start_from
from medusa.training.run.recipe import Feed, Recipe
from medusa.training.states.feeds import FeatureBatch, FeatureFeed, StateFeed
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile


class MedusaRecipe(Recipe):
    """Medusa heads alone."""

    def __init__(
        self,
        configuration: TrainingConfiguration,
        base: CausalLM,
        training: Documents,
        stored: StateFile | None = None,
        live: LiveStates | None = None,
    ):
        heads = new_heads(configuration, base, training, stored, live)
        self.loss: HeadsLoss
        super().__init__(configuration, base, heads, HeadsLoss(heads, configuration.loss), live)

    def split(self, mesh: DeviceMesh) -> list[nn.Parameter]:
        self.loss.split = SplitHeads(self.loss.heads, mesh)
        return self.loss.split.parameters

    def feed(self, documents: Documents, stored: StateFile | None) -> Feed:
        heads, feed = self.heads, FeatureFeed if self.heads.reads_text else StateFeed
        return feed(
            self.base, documents, heads.num_heads, self.columns, heads.reads_layers, stored, self.live
        )


def new_heads(
    configuration: TrainingConfiguration,
    base: CausalLM,
    training: Documents,
    stored: StateFile | None = None,
    live: LiveStates | None = None,
) -> MedusaHeads:
    """New Medusa heads on the base's device, in float32; ``stored`` are the states of ``training``, if any.

    They start as ``start_from`` says; without it as the base's own output embedding.

    Raises:
        ConfigurationError: the heads to start from have other options.
    """
    heads = built_heads(MedusaHeads, configuration, base, training)
    if configuration.heads.start_from is not None:
        start_from(heads, configuration.heads.start_from)
    else:
        heads.initialise_from(output_embedding(base))
    if heads.reads_layers and not heads.fusion.weight.any():
        documents = trained_on(training, configuration.data)
        live = live or LiveStates(base)
        states = sampled_states(live, documents, heads.num_heads, heads.reads_layers, stored)
        heads.set_layer_scale(states.to(heads.layer_scale.device))
    return heads.to(base.device).float().train()


class HeadsLoss(nn.Module):
    """The heads and their loss."""

    def __init__(self, heads: MedusaHeads, options: LossOptions):
        super().__init__()
        self.heads = heads
        self.options = options
        self.split: SplitHeads | None = None

    def forward(
        self,
        given: Tensor | FeatureBatch,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The weighted loss, a scalar, and its sums.

        Args:
            given: (P, (1 + L) * D) states that ``alignment`` points into, the last one first, then those of
                the layers that the heads fuse; gradients reach them when they want them. For heads that read
                the text, whole rows of them, which the alignment counts row by row.
            output_embedding: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        heads, options = self.heads, self.options
        if isinstance(given, FeatureBatch):
            hidden, mask = given.hidden.flatten(0, 1), document_mask(given.positions)
            fused = heads.fuse(given.hidden)
            read = heads.attend(fused, given.next_tokens, output_embedding, mask, given.positions)
            read = read.flatten(0, 1)
        else:
            hidden, read = given, heads.fuse(given)
        last = hidden.detach()[:, : heads.config.hidden_size]

        def logits_of(index: int, block: slice, states: Tensor) -> Tensor:
            path = alignment.path(index + 1, block) if heads.config.reads_path else None
            return heads.logits_of(index, states, output_embedding, path)

        work = FusedLoss(
            columns=alignment.columns,
            sources=alignment.sources[1:],
            weights=decay_weights(alignment, options.decay),
            num_scored=num_scored,
            objective=objective_named(options.objective, options.kl_weight),
            block_elements=options.block_elements,
            num_columns=heads.config.token_map_size or heads.config.vocab_size,
            logits_of=logits_of,
            parameters_of=heads.parameters_of,
            teacher=checked_teacher(options.objective, teacher),
            teacher_states=lambda block: last[alignment.sources[0, block]],
            split=self.split,
        )
        loss = work(read, list(heads.parameters()))
        return loss, work.sums._replace(num_labels=work.sums.num_scored + alignment.num_unmapped)
