"""What takes the steps: one optimiser, a group of parameters for each learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from medusa.training.config.options import OptimisationOptions


def new_optimiser(
    groups: Sequence[Sequence[nn.Parameter]], options: OptimisationOptions
) -> torch.optim.Optimizer:
    """AdamW over what is trained of each group, in that order."""
    return torch.optim.AdamW(
        [{"params": [each for each in group if each.requires_grad]} for group in groups],
        lr=options.learning_rate,
        betas=(0.9, options.adam_beta2),
        weight_decay=options.weight_decay,
    )
