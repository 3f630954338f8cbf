"""The parts of a pass that are compiled: before the decoder layers, groups of layers, and after them.

They are found by running the base twice, with other numbers of rows, nodes and slots, and looking at how it
calls its layers. Each part is a module over the base's own modules, a function of tensors:

- before: the inputs of the pass -> whatever the layers take beside them (embedded tokens, rotary angles);
- a group of layers: the tensors that its layers take, the slots of the pass, and the keys and values of each
  layer -> the output of each layer;
- after: the last hidden state, which nodes are asked for, and the inputs of the pass -> the input of the LM
  head, and logits.

The *tensors of a pass* are its inputs, and then what ``before`` gives. A part names those that it takes by
their place in this list.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, copy_sharing_parameters, decoder_layers
from medusa.base.passes import cache_argument, capture_hidden_states, new_cache, tree_inputs
from medusa.base.profile import rope_types
from medusa.base.recurrent import ConvolutionState, MatrixState, Paths, StateLayer
from medusa.engine.programs import Part
from medusa.trees.candidate_tree import CandidateTree

TRIALS = ((3, 5, 250), (2, 4, 520))
"""Rows, nodes and tokens of the two passes that tell which dimensions change from pass to pass."""
OLD_NODES, OLD_LENGTH = 6, 11
"""Nodes of the pass before these, and of its path, more than those of the passes: dimensions of their own."""
SELECTED = (6, 8)
"""Number of nodes whose logits these passes return."""
MOST_TOGETHER = 6
"""Layers of a group, at most. A program takes some 20 microseconds to call, and a layer more in it two
seconds to compile."""
STATES = (ConvolutionState, MatrixState)
MOST_LAYERS = 1024
"""More layers than models have."""
READ_ON_THE_HOST = ("dynamic", "longrope")
"""Kinds of rotary angles that ask how long the text is, which no program can."""


@dataclass(frozen=True)
class CachePart:
    """One of the things that a layer keeps in the cache (:attr:`medusa.base.cache.TreeCache.parts`)."""

    sizes: list[Any]
    """Its ``sizes``; none where the layer does not use it."""
    num_inputs: int
    """Tensors of it that a program takes."""
    num_results: int
    """Tensors that it makes for it, behind the outputs of its layers."""
    kind: type
    """Its class."""


@dataclass
class LayerGroup:
    """Layers that follow each other, and one program computes."""

    layers: slice
    takes: list[int]
    """Its inputs, by their place among the tensors of a pass; the first is the hidden state."""
    parts: list[list[CachePart]]
    """What each layer keeps."""
    classes: set[type]
    """Of its layers."""


@dataclass
class PassParts:
    """The parts of a pass of a view."""

    before: Part
    groups: list[tuple[Part, LayerGroup]]
    after: Part
    window_sizes: list[int]
    """Inputs that a node reads of convolutions, each number once."""
    ends_are_code: bool
    """Whether ``before`` and ``after`` run as they are, and are not compiled."""

    @property
    def compiled(self) -> dict[Path, Part]:
        """One for each library."""
        ends = [] if self.ends_are_code else [self.before, self.after]
        parts = [*ends, *(part for part, _ in self.groups)]
        return {part.path: part for part in parts}


@torch.no_grad()
def parts_of(view: CausalLM) -> PassParts:
    """The parts of a pass of ``view``, found by running it.

    Raises:
        ValueError: its layers do not follow each other with keys and values of their own.
    """
    calls = [LayerCall(layer) for layer in decoder_layers(view)]
    trials = [_trial(view, calls, num_rows, num_nodes, length) for num_rows, num_nodes, length in TRIALS]
    if trials[0].lacks_entries or not _follow_each_other(calls):
        raise ValueError(
            f"the layers of {type(view).__name__} do not follow each other with keys and values of their "
            "own, so they cannot be compiled separately; use step='general'"
        )
    config = view.config.get_text_config(decoder=True)
    name = view.config.model_type
    settings = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    common = (settings, config._attn_implementation)
    arguments = {**trials[-1].arguments, cache_argument(view): new_cache(view, 1)}  # which holds nothing

    before = _Before(view, calls, arguments)
    takes = before.taken_by_layers(trials[1].inputs)
    return PassParts(
        before=Part(f"{name}-before", before, [trial.inputs for trial in trials], common),
        groups=_groups(f"{name}-layers", calls, takes, trials, common),
        after=Part(
            f"{name}-after",
            _After(view, calls, arguments),
            [
                [
                    [*trial.inputs, *before(*trial.inputs)][takes[0][0]],
                    torch.zeros(len(trial.of_cache[0]), num_selected, dtype=torch.long),
                    *trial.inputs,
                ]
                for trial, num_selected in zip(trials, SELECTED, strict=True)
            ],
            common,
        ),
        window_sizes=trials[0].window_sizes,
        ends_are_code=any(kind in READ_ON_THE_HOST for kind in rope_types(view)),
    )


def _groups(
    name: str,
    calls: list[LayerCall],
    takes: list[list[int]],
    trials: list[_Trial],
    common: tuple[Any, ...],
) -> list[tuple[Part, LayerGroup]]:
    """All layers in groups of one size, the largest up to :data:`MOST_TOGETHER` that divides their number."""
    size = max(size for size in range(1, MOST_TOGETHER + 1) if len(calls) % size == 0)
    groups = []
    for first in range(0, len(calls), size):
        layers = slice(first, first + size)
        parts = trials[0].parts[layers]
        module = LayersAsFunction(
            calls[layers], takes[layers], parts, trials[0].window_sizes, len(trials[0].of_cache) > 1
        )
        inputs = [
            [*module.inputs_in(number), *trial.of_cache, *itertools.chain(*trial.of_parts[layers])]
            for number, trial in enumerate(trials)
        ]
        part = Part(name, module, inputs, (common, module.settings))
        classes = {type(call.layer) for call in calls[layers]}
        groups.append((part, LayerGroup(layers, module.places, parts, classes)))
    return groups


# ------------------------------------------------------------------ how the base calls its layers


@dataclass
class LayerCall:
    """How a model calls one of its layers, in each of :data:`TRIALS`."""

    layer: nn.Module
    args: list[tuple] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def note(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook."""
        self.args.append(args)
        self.kwargs.append(kwargs)
        self.outputs.append(output)


@dataclass
class _Trial:
    """One of the two passes."""

    arguments: dict[str, Any]
    """The arguments of the base's forward."""
    inputs: list[Tensor]
    """The tensors among them."""
    window_sizes: list[int]
    """Inputs that a node reads of convolutions, each number once."""
    of_cache: list[Tensor]
    """What its layers read of the cache for all of them (:meth:`TreeCache.program_inputs`)."""
    parts: list[list[CachePart]]
    """What each layer keeps in the cache."""
    of_parts: list[list[Tensor]]
    """The tensors of these, by layer."""
    lacks_entries: bool
    """Whether an attention layer has no keys and values of its own."""


def _trial(view: CausalLM, calls: list[LayerCall], num_rows: int, num_nodes: int, length: int) -> _Trial:
    """A pass of ``view`` behind texts of ``length`` tokens, which ``calls`` take note of."""
    cache = new_cache(view, num_rows)
    cache.lengths += length  # empty slots: the values are of no interest
    cache.longest = length
    tokens = torch.zeros(num_rows, num_nodes, dtype=torch.long)
    arguments = tree_inputs(view, tokens, CandidateTree.chain(num_nodes - 1).topology(), cache)
    inputs = tensors_in(arguments)
    hooks = [call.layer.register_forward_hook(call.note, with_kwargs=True) for call in calls]
    try:
        view(**arguments)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = sorted({size for layer in cache.parts for part in layer for size in _window_sizes(part)})
    of_cache = [tensor.contiguous() for tensor in cache.program_inputs(sizes)]
    parts = []
    of_parts = []
    for layer in cache.parts:
        num_results = [len(part.results()) for part in layer]
        tensors = [_trial_tensors(part, num_rows, num_nodes) for part in layer]
        of_parts.append([*itertools.chain(*tensors)])
        parts.append(
            [
                CachePart(part.sizes, len(given), count, type(part))
                for part, given, count in zip(layer, tensors, num_results, strict=True)
            ]
        )
    lacks_entries = any(not layer.sizes for layer in cache.tree_layers)
    return _Trial(arguments, inputs, sizes, of_cache, parts, of_parts, lacks_entries)


def _window_sizes(part: Any) -> list[int]:
    """The inputs that a node reads of a convolution, if ``part`` is the state of one that is in use."""
    return [part.sizes[0][0] + 1] if type(part) is ConvolutionState and part.sizes else []


def _trial_tensors(part: Any, num_rows: int, num_nodes: int) -> list[Tensor]:
    """The tensors of one part of the cache in a trial, of a state as after another pass."""
    if not part.sizes:
        return []
    if type(part) not in STATES:
        return [*part.program_inputs()]
    state = type(part)(Paths())
    state.fill(part.sizes, torch.empty(num_rows, 0), num_nodes + OLD_NODES, num_nodes + OLD_LENGTH)
    # tensors of their own, though one may be another; numbers, that are of no interest, take no memory so
    return [
        torch.empty_like(each) if each.is_floating_point() else each.clone()
        for each in state.program_inputs()
    ]


def _follow_each_other(calls: list[LayerCall]) -> bool:
    """Whether each layer is called once a pass, with the output of the one before it."""
    if any(len(call.args) != len(TRIALS) for call in calls):
        return False
    return all(
        tensors_in((after.args[0], after.kwargs[0]))[0] is tensors_in((before.outputs[0],))[0]
        for before, after in itertools.pairwise(calls)
    )


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in ``value``, a tensor or tuples and dictionaries of them, in order."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def _exchanged(value: Any, tensors: Iterator[Tensor], cache: Cache) -> Any:
    """``value`` with other tensors and another cache in their places."""
    if isinstance(value, dict):
        return {name: _exchanged(part, tensors, cache) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_exchanged(part, tensors, cache) for part in value)
    if isinstance(value, Tensor):
        return next(tensors)
    return cache if isinstance(value, TreeCache) else value


# ------------------------------------------------------------------ the parts as functions of tensors


class LayersAsFunction(nn.Module):
    """Consecutive layers as a function of their input tensors, of the pass's in the cache, and of those that
    each layer keeps; returns the output of each layer, and then what is made of the kept."""

    def __init__(
        self,
        calls: Sequence[LayerCall],
        takes: Sequence[Sequence[int]],
        parts: Sequence[Sequence[CachePart]],
        window_sizes: Sequence[int],
        keeps_states: bool,
    ):
        super().__init__()
        self.layers = nn.ModuleList(call.layer for call in calls)
        self.calls = calls
        self.takes = takes
        self.parts = parts
        self._window_sizes = window_sizes
        self._keeps_states = keeps_states  # the base, though not these layers
        self.places = list(dict.fromkeys(itertools.chain(*takes)))
        """The tensors of the pass that the layers take, each once."""
        self.settings = [
            ([self.places.index(place) for place in taken], _plain_arguments(call))
            for call, taken in zip(calls, takes, strict=True)
        ]

    def inputs_in(self, trial: int) -> list[Tensor]:
        """The tensors at :attr:`places` in one of :data:`TRIALS`."""
        inputs: dict[int, Tensor] = {}
        for call, taken in zip(self.calls, self.takes, strict=True):
            tensors = tensors_in((call.args[trial], call.kwargs[trial]))
            for place, tensor in zip(taken, tensors, strict=True):
                inputs.setdefault(place, tensor.contiguous())
        return list(inputs.values())

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        at_place = dict(zip(self.places, inputs, strict=False))
        rest = iter(inputs[len(at_place) :])
        slots = next(rest)
        paths = Paths()
        if self._keeps_states:
            paths.rows_at = torch.ops.medusa.rows_at
            paths.set_tensors(next(rest), {size: next(rest) for size in self._window_sizes})
        outputs: list[Tensor] = []
        results: list[Tensor] = []
        for call, taken, parts in zip(self.calls, self.takes, self.parts, strict=True):
            tensors = iter([at_place[place] for place in taken])
            layer = _LayerInProgram(slots, paths, parts, rest)
            args, kwargs = _exchanged((call.args[0], call.kwargs[0]), tensors, layer.as_cache())
            output = call.layer(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            at_place[taken[0]] = hidden  # the next layer's
            outputs.append(hidden)
            results += layer.results()
        return [*outputs, *results]


def _plain_arguments(call: LayerCall) -> list[tuple[str, str]]:
    """The keyword arguments of a layer, except tensors."""
    kwargs = call.kwargs[0].items()
    return [(name, repr(value)) for name, value in kwargs if not isinstance(value, (Tensor, tuple, Cache))]


class _LayerInProgram(StateLayer):
    """What one layer keeps, while it is exported: the next tensors of ``inputs``."""

    def __init__(
        self, slots: Tensor, paths: Paths, parts: Sequence[CachePart], inputs: Iterator[Tensor]
    ) -> None:
        kinds = [part.kind for part in parts]
        num_states = kinds.count(ConvolutionState)
        super().__init__(paths, num_states, kinds.count(MatrixState) // max(1, num_states))
        self.slots = slots
        self.entries: list[Tensor] = []
        self._used = []
        states = iter(self.states)
        for part in parts:
            tensors = [*itertools.islice(inputs, part.num_inputs)]
            if part.kind not in STATES:
                self.entries = tensors
                continue
            state = next(states)
            if part.sizes:
                state.take_inputs(tensors)
                self._used.append(state)

    def as_cache(self) -> Cache:
        """A cache that has this layer at every place."""
        return Cache(layers=[self] * MOST_LAYERS)

    def results(self) -> list[Tensor]:
        """The tensors that the states have made."""
        return [tensor for state in self._used for tensor in state.results()]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write this pass's keys and values (B, heads, N, width); all that there are."""
        rows = torch.arange(self.slots.shape[0])
        heads = torch.arange(key_states.shape[1])
        where = (rows[:, None, None], heads[:, None], self.slots[:, None])
        for entries, states in zip(self.entries, (key_states, value_states), strict=True):
            entries.index_put_(where, states)  # Inductor writes in place here, and copies all for scatter_
        return self.entries


class _End(nn.Module):
    """A view without its layers, as a function of the tensors that it takes."""

    def __init__(self, view: CausalLM, calls: Sequence[LayerCall], arguments: dict[str, Any]):
        super().__init__()
        self.base = copy_sharing_parameters(view)
        self._arguments = arguments
        self._stubs = [_Stub(call) for call in calls]
        layers = decoder_layers(self.base)
        for index, stub in enumerate(self._stubs):
            layers[index] = stub

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """The logits from the output of the last stub, in a pass with these inputs."""
        cache = self._arguments[cache_argument(self.base)]
        return self.base(**_exchanged(self._arguments, iter(inputs), cache)).logits


class _Before(_End):
    """The tensors that layers take and that are not inputs of the pass. The LM head is left out: where this
    is not compiled, nothing else would see that its scores are not used."""

    def __init__(self, view: CausalLM, calls: Sequence[LayerCall], arguments: dict[str, Any]):
        super().__init__(view, calls, arguments)
        self.base.set_output_embeddings(nn.Identity())

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        self.run(inputs)
        return [tensor.contiguous() for tensor in self._made_of(inputs)]

    def taken_by_layers(self, inputs: Sequence[Tensor]) -> list[list[int]]:
        """The inputs of each layer, by their place among the tensors of a pass."""
        self.run(inputs)
        tensors = [*inputs, *self._made_of(inputs)]
        return [[_place(tensors, tensor) for tensor in stub.noted.inputs] for stub in self._stubs]

    def _made_of(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, each once, that the layers have taken and that are none of ``inputs``."""
        tensors: list[Tensor] = []
        for stub in self._stubs:
            tensors += [tensor for tensor in stub.noted.inputs if _place([*inputs, *tensors], tensor) < 0]
        return tensors


def _place(tensors: Sequence[Tensor], wanted: Tensor) -> int:
    """Where ``wanted`` itself is among ``tensors``; -1 where it is not."""
    return next((place for place, tensor in enumerate(tensors) if tensor is wanted), -1)


class _After(_End):
    """The part after the layers: (hidden (B, M, D), select (B, S) long, inputs) -> (input of the LM head (B,
    M, D), logits (B, S, V))."""

    def forward(self, hidden: Tensor, select: Tensor, *inputs: Tensor) -> list[Tensor]:
        def selected(states: Tensor) -> Tensor:
            return states.gather(1, select[..., None].expand(-1, -1, states.shape[2]))

        self._stubs[-1].noted.result = hidden
        with capture_hidden_states(self.base, selected) as seen:
            logits = self.run(inputs)
        return [seen.last, logits]


class _Stub(nn.Module):
    """Stands for a layer: notes the tensors that it gets, and gives the first of them, or ``result``."""

    def __init__(self, call: LayerCall):
        super().__init__()
        self._layer = (call.layer,)  # hidden, so that no weight counts as this module's own
        is_tuple = isinstance(call.outputs[0], tuple)
        self._others = (None,) * (len(call.outputs[0]) - 1) if is_tuple else None  # such as attention weights
        self.noted = threading.local()
        """``inputs`` and ``result`` of each thread: several may run an end that is not compiled."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of layers that a model reads, such as the type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.noted.inputs = tensors_in((args, kwargs))
        result = getattr(self.noted, "result", self.noted.inputs[0])
        return result if self._others is None else (result, *self._others)
