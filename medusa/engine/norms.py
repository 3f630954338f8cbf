"""Root-mean-square norms in one call instead of six."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OneCallNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def one_call_norm(module: nn.Module) -> OneCallNorm | None:
    """What gives the same bits as ``module``, a norm of ``transformers``, in one call; None for all others.

    Norms are known by the name of their epsilon, and believed only when a trial gives equal results.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    norm = OneCallNorm(weight, eps)
    trial = torch.linspace(-2, 3, 7 * len(weight), dtype=weight.dtype, device=weight.device).view(7, -1)
    with torch.no_grad():
        return norm if torch.equal(norm(trial), module(trial)) else None
