"""What one step of the loss of all heads costs, fused and plain: bytes and seconds.

The plain loss is the one to hold the fused one against: the logits of all heads at once, and autograd. Bytes
are those beyond the hidden states, the weights and the gradients of the heads, which any training holds; on a
CPU they are resident memory, which Linux tells.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.training.losses.alignment import align
from medusa.training.losses.loss import HeadsLoss, LossOptions

PLAIN_COPIES = 3
"""The stacked logits, their log-softmax and its gradient: what the plain loss holds at its peak."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    implementation: Literal["fused", "plain"]
    heads: int
    vocab: int
    targets: int
    hidden_size: int
    block_elements: int
    device: str

    @property
    def work(self) -> int:
        """Logits made: what its duration grows with."""
        return self.heads * self.vocab * self.targets

    @property
    def predicted_bytes(self) -> int:
        """Peak of the plain loss."""
        return PLAIN_COPIES * 4 * self.work


def measured(cell: Cell) -> dict[str, float]:
    """Peak bytes and seconds of one step, the better of two, with everything but the loss in place."""
    torch.manual_seed(0)
    config = HeadsConfig(cell.hidden_size, cell.vocab, cell.heads)
    with torch.device(cell.device):
        heads = MedusaHeads(config)
        embedding = nn.Linear(cell.hidden_size, cell.vocab, bias=False).requires_grad_(False)
        hidden = torch.randn(cell.targets + cell.heads + 1, cell.hidden_size)
    tokens = torch.randint(0, cell.vocab, (len(hidden),))
    for parameter in heads.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = {"fused": fused_step, "plain": plain_step}[cell.implementation]
    before, seconds = reset_peak(cell.device), []
    for _ in range(2):
        began = time.perf_counter()
        step(heads, embedding, hidden, tokens, cell.block_elements)
        if cell.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"bytes": peak_bytes(cell.device) - before, "seconds": min(seconds)}


def fused_step(
    heads: MedusaHeads, embedding: nn.Module, hidden: Tensor, tokens: Tensor, block_elements: int
) -> Tensor:
    """Forward and backward of the library's loss, on the targets that every head can predict."""
    positions = torch.arange(len(tokens))
    is_label = positions > heads.num_heads
    alignment = align(tokens, is_label, positions, heads.num_heads).to(hidden.device)
    num_scored = is_label.sum().repeat(heads.num_heads).to(hidden.device)
    module = HeadsLoss(heads, LossOptions(block_elements=block_elements))
    loss, _ = module(hidden, alignment, embedding, num_scored)
    loss.backward()
    return loss.detach()


def plain_step(
    heads: MedusaHeads, embedding: nn.Module, hidden: Tensor, tokens: Tensor, _block_elements: int
) -> Tensor:
    """The same from the logits of all heads at once, by autograd."""
    num_heads, first = heads.num_heads, heads.num_heads + 1
    logits = heads(hidden[: len(tokens) - 2], embedding)  # (P, K, V)
    losses = [
        F.cross_entropy(
            logits[first - 1 - depth :, depth - 1][: len(tokens) - first], tokens[first:].to(hidden.device)
        )
        for depth in range(1, num_heads + 1)
    ]
    loss = torch.stack([0.8**depth * each for depth, each in enumerate(losses, start=1)]).sum()
    loss.backward()
    return loss.detach()


def reset_peak(device: str) -> int:
    """Start counting the peak from here; the bytes in use now."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device != "cpu" else _status("VmHWM")


def free_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _status(key: str) -> int:
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
