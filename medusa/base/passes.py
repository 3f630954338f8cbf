"""Passes of a base: over a tree of tokens below what its cache holds, or over texts, for their hidden states.

A prompt is a tree too, a chain. What a pass needs beside tokens and positions is prepared here: masks by the
kind of layer, the cache under the name that the model's forward has for it, and views of bases that keep
states.

The hidden state that heads read is the exact input of the model's LM head, whatever scaling or soft-capping
the architecture adds after it. It is seen through a forward pre-hook that lives for one forward pass (or,
where passes are compiled or captured, one answer); nothing stays attached to the model. Heads that fuse
layers also read what comes out of some decoder layers, seen in the same way: hidden states are then
(..., (1 + L) * D), the last state first.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa.base.attention import (
    BESIDE_STATES,
    LayerWindows,
    attention_windows,
    check_attention,
    mask_dtype,
    node_positions,
    seen_slots,
    takes_seen_slots,
    tree_attention_masks,
)
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import (
    CausalLM,
    copy_sharing_parameters,
    decoder_layers,
    embedding_weight,
    hidden_size,
    lm_head,
    lm_head_device,
    place_of,
)
from medusa.base.profile import context_length, longrope_threshold
from medusa.base.recurrent import MASKS_OF_STATES, RecurrentCache, is_recurrent
from medusa.base.recurrent_rules import MatrixRule, has_rules, matrix_rule, put_rules
from medusa.trees.candidate_tree import TreeTopology

CHUNK = 512
"""Tokens of a prompt that one pass reads at most."""


def with_rules(base: CausalLM, rule: MatrixRule = matrix_rule) -> CausalLM:
    """The model to decode with where ``base`` keeps states: a view that runs the rules of
    :mod:`medusa.base.recurrent_rules`, ``rule`` for those that change a matrix. Otherwise, and for such a
    view, ``base`` itself."""
    if not is_recurrent(base) or has_rules(base):
        return base
    return cast(CausalLM, put_rules(copy_sharing_parameters(base).eval(), rule))


def new_cache(base: CausalLM, num_rows: int, keeps_state: bool | None = None) -> TreeCache:
    """An empty cache for ``num_rows`` rows of ``base``; ``keeps_state`` says whether that keeps states, where
    the caller knows it."""
    if is_recurrent(base) if keeps_state is None else keeps_state:
        return RecurrentCache(base.config, num_rows, lm_head_device(base))
    config = base.config.get_text_config(decoder=True)
    return TreeCache(num_rows, config.num_hidden_layers, lm_head_device(base))


@torch.no_grad()
def cache_bytes(base: CausalLM) -> tuple[int, int]:
    """Memory that one token of one row takes in a cache, and that a row takes beside its tokens: one token is
    read to find out."""
    base = with_rules(base)
    device = lm_head_device(base)
    cache = new_cache(base, 1)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    prefill(base, token, torch.ones(1, dtype=torch.long, device=device), cache)
    return cache.bytes_per_token, cache.bytes_per_row


def verify(
    base: CausalLM,
    tokens: Tensor,
    topology: TreeTopology,
    cache: TreeCache,
    select: Tensor | None = None,
    first_node: int = 0,
    layers: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """One forward pass over nodes of a tree: hidden states (B, M, D) and logits (B, M, V).

    tokens (B, M) long are the nodes ``first_node`` to ``first_node + M`` of trees that hang below each row's
    committed tokens in ``cache`` as ``topology`` says. ``select`` (B, S) long narrows the logits to some of
    them, (B, S, V). ``layers`` are passed to :func:`capture_hidden_states`. The cache then holds the pass's
    keys and values, uncommitted. Of a base that keeps states, ``base`` is the view of :func:`with_rules`.
    """

    def selected(hidden: Tensor) -> Tensor:
        if select is None:
            return hidden
        return hidden.gather(1, select.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[2]))

    with capture_hidden_states(base, selected, layers) as seen:
        output = base(**tree_inputs(base, tokens, topology, cache, first_node))
    return seen.last, output.logits


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the cache in a forward. ``transformers`` 5.24 calls it ``cache`` and warns of the others, which
were its names before; the last was for models whose layers are all recurrent."""


def takes_cache(module: nn.Module) -> bool:
    """Whether the class of ``module`` names a cache of ``transformers`` in its forward."""
    return _named_cache(cast(Any, type(module))) is not None


def cache_argument(module: nn.Module) -> str:
    """The name of the cache in the forward of a model or a layer. A class that names none, and hands on
    whatever comes, is one of a model's own code, which uses the name that all versions take."""
    return _named_cache(cast(Any, type(module))) or "past_key_values"


@functools.cache
def _named_cache(kind: Any) -> str | None:
    """The name by the first class of the inheritance that has one."""
    for ancestor in kind.__mro__:
        parameters = inspect.signature(ancestor.forward).parameters if "forward" in vars(ancestor) else {}
        for name in CACHE_ARGUMENTS:  # XLM's is a dict
            if name in parameters and not str(parameters[name].annotation).startswith("dict["):
                return name
    return None


def holds_text(cache: Cache) -> bool:
    """Whether a cache of ``transformers`` holds keys, values or states of a text."""
    return any(
        (isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0)
        or any(getattr(layer, "has_previous_state", {}).values())
        for layer in cache.layers
    )


def cache_of(output: Any) -> Any:
    """The cache in a model's output, under whichever name."""
    return next(output[name] for name in CACHE_ARGUMENTS if name in output.keys())  # noqa: SIM118


def tree_inputs(
    base: CausalLM,
    tokens: Tensor,
    topology: TreeTopology,
    cache: TreeCache,
    first_node: int = 0,
    windows: LayerWindows | None = None,
) -> dict[str, Any]:
    """The arguments of ``base``'s forward for tree nodes, as in :func:`verify`; plans the pass in ``cache``.

    ``windows`` are the layers' sliding windows, if the caller knows that they have not changed.
    """
    if windows is None:
        check_attention(base)
        windows = attention_windows(base)
    config = base.config.get_text_config(decoder=True)
    nodes = slice(first_node, first_node + tokens.shape[1])
    cache.plan_pass(tokens.shape[1], first_node)
    masks: Any = None
    if windows and takes_seen_slots(config):
        masks = seen_slots(cache.lengths, topology, windows, nodes)
    elif windows:
        dtype = mask_dtype(config, base.dtype)
        masks = tree_attention_masks(cache.lengths, cache.num_slots, topology, windows, dtype, nodes)
    num_positions = cache.num_positions or context_length(base)
    arguments = {
        "input_ids": tokens,
        "attention_mask": masks,
        "position_ids": node_positions(cache.lengths, topology, num_positions, nodes),
        cache_argument(base): cache,
        "use_cache": True,
    }
    if isinstance(cache, RecurrentCache):
        cache.begin_pass(topology)
        _for_states(arguments, base, windows)
    return arguments


def _for_states(arguments: dict[str, Any], base: CausalLM, windows: LayerWindows) -> None:
    """Change the arguments of a forward into those for a base whose layers keep states: masks by the type of
    layer, and none for states; no positions where it takes none."""
    masks = arguments["attention_mask"]
    if masks is not None:
        by_kind = masks if isinstance(masks, dict) else dict.fromkeys(windows, masks)
        beside = {name: by_kind[kind] for name, kind in BESIDE_STATES.items() if kind in by_kind}
        arguments["attention_mask"] = {**dict.fromkeys(MASKS_OF_STATES), **by_kind, **beside}
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        del arguments["position_ids"]


def prefill(
    base: CausalLM,
    tokens: Tensor,
    lengths: Tensor,
    cache: TreeCache,
    chunk: int = CHUNK,
    layers: Sequence[int] = (),
    run: Callable[..., tuple[Tensor, Tensor]] = verify,
    keeps_features: bool = False,
    known: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Commit the tokens that ``cache`` lacks; hidden states (B, D) and logits (B, V) of the last.

    tokens: (B, T) long, right-padded. lengths: (B,) long, tokens per row; each must exceed the cached length.
    A prompt is a tree too, a chain, so it goes through ``run``, ``chunk`` tokens at a time to bound memory;
    with LongRoPE (:mod:`medusa.base.profile`) the first chunk of a long prompt is as long as it takes to
    switch the factors. ``keeps_features`` has the cache keep the states of all tokens, for drafters that read
    them. ``known`` are the ``lengths`` where the host has them.
    """
    hidden = logits = None
    cache.expect(tokens.shape[1])
    missing = lengths - cache.lengths
    if known is None:
        known = lengths.tolist()
    switch = longrope_threshold(base)
    if switch is not None and max(known) <= switch:
        cache.num_positions = switch  # nodes beyond the answer would switch the factors of those within
    elif switch is not None:
        chunk = max(chunk, switch + 1)  # the long factors from the first chunk on
    while left := tokens_missing(known, cache):
        width = min(max(left), chunk)
        columns = cache.lengths[:, None] + torch.arange(width, device=tokens.device)
        part = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
        num_new = missing.clamp(max=width)
        last = (num_new - 1).clamp(min=0)[:, None]
        chain = TreeTopology.chain(width, tokens.device)
        cache.is_prompt_next = min(left) >= width
        states, part_logits = run(base, part, chain, cache, select=last, layers=layers)
        if keeps_features:
            cache.keep_features(states, cache.lengths, cache.longest)
        cache.commit_prefix(num_new, [min(num_left, width) for num_left in left])
        newest = states.gather(1, last[..., None].expand(-1, -1, states.shape[2]))[:, 0]
        has_new = (num_new > 0)[:, None]
        hidden = newest if hidden is None else torch.where(has_new, newest, hidden)
        logits = part_logits[:, 0] if logits is None else torch.where(has_new, part_logits[:, 0], logits)
        missing = missing - num_new
    assert hidden is not None and logits is not None, "a token is missing at least"
    return hidden, logits


def tokens_missing(lengths: list[int], cache: TreeCache) -> list[int]:
    """Tokens of each row that ``cache`` lacks of ``lengths``; [] where it lacks none."""
    missing = [length - cached for length, cached in zip(lengths, cache.known_lengths, strict=True)]
    return missing if max(missing) > 0 else []


# ------------------------------------------------------------------ hidden states


def layers_of(hidden: Tensor, layers: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Hidden states (..., (1 + W) * D) with the layers ``wanted``, selected from states with ``layers``."""
    if list(layers) == list(wanted):
        return hidden
    last, *below = hidden.unflatten(-1, (1 + len(layers), -1)).unbind(-2)
    state_after = dict(zip(layers, below, strict=True))
    return torch.cat([last, *(state_after[layer] for layer in wanted)], dim=-1)


def hidden_states(
    base: CausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    layers: Sequence[int] = (),
) -> Tensor:
    """The input of the LM head, (B, T, D), for input_ids (B, T) long; no logits are computed.

    Runs under the caller's gradient mode. ``attention_mask`` is (B, T) or (B, 1, T, T); ``layers`` are passed
    to :func:`capture_hidden_states`.
    """
    with capture_hidden_states(base, lambda hidden: hidden[:, :0], layers) as seen:
        base(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    return seen.last


class CapturedHiddenStates:
    """The states that :func:`capture_hidden_states` records."""

    def __init__(self, num_layers: int):
        self.parts = [torch.empty(0)] * (1 + num_layers)
        """(B, T, D) each: the last input of the LM head, then the last output of each layer."""

    @property
    def last(self) -> Tensor:
        """(B, T, D): the hidden states of the last forward pass; (B, T, (1 + L) * D) with L layers."""
        last, *below = self.parts
        return torch.cat([last, *(states.to(last) for states in below)], dim=-1) if below else last


@contextmanager
def capture_hidden_states(
    base: CausalLM,
    keep: Callable[[Tensor], Tensor] = lambda hidden: hidden,
    layers: Sequence[int] = (),
) -> Iterator[CapturedHiddenStates]:
    """The states of the passes within: the input of the LM head, of which only ``keep`` goes on to the
    logits.

    ``layers`` asks for the hidden states after these decoder layers too, counted from 1; they are appended to
    the last state, in this order. Only passes of the calling thread are seen and narrowed: others may run the
    same model meanwhile, each with hooks of its own or none.
    """
    seen = CapturedHiddenStates(len(layers))
    owner = threading.get_ident()

    def look(module: nn.Module, args: tuple) -> tuple | None:
        if threading.get_ident() != owner:
            return None
        seen.parts[0] = args[0].to(place_of(module))
        return (keep(seen.parts[0]), *args[1:])

    def look_at(index: int) -> Callable[..., None]:
        def note(_module: nn.Module, _args: tuple, output: Any) -> None:
            if threading.get_ident() == owner:
                seen.parts[index] = output[0] if isinstance(output, tuple) else output

        return note

    modules = decoder_layers(base) if layers else nn.ModuleList()
    for number in layers:
        if not 1 <= number <= len(modules):
            raise ValueError(
                f"fused_layers must be in [1, {len(modules)}], the decoder layers of {base.name_or_path!r}, "
                f"got {number}"
            )
    handles = [lm_head(base).register_forward_pre_hook(look)]
    for index, number in enumerate(layers, start=1):
        handles.append(modules[number - 1].register_forward_hook(look_at(index)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def logit_scale(base: CausalLM) -> float:
    """The factor of ``base``'s logits after its LM head; 1 for most.

    Found by a trial, with logits too small for a cap, to three digits: in low precision no more can be said.
    """
    embedding = lm_head(base)
    probe = torch.randn(3, hidden_size(base), generator=torch.Generator().manual_seed(0))
    probe = probe.to(lm_head_device(base), embedding_weight(embedding).dtype)
    probe = probe * (0.1 / embedding(probe).abs().max())
    plain = embedding(probe).double()
    own = logits_of_states(base, probe).double()
    scale = float((plain * own).sum() / plain.square().sum())
    if (own - scale * plain).norm() > 0.05 * own.norm():
        return 1.0  # it does something else than to scale
    return float(f"{scale:.3g}")


def logits_of_states(base: CausalLM, states: Tensor) -> Tensor:
    """Logits (C, V) of states (C, D): one dummy token's forward pass with its hidden state exchanged."""
    embedding = lm_head(base)

    def exchange(_module: nn.Module, args: tuple) -> tuple:
        return (states.to(embedding_weight(embedding).dtype)[None], *args[1:])

    handle = embedding.register_forward_pre_hook(exchange)
    try:
        dummy = torch.zeros(1, 1, dtype=torch.long, device=states.device)
        return base(input_ids=dummy, use_cache=False).logits[0]
    finally:
        handle.remove()
