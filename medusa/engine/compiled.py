"""Passes of a view as compiled programs; their libraries are kept on disk.

A pass has three parts: before the decoder layers (embedding, rotary angles), the layers, and after them
(norm, LM head). The layers are run in groups, most often of one kind, which differ only in their weights.
Each kind is exported once, with its weights, keys and values as arguments and with dynamic rows, nodes and
slots, and compiled in some twenty seconds (:mod:`medusa.engine.programs`), as are the two ends in ten. The
libraries serve every model of that configuration. Products and attention are calls of the kernels; the code
between them is compiled.

Modules are slow because of their calls, not their arithmetic: the weights of a pass drive all code out of the
processor's caches, so that each operator between two layers takes 20 to 80 microseconds.

Loops that are compiled compute a function such as exp otherwise after the last whole vector. So a row's
widths must be whole vectors, or its logits would depend on the rows beside it.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from medusa.base.attention import attention_windows, takes_seen_slots
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import (
    CausalLM,
    cache_argument,
    capture_hidden_states,
    copy_sharing_parameters,
    decoder_layers,
    new_cache,
    prefill,
    rope_types,
    tree_inputs,
    verify,
    vocab_size,
)
from medusa.engine.kernels import PackedMatmul
from medusa.engine.libraries import digest_of, kept_library
from medusa.engine.packed_experts import PackedExperts
from medusa.engine.programs import Part, Program
from medusa.engine.views import JoinedLinear
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

VECTOR = 16
"""Floats in the widest vector of a processor."""
TRIALS = ((3, 5, 250), (2, 4, 520))
"""Rows, nodes and tokens of the two passes that tell which dimensions change from pass to pass."""
MOST_TOGETHER = 6
"""Layers of a group, at most. A program takes some 20 microseconds to call, and a layer more in it two
seconds to compile."""
SELECTED = (6, 8)
"""Number of nodes whose logits these passes return."""
ROUNDING_FACTOR = 8
"""Largest allowed ratio of the distance between compiled passes and the view's to the distance between the
view's own passes when the last bit of the embeddings changes. On three families of full width it was 0.7 to
1.3 times: 1e-6 of the largest logit, and 1e-4 in int8, where steps are rounded to other sides."""
READ_ON_THE_HOST = ("dynamic", "longrope")
"""Kinds of rotary angles that ask how long the text is, which no program can."""


def layers_unsupported_reason(view: CausalLM) -> str | None:
    """The requirement of :class:`CompiledPass` that ``view`` does not meet; None without any."""
    config = view.config.get_text_config(decoder=True)
    if not takes_seen_slots(config):
        return f"attention that the kernels compute, got {config._attn_implementation!r}"
    parts = [module for layer in decoder_layers(view) for module in layer.modules()]
    has_others = any(weight.dim() > 2 for layer in decoder_layers(view) for weight in layer.parameters())
    if has_others or any(isinstance(each, PackedExperts) for each in parts):
        return "layers without experts, which are chosen by numbers that no library asks for"
    widths = [len(each.weight) for each in parts if isinstance(each, JoinedLinear)]
    widths += [each.width for each in parts if isinstance(each, PackedMatmul)]  # of rows inside a layer
    odd = [width for width in widths if width % VECTOR]
    return f"widths that are multiples of {VECTOR}, got {odd[0]}" if odd else None


class CompiledPass:
    """The passes of ``view``, computed by libraries from the cache directory, or compiled first.

    Raises:
        ValueError: a part cannot be exported, or its compiled code computes something else.
    """

    def __init__(self, view: CausalLM):
        self.view, self._windows = view, attention_windows(view)
        parts = _parts(view)
        digest = digest_of(*(str(path) for path in parts.compiled))
        refusal = kept_library(f"{parts.before.name}-refused", digest).with_suffix(".txt")
        if refusal.exists():
            raise ValueError(refusal.read_text())
        new = [part for part in parts.compiled.values() if not part.path.exists()]
        for number, part in enumerate(new, start=1):
            part.compile(f" ({number} of {len(new)})")
        ends = [(part.module, None if parts.ends_are_code else part) for part in (parts.before, parts.after)]
        self._before, self._after = (Program(*end) for end in ends)
        self._groups = [(Program(each.part.module, each.part), each) for each in parts.groups]
        if new:
            try:
                self._check_same()
            except ValueError as error:
                for part in new:
                    part.path.unlink()
                refusal.write_text(str(error))  # not to be compiled again at each start
                raise

    def verify(
        self,
        base: CausalLM,
        tokens: Tensor,
        topology: TreeTopology,
        cache: TreeCache,
        select: Tensor | None = None,
        first_node: int = 0,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.verify` of ``base``, which is the view."""
        inputs = tree_inputs(base, tokens, topology, cache, first_node, self._windows)
        given = [each.contiguous() for each in _tensors(inputs)]
        shared = [*given, *self._before(given)]
        hidden = shared[self._groups[0][1].takes[0]]
        states: list[Tensor] = []
        for program, group in self._groups:
            taken = [hidden, *(shared[at] for at in group.takes[1:]), cache.slots]
            for own, sizes in zip(cache.tree_layers[group.layers], group.entry_sizes, strict=True):
                if not own.is_initialized:
                    empty = [(len(tokens), heads, 0, width) for heads, width in sizes]
                    own.lazy_initialization(*(hidden.new_empty(size) for size in empty))
                own.reserve(cache.num_slots)
                taken += own.entries
            states += program(taken)
            hidden = states[-1]
        select = _all_nodes(*tokens.shape) if select is None else select.contiguous()
        last, logits = self._after([hidden, select, *given])
        return torch.cat([last, *(states[layer - 1] for layer in layers)], dim=-1) if layers else last, logits

    def _check_same(self) -> None:
        """Raise ValueError unless the programs give the logits of the view."""
        expected = self._trial(verify)
        with _last_bits_moved(self.view):
            rounded = self._trial(verify)
        apart, rounding = (
            float((each - expected).abs().max()) for each in (self._trial(self.verify), rounded)
        )
        if not apart <= ROUNDING_FACTOR * max(rounding, torch.finfo(expected.dtype).eps):
            raise ValueError(
                f"compiled passes of {type(self.view).__name__} give other logits than the model: they "
                f"differ by {apart:.1e}, and rounding explains {rounding:.1e}; use step='general'"
            )

    @torch.no_grad()
    def _trial(self, run: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """Logits (B, 1 + N, V) after two prompts and of a tree below them."""
        tree = CandidateTree.from_paths([(0,), (1,), (0, 0)])
        ids = torch.randint(vocab_size(self.view), (2, 24), generator=torch.Generator().manual_seed(0))
        cache = new_cache(self.view, 2)
        _, after_prompt = prefill(self.view, ids[:, :20], torch.tensor([20, 13]), cache, run=run)
        _, after_nodes = run(self.view, ids[:, 20:], tree.topology("cpu"), cache)
        return torch.cat([after_prompt[:, None], after_nodes], dim=1)


@contextmanager
def _last_bits_moved(view: CausalLM) -> Iterator[None]:
    """Have ``view`` embed every token with each number larger or smaller by its last bit."""
    generator = torch.Generator().manual_seed(0)

    def move(_module: nn.Module, _args: tuple, rows: Tensor) -> Tensor:
        signs = torch.randint(2, rows.shape, generator=generator).mul_(2).sub_(1)
        return rows * (1 + torch.finfo(rows.dtype).eps * signs)

    hook = view.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


@functools.lru_cache(64)
def _all_nodes(num_rows: int, num_nodes: int) -> Tensor:
    """(B, N) long: 0 to N - 1 in each row."""
    return torch.arange(num_nodes).repeat(num_rows, 1)


def library_paths(view: CausalLM) -> list[Path]:
    """Where the libraries of a view's passes are, or will be."""
    return list(_parts(view).compiled)


@dataclass
class _Parts:
    """The parts of a pass of a view."""

    before: Part
    groups: list[_Group]
    after: Part
    ends_are_code: bool
    """Whether ``before`` and ``after`` run as they are, and are not compiled."""

    @property
    def compiled(self) -> dict[Path, Part]:
        """One for each library."""
        ends = [] if self.ends_are_code else [self.before, self.after]
        return {part.path: part for part in (*ends, *(group.part for group in self.groups))}


@dataclass
class _Group:
    """Layers that follow each other, and one program computes."""

    part: Part
    layers: slice
    takes: list[int]
    """Its inputs: places in the list of the pass's inputs and the outputs of ``before``; the first is the
    hidden state."""
    entry_sizes: list[list[tuple[int, int]]]
    """For each layer, heads and width of keys, and of values."""


@dataclass
class _Call:
    """How a model calls one of its layers, in each of :data:`TRIALS`."""

    layer: nn.Module
    args: list[tuple] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


@torch.no_grad()
def _parts(view: CausalLM) -> _Parts:
    """The parts of a pass of ``view``, found by running it."""
    layers = list(decoder_layers(view))
    calls = [_Call(layer) for layer in layers]
    given, slots, entries = [], [], []
    for rows, nodes, length in TRIALS:
        cache = new_cache(view, rows)
        cache.lengths += length  # empty slots: the values are of no interest
        cache.longest = length
        tokens, chain = torch.zeros(rows, nodes, dtype=torch.long), CandidateTree.chain(nodes - 1).topology()
        hooks = [
            call.layer.register_forward_hook(functools.partial(_note, call), with_kwargs=True)
            for call in calls
        ]
        try:
            given.append(_tensors(inputs := tree_inputs(view, tokens, chain, cache)))
            view(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
        slots.append(cache.slots)
        entries.append([list(layer.entries) for layer in cache.tree_layers])
    follow_each_other = all(len(call.args) == len(TRIALS) for call in calls) and all(
        _tensors((after.args[0], after.kwargs[0]))[0] is _tensors((before.outputs[0],))[0]
        for before, after in itertools.pairwise(calls)
    )  # each is called once a pass, with the output of the one before it
    if not all(entries[0]) or not follow_each_other:
        raise ValueError(
            f"the layers of {type(view).__name__} do not follow each other with keys and values of their "
            "own, so they cannot be compiled separately; use step='general'"
        )
    config, name = view.config.get_text_config(decoder=True), view.config.model_type
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    common = (settings, config._attn_implementation)

    inputs[cache_argument(view)] = new_cache(view, 1)  # one that holds nothing
    before = _Before(view, calls, inputs)
    takes = before.takes(given[1])
    hidden = [[*each, *before(*each)][takes[0][0]] for each in given]
    select = [
        torch.zeros(rows, many, dtype=torch.long) for (rows, *_), many in zip(TRIALS, SELECTED, strict=True)
    ]
    together = max(size for size in range(1, MOST_TOGETHER + 1) if len(calls) % size == 0)
    groups = []
    for first in range(0, len(calls), together):
        of = slice(first, first + together)
        module = _CalledLayers(calls[of], takes[of])
        trials = [
            [*module.given(trial), slots[trial], *itertools.chain(*entries[trial][of])]
            for trial in range(len(TRIALS))
        ]
        part = Part(f"{name}-layers", module, trials, (common, module.settings))
        sizes = [[(each.shape[1], each.shape[3]) for each in own] for own in entries[0][of]]
        groups.append(_Group(part, of, module.places, sizes))
    return _Parts(
        Part(f"{name}-before", before, given, common),
        groups,
        Part(
            f"{name}-after",
            _After(view, calls, inputs),
            [[*each] for each in zip(hidden, select, *zip(*given, strict=True), strict=True)],
            common,
        ),
        any(kind in READ_ON_THE_HOST for kind in rope_types(view)),
    )


def _note(call: _Call, _module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    call.args.append(args)
    call.kwargs.append(kwargs)
    call.outputs.append(output)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in ``value``, in order."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return [each for part in value for each in _tensors(part)]
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


class _CalledLayers(nn.Module):
    """Consecutive layers as a function of their input tensors, slots, and keys and values of each; returns
    the output of each layer."""

    def __init__(self, calls: Sequence[_Call], takes: Sequence[Sequence[int]]):
        super().__init__()
        self.layers = nn.ModuleList(call.layer for call in calls)
        self._calls, self._takes = calls, takes
        self.places = list(dict.fromkeys(itertools.chain(*takes)))
        """Each tensor once: places as in :class:`_Group`."""
        self.settings = [
            (
                [self.places.index(at) for at in taken],
                [  # the keyword arguments of the layer, except tensors
                    (name, repr(value))
                    for name, value in call.kwargs[0].items()
                    if not isinstance(value, (Tensor, tuple, Cache))
                ],
            )
            for call, taken in zip(calls, takes, strict=True)
        ]

    def given(self, trial: int) -> list[Tensor]:
        """The tensors at :attr:`places` in one of :data:`TRIALS`."""
        found: dict[int, Tensor] = {}
        for call, taken in zip(self._calls, self._takes, strict=True):
            for at, tensor in zip(taken, _tensors((call.args[trial], call.kwargs[trial])), strict=True):
                found.setdefault(at, tensor.contiguous())
        return list(found.values())

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        given = dict(zip(self.places, inputs, strict=False))
        slots, *entries = inputs[len(given) :]
        states: list[Tensor] = []
        pairs = zip(entries[::2], entries[1::2], strict=True)
        for call, taken, (keys, values) in zip(self._calls, self._takes, pairs, strict=True):
            tensors = iter([given[at] for at in taken])
            args, kwargs = _exchanged((call.args[0], call.kwargs[0]), tensors, _Entries(keys, values, slots))
            output = call.layer(*args, **kwargs)
            given[taken[0]] = output[0] if isinstance(output, tuple) else output
            states.append(given[taken[0]])
        return states


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


class _Ends(nn.Module):
    """A view without its layers, as a function of the tensors that it takes."""

    def __init__(self, view: CausalLM, calls: Sequence[_Call], inputs: dict[str, Any]):
        super().__init__()
        self.base, self._inputs = copy_sharing_parameters(view), inputs
        self._stubs = [_Stub(call) for call in calls]
        layers = decoder_layers(self.base)
        for index, stub in enumerate(self._stubs):
            layers[index] = stub

    def run(self, given: Sequence[Tensor]) -> Tensor:
        """The logits from the output of the last stub."""
        inputs = _exchanged(self._inputs, iter(given), self._inputs[cache_argument(self.base)])
        return self.base(**inputs).logits


class _Before(_Ends):
    """The layers' inputs that are not inputs of the pass."""

    def forward(self, *given: Tensor) -> list[Tensor]:
        self.run(given)
        return [each.contiguous() for each in self._made(given)]

    def takes(self, given: Sequence[Tensor]) -> list[list[int]]:
        """The inputs of each layer: places as in :class:`_Group`."""
        self.run(given)
        shared = [*given, *self._made(given)]
        return [[_place(shared, each) for each in stub.noted.given] for stub in self._stubs]

    def _made(self, given: Sequence[Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        for stub in self._stubs:
            made += [each for each in stub.noted.given if _place([*given, *made], each) < 0]
        return made


def _place(among: Sequence[Tensor], wanted: Tensor) -> int:
    return next((at for at, each in enumerate(among) if each is wanted), -1)


class _After(_Ends):
    """The part after the layers: (hidden (B, M, D), select (B, S) long, inputs) -> (input of the LM head (B,
    M, D), logits (B, S, V))."""

    def forward(self, hidden: Tensor, select: Tensor, *given: Tensor) -> list[Tensor]:
        def wanted(states: Tensor) -> Tensor:
            return states.gather(1, select[..., None].expand(-1, -1, states.shape[2]))

        self._stubs[-1].noted.result = hidden
        with capture_hidden_states(self.base, wanted) as seen:
            logits = self.run(given)
        return [seen.last, logits]


class _Stub(nn.Module):
    """Stands for a layer: notes the tensors that it is given, and gives the first of them, or ``result``."""

    def __init__(self, call: _Call):
        super().__init__()
        self._of, self._is_tuple = (call.layer,), isinstance(call.outputs[0], tuple)
        self.noted = threading.local()
        """``given`` tensors and ``result``, of each thread: several may run an end that is not compiled."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of layers that a model reads, such as the type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_of"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.noted.given = _tensors((args, kwargs))
        result = getattr(self.noted, "result", self.noted.given[0])
        return (result,) if self._is_tuple else result
