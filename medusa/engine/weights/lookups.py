"""Embeddings whose rows stay in their file, and are widened on lookup: the file must not be written to
meanwhile."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import HasQuantisedRows
from medusa.engine.weights.forms import FileRows
from medusa.engine.weights.memory import placeholder


class _Lookup(nn.Module):
    """An embedding whose rows are converted to float32 on lookup."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self._of = copy.copy(embedding)
        self._is_plain = type(embedding) is nn.Embedding
        self._of._parameters = {}
        self.padding_idx = embedding.padding_idx
        self._of.padding_idx = None  # it matters to gradients alone
        self.weight = placeholder(embedding.weight)

    def _looked_up(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` (...) long, (..., D) float32."""
        raise NotImplementedError

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


class NarrowEmbedding(_Lookup):
    """An embedding whose ``rows`` (V, D) are stored in the precision of their file."""

    rows: Tensor

    def __init__(self, embedding: nn.Embedding, rows: Tensor):
        super().__init__(embedding)
        self.register_buffer("rows", rows.detach(), persistent=False)

    def _looked_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows).float()


class QuantisedEmbedding(_Lookup, HasQuantisedRows):
    """An embedding whose ``rows`` are stored as their file has quantised them."""

    file_rows: Tensor

    def __init__(self, embedding: nn.Embedding, rows: FileRows):
        super().__init__(embedding)
        self._type = rows.type
        self._width = rows.num_inputs
        self.register_buffer("file_rows", rows.rows.detach(), persistent=False)

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
