"""Parameters of heads that are split among processes, and whole for one head at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from medusa.heads.medusa_heads import MedusaHeads


class SplitHeads:
    """What every process keeps of each head's parameters: an equal part of their rows.

    The modules hold these parts, as DTensors, for the optimiser and checkpoints to see. All processes must be
    in :meth:`whole` for the same head at the same time.
    """

    def __init__(self, heads: MedusaHeads, mesh: DeviceMesh):
        """Split the parameters of ``heads`` that one head alone reads; the values are the first process's."""
        self._mesh = mesh
        self._places = [_places_of(heads, index) for index in range(heads.num_heads)]
        for places in self._places:
            for module, name in places:
                part = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(part))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parts."""
        return [getattr(module, name) for places in self._places for module, name in places]

    @contextmanager
    def whole(self, index: int, gradients: dict[Tensor, Tensor]) -> Iterator[dict[Tensor, Tensor]]:
        """Within the block the head at ``index`` (from 0) has its whole parameters, and no other has.

        ``gradients`` come back with a tensor for each whole parameter whose part has one there. What was
        added to these is afterwards averaged over the processes, and added to the gradients of the parts.
        """
        parts = [(module, name, getattr(module, name)) for module, name in self._places[index]]
        found: dict[DTensor, Tensor] = {}
        inside = dict(gradients)
        for module, name, part in parts:
            whole = nn.Parameter(part.detach().full_tensor())
            setattr(module, name, whole)
            if part in gradients:
                found[part] = inside[whole] = torch.zeros_like(whole)
        try:
            yield inside
        finally:
            for module, name, part in parts:
                setattr(module, name, part)
        for part, gradient in found.items():
            total = DTensor.from_local(gradient, self._mesh, [Partial()]).redistribute(placements=[Shard(0)])
            gradients[part].add_(total, alpha=1 / self._mesh.size())


def _places_of(heads: MedusaHeads, index: int) -> list[tuple[nn.Module, str]]:
    """The modules that hold the parameters of one head, and the names by which they do."""
    own = set(heads.parameters_of(index))
    return [
        (module, name)
        for module in heads.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter in own
    ]
