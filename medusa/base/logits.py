"""What a base makes of its last hidden states: logits, which some architectures scale or cap."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, embedding_weight, hidden_size, output_embedding


@torch.no_grad()
def logit_scale(base: CausalLM) -> float:
    """What ``base`` multiplies the logits of its output embedding by; 1 for most.

    Found by a trial, with logits too small for a cap, to three digits: in low precision no more can be said.
    """
    embedding = output_embedding(base)
    probe = torch.randn(3, hidden_size(base), generator=torch.Generator().manual_seed(0))
    probe = probe.to(base.device, embedding_weight(embedding).dtype)
    probe = probe * (0.1 / embedding(probe).abs().max())
    plain, own = embedding(probe).double(), logits_of_states(base, probe).double()
    scale = float((plain * own).sum() / plain.square().sum())
    if (own - scale * plain).norm() > 0.05 * own.norm():
        return 1.0  # it does something else than to scale
    return float(f"{scale:.3g}")


def logits_of_states(base: CausalLM, states: Tensor) -> Tensor:
    """Logits (C, V) of states (C, D): one dummy token's forward pass with its hidden state exchanged."""
    embedding = output_embedding(base)

    def exchange(_module: nn.Module, args: tuple) -> tuple:
        return (states.to(embedding_weight(embedding).dtype)[None], *args[1:])

    handle = embedding.register_forward_pre_hook(exchange)
    try:
        dummy = torch.zeros(1, 1, dtype=torch.long, device=states.device)
        return base(input_ids=dummy, use_cache=False).logits[0]
    finally:
        handle.remove()
