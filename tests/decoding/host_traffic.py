"""What a step brings to the host while a device decodes: a step that is to be captured may bring nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READ_BY_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")
"""Operations whose result, or its shape, the host has to know."""


class HostTraffic(TorchDispatchMode):
    """Counts the operations that bring data to or from ``device``, or a number to the host."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
        kinds = {each.device.type for each in leaves if torch.is_tensor(each) and each.dim() > 0}
        is_written = func is torch.ops.aten.lift_fresh.default and self.device.type != "cpu"  # torch.tensor
        if len(kinds) > 1 or is_written or func.name().partition(".")[0] in READ_BY_HOST:
            self.found[str(func)] += 1
        return out
