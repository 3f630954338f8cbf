"""Which tokens a drafting module scores: all of them, or those in a map.

Most of what a model writes is made of few tokens. A module that scores only those multiplies by fewer rows
of the base's output embedding, which is most of what drafting costs (FR-Spec, arXiv 2502.14856). A token
outside the map is never drafted; the base still emits it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import embedding_weight


class TokenMapped(nn.Module):
    """A module whose logits columns are tokens of a vocabulary of V, or the V' in ``token_map``.

    Args:
        token_map: the ids, all different. None with a ``token_map_size`` leaves them to be loaded.

    Raises:
        ValueError: as :func:`checked_token_map`.
    """

    def __init__(
        self, vocab_size: int, token_map_size: int | None, token_map: Sequence[int] | Tensor | None = None
    ):
        super().__init__()
        self.vocab_size = vocab_size
        if token_map is not None:
            token_map = checked_token_map(vocab_size, token_map_size, token_map)
        elif token_map_size is not None:  # filled by loading weights
            token_map = torch.zeros(token_map_size, dtype=torch.long)
        self.register_buffer("token_map", token_map)
        self._mapped_rows: _MappedRows | None = None

    token_map: Tensor | None
    """(V',) long: the token id that each scored column stands for; None when every token is scored."""

    @property
    def num_columns(self) -> int:
        """V': how many tokens are scored."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of logits columns, any shape, long."""
        return columns if self.token_map is None else self.token_map[columns]

    def unembedded(self, features: Tensor, output_embedding: nn.Module) -> Tensor:
        """Features (..., D) as the base's own output embedding scores them: logits (..., V')."""
        weight = embedding_weight(output_embedding)
        if self.token_map is None:
            features = features.to(weight.dtype) if weight.is_floating_point() else features
            # Compiled code leaves hooks out: other threads hang theirs on this module for the time of a pass.
            compute = output_embedding.forward if torch.compiler.is_compiling() else output_embedding
            return compute(features)
        return self._mapped(output_embedding).score(features)

    def gather_rows(self, output_embedding: nn.Module) -> None:
        """Have the rows of the mapped tokens at hand: for code that is compiled or captured."""
        if self.token_map is not None:
            self._mapped(output_embedding)

    def gathered_rows(self) -> list[Tensor]:
        """The tensors that :meth:`gather_rows` holds, and replaces when the weights have changed."""
        return [] if self._mapped_rows is None else self._mapped_rows.gathered()

    def _mapped(self, output_embedding: nn.Module) -> _MappedRows:
        """The base's rows for the mapped tokens, gathered anew when the weights or the map have changed."""
        assert self.token_map is not None
        kept = self._mapped_rows
        # Compiled code cannot compare addresses; gather_rows, which runs before it, has done so.
        if kept is None or not (
            torch.compiler.is_compiling() or kept.are_of(output_embedding, self.token_map)
        ):
            kept = self._mapped_rows = _MappedRows(output_embedding, self.token_map)
        return kept


@runtime_checkable
class ScoresSome(Protocol):
    """An output embedding with quicker products for drafts than its own rows, and its own precision."""

    def scorer_of(self, token_ids: Tensor) -> nn.Module | None:
        """What scores ``token_ids`` (V',) long alone, (..., D) -> (..., V'); None where it has none."""
        ...

    def product_of(self, weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        """What multiplies with a drafting module's own weight (out, in) as quickly; None likewise."""
        ...


class _MappedRows:
    """Rows of an output embedding, and how to tell that they are out of date."""

    def __init__(self, output_embedding: nn.Module, token_map: Tensor):
        # Views, since moving or casting a model swaps the data of its parameters and keeps the objects.
        weight, bias = _weight_and_bias(output_embedding)
        self.sources = [each.detach() for each in (weight, token_map, bias) if each is not None]
        self.versions = [version_of(each) for each in (weight, token_map, bias) if each is not None]
        self.kind = type(output_embedding)
        self.quick = (
            output_embedding.scorer_of(token_map) if isinstance(output_embedding, ScoresSome) else None
        )
        if self.quick is None:
            self.rows = weight.detach()[token_map]
            self.bias = None if bias is None else bias.detach()[token_map]

    def __deepcopy__(self, memo: dict) -> _MappedRows:
        return self  # a copied module has its own map, and these rows belong to another

    def score(self, features: Tensor) -> Tensor:
        """Features (..., D) -> (..., V')."""
        features = features.to(self.sources[0].dtype)
        return F.linear(features, self.rows, self.bias) if self.quick is None else self.quick(features)

    def gathered(self) -> list[Tensor]:
        return [] if self.quick is not None else [each for each in (self.rows, self.bias) if each is not None]

    def are_of(self, output_embedding: nn.Module, token_map: Tensor) -> bool:
        """Whether nothing has moved, been cast or written to since."""
        weight, bias = _weight_and_bias(output_embedding)
        current = [each for each in (weight, token_map, bias) if each is not None]
        same_data = self.kind is type(output_embedding) and all(
            kept.data_ptr() == now.data_ptr() and kept.dtype == now.dtype
            for kept, now in zip(self.sources, current, strict=True)
        )
        return same_data and self.versions == [version_of(each) for each in current]


def _weight_and_bias(output_embedding: nn.Module) -> tuple[Tensor, Tensor | None]:
    return embedding_weight(output_embedding), cast("Tensor | None", getattr(output_embedding, "bias", None))


def version_of(tensor: Tensor) -> int:
    """Grows with every write to ``tensor``; 0 for tensors of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def checked_token_map(vocab_size: int, size: int | None, token_map: Sequence[int] | Tensor) -> Tensor:
    """``token_map`` as (V',) long.

    Raises:
        ValueError: it is not ``size`` different ids of a vocabulary of ``vocab_size``.
    """
    if size is None:
        raise ValueError("token_map goes with token_map_size, which is None")
    try:
        ids = torch.as_tensor(token_map)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"token_map must hold token ids, got {reprlib.repr(token_map)}") from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"token_map must hold token ids, which are ints, got {ids.dtype}")
    ids = ids.long()
    if ids.shape != (size,) or len(ids.unique()) != len(ids):
        raise ValueError(f"token_map must hold {size} different ids, got shape {tuple(ids.shape)}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"token_map ids must be in [0, {vocab_size}), got {int(ids.min())} to {int(ids.max())}"
        )
    return ids
