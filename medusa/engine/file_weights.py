"""Weights that stay in their file, and what is left of weights that were packed.

Embeddings stay in the file, whose rows are widened on lookup: the file must not be written to meanwhile. The
pages of what was packed are given back to the system.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import CausalLM, HasQuantisedRows, lm_head
from medusa.engine.group_quantised import QuantisedRows
from medusa.engine.views import with_kernels


class NarrowEmbedding(nn.Module):
    """An embedding whose rows are stored in the precision of their file, and converted to float32 on
    lookup."""

    rows: Tensor

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self._of = copy.copy(embedding)
        self._is_plain = type(embedding) is nn.Embedding
        self._of._parameters = {}
        self.padding_idx = embedding.padding_idx
        self._of.padding_idx = None  # it matters to gradients alone
        self.weight = placeholder(embedding.weight)
        self._hold(embedding)

    def _hold(self, embedding: nn.Embedding) -> None:
        self.register_buffer("rows", embedding.weight.detach(), persistent=False)

    def _looked_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows).float()

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...) long -> (..., D) float32."""
        rows = self._looked_up(ids)
        if self._is_plain:
            return rows
        numbered = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        return torch.func.functional_call(self._of, {"weight": rows.flatten(0, -2)}, (numbered,))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _OF_EMBEDDINGS:
                raise
            return getattr(self._of, name)


class QuantisedEmbedding(NarrowEmbedding, HasQuantisedRows):
    """An embedding whose rows stay in their file as it has quantised them, and are widened on lookup."""

    file_rows: Tensor

    def __init__(self, embedding: nn.Embedding, rows: QuantisedRows):
        super().__init__(embedding)
        self._type = rows.type
        self._width = rows.num_inputs
        self.register_buffer("file_rows", rows.rows.detach(), persistent=False)

    def _hold(self, embedding: nn.Embedding) -> None:
        """The file's rows are held, and no weight of the module."""

    def rows_at(self, ids: Tensor) -> Tensor:
        return torch.ops.medusa.quantised_rows(self.file_rows, ids, self._type, self._width)

    def _looked_up(self, ids: Tensor) -> Tensor:
        return self.rows_at(ids)


_OF_EMBEDDINGS = ("num_embeddings", "embedding_dim", "embed_scale", "scalar_embed_scale")
"""Attributes of an embedding that code reads besides its weight."""


def is_lookup(module: nn.Module) -> bool:
    """Whether ``module`` is an embedding that is a function of only token ids."""
    return (
        isinstance(module, nn.Embedding)
        and len(inspect.signature(module.forward).parameters) == 1
        and module.max_norm is None
    )


def is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def placeholder(weight: Tensor) -> Tensor:
    """A tensor of the shape and place of ``weight`` that takes no memory: each number of it is none."""
    return torch.full((), float("nan"), dtype=torch.float32).expand(weight.shape)


def packed_rest(
    base: CausalLM, int8: bool, rows: Tensor | None, release: Callable[[Tensor], Tensor]
) -> CausalLM:
    """``base`` with all weights packed that are not yet, as :func:`medusa.engine.views.with_kernels` does.

    Args:
        rows: (V, D), the rows of the LM head; None where it holds its own. release: as there.
    """
    base = with_kernels(base, int8, release)
    output = lm_head(base)
    if rows is not None:
        output.register_buffer("rows", rows, persistent=False)
    if next(base.parameters(), None) is None:  # transformers asks one for type and device
        weight = placeholder(cast(Tensor, output.weight))
        del output.weight
        output.weight = nn.Parameter(weight, requires_grad=False)
    base.save_pretrained = _refuse_to_save
    return base


@torch.no_grad()
def misses_weights(base: CausalLM) -> bool:
    """Whether code of ``base`` reads a weight without calling its module, and so would find the
    placeholder."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    return bool(base(input_ids=ids, use_cache=False).logits.isnan().any())


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "save_pretrained needs the weights of the base, which was loaded for a CPU engine and holds them "
        "packed; load it with engine='eager' and save that"
    )


# ------------------------------------------------------------------ pages of files


def released_pages() -> Callable[[Tensor], Tensor]:
    """A function that releases the file pages of a packed weight, and returns the weight's placeholder."""
    files = list(_mapped_files())
    advise = ctypes.CDLL(None, use_errno=True).madvise if files else None

    def release(weight: Tensor) -> Tensor:
        start = weight.data_ptr()
        size = weight.nbytes
        if advise is not None and any(low <= start and start + size <= high for low, high in files):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if whole > 0:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)
        return placeholder(weight)

    return release


def give_back_freed_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps what lies between blocks in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _mapped_files() -> Iterator[tuple[int, int]]:
    """The addresses of mapped files in this process; empty on systems that do not report them.

    A file that comes from the hub is named by its checksum there, so names tell nothing."""
    listing = Path("/proc/self/maps")
    if sys.platform != "linux" or not listing.exists():
        return
    for line in listing.read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5) if line.count(" ") >= 5 else (line, "")
        if path.startswith("/"):
            low, high = (int(each, 16) for each in addresses.split("-"))
            yield low, high
