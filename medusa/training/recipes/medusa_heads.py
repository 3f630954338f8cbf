"""Medusa heads on a frozen base.

    L = sum over depths d of (sum over targets of decay^d * loss_d) / num_scored_d

which is eq. 1 of arXiv 2401.10774, averaged over targets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from medusa.base.causal_lm import output_embedding
from medusa.heads.causal_layer import document_mask
from medusa.heads.medusa_heads import MedusaHeads
from medusa.training.config import LossOptions, TrainingConfiguration
from medusa.training.data.dataset import Documents, trained_on
from medusa.training.losses.fused import FusedLoss, LossSums, SplitHeads
from medusa.training.losses.targets import Alignment, Teacher, needed_states
from medusa.training.recipes.recipe import Recipe, built_heads
from medusa.training.states.stored import BaseStates, StateBatch

_SCALE_DOCUMENTS = 16
"""Documents in which the sizes of states are measured."""


class MedusaRecipe(Recipe):
    """Medusa heads alone."""

    loss: HeadsLoss

    def __init__(self, configuration: TrainingConfiguration, states: BaseStates, training: Documents):
        heads = new_heads(configuration, states, training)
        super().__init__(configuration, states, heads, HeadsLoss(heads, configuration.loss))

    def split(self, mesh: DeviceMesh) -> list[nn.Parameter]:
        self.loss.split = SplitHeads(self.loss.heads, mesh)
        return self.loss.split.parameters


def new_heads(configuration: TrainingConfiguration, states: BaseStates, training: Documents) -> MedusaHeads:
    """New Medusa heads on the base's device, in float32.

    They start as ``start_from`` says; without it as the base's own output embedding.

    Raises:
        ValueError: the heads to start from have other options.
    """
    heads = built_heads(configuration, states.base, training)
    if configuration.heads.start_from is None:
        heads.initialise_from(output_embedding(states.base))
    if heads.reads_layers and not heads.fusion.weight.any():
        documents = trained_on(training, configuration.data)
        found = []
        for index in documents.spread(_SCALE_DOCUMENTS):
            is_label = torch.from_numpy(documents[index].is_label)
            needed = needed_states(is_label, torch.arange(len(is_label)), heads.num_heads)
            given = states.of_document(documents, "training", index, heads.reads_layers)
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
        given: Tensor | StateBatch,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The weighted loss, a scalar, and its sums.

        Args:
            given: rows of states that ``alignment`` counts row by row. For heads that do not read the text
                states alone will do, (P, (1 + L) * D); gradients reach them when they want them.
            output_embedding: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        heads = self.heads
        hidden = given.hidden if isinstance(given, StateBatch) else given
        read = heads.fuse(hidden)
        if heads.reads_text:
            assert isinstance(given, StateBatch)
            mask = document_mask(given.positions)
            read = heads.attend(read, given.next_tokens, output_embedding, mask, given.positions)
        hidden, read = hidden.flatten(0, -2), read.flatten(0, -2)  # (P, (1 + L) * D), (P, D)
        last = hidden.detach()[:, : heads.config.hidden_size]

        def logits_of(index: int, block: slice, states: Tensor) -> Tensor:
            path = alignment.path(index + 1, block) if heads.config.reads_path else None
            return heads.logits_of(index, states, output_embedding, path)

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
        return work(read, list(heads.parameters())), work.sums
