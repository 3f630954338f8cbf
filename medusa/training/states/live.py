"""Hidden states as they are computed: by a base that this process runs, or by all processes together."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, hidden_size, hidden_states
from medusa.training.data.batching import PaddedBatch, one_token


def frozen_states(base: CausalLM, padded: PaddedBatch, layers: tuple[int, ...] = ()) -> Tensor:
    """States (B, T, (1 + L) * D) of a micro-batch, without gradients."""
    ids, positions = padded.input_ids.to(base.device), padded.positions.to(base.device)
    with torch.no_grad():
        return hidden_states(base, ids, position_ids=positions, layers=layers)


def states_width(base: CausalLM, layers: tuple[int, ...]) -> int:
    """(1 + L) * D: the numbers of one token's states."""
    return (1 + len(layers)) * hidden_size(base)


class LiveStates:
    """The states of a base that this process runs alone, on one device or on several."""

    needs_all = False
    """Whether all processes must call it, equally often, or :meth:`finish` before they do something else."""

    def __init__(self, base: CausalLM):
        self.base = base

    def __call__(self, padded: PaddedBatch | None, layers: tuple[int, ...] = ()) -> Tensor | None:
        """States (B, T, (1 + L) * D) of a micro-batch; None where there is no micro-batch."""
        return None if padded is None else frozen_states(self.base, padded, layers)

    def of(self, padded: PaddedBatch, layers: tuple[int, ...] = ()) -> Tensor:
        """The same of a micro-batch that is there."""
        states = self(padded, layers)
        assert states is not None
        return states

    def finish(self) -> None:
        """Take part until no process has a micro-batch left."""
        return None


class SharedLiveStates(LiveStates):
    """The states of a base whose weights are split among all processes of the launch."""

    needs_all = True

    def __init__(self, base: CausalLM, reads_alike: bool, timeout_minutes: float):
        """``reads_alike`` says whether all processes must read the same micro-batch (tensor parallel), which
        they then do in turn, or each its own (FSDP)."""
        super().__init__(base)
        self._reads_alike, self._is_over = reads_alike, False
        timeout = timedelta(minutes=timeout_minutes)
        self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)  # between the hosts

    def __call__(self, padded: PaddedBatch | None, layers: tuple[int, ...] = ()) -> Tensor | None:
        given: list[PaddedBatch | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(given, padded, group=self._group)
        self._is_over = all(each is None for each in given)
        if self._is_over:
            return None
        if not self._reads_alike:
            states = frozen_states(self.base, one_token() if padded is None else padded, layers)
            return None if padded is None else states
        mine = None
        for rank, each in enumerate(given):
            if each is not None:
                states = frozen_states(self.base, each, layers)
                mine = states if rank == torch.distributed.get_rank() else mine
        return mine

    def finish(self) -> None:
        self._is_over = False
        while not self._is_over:
            self(None)
