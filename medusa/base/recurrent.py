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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
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


def rows_at(before: Tensor, nodes: Tensor, places: Tensor) -> Tensor:
    """The inputs at ``places`` (B, L) long among ``before`` (B, M, C), followed by ``nodes`` (B, N, C):
    (B, L, C)."""
    inputs = torch.cat([before, nodes], dim=1)
    if inputs.shape[0] == 1:  # in a third of the time
        return inputs[0].index_select(0, places[0])[None]
    return inputs.gather(1, places[..., None].expand(-1, -1, inputs.shape[2]))


class Paths:
    """The tree of the current pass; one object, shared by all states of a cache."""

    def __init__(self) -> None:
        self.parents = torch.zeros(1, 0, dtype=torch.long)
        """(R, N) long: the parent of each node; the root is its own."""
        self.is_chain = False
        """Whether the tree is known to be a chain."""
        self.is_committed = False
        """Whether it is known to be one that each row commits whole, so that its nodes need not be kept."""
        self.rows_at: Callable[[Tensor, Tensor, Tensor], Tensor] = rows_at
        """:func:`rows_at`, or another form of it."""
        self._topology: TreeTopology | None = None
        self._inputs: dict[int, Tensor] = {}

    def set_tensors(self, parents: Tensor, inputs: dict[int, Tensor]) -> None:
        """Take these :attr:`parents` and :meth:`inputs_of_nodes`, by size."""
        self.parents = parents
        self._inputs = inputs

    def begin(self, topology: TreeTopology, is_committed: bool = False) -> None:
        """Begin a pass over the nodes of ``topology``."""
        self.parents = topology.parents
        self.is_chain = topology.is_chain
        self.is_committed = is_committed
        self._topology = topology
        self._inputs = {}

    def inputs_of_nodes(self, size: int) -> Tensor:
        """The last ``size`` inputs on each node's path, (R, N, size) long: places among ``size`` - 1 inputs
        before the root, followed by the nodes."""
        if size not in self._inputs:
            assert self._topology is not None, "begin() comes first"
            depths = self._topology.depths[..., None]  # (R, N, 1)
            back = torch.arange(size - 1, -1, -1, device=depths.device)
            if self.is_chain:  # whose lineage may be left out
                places = depths + size - 1 - back
            else:
                ancestors = self._topology.lineage.gather(2, (depths - back).clamp(min=0))
                places = torch.where(back <= depths, size - 1 + ancestors, size - 1 + depths - back)
            self._inputs[size] = places
        return self._inputs[size]


@dataclass(frozen=True)
class Kept:
    """The nodes of a pass that its commit keeps."""

    path: Tensor
    """(B, L) long: nodes in the order of the text."""
    counts: Tensor
    """(B,) long: how many of them each row keeps."""

    @classmethod
    def nothing(cls, num_rows: int, device: torch.device) -> Kept:
        """No node of ``num_rows`` rows."""
        counts = torch.zeros(num_rows, dtype=torch.long, device=device)
        return cls(counts[:, None], counts)

    def last_inputs(self, num_inputs: int) -> Tensor:
        """(B, num_inputs) long: the newest of as many inputs before the pass, followed by its nodes."""
        before = torch.arange(num_inputs, device=self.path.device).expand(self.path.shape[0], -1)
        along = torch.cat([before, num_inputs + self.path], dim=1)
        return along.gather(1, self.counts[:, None] + before)

    def of_rows(self, rows: Tensor) -> Kept:
        """The same of ``rows`` (B',) long."""
        return Kept(self.path[rows], self.counts[rows])

    def joined(self, other: Kept) -> Kept:
        """The rows of both."""
        length = max(self.path.shape[1], other.path.shape[1])
        paths = [_padded(each.path, length) for each in (self, other)]
        return Kept(torch.cat(paths), torch.cat([self.counts, other.counts]))


def _padded(tensor: Tensor, length: int) -> Tensor:
    """``tensor`` (B, N, ...) with ``length`` entries in its second dimension, the new ones zero."""
    missing = length - tensor.shape[1]
    return torch.cat([tensor, tensor.new_zeros(len(tensor), missing, *tensor.shape[2:])], dim=1)


class RowStates:
    """What one rule of a layer keeps of the text of each row: a tensor as it was before the last pass, and
    what the nodes of that pass do to it."""

    def __init__(self, paths: Paths):
        self._paths = paths
        self._before: Tensor | None = None  # (B, ...); None before any text
        self._nodes: tuple[Tensor, ...] = ()  # (B, N, ...) each
        self._kept: Kept | None = None  # None: no node is committed
        self._last: Tensor | None = None  # the same after the last node of a chain, where that is kept

    @property
    def parents(self) -> Tensor:
        """(R, N) long: the parent of each node of the pass."""
        return self._paths.parents

    @property
    def is_of_chain(self) -> bool:
        """Whether the nodes of the pass are known to be a chain."""
        return self._paths.is_chain

    def begin_pass(self) -> None:
        """Forget the nodes of a pass that is not committed."""
        if self._kept is None:
            self._nodes = ()
        self._last = None

    def commit(self, kept: Kept, known: list[int]) -> None:
        """Keep nodes of the pass; ``known`` are the numbers of each row."""
        is_whole = not self._nodes or all(count == self._nodes[0].shape[1] for count in known)
        if self._has_last and is_whole:
            self._before = self._last
            self._nodes = ()
        elif self._nodes:
            self._kept = kept
        self._last = None

    @property
    def _has_last(self) -> bool:
        return self._last is not None and self._last is not self._before

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [*self._nodes, *([] if self._before is None else [self._before])]

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The shape of the tensor of a row, and of what a node does to it; none where the layer has no such
        state. Known after a pass."""
        if self._before is None:
            return []
        return [tuple(self._before.shape[1:]), *(tuple(each.shape[2:]) for each in self._nodes)]

    def fill(self, sizes: Sequence[Sequence[int]], like: Tensor, num_nodes: int = 1, length: int = 1) -> None:
        """Where tensors of the rows of ``like`` are missing, make them with these :attr:`sizes`: of
        ``num_nodes`` nodes, and a path of ``length`` that keeps none."""
        num_rows = len(like)
        if self._before is None:
            self._before = like.new_zeros(num_rows, *sizes[0])
        if self._kept is None:
            self._nodes = tuple(like.new_zeros(num_rows, num_nodes, *size) for size in sizes[1:])
            nothing = Kept.nothing(num_rows, like.device)
            self._kept = Kept(nothing.path.expand(-1, length).contiguous(), nothing.counts)

    def program_inputs(self) -> list[Tensor]:
        """The tensors that a compiled pass takes (:meth:`take_inputs`); all have been made (:meth:`fill`)."""
        assert self._before is not None and self._kept is not None
        return [
            self._before,
            *(each.contiguous() for each in self._nodes),
            self._kept.path,
            self._kept.counts,
        ]

    def take_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Stand for the state with these :meth:`program_inputs`."""
        self._before, *nodes, path, counts = tensors
        self._nodes = tuple(nodes)
        self._kept = Kept(path, counts)

    def results(self) -> list[Tensor]:
        """The tensors that a pass has made, for :meth:`take_results`."""
        return [each.contiguous() for each in self._nodes]

    def take_results(self, tensors: Sequence[Tensor]) -> None:
        """Take over the :meth:`results` of a compiled pass."""
        self._keep_nodes(tuple(tensors))

    def _keep_nodes(self, nodes: tuple[Tensor, ...]) -> None:
        """Keep what the nodes of the pass do, where the commit will need it."""
        self._nodes = () if self._paths.is_committed and self._has_last else nodes
        self._kept = None

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but ``rows`` (B',) long."""
        self.begin_pass()
        if self._before is None:
            return
        rows = rows.to(self._before.device)
        self._before = self._before[rows]
        if self._kept is not None:
            self._nodes = tuple(each[rows] for each in self._nodes)
            self._kept = self._kept.of_rows(rows)

    def join(self, other: RowStates) -> None:
        """Append the rows of ``other``, a state of the same rule."""
        self.begin_pass()
        if self._before is None or other._before is None:
            return
        if self._kept is not None or other._kept is not None:
            own_nodes, own_kept = self._pending_like(other)
            other_nodes, other_kept = other._pending_like(self)
            length = max(own_nodes[0].shape[1], other_nodes[0].shape[1])
            self._nodes = tuple(
                torch.cat([_padded(own, length), _padded(others, length)])
                for own, others in zip(own_nodes, other_nodes, strict=True)
            )
            self._kept = own_kept.joined(other_kept)
        self._before = torch.cat([self._before, other._before])

    def _pending_like(self, other: RowStates) -> tuple[tuple[Tensor, ...], Kept]:
        """The nodes and which of them are committed; of the kind of ``other``, and none, where none are."""
        if self._kept is not None:
            return self._nodes, self._kept
        assert self._before is not None
        num_rows = len(self._before)
        nodes = tuple(each.new_zeros(num_rows, 1, *each.shape[2:]) for each in other._nodes)
        return nodes, Kept.nothing(num_rows, self._before.device)

    def copy_row(self, source: RowStates, row: int) -> None:
        """Take a row of ``source``, a state of the same rule."""
        if source._before is None:
            return
        self._before = source._before[row : row + 1].clone()
        if source._kept is not None:
            path = source._kept.path[row : row + 1, : int(source._kept.counts[row])]
            self._nodes = tuple(each[row : row + 1, path[0].to(each.device)] for each in source._nodes)
            in_order = torch.arange(path.shape[1], device=path.device)[None]
            self._kept = Kept(in_order, source._kept.counts[row : row + 1]) if path.numel() else None


class ConvolutionState(RowStates):
    """The last inputs of each channel of a causal convolution, (B, K - 1, C); of nodes (B, N, C)."""

    def windows(self, inputs: Tensor, size: int, before: Tensor | None = None) -> Tensor:
        """The ``size`` inputs (K) that each node of a pass reads, (B, C, N, K), the newest last; ``inputs``
        are those of the nodes, (B, C, N). Before any text come the inputs ``before`` (B, C, K - 1), zeros
        where it is None."""
        nodes = inputs.transpose(1, 2)
        if self._before is None and before is not None:
            self._before = before.transpose(1, 2).contiguous()
        committed = self._committed(nodes, size - 1)
        self._before = committed
        self._keep_nodes((nodes,))
        places = self._paths.inputs_of_nodes(size).to(inputs.device)  # (R, N, K)
        places = places.flatten(1).expand(inputs.shape[0], -1)
        windows = self._paths.rows_at(committed, nodes, places)
        return windows.unflatten(1, (-1, size)).permute(0, 3, 1, 2)

    def results(self) -> list[Tensor]:
        assert self._before is not None
        return [self._before.contiguous(), *super().results()]

    def take_results(self, tensors: Sequence[Tensor]) -> None:
        self._before = tensors[0]
        super().take_results(tensors[1:])

    def _keep_nodes(self, nodes: tuple[Tensor, ...]) -> None:
        if self._paths.is_committed:
            assert self._before is not None
            num_inputs = self._before.shape[1]
            newest = nodes[0][:, max(0, nodes[0].shape[1] - num_inputs) :]
            self._last = torch.cat([self._before[:, newest.shape[1] :], newest], dim=1)
        super()._keep_nodes(nodes)

    def _committed(self, nodes: Tensor, num_inputs: int) -> Tensor:
        """The inputs before the root of the pass over ``nodes`` (B, N, C)."""
        if self._before is None:
            return nodes.new_zeros(nodes.shape[0], num_inputs, nodes.shape[2])
        if self._kept is None:
            return self._before
        places = self._kept.last_inputs(num_inputs).to(nodes.device)
        return self._paths.rows_at(self._before, self._nodes[0], places)


def of_heads(keys: Tensor, num_heads: int) -> Tensor:
    """Keys (B, G, K), each for as many heads in turn, as those of heads (B, H, K)."""
    return keys.repeat_interleave(num_heads // keys.shape[1], dim=1)


class Updates(NamedTuple):
    """What nodes do to the matrices of their heads: S <- decay S + key written'."""

    decay: Tensor
    """(B, N, H) or (B, N, H, K) float32; of a selective scan a time step for each column, (B, N, H, V)."""
    key: Tensor
    """(B, N, G, K) float32; H / G heads in turn share one."""
    written: Tensor
    """(B, N, H, V) float32."""
    rates: Tensor | None = None
    """(H, K, V) float32, of a selective scan: in a time step an entry decays by e^(rate step)."""

    def factors(self, node: int) -> Tensor:
        """The decay of a node in each row, (B, H, 1 or K, 1 or V)."""
        decay = self.decay[:, node]
        if self.rates is not None:
            return (self.rates * decay[:, :, None]).exp()
        return decay[..., None, None] if decay.dim() == 2 else decay[..., None]

    def apply(self, state: Tensor, node: int) -> Tensor:
        """The state after a node, from the one before it: (B, H, K, V) both."""
        key = of_heads(self.key[:, node], self.written.shape[2])
        return state * self.factors(node) + key[..., None] * self.written[:, node, :, None]

    def along(self, path: Tensor) -> Updates:
        """The updates of the nodes ``path`` (B, L) long, in order."""
        rows = torch.arange(len(path), device=path.device)[:, None]
        return Updates(self.decay[rows, path], self.key[rows, path], self.written[rows, path], self.rates)


LEAST_KEPT = 8
"""Nodes of a chain from which on the matrix after the last one is kept: where all are committed, the next
pass has no updates to apply."""


class MatrixState(RowStates):
    """The matrix of each head of a layer, (B, H, K, V) float32; of nodes their :class:`Updates`."""

    def before(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The state (B, H, K, V) = ``shape`` that lacks the :meth:`pending` updates, on the device of
        ``like``."""
        if self._before is None:
            self._before = torch.zeros(shape, dtype=torch.float32, device=like.device)
        return self._before

    def pending(self) -> tuple[Updates, Kept] | None:
        """The updates that :meth:`before` lacks: nodes of the last pass, and which of them are committed."""
        return None if self._kept is None else (Updates(*self._nodes), self._kept)

    def place_of_last(self) -> Tensor:
        """Where a rule writes the state after the last node of a chain; the state before the pass itself,
        which is then not to be written to, where nobody needs it."""
        if self._last is None:
            assert self._before is not None, "before() comes first"
            is_needed = self.is_of_chain and self.parents.shape[1] >= LEAST_KEPT
            self._last = torch.empty_like(self._before) if is_needed else self._before
        return self._last

    def program_inputs(self) -> list[Tensor]:
        return [*super().program_inputs(), self.place_of_last()]

    def take_inputs(self, tensors: Sequence[Tensor]) -> None:
        super().take_inputs(tensors[:-1])
        self._last = tensors[-1]

    def committed(self, like: Tensor, shape: tuple[int, ...], rates: Tensor | None = None) -> Tensor:
        """The state with all committed updates, as :meth:`before`; none are pending then. ``rates`` are those
        of :class:`Updates`."""
        state = self.before(like, shape)
        pending = self.pending()
        if pending is not None:
            updates = pending[0]._replace(rates=rates)
            kept = pending[1]
            most = int(kept.counts.max())
            along = updates.along(kept.path[:, :most].to(state.device))
            for number in range(most):
                has_it = (number < kept.counts).to(state.device)[:, None, None, None]
                state = torch.where(has_it, along.apply(state, number), state)
        self._before = state
        self._nodes = ()
        self._kept = None
        return state

    def keep(self, nodes: Updates) -> None:
        """Keep what the nodes of the pass do. Pending updates have been applied."""
        self._keep_nodes(nodes[:3])


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
    def states(self) -> list[RowStates]:
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
        self.layers = []
        self.tree_layers = []
        self.states: list[RowStates] = []
        self._parts: list[list[Any]] = []
        for layer in map(self._layer_for, DynamicCache(config=config).layers):
            entries = [layer] if isinstance(layer, TreeCacheLayer) else []
            states = layer.states if isinstance(layer, StateLayer) else []
            self.layers.append(layer)
            self.tree_layers += entries
            self.states += states
            self._parts.append([*entries, *states])

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
    def parts(self) -> list[list[Any]]:
        return self._parts

    def program_inputs(self, window_sizes: Sequence[int]) -> list[Tensor]:
        shape = self.slots.shape
        windows = [self.paths.inputs_of_nodes(size).expand(*shape, -1) for size in window_sizes]
        return [*super().program_inputs(()), self.paths.parents.expand(shape), *windows]

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._state_bytes

    @property
    def _state_bytes(self) -> int:
        return sum(tensor.nbytes for state in self.states for tensor in state.tensors())

    @property
    def bytes_per_row(self) -> int:
        return self._state_bytes // max(1, self.num_rows)

    def begin_pass(self, topology: TreeTopology) -> None:
        """Begin a pass over the nodes of ``topology``."""
        self.paths.begin(topology, self.is_prompt_next)
        self.is_prompt_next = False
        for state in self.states:
            state.begin_pass()

    def commit_prefix(
        self, num_kept: Tensor, known: list[int] | None = None, path: Tensor | None = None
    ) -> None:
        known = num_kept.tolist() if known is None else known
        if path is None:
            path = torch.arange(max(known), device=num_kept.device).expand(len(known), -1)
        kept = Kept(path.contiguous(), num_kept)
        for state in self.states:
            state.commit(kept, known)
        super().commit_prefix(num_kept, known)

    def uncommit_last(self) -> None:
        raise NotImplementedError("a state cannot forget its last token")

    def keep_rows(self, rows: Tensor, known: list[int] | None = None) -> None:
        super().keep_rows(rows, known)
        for state in self.states:
            state.keep_rows(rows)

    def join(self, other: TreeCache, most_rows: int = 0) -> None:
        assert isinstance(other, RecurrentCache), "of the same base"
        super().join(other, most_rows)
        for state, other_state in zip(self.states, other.states, strict=True):
            state.join(other_state)

    keeps_states = True

    def states_of_row(self, row: int) -> TreeCache:
        copied = RecurrentCache(self.config, 1, self.lengths.device)
        copied._copy_states(self, row)
        return copied

    def copy_of_row(self, row: int, length: int, states: TreeCache | None = None) -> TreeCache:
        """A new cache of one row, with the first ``length`` committed tokens of ``row``; without any where
        the states have read more, and others are not given: look at its ``longest``."""
        is_whole = length >= self.known_lengths[row]
        copied = super().copy_of_row(row, length if is_whole or states is not None else 0)
        assert isinstance(copied, RecurrentCache)
        if is_whole:
            copied._copy_states(self, row)
        elif states is not None:
            copied._copy_states(states, 0)
        return copied

    def _copy_states(self, source: Any, row: int) -> None:
        """Take the states of a row of ``source``, a cache of the same base."""
        for state, source_state in zip(self.states, source.states, strict=True):
            state.copy_row(source_state, row)

    def _empty_row(self) -> TreeCache:
        return RecurrentCache(self.config, 1, self.lengths.device)
