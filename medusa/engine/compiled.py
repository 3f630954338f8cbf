"""A view whose decoder layers are compiled for this processor; the libraries are kept on disk.

A model's layers are of one kind or two, which differ in their weights alone. Each kind is exported once, with
its weights, keys and values as arguments and with dynamic rows, nodes and slots, and compiled in some twenty
seconds (:mod:`medusa.engine.libraries`); the library serves every layer of the kind, and every model of that
configuration. Products and attention are calls of the kernels; what is compiled is what lies between them.
Around the layers the view's own modules run.

Loops that are compiled compute a function such as exp otherwise after the last whole vector. So a row's
widths must be whole vectors, or its logits would depend on the rows beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from medusa.base.attention import takes_seen_slots
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import (
    CausalLM,
    copy_sharing_parameters,
    decoder_layers,
    new_cache,
    prefill,
    verify,
    vocab_size,
)
from medusa.engine.kernels import SOURCE
from medusa.engine.libraries import (
    check_library,
    compile_library,
    digest_of,
    kept_library,
)
from medusa.engine.products import Product
from medusa.engine.programs import code_of, compiled_program, exported, open_program, weights_of
from medusa.engine.views import JoinedLinear
from medusa.trees.candidate_tree import CandidateTree

VERSION = 6
"""Of what is compiled: raise it with every change of what a layer computes."""
VECTOR = 16
"""Floats in the widest vector of a processor."""
TRIALS = ((3, 5, 250), (2, 4, 520))
"""Rows, nodes and tokens of the two passes that tell which dimensions change from pass to pass."""
TOLERANCE = 1e-3
"""Largest difference of logits between compiled layers and the view's, over the largest logit."""


def missing_for_compiled_layers(view: CausalLM) -> str | None:
    """What :func:`compiled_view` lacks to compile the layers of ``view``; None when nothing."""
    config = view.config.get_text_config(decoder=True)
    if not takes_seen_slots(config):
        return f"attention that the kernels compute, got {config._attn_implementation!r}"
    odd = [width for width in _widths(view) if width % VECTOR]
    return f"widths that are multiples of {VECTOR}, got {odd[0]}" if odd else None


def _widths(view: CausalLM) -> list[int]:
    """Of what a row is while it passes through a layer."""
    parts = [module for layer in decoder_layers(view) for module in layer.modules()]
    joined = [len(each.weight) for each in parts if isinstance(each, JoinedLinear)]
    return joined + [each.width for each in parts if isinstance(each, Product)]


def compiled_view(view: CausalLM) -> CausalLM:
    """``view`` with compiled layers, which are taken from the cache directory, or compiled first.

    Raises:
        ValueError: a layer cannot be exported, or what was compiled computes something else.
    """
    calls = _calls(view)
    paths = [_library_path(view, call) for call in calls]
    new = {path: call for path, call in zip(paths, calls, strict=True) if not path.exists()}
    for number, (path, call) in enumerate(new.items(), start=1):
        text = (
            f"compiling {type(call.layer).__name__} for this processor ({number} of {len(new)}): about half "
            f"a minute, once; kept in {path.parent}"
        )
        compile_library(path, text, functools.partial(_compiled, call))
    for path in set(paths):
        check_library(path)
    programs = {path: open_program(path) for path in set(paths)}
    made = copy_sharing_parameters(view)
    layers = decoder_layers(made)
    for index, (path, call) in enumerate(zip(paths, calls, strict=True)):
        layers[index] = CompiledLayer(layers[index], index, programs[path], call)
    if new:
        try:
            _check_same(made, view)
        except ValueError:
            for path in new:
                path.unlink()
            raise
    return made


def _compiled(call: _Call, directory: Path) -> Path:
    return compiled_program(_exported(call), directory)


def library_paths(view: CausalLM) -> list[Path]:
    """Where the libraries of a view's layers are, or will be; one for each kind."""
    return list(dict.fromkeys(_library_path(view, call) for call in _calls(view)))


class CompiledLayer(nn.Module):
    """A decoder layer that a library computes in passes over a :class:`TreeCache`."""

    def __init__(self, layer: nn.Module, index: int, program: Any, call: _Call):
        super().__init__()
        self.layer, self.index, self._program = layer, index, program
        self._weights = list(weights_of(layer).values())
        self._entry_sizes = call.entry_sizes

    def __getattr__(self, name: str) -> Any:
        """What a model reads of its layers, such as the type of their attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, TreeCache):
            return self.layer(*args, **kwargs)
        entries = cache.tree_layers[self.index]
        if not entries.is_initialized:
            rows, device = len(cache.lengths), cache.lengths.device
            entries.lazy_initialization(
                *(torch.empty(rows, n, 0, w, device=device) for n, w in self._entry_sizes)
            )
        entries.reserve(cache.num_slots)
        given = [each.contiguous() for each in _tensors(args, kwargs)]
        return self._program.run([*self._weights, *given, cache.slots, *entries.entries])[0]


@dataclass(frozen=True)
class _Call:
    """How a model calls one of its layers, twice: once for each of :data:`TRIALS`."""

    layer: nn.Module
    args: list[tuple]
    kwargs: list[dict[str, Any]]
    entries: list[list[Tensor]]
    slots: list[Tensor]

    @property
    def entry_sizes(self) -> list[tuple[int, int]]:
        """Heads and width of keys, and of values."""
        return [(each.shape[1], each.shape[3]) for each in self.entries[0]]

    def inputs(self, trial: int) -> list[Tensor]:
        """What the program takes after the weights: the tensors of the call, slots, keys and values."""
        given = _tensors(self.args[trial], self.kwargs[trial])
        return [*(each.contiguous() for each in given), self.slots[trial], *self.entries[trial]]


@torch.no_grad()
def _calls(view: CausalLM) -> list[_Call]:
    """How ``view`` calls its layers, found by running it."""
    layers = list(decoder_layers(view))
    calls = [_Call(layer, [], [], [], []) for layer in layers]

    def note(index: int) -> Any:
        def look(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            calls[index].args.append(args)
            calls[index].kwargs.append(kwargs)

        return look

    for rows, nodes, length in TRIALS:
        cache = new_cache(view, rows)
        cache.lengths += length  # empty, as if it had been read: what is computed is of no interest
        cache.longest = length
        tokens = torch.zeros(rows, nodes, dtype=torch.long)
        hooks = [layer.register_forward_pre_hook(note(i), with_kwargs=True) for i, layer in enumerate(layers)]
        try:
            verify(view, tokens, CandidateTree.chain(nodes - 1).topology(), cache)
        finally:
            for hook in hooks:
                hook.remove()
        for call, kept in zip(calls, cache.tree_layers, strict=True):
            if not kept.is_initialized:
                raise ValueError(
                    f"a {type(call.layer).__name__} of {type(view).__name__} keeps no keys and values of "
                    "its own, so it cannot be compiled alone; use step='general'"
                )
            call.entries.append(list(kept.entries))
            call.slots.append(cache.slots)
    return calls


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors in the arguments of a layer, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(each for each in value if isinstance(each, Tensor))
    return found


def _exchanged(call: _Call, tensors: Sequence[Tensor], cache: Cache) -> Any:
    """The arguments of a call with other tensors and another cache in their places."""
    left = iter(tensors)

    def exchanged(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(left)
        if isinstance(value, TreeCache):
            return cache
        return tuple(map(exchanged, value)) if isinstance(value, tuple) else value

    args, kwargs = call.args[0], call.kwargs[0]
    return tuple(map(exchanged, args)), {name: exchanged(value) for name, value in kwargs.items()}


def _library_path(view: CausalLM, call: _Call) -> Path:
    """Where the library of a layer is kept: the name tells apart all that it depends on but weights."""
    config = view.config.get_text_config(decoder=True)
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    parts = [
        (
            type(module).__qualname__,
            sorted((n, repr(v)) for n, v in vars(module).items() if _is_setting(n, v)),
        )
        for module in call.layer.modules()
    ]
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights_of(call.layer).items()]
    others = [(n, repr(v)) for n, v in call.kwargs[0].items() if not isinstance(v, (Tensor, tuple, Cache))]
    attention = config._attn_implementation
    kernels = SOURCE.read_bytes()
    depends_on = (settings, attention, parts, shapes, others, code_of(call.layer), kernels, VERSION)
    return kept_library(f"{view.config.model_type}-layer", digest_of({}, view.device, *depends_on))


def _is_setting(name: str, value: Any) -> bool:
    return name not in ("layer_idx", "training") and isinstance(value, (int, float, str, type(None)))


def _exported(call: _Call) -> torch.export.ExportedProgram:
    """A layer as a program of tensors: what differs between the two calls is dynamic."""
    dims: dict[tuple[int, int], Any] = {}
    shapes = []
    for one, other in zip(call.inputs(0), call.inputs(1), strict=True):
        sizes = zip(one.shape, other.shape, strict=True)
        changing = {at: pair for at, pair in enumerate(sizes) if pair[0] != pair[1]}
        shapes.append(
            {
                at: dims.setdefault(pair, torch.export.Dim(f"d{len(dims)}", min=1))
                for at, pair in changing.items()
            }
        )
    return exported(_CalledLayer(call), call.inputs(0), shapes)


class _CalledLayer(nn.Module):
    """A layer as a function of the tensors of a call, slots, keys and values."""

    def __init__(self, call: _Call):
        super().__init__()
        self.layer, self._call = call.layer, call

    def forward(self, *inputs: Tensor) -> Tensor:
        *tensors, slots, keys, values = inputs
        args, kwargs = _exchanged(self._call, tensors, _Entries(keys, values, slots))
        output = self.layer(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


class _Entries(Cache):
    """Keys and values of one layer while it is exported."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor):
        super().__init__(layers=[])
        self.entries, self.slots = (keys, values), slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write this pass's keys and values (B, heads, N, width); all that there are."""
        rows, heads = torch.arange(self.slots.shape[0]), torch.arange(key_states.shape[1])
        where = (rows[:, None, None], heads[:, None], self.slots[:, None])
        for entries, states in zip(self.entries, (key_states, value_states), strict=True):
            entries.index_put_(where, states)  # Inductor writes in place here, and copies all for scatter_
        return self.entries


def _check_same(compiled: CausalLM, view: CausalLM) -> None:
    """Raise ValueError unless compiled layers give the logits of the view they were made of."""
    tree = CandidateTree.from_paths([(0,), (1,), (0, 0)])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size(view), (2, 24), generator=generator)
    given = []
    for base in (view, compiled):
        cache = new_cache(base, 2)
        with torch.no_grad():
            _, after_prompt = prefill(base, ids[:, :20], torch.tensor([20, 13]), cache)
            _, after_nodes = verify(base, ids[:, 20:], tree.topology("cpu"), cache)
        given.append(torch.cat([after_prompt[:, None], after_nodes], dim=1))
    apart = float((given[0] - given[1]).abs().max() / given[0].abs().max())
    if not apart <= TOLERANCE:
        raise ValueError(
            f"the compiled layers of {type(view).__name__} give other logits than the model ({apart:.1e} of "
            "the largest); use step='general'"
        )
