"""The cache of a base whose layers keep a state: every pass begins from a snapshot.

A recurrent state, and the window of a convolution, cannot forget rejected tokens. So the states are copied
before a pass. If all tokens of the pass are accepted, the new states are right. If not, the copies are
restored, and the accepted tokens are *replayed* at the start of the next pass, before its root and its
drafts; their keys and values are written once more, into the same slots. Nothing here depends on the kind of
layer. The price is that tokens are read several times, until all tokens of a pass are accepted; a pass
without drafts always qualifies.

Many layers use another algorithm for several tokens than for one, and the two round differently. So there is
a checkpoint of the last states that equal plain decoding's: :meth:`StatefulCache.restore_checkpoint` goes
back to it, and the text since can be read again, token by token.

A state has no padding, so each row has a cache of its own, and rows run one after the other. The model makes
its own masks, so only chains are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from medusa.base.cache import PassSlots, TreeCache, TreeCacheLayer

KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
WITHOUT_MEMORY = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
"""Layers that keep nothing of a text: none in ``transformers`` before 5.23."""
KNOWN_LAYERS = (
    *KEYS_AND_VALUES,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    *WITHOUT_MEMORY,
)
"""The cache layers of ``transformers`` that :class:`StatefulRow` replaces."""
NO_LIMIT = (0.0, float("inf"))
FROM_NOTHING = "reads several tokens at a time without the tokens before them"
REFUSED_TYPES = {
    "falcon_mamba": FROM_NOTHING,
    "jamba": FROM_NOTHING,
    "mamba": FROM_NOTHING,
    "minimax": "takes no cache but its own",
    "recurrent_gemma": "keeps its recurrent state in its modules, and not in the cache",
    "zamba": FROM_NOTHING,
}
"""Reasons against models in ``transformers`` 5.23, by ``model_type``."""


def is_recurrent(base: Any) -> bool:
    """Whether layers of ``base`` keep more of a text than keys and values: a recurrent state, or the window
    of a convolution."""
    kinds = getattr(base.config.get_text_config(decoder=True), "layer_types", None) or ()
    classes = [DYNAMIC_LAYER_TYPE_MAPPING.get(kind) for kind in kinds]
    if any(kind is not None and issubclass(kind, LinearAttentionCacheLayerMixin) for kind in classes):
        return True
    # of a class that may keep one, a model whose layers all attend does not
    all_attend = bool(kinds) and all(kind in (*KEYS_AND_VALUES, *WITHOUT_MEMORY) for kind in classes)
    return not all_attend and bool(getattr(base, "_is_stateful", False))


def check_states(base: Any) -> None:
    """Raise ValueError, with the reason, unless the states of ``base`` can be copied."""
    name = type(base).__name__
    layers = DynamicCache(config=base.config).layers
    reason = REFUSED_TYPES.get(base.config.get_text_config(decoder=True).model_type)
    if reason is not None:
        raise ValueError(f"{name} {reason}, so no draft can be verified on it; use its own generate")
    settings = [getattr(module, "time_step_limit", NO_LIMIT) for module in base.modules()]  # lists in files
    limits = {tuple(limit) if isinstance(limit, list) else limit for limit in settings} - {NO_LIMIT}
    if limits:
        raise ValueError(
            f"{name} limits its time steps to {', '.join(map(str, sorted(limits)))} where a pass reads "
            "several tokens, and not where it reads one, so its text depends on how many are read at once; "
            "use its own generate"
        )
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in KNOWN_LAYERS})
    if unknown:
        raise ValueError(
            f"{name} keeps its states in {', '.join(unknown)}, which medusa cannot copy and restore, "
            "so it cannot forget rejected tokens; use its own generate"
        )
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise ValueError(
            f"{name} keeps its recurrent state outside of transformers' cache, where it cannot be copied and "
            "put back, so it cannot forget rejected tokens; use its own generate"
        )


def kind_of_layer(layer: Any) -> str:
    """The kind of a cache layer of ``transformers``, in words."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "attention beside a state" if isinstance(layer, DynamicLayer) else "with a state"
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "sliding attention"
    return "without memory" if isinstance(layer, WITHOUT_MEMORY) else "attention"


def holds_text(cache: Cache) -> bool:
    """Whether a cache of ``transformers`` holds keys, values or states of a text."""
    return any(
        (isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0)
        or any(getattr(layer, "has_previous_state", {}).values())
        for layer in cache.layers
    )


class StatefulRow(TreeCache):
    """The cache of one row: keys and values, and the states of its other layers.

    ``lengths`` and ``longest`` count the tokens in the states. Per pass: :meth:`begin_pass`, the model's
    forward, then :meth:`keep`. If nothing of the last pass was kept, the next pass replaces it.
    """

    takes_masks = False

    def __init__(self, config: PreTrainedConfig, device: torch.device | str):
        super().__init__(1, 0, device)
        self.config = config
        self.layers = [_layer_for(layer, self.under_way) for layer in DynamicCache(config=config).layers]
        self.tree_layers = [layer for layer in self.layers if isinstance(layer, TreeCacheLayer)]
        self.replay_tokens = torch.zeros(1, 0, dtype=torch.long, device=device)
        """(1, M) long: tokens that were kept and that the states have not read."""
        self.is_exact = True
        """Whether the states are bit-identical to plain decoding's."""
        self._announced = self.replay_tokens  # (1, M + N) long
        self._before: list[dict[str, Any]] | None = None  # the states before the pass under way
        self._checkpoint: tuple[int, list[dict[str, Any]]] = (0, [])  # tokens read, and the states then

    @property
    def num_kept(self) -> int:
        return self.longest + self.replay_tokens.shape[1]

    @property
    def num_bytes(self) -> int:
        values: list[Any] = []
        for layer in self._stateful_layers:
            for value in _states(layer).values():
                values += value.values() if isinstance(value, dict) else [value]
        return super().num_bytes + sum(value.nbytes for value in values if isinstance(value, Tensor))

    @property
    def _stateful_layers(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def begin_pass(self, tokens: Tensor) -> Tensor:
        """Begin a pass over ``tokens`` (1, N) long; returns the tokens to run, replayed ones first, (1, M +
        N) long."""
        self._put_back()
        self._before = [_copied(_states(layer)) for layer in self._stateful_layers]
        if self.is_exact:
            self._checkpoint = self.longest, self._before
        self._announced = torch.cat([self.replay_tokens, tokens], dim=1)
        self.plan_pass(self._announced.shape[1])
        return self._announced

    def keep(self, num_kept: int) -> None:
        """Keep the first ``num_kept`` of the tokens that were announced, and forget the others."""
        num_right = self.replay_tokens.shape[1] + num_kept
        if num_right < self._announced.shape[1]:  # the states have read tokens that are forgotten
            self._put_back()
            self.replay_tokens = self._announced[:, :num_right]
        else:
            self._before = None
            self.replay_tokens = self._announced[:, :0]
            self.is_exact &= num_right == 1
            self.commit_prefix(torch.full_like(self.lengths, num_right), [num_right])

    @property
    def is_exact_pass(self) -> bool:
        """Whether the running pass is bit-identical to plain decoding."""
        return self.is_exact and self._announced.shape[1] == 1

    def restore_checkpoint(self) -> None:
        """Go back to the last states that equal plain decoding's."""
        self.longest, self._before = self._checkpoint
        self.lengths = torch.full_like(self.lengths, self.longest)
        self._put_back()
        self.replay_tokens = self.replay_tokens[:, :0]
        self.is_exact = True

    def _put_back(self) -> None:
        """Restore the states before the pass under way, if there is one."""
        if self._before is not None:
            for layer, states in zip(self._stateful_layers, self._before, strict=True):
                vars(layer).update(_copied(states))  # passes write into them, and they may be needed again
            self._before = None

    def copy_of_row(self, row: int, length: int) -> StatefulRow:
        """A row of its own with the first ``length`` tokens; without any where the states have read more."""
        self._put_back()
        copied = super().copy_of_row(row, self.longest if length >= self.longest else 0)
        assert isinstance(copied, StatefulRow)
        if length >= self.longest:
            for layer, source in zip(copied._stateful_layers, self._stateful_layers, strict=True):
                vars(layer).update(_copied(_states(source)))
            copied.replay_tokens = self.replay_tokens[:, : length - self.longest].clone()
        return copied

    def _empty_row(self) -> StatefulRow:
        return StatefulRow(self.config, self.lengths.device)


class StatefulCache(TreeCache):
    """The cache of a base that keeps a state: one :class:`StatefulRow` for each row.

    ``lengths`` counts all that was kept, whether the states have read it or not.
    """

    def __init__(self, rows: Sequence[StatefulRow], device: torch.device | str):
        super().__init__(len(rows), 0, device)
        self.stateful_rows = list(rows)
        self.sync_lengths()

    def sync_lengths(self) -> None:
        """Update ``lengths`` from the rows."""
        self.lengths = self.lengths.new_tensor([row.num_kept for row in self.stateful_rows])
        self.longest = max((row.num_kept for row in self.stateful_rows), default=0)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(row.num_bytes for row in self.stateful_rows)

    @property
    def bytes_per_token(self) -> int:
        """Memory that a row takes for each token of its text, its states shared out among these."""
        rows = (row.num_bytes // max(1, row.num_kept) for row in self.stateful_rows)
        return super().bytes_per_token + max(rows, default=0)

    @property
    def capacity(self) -> int:
        return max((row.capacity for row in self.stateful_rows), default=0)

    @property
    def num_replay_tokens(self) -> int:
        """Largest number of tokens over the rows that the next pass replays."""
        return max((row.replay_tokens.shape[1] for row in self.stateful_rows), default=0)

    def commit(
        self, path: Tensor, num_kept: Tensor, is_chain: bool = False, known: list[list[int]] | None = None
    ) -> None:
        """As :meth:`TreeCache.commit`; the pass was a chain."""
        self.commit_prefix(num_kept, None if known is None else [*map(len, known)])

    def commit_prefix(self, num_kept: Tensor, known: list[int] | None = None) -> None:
        for row, count in zip(self.stateful_rows, num_kept.tolist() if known is None else known, strict=True):
            row.keep(count)
        self.sync_lengths()

    @property
    def inexact_rows(self) -> list[int]:
        """Rows whose pass may differ from plain decoding's by rounding."""
        return [index for index, row in enumerate(self.stateful_rows) if not row.is_exact_pass]

    def split_rows(self) -> list[StatefulCache]:
        """One single-row cache per row, sharing storage. Call ``sync_lengths()`` after changing them."""
        return [StatefulCache([row], self.lengths.device) for row in self.stateful_rows]

    def set_checkpoint(self) -> None:
        """Mark the current states as plain decoding's."""
        for row in self.stateful_rows:
            row.is_exact = True

    def restore_checkpoint(self) -> None:
        """Restore the checkpoint of every row."""
        for row in self.stateful_rows:
            row.restore_checkpoint()
        self.sync_lengths()

    def uncommit_last(self) -> None:
        raise NotImplementedError("a state cannot forget its last token")

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self.stateful_rows = [self.stateful_rows[row] for row in rows.tolist()]
        self.sync_lengths()

    def join(self, other: TreeCache, most_rows: int = 0) -> None:
        assert isinstance(other, StatefulCache), "of the same base"
        super().join(other, most_rows)
        self.stateful_rows += other.stateful_rows
        self.sync_lengths()

    def copy_of_row(self, row: int, length: int) -> StatefulCache:
        """As :meth:`StatefulRow.copy_of_row`: look at its ``longest``."""
        copied = StatefulCache([self.stateful_rows[row].copy_of_row(0, length)], self.lengths.device)
        if self.features is not None:
            copied.keep_features(self.features[row : row + 1, : copied.longest], copied.lengths * 0, 0)
        return copied

    def clear_uncommitted(self) -> None:
        super().clear_uncommitted()
        for row in self.stateful_rows:
            row.clear_uncommitted()

    def trim(self) -> None:
        super().trim()
        for row in self.stateful_rows:
            row.trim()


class TreeAndStateLayer(LinearAttentionLayer, TreeCacheLayer):  # type: ignore[override]  # as theirs
    """A layer with attention and a state side by side."""

    def __init__(self, under_way: PassSlots, **kwargs: Any):
        TreeCacheLayer.__init__(self, under_way)
        LinearAttentionLayer.__init__(self, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # keys and values come by position
        (TreeCacheLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


def _layer_for(layer: Any, under_way: PassSlots) -> Any:
    """The replacement of a cache layer of ``transformers``; itself where it only keeps a state, or
    nothing."""
    if type(layer) in KEYS_AND_VALUES:
        return TreeCacheLayer(under_way)
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        return TreeAndStateLayer(under_way, number_of_states=layer.number_of_states)
    return layer


def _states(layer: Any) -> dict[str, Any]:
    """The attributes of a layer that its passes write, keys and values left out."""
    attention = vars(TreeCacheLayer(layer.under_way)) if isinstance(layer, TreeCacheLayer) else {}
    return {name: value for name, value in vars(layer).items() if name not in attention}


def _copied(value: Any) -> Any:
    """``value`` with tensors of its own, in dictionaries too."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
