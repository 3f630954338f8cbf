"""The draft vocabulary: the tokens that a drafting module scores, all of them or a subset.

Most text consists of few different tokens. A module that scores only those multiplies by fewer rows of the
base's LM head, which is most of the cost of drafting (FR-Spec, arXiv 2502.14856). A token outside the map is
never drafted; the base still emits it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import embedding_weight, rows_at
from medusa.options import is_count

MAX_SIZE = 2**24
"""Largest hidden size or vocabulary that is read: far above any model's. A file with a larger number is
refused before memory is allocated."""
MAX_LAYERS = 4096
"""Largest number of layers, of a head or of a base."""

LIKELY = 2**15
"""Tokens that a module without a token map of its own drafts, of a vocabulary of twice as many and more. The
first so many of Qwen 2.5 are 94 % of those of English prose, 89 % of Python and 51 % of Chinese; half as many
are 88, 81 and 41 %, and all are eight times the work at each draft, where a base has 248,320."""


def likely_tokens(vocab_size: int, ends: Iterable[int]) -> Tensor | None:
    """The tokens to draft where no text tells more, (V',) long: the first :data:`LIKELY` and ``ends``, which
    end answers. None for all of a smaller vocabulary.

    Byte-pair merges are numbered as they were learnt, the most frequent first.
    """
    if vocab_size < 2 * LIKELY:
        return None
    return torch.tensor(sorted({*range(LIKELY), *(id for id in ends if id < vocab_size)}))


class DraftVocab(nn.Module):
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
        self.scorer: Callable[[Tensor], Tensor] | None = None
        """Scores the mapped tokens, (..., D) -> (..., V'), from rows gathered beforehand; None gathers them
        from the LM head at every call. See :func:`medusa.engine.optimized_heads.optimized_heads`."""

    token_map: Tensor | None
    """(V',) long: the token id of each scored column; None when every token is scored."""

    @property
    def scores_base_rows(self) -> bool:
        """Whether it scores with rows of the base's LM head, and not with rows of its own."""
        return True

    @property
    def num_columns(self) -> int:
        """V': how many tokens are scored."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of logits columns, any shape, long."""
        return columns if self.token_map is None else self.token_map[columns]

    def copy_weights(self, other: DraftVocab) -> None:
        """Take all weights of ``other`` but its token map: the rows that it scores are the base's.

        Raises:
            ValueError: there is no place for some of them.
        """
        weights = {name: weight for name, weight in other.state_dict().items() if name != "token_map"}
        # not strict: what ``other`` has no layer for stays untrained
        left_over = self.load_state_dict(weights, strict=False).unexpected_keys
        if left_over:
            raise ValueError(
                f"there is no place for the weights {left_over}; start from heads of these sizes"
            )

    def unembedded(self, features: Tensor, lm_head: nn.Module) -> Tensor:
        """Features (..., D) as the base's own LM head scores them: logits (..., V')."""
        weight = embedding_weight(lm_head)
        if self.token_map is None:
            features = features.to(weight.dtype) if weight.is_floating_point() else features
            # Compiled code leaves hooks out: other threads hang theirs on this module for the time of a pass.
            compute = lm_head.forward if torch.compiler.is_compiling() else lm_head
            return compute(features)
        scorer = GatheredRows(lm_head, self.token_map) if self.scorer is None else self.scorer
        return scorer(features)


class GatheredRows:
    """Rows of an LM head for some tokens, (..., D) -> (..., V'), as they are now.

    Args:
        token_map: (V',) long.
    """

    def __init__(self, lm_head: nn.Module, token_map: Tensor):
        bias = cast("Tensor | None", getattr(lm_head, "bias", None))
        dtype = embedding_weight(lm_head).dtype
        self.rows = rows_at(lm_head, token_map).to(dtype)
        self.bias = None if bias is None else bias.detach()[token_map]

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.rows.dtype), self.rows, self.bias)


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


def checked_layers(layers: Any, least: int = 0) -> tuple[int, ...]:
    """``fused_layers`` as a tuple; ValueError unless they are ``least`` or more, ascending."""
    if isinstance(layers, (list, tuple)) and len(layers) >= least:
        ascends = all(is_count(layer, MAX_LAYERS) for layer in layers) and list(layers) == sorted(set(layers))
        if ascends:
            return tuple(layers)
    raise ValueError(
        f"fused_layers must be different ints from 1 to {MAX_LAYERS}, in ascending order"
        f"{f', at least {least}' if least else ''}, got {reprlib.repr(layers)}"
    )
