"""The cache of a base whose layers keep a state. What a token did to a state is kept, and not what it left.

There are two kinds of states. A causal convolution reads the last inputs of each channel
(:class:`ConvolutionState`). All other rules change a matrix S of each head by one outer product a token,
S <- decay S + k w' (:class:`MatrixState`): the gated delta rule, KDA, the state-space rule of Mamba 2 and the
selective scan of Mamba differ in how k, w and the decay come about (:mod:`medusa.base.recurrent_rules`).

A pass over a tree begins at the committed state and leaves it as it is. Each node starts from the state of
its parent, and its k, w and decay are kept: some hundred numbers a head, where a state has thousands. The
commit keeps those of the accepted path, and the next pass applies them first: the same operations in the same
order, so the same bits. So nothing is copied before a pass, put back or read again, and a row's state depends
on its text alone: not on how it was split into passes, on rejected drafts, or on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

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
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from medusa.base.cache import TreeCache, TreeCacheLayer
from medusa.trees.candidate_tree import TreeTopology

KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
WITHOUT_MEMORY = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
"""Layers that keep nothing of a text: none in ``transformers`` before 5.23."""
BESIDE_A_STATE = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""Layers with keys and values, and a state."""
KNOWN_LAYERS = (*KEYS_AND_VALUES, LinearAttentionLayer, *BESIDE_A_STATE, *WITHOUT_MEMORY)
"""The cache layers of ``transformers`` that :class:`RecurrentCache` replaces."""
MASKS_OF_STATES = ("linear_attention", "conv")
"""Layer types without keys and values, as models name them in their masks: a state has no padding to mask."""


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


def kind_of_layer(layer: Any) -> str:
    """The kind of a cache layer of ``transformers``, in words."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "attention beside a state" if isinstance(layer, BESIDE_A_STATE) else "with a state"
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


@dataclass
class Paths:
    """The tree of the current pass; one object, shared by all states of a cache."""

    topology: TreeTopology | None = None
    _inputs: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, topology: TreeTopology) -> None:
        """Begin a pass over the nodes of ``topology``."""
        self.topology = topology
        self._inputs = {}

    def inputs_of_nodes(self, size: int) -> Tensor:
        """The last ``size`` inputs on each node's path, (R, N, size) long: places among ``size`` - 1 inputs
        before the root, followed by the nodes."""
        assert self.topology is not None
        if size not in self._inputs:
            depths = self.topology.depths[..., None]  # (R, N, 1)
            back = torch.arange(size - 1, -1, -1, device=depths.device)
            ancestors = self.topology.lineage.gather(2, (depths - back).clamp(min=0))
            self._inputs[size] = torch.where(back <= depths, size - 1 + ancestors, size - 1 + depths - back)
        return self._inputs[size]


class ConvolutionState:
    """The last inputs of each channel of a causal convolution, as the committed text left them."""

    def __init__(self, paths: Paths):
        self._paths = paths
        self.committed: Tensor | None = None
        """(B, C, K - 1): the inputs before the next token."""
        self._nodes: Tensor | None = None  # (B, C, N): the inputs of the last pass

    def windows(self, inputs: Tensor, size: int, before: Tensor | None = None) -> Tensor:
        """The ``size`` inputs (K) that each node of a pass reads, (B, C, N, K), the newest last; ``inputs``
        are those of the nodes, (B, C, N). Before any text come the inputs ``before`` (B, C, K - 1), zeros
        where it is None."""
        if self.committed is None:
            self.committed = inputs.new_zeros(*inputs.shape[:2], size - 1) if before is None else before
        self._nodes = inputs
        extended = torch.cat([self.committed, inputs], dim=2)
        topology = self._paths.topology
        assert topology is not None
        if topology.is_chain:
            return extended.unfold(2, size, 1)
        places = self._paths.inputs_of_nodes(size).to(inputs.device)  # (R, N, K)
        places = places.flatten(1)[:, None].expand(len(inputs), inputs.shape[1], -1)
        return extended.gather(2, places).unflatten(2, (-1, size))

    def commit(self, path: Tensor, num_kept: Tensor) -> None:
        """Keep the first ``num_kept`` (B,) long nodes of ``path`` (B, L) long."""
        if self.committed is None or self._nodes is None:
            return
        num_before = self.committed.shape[2]
        extended = torch.cat([self.committed, self._nodes], dim=2)
        before = torch.arange(num_before, device=path.device).expand(len(path), -1)
        along = torch.cat([before, num_before + path], dim=1)
        places = along.gather(1, num_kept[:, None] + torch.arange(num_before, device=path.device))
        places = places.to(extended.device)[:, None].expand(-1, extended.shape[1], -1)
        self.committed = extended.gather(2, places)
        self._nodes = None

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [tensor for tensor in (self.committed, self._nodes) if tensor is not None]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but ``rows`` (B',) long."""
        self._nodes = None
        if self.committed is not None:
            self.committed = self.committed[rows.to(self.committed.device)]

    def join(self, other: ConvolutionState) -> None:
        """Append the rows of ``other``."""
        self._nodes = None
        if self.committed is not None and other.committed is not None:
            self.committed = torch.cat([self.committed, other.committed])

    def copy_row(self, source: ConvolutionState, row: int) -> None:
        """Take the row of ``source``."""
        if source.committed is not None:
            self.committed = source.committed[row : row + 1].clone()


@dataclass(frozen=True)
class Updates:
    """What tokens did to the matrices of their heads: S <- decay S + key written'."""

    decay: Tensor
    """(B, N, H) or (B, N, H, K) float32; of a selective scan a time step for each column, (B, N, H, V)."""
    key: Tensor
    """(B, N, H, K) float32."""
    written: Tensor
    """(B, N, H, V) float32."""
    rates: Tensor | None = None
    """(H, K, V) float32, of a selective scan: in a time step an entry decays by e^(rate step)."""

    def along(self, path: Tensor) -> Updates:
        """The updates of the nodes ``path`` (B, L) long, in order."""
        rows = torch.arange(len(path), device=path.device)[:, None]
        return self._with(self.decay[rows, path], self.key[rows, path], self.written[rows, path])

    def of_rows(self, rows: Tensor) -> Updates:
        """The updates of ``rows`` (B',) long."""
        return self._with(self.decay[rows], self.key[rows], self.written[rows])

    def padded(self, length: int) -> Updates:
        """The same with ``length`` updates a row, the new ones without meaning."""
        return self._with(*(_padded(each, length) for each in (self.decay, self.key, self.written)))

    def joined(self, other: Updates) -> Updates:
        """The rows of both, which have equally many updates."""
        return self._with(
            torch.cat([self.decay, other.decay]),
            torch.cat([self.key, other.key]),
            torch.cat([self.written, other.written]),
        )

    def _with(self, decay: Tensor, key: Tensor, written: Tensor) -> Updates:
        return replace(self, decay=decay, key=key, written=written)

    def factors(self, number: int) -> Tensor:
        """The decay of the update ``number`` of each row, (B, H, 1 or K, 1 or V)."""
        decay = self.decay[:, number]
        if self.rates is not None:
            return (self.rates * decay[:, :, None]).exp()
        return decay[..., None, None] if decay.dim() == 2 else decay[..., None]

    def apply(self, state: Tensor, number: int, counts: Tensor | None = None) -> Tensor:
        """The state (B, H, K, V) after the update ``number`` of each row, of which there are ``counts`` (B,)
        long; all where it is None."""
        after = (
            state * self.factors(number) + self.key[:, number, :, :, None] * self.written[:, number, :, None]
        )
        if counts is None:
            return after
        return torch.where((number < counts)[:, None, None, None], after, state)


def _padded(tensor: Tensor, length: int) -> Tensor:
    """``tensor`` (B, N, ...) with ``length`` entries in its second dimension."""
    return torch.cat(
        [tensor, tensor.new_zeros(len(tensor), length - tensor.shape[1], *tensor.shape[2:])], dim=1
    )


class MatrixState:
    """The matrix of each head of a recurrent layer, as the committed text left it."""

    def __init__(self, paths: Paths):
        self._paths = paths
        self._committed: Tensor | None = None  # (B, H, K, V) float32, without the pending updates
        self.pending: Updates | None = None
        """What committed tokens did that the matrix lacks."""
        self.num_pending: Tensor | None = None
        """(B,) long: how many of these each row has."""
        self._nodes: Updates | None = None  # of the last pass
        self._last: Tensor | None = None  # (B, H, K, V): the state after its last node, if it was a chain

    @property
    def topology(self) -> TreeTopology:
        """The tree of the pass."""
        assert self._paths.topology is not None
        return self._paths.topology

    def before_pending(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The state before the :attr:`pending` updates, of this ``shape`` (B, H, K, V) float32, on the device
        of ``like``; zeros before any text."""
        if self._committed is None:
            self._committed = torch.zeros(shape, dtype=torch.float32, device=like.device)
        return self._committed

    def committed(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The state after the committed text, as :meth:`before_pending`; no updates are pending then."""
        state = self.before_pending(like, shape)
        if self.pending is not None:
            for number in range(self.pending.key.shape[1]):
                state = self.pending.apply(state, number, self.num_pending)
            self.pending = None
            self.num_pending = None
        self._committed = state
        return state

    def keep(self, nodes: Updates, last: Tensor | None) -> None:
        """Keep what the nodes of the pass do; ``last`` is the state after the last one of a chain, where it
        is known. Pending updates have been applied."""
        self.pending = None
        self.num_pending = None
        self._nodes = nodes
        self._last = last

    def commit(self, path: Tensor, num_kept: Tensor, known: list[int]) -> None:
        """Keep the first ``num_kept`` (B,) long nodes of ``path`` (B, L) long; ``known`` are the same
        numbers."""
        if self._nodes is None:
            return
        num_nodes = self._nodes.key.shape[1]
        if self._last is not None and all(count == num_nodes for count in known):
            self._committed = self._last
        elif any(known):
            device = self._nodes.key.device
            self.pending = self._nodes.along(path[:, : max(known)].to(device))
            self.num_pending = num_kept.to(device)
        self._nodes = None
        self._last = None

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        held = [self._committed, self._last]
        for updates in filter(None, (self.pending, self._nodes)):
            held += [updates.decay, updates.key, updates.written]
        return [tensor for tensor in held if tensor is not None]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but ``rows`` (B',) long."""
        self._nodes = None
        self._last = None
        if self._committed is not None:
            rows = rows.to(self._committed.device)
            self._committed = self._committed[rows]
        if self.pending is not None and self.num_pending is not None:
            self.pending = self.pending.of_rows(rows)
            self.num_pending = self.num_pending[rows]

    def join(self, other: MatrixState) -> None:
        """Append the rows of ``other``."""
        self._nodes = None
        self._last = None
        if self._committed is None or other._committed is None:
            return
        own = self._pending_like(other)
        others = other._pending_like(self)
        if own is not None and others is not None:
            length = max(own[0].key.shape[1], others[0].key.shape[1])
            self.pending = own[0].padded(length).joined(others[0].padded(length))
            self.num_pending = torch.cat([own[1], others[1]])
        self._committed = torch.cat([self._committed, other._committed])

    def _pending_like(self, other: MatrixState) -> tuple[Updates, Tensor] | None:
        """The pending updates and their numbers; updates that no row takes where ``other`` alone has some."""
        if self.pending is not None and self.num_pending is not None:
            return self.pending, self.num_pending
        if other.pending is None or self._committed is None:
            return None
        no_row_has_any = torch.zeros(len(self._committed), dtype=torch.long, device=self._committed.device)
        return other.pending.of_rows(no_row_has_any), no_row_has_any

    def copy_row(self, source: MatrixState, row: int) -> None:
        """Take the row of ``source``."""
        if source._committed is None:
            return
        self._committed = source._committed[row : row + 1].clone()
        if source.pending is not None and source.num_pending is not None:
            only = torch.tensor([row], device=source._committed.device)
            self.pending = source.pending.of_rows(only)
            self.num_pending = source.num_pending[only]


class StatesOfHeads:
    """The states of a layer of Zamba, which scans its heads one after the other, each by itself."""

    def __init__(self, paths: Paths, num_heads: int):
        self.heads = [MatrixState(paths) for _ in range(num_heads)]

    def __getitem__(self, place: tuple[slice, int]) -> MatrixState:
        return self.heads[place[1]]


def states_of_scans(state: Any) -> list[Any]:
    """The states of a layer's scans, in the order in which it calls them."""
    return getattr(state, "heads", [state])


class StateLayer(LinearAttentionLayer):
    """The states of one layer, where models of ``transformers`` look for tensors: they hand them to the rules
    of :mod:`medusa.base.recurrent_rules`. Methods without a docstring are ``transformers``' interface."""

    def __init__(self, paths: Paths, number_of_states: int = 1, num_scans: int = 1):
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.record_past = True  # models then ask for windows in passes of one token too
        numbers = range(number_of_states)
        self.conv_states: dict[int, Any] = {number: ConvolutionState(paths) for number in numbers}
        self.recurrent_states: dict[int, Any] = {number: MatrixState(paths) for number in numbers}
        if num_scans > 1:
            self.recurrent_states = {number: StatesOfHeads(paths, num_scans) for number in numbers}
        self.has_previous_state = dict.fromkeys(numbers, True)

    @property
    def states(self) -> list[ConvolutionState | MatrixState]:
        matrices = [states_of_scans(state) for state in self.recurrent_states.values()]
        return [*self.conv_states.values(), *chain.from_iterable(matrices)]

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        return cast(Tensor, self.conv_states[state_idx].windows(conv_states, conv_kernel_size))

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        return recurrent_states  # the rule has kept what there is to keep

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class TreeAndStateLayer(StateLayer, TreeCacheLayer):  # type: ignore[misc, override]  # as theirs
    """A layer with attention and a state side by side."""

    def __init__(self, under_way: Any, paths: Paths, number_of_states: int = 1, num_scans: int = 1):
        TreeCacheLayer.__init__(self, under_way)
        StateLayer.__init__(self, paths, number_of_states, num_scans)

    lazy_initialization = TreeCacheLayer.lazy_initialization  # type: ignore[assignment]
    get_seq_length = TreeCacheLayer.get_seq_length
    get_mask_sizes = TreeCacheLayer.get_mask_sizes


class RecurrentCache(TreeCache):
    """The cache of B rows of a base that keeps a state: keys and values, and the states of the layers."""

    def __init__(self, config: PreTrainedConfig, num_rows: int, device: torch.device | str):
        super().__init__(num_rows, 0, device)
        self.config = config
        self.paths = Paths()
        self.layers = [self._layer_for(layer) for layer in DynamicCache(config=config).layers]
        self.tree_layers = [layer for layer in self.layers if isinstance(layer, TreeCacheLayer)]
        layers = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.states = [state for layer in layers for state in layer.states]

    def _layer_for(self, layer: Any) -> Any:
        """The replacement of a cache layer of ``transformers``; itself where it keeps nothing."""
        config = self.config.get_text_config(decoder=True)
        num_scans = config.n_mamba_heads if config.model_type == "zamba" else 1
        if isinstance(layer, BESIDE_A_STATE):
            return TreeAndStateLayer(self.under_way, self.paths, layer.number_of_states, num_scans)
        if isinstance(layer, LinearAttentionLayer):
            return StateLayer(self.paths, layer.number_of_states, num_scans)
        return layer if isinstance(layer, WITHOUT_MEMORY) else TreeCacheLayer(self.under_way)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._state_bytes

    @property
    def _state_bytes(self) -> int:
        return sum(tensor.nbytes for state in self.states for tensor in state.tensors())

    @property
    def bytes_per_row(self) -> int:
        return self._state_bytes // max(1, self.num_rows)

    def commit(
        self, path: Tensor, num_kept: Tensor, is_chain: bool = False, known: list[list[int]] | None = None
    ) -> None:
        counts = num_kept.tolist() if known is None else [*map(len, known)]
        self._commit_states(path, num_kept, counts)
        super().commit(path, num_kept, is_chain, known)

    def commit_prefix(self, num_kept: Tensor, known: list[int] | None = None) -> None:
        known = num_kept.tolist() if known is None else known
        path = torch.arange(max(known), device=num_kept.device).expand(len(known), -1)
        self._commit_states(path, num_kept, known)
        super().commit_prefix(num_kept, known)

    def _commit_states(self, path: Tensor, num_kept: Tensor, known: list[int]) -> None:
        """As :meth:`commit`; nothing where it has been done."""
        for state in self.states:
            if isinstance(state, MatrixState):
                state.commit(path, num_kept, known)
            else:
                state.commit(path, num_kept)

    def uncommit_last(self) -> None:
        raise NotImplementedError("a state cannot forget its last token")

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        for state in self.states:
            state.keep_rows(rows)

    def join(self, other: TreeCache, most_rows: int = 0) -> None:
        assert isinstance(other, RecurrentCache), "of the same base"
        super().join(other, most_rows)
        for state, other_state in zip(self.states, other.states, strict=True):
            state.join(other_state)  # type: ignore[arg-type]  # of the same kind

    def copy_of_row(self, row: int, length: int) -> TreeCache:
        """A new cache of one row, with the first ``length`` committed tokens of ``row``; without any where
        the states have read more: look at its ``longest``."""
        is_whole = length >= self.known_lengths[row]
        copied = super().copy_of_row(row, length if is_whole else 0)
        assert isinstance(copied, RecurrentCache)
        if is_whole:
            for state, source in zip(copied.states, self.states, strict=True):
                state.copy_row(source, row)  # type: ignore[arg-type]  # of the same kind
        return copied

    def _empty_row(self) -> TreeCache:
        return RecurrentCache(self.config, 1, self.lengths.device)
