"""The rules of layers that keep a state, one token after the other: a token's result depends on its path.

Models of ``transformers`` call their rules by name, a handful of functions in every one of them: chunked ones
for prompts, recurrent ones for single tokens, which round otherwise. :func:`put_rules` puts those of this
module in their place, in a view of the model. They get the state from
:class:`medusa.base.recurrent.RecurrentCache`, and the tree of the pass with it, and run each node from the
state of its parent. Without such a cache, as in training, the model's own functions run.

Sources: causal convolution, arXiv 2312.00752; the gated delta rule, arXiv 2412.06464, equation 10; KDA, arXiv
2510.26692; the state-space rule of Mamba 2, arXiv 2405.21060; the selective scan of Mamba, arXiv 2312.00752.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from medusa.base.convolved_attention import projection_in_place
from medusa.base.recurrent import KNOWN_LAYERS, MatrixState, Updates, of_heads, states_of_scans
from medusa.base.rowwise import rowwise


def causal_convolution(
    windows: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """The outputs (B, C, N) of a causal convolution of each channel.

    Args:
        windows: (B, C, N, K), the inputs that each node reads, the newest last.
        weight: (C, K). bias: (C,).
    """
    terms = windows.transpose(1, 2).to(weight.dtype).unbind(dim=3)  # K of (B, N, C)
    output = terms[0] * weight[:, 0]
    for number, term in enumerate(terms[1:], start=1):
        output = output + term * weight[:, number]  # in two roundings
    if bias is not None:
        output = output + bias
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.transpose(1, 2).to(windows.dtype)


def run_nodes(state: Tensor, nodes: MatrixState, step: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Run ``step`` from the state of a node's parent, (B, H, K, V), and the node's number, to the node's own
    state, for each node of the pass of ``nodes`` in turn; the root's parent is ``state``. Returns the state
    after the last node."""
    num_nodes = nodes.parents.shape[1]
    if nodes.is_of_chain:
        for node in range(num_nodes):
            state = step(state, node)
        return state
    parents = nodes.parents.expand(len(state), -1).to(state.device)
    rows = torch.arange(len(state), device=state.device)
    states = [step(state, 0)]
    for node in range(1, num_nodes):
        above = torch.stack(states)[parents[:, node], rows] if len(state) > 1 else None
        states.append(step(states[int(parents[0, node])] if above is None else above, node))
    return states[-1]


def matrix_rule(
    state: MatrixState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    rates: Tensor | None = None,
) -> Tensor:
    """The outputs (B, N, H, V) of a rule that changes a matrix by outer products: S <- decay S + key w', and
    reads S' query. What is written, w, is the value; of a delta rule beta (value - S' key), with S after its
    decay. All is float32.

    Args:
        query: (B, N, G, K). key: (B, N, G, K). value: (B, N, H, V); H / G heads in turn share a key.
        decay: (B, N, H), or (B, N, H, K) for KDA.
        beta: (B, N, H) for a delta rule.
        rates: (H, K, V) for a selective scan: the decay of an entry is e^(rate step), and ``decay`` are the
            time steps (B, N, H, V).
    """
    B, _, H, V = value.shape
    committed = state.committed(value, (B, H, key.shape[3], V), rates)
    outputs = torch.empty_like(value)
    written = value if beta is None else torch.empty_like(value)
    updates = Updates(decay, key, written, rates)

    def step(before: Tensor, node: int) -> Tensor:
        if beta is not None:
            key_of_node = of_heads(key[:, node], H)
            seen = (before * updates.factors(node) * key_of_node[..., None]).sum(dim=-2)
            written[:, node] = (value[:, node] - seen) * beta[:, node, :, None]
        after = updates.apply(before, node)
        outputs[:, node] = (after * of_heads(query[:, node], H)[..., None]).sum(dim=-2)
        return after

    last = run_nodes(committed, state, step)
    place = state.place_of_last()
    if place is not committed:
        place.copy_(last)
    state.keep(updates)
    return outputs


MatrixRule = Callable[..., Tensor]
"""A function with the arguments of :func:`matrix_rule`."""


# ------------------------------------------------------------------ in the place of transformers' functions


def _floats(*tensors: Tensor) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


def _normed(x: Tensor, is_reciprocal: bool) -> Tensor:
    """``x`` over its length, as the models of either rule compute it."""
    x = x.contiguous()  # torch adds in another order where the last dimension is not; convolutions vary it
    length = (x * x).sum(dim=-1, keepdim=True) + 1e-6
    return x * torch.rsqrt(length) if is_reciprocal else x / torch.sqrt(length)


def _delta(
    rule: MatrixRule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: MatrixState,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Both gated delta rules: ``g`` is the logarithm of the decay, one a head, or of KDA one a row."""
    dtype = value.dtype
    query, key, value, g, beta = _floats(query, key, value, g, beta)
    if use_qk_l2norm_in_kernel:
        query, key = (_normed(x, is_reciprocal=g.dim() == 3) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    outputs = rule(initial_state, query, key, value, g.exp(), beta)
    return outputs.to(dtype), outputs[:0]


def _scan(
    rule: MatrixRule,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_states: MatrixState,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The state-space rule of Mamba 2 over nodes: hidden_states (B, N, H, P), dt (B, N, H), A (H,), B and C
    (B, N, G, S)."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = nn.functional.softplus(dt)
    x, dt, B, C = _floats(hidden_states, dt, B, C)
    outputs = rule(initial_states, C, B, x * dt[..., None], (dt * A.float()).exp())
    if D is not None:
        outputs = outputs + x * D.float()[:, None]
    return outputs.to(hidden_states.dtype), outputs[:0]


def _scan_of_one(
    rule: MatrixRule,
    state: MatrixState,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """:func:`_scan` as models call it for one token: without its dimension, and with the numbers of a head
    repeated for each of its entries."""
    outputs, _ = _scan(
        rule,
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        state,
        D=None if D is None else D[:, 0],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        dt_softplus=dt_softplus,
    )
    return outputs[:, 0] if z is None else outputs[:, 0] * nn.functional.silu(z)


def _selective_scan(
    rule: MatrixRule,
    state: MatrixState,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The selective scan of Mamba over nodes: hidden_states, dt and z (B, V, N), A (V, K), B and C (B, K, N).
    The channels are the columns of one matrix, in which each entry decays by itself."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    x, dt, B, C = (each.transpose(1, 2) for each in (hidden_states, dt, B, C))  # (B, N, V or K)
    if delta_softplus:
        dt = nn.functional.softplus(dt)
    x, dt, B, C = _floats(x, dt, B, C)
    of_one_head = (each[:, :, None] for each in (C, B, x * dt, dt))  # (B, N, 1, V or K)
    outputs = rule(state, *of_one_head, rates=A.float().T[None].contiguous())[:, :, 0]  # (B, N, V)
    if D is not None:
        outputs = outputs + x * D.float()
    if z is not None:
        outputs = outputs * nn.functional.silu(z.transpose(1, 2))
    return outputs.transpose(1, 2).to(hidden_states.dtype), outputs[:0]


def _selective_scan_of_one(
    rule: MatrixRule,
    state: MatrixState,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> Tensor:
    """:func:`_selective_scan` as models call it for one token: without its dimension."""
    x, dt, B, C = (each[..., None] for each in (hidden_states, dt, B, C))
    gate = None if z is None else z[..., None]
    outputs, _ = _selective_scan(rule, state, x, dt, A, B, C, D, gate, dt_bias, dt_softplus)
    return outputs[..., 0]


def _convolution_in_place(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """:func:`causal_convolution` where a model calls ``own``."""

    @functools.wraps(own)
    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if hidden_states.dim() == 3:  # inputs and no windows: there is no cache
            return own(hidden_states, weight, bias, activation=activation, **kwargs)
        return causal_convolution(hidden_states, weight, bias, activation)

    return convolution


def _single_convolution_in_place(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """:func:`causal_convolution` where a model calls ``own`` for one token."""

    @functools.wraps(own)
    def convolution(
        hidden_states: Tensor,
        conv_state: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return causal_convolution(
            conv_state.windows(hidden_states, weight.shape[1]), weight, bias, activation
        )

    return convolution


CONVOLUTIONS = {
    "causal_conv1d_fn": _convolution_in_place,
    "causal_conv1d_update": _single_convolution_in_place,
}
"""The makers of functions that are called in the place of ``transformers``' own, by name."""
OF_THE_LAYER = "of the layer"
"""The place of a state that a function is not given: it is that of the layer whose forward runs."""
_scans_to_come: ContextVar[Iterator[Any] | None] = ContextVar("_scans_to_come", default=None)
"""The states of the scans that the forward of the layer has yet to call; None where it has no cache."""
MATRIX_RULES: dict[str, tuple[Callable[..., Any], str | int]] = {
    **dict.fromkeys(
        (
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
            "chunk_kimi_delta_attention",
            "recurrent_kimi_delta_attention",
        ),
        (_delta, "initial_state"),
    ),
    "mamba2_chunk_scan": (_scan, "initial_states"),
    "mamba2_selective_state_update": (_scan_of_one, 0),
    "mamba_selective_scan": (_selective_scan, OF_THE_LAYER),
    "mamba_selective_state_update": (_selective_scan_of_one, 0),
}
"""The function that is called in the place of one of this name, and the name or place of its state."""


def _rule_in_place(name: str, own: Callable[..., Any], rule: MatrixRule) -> Callable[..., Any]:
    """One of :data:`MATRIX_RULES` where a model calls ``own`` with a state of ours."""
    function, state_name = MATRIX_RULES[name]
    of_the_layer = state_name == OF_THE_LAYER

    @functools.wraps(own)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if of_the_layer:
            scans = _scans_to_come.get()
            state = None if scans is None else next(scans, None)
        else:
            state = args[state_name] if isinstance(state_name, int) else kwargs.get(state_name)
        if not isinstance(state, MatrixState):
            return own(*args, **kwargs)
        return function(rule, *([state] if of_the_layer else []), *args, **kwargs)

    return chosen


CONVOLVED = frozenset({"ZayaCCAProjection"})
"""Layers whose whole forward is :func:`medusa.base.convolved_attention.convolved_projection`."""
ELEMENTWISE_NAMES = frozenset({"exp", "gelu", "sigmoid", "silu", "softplus", "tanh"})
"""Functions that torch computes with other code for the numbers after the last whole vector of a loop."""
ELEMENTWISE = frozenset(
    getattr(home, name)
    for home in (nn.functional, torch, Tensor)
    for name in ELEMENTWISE_NAMES
    if hasattr(home, name)
)
"""These functions, under all names that a model may call them by."""


class RowwiseFunctions(TorchFunctionMode):
    """Within, :data:`ELEMENTWISE` functions give a row the same bits whatever the other rows are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ELEMENTWISE and args[0].dim() > 1:
            with torch._C.DisableTorchFunction():
                return rowwise(functools.partial(func, **(kwargs or {})), args[0])
        return func(*args, **(kwargs or {}))


def keeps_states(kind: type[nn.Module]) -> bool:
    """Whether layers of this class read and write states of a cache themselves."""
    return not STATE_UPDATES.isdisjoint(_code_of(kind).co_names)


def calls_scans(kind: type[nn.Module]) -> bool:
    """Whether layers of this class run selective scans."""
    return "mamba_selective_scan" in _code_of(kind).co_names


def _code_of(kind: type[nn.Module]) -> Any:
    return cast(FunctionType, inspect.unwrap(kind.forward)).__code__


STATE_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
"""Methods of a cache that change a state."""


def unknown_rule(base: PreTrainedModel) -> str | None:
    """The class of a layer of ``base`` that keeps a state by a rule that is not known; None where there is
    none."""
    for kind in {type(module) for module in base.modules()}:
        if keeps_states(kind) and kind.__name__ not in CONVOLVED:
            names = {*_code_of(kind).co_names}
            has_matrix = "update_recurrent_state" in names
            if not (names & CONVOLUTIONS.keys()) or (has_matrix and not names & MATRIX_RULES.keys()):
                return kind.__name__
    return None


REFUSED_TYPES = {
    "minimax": "takes no cache but its own",
    "recurrent_gemma": "keeps its recurrent state in its modules, and not in the cache",
}
"""Reasons against models in ``transformers`` 5.24, by ``model_type``."""


def check_states(base: Any) -> None:
    """Raise ValueError, with the reason, unless the rules by which ``base`` keeps states are known."""
    name = type(base).__name__
    layers = DynamicCache(config=base.config).layers
    reason = REFUSED_TYPES.get(base.config.get_text_config(decoder=True).model_type)
    if reason is not None:
        raise ValueError(f"{name} {reason}, so no draft can be verified on it; use its own generate")
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in KNOWN_LAYERS})
    if unknown:
        raise ValueError(
            f"{name} keeps its states in {', '.join(unknown)}, which medusa does not know, so it cannot "
            "forget rejected tokens; use its own generate"
        )
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise ValueError(
            f"{name} keeps its recurrent state outside of transformers' cache, where it cannot be found, so "
            "it cannot forget rejected tokens; use its own generate"
        )
    kind = unknown_rule(base)
    if kind is not None:
        raise ValueError(
            f"{name} has layers that change their state by a rule of their own ({kind}), so no draft can be "
            "verified on it; use its own generate"
        )


def _is_changed(kind: type[nn.Module]) -> bool:
    """Whether a view runs another forward than the one of this class, of ``transformers``."""
    names = {*getattr(_code_of(kind), "co_names", ())}
    return bool(names & (STATE_UPDATES | ELEMENTWISE_NAMES)) and kind.__module__.startswith("transformers.")


@functools.cache
def forward_with_rules(kind: Any, rule: MatrixRule) -> Callable[..., Any]:
    """The forward of a layer, with the functions of this module in the place of the model's own, which it
    finds under the same names; a row's bits do not depend on other rows."""
    own = cast(FunctionType, inspect.unwrap(kind.forward))
    names = own.__globals__
    called = {*own.__code__.co_names}
    in_place = {name: CONVOLUTIONS[name](names[name]) for name in called & CONVOLUTIONS.keys()}
    in_place |= {name: _rule_in_place(name, names[name], rule) for name in called & MATRIX_RULES.keys()}
    forward: Any = FunctionType(
        own.__code__, {**names, **in_place}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    if kind.__name__ in CONVOLVED:
        forward = projection_in_place(forward, causal_convolution)

    @functools.wraps(own)
    def forward_of_rows(*args: Any, **kwargs: Any) -> Any:
        with RowwiseFunctions():
            return forward(*args, **kwargs)

    @functools.wraps(own)
    def forward_of_scans(*args: Any, **kwargs: Any) -> Any:
        token = _scans_to_come.set(_scans_of(own, args, kwargs))
        try:
            return forward_of_rows(*args, **kwargs)
        finally:
            _scans_to_come.reset(token)

    chosen = forward_of_scans if calls_scans(kind) else forward_of_rows
    chosen.has_rules = True  # type: ignore[attr-defined]
    return chosen


def _scans_of(forward: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any] | None:
    """The states of the scans of a layer whose ``forward`` is called so; None without a cache."""
    names = forward.__code__.co_varnames
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = arguments.get("cache", arguments.get("cache_params"))  # as transformers 5.24 calls it, and 5.17
    if cache is None:
        return None
    return iter(states_of_scans(cache.layers[arguments[names[0]].layer_idx].recurrent_states[0]))


def has_rules(base: PreTrainedModel) -> bool:
    """Whether ``base`` is a view that :func:`put_rules` has changed."""
    return any(getattr(_replaced_forward(module)[1], "has_rules", False) for module in base.modules())


def _replaced_forward(module: nn.Module) -> tuple[str, Any]:
    """The attribute of ``module`` that holds the forward in the place of its class's, and what is there, None
    where nothing is: hooks of accelerate keep it under another name, and call it."""
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    return name, vars(module).get(name)


def put_rules(base: Any, rule: MatrixRule) -> Any:
    """``base``, a view of our own, with the rules of this module; matrices change by ``rule``.

    Raises:
        ValueError: the forward of a layer that keeps a state is not its class's.
    """
    for module in base.modules():
        kind: Any = type(module)
        if not _is_changed(kind):
            continue
        name, replaced = _replaced_forward(module)
        if replaced is None or getattr(replaced, "__func__", None) is kind.forward:
            setattr(module, name, MethodType(forward_with_rules(kind, rule), module))
        elif keeps_states(kind):
            raise ValueError(
                f"{kind.__name__} keeps a state by rules of medusa's own, and the forward of this one has "
                "been replaced; put the model's own back, or use its own generate"
            )
    return base
