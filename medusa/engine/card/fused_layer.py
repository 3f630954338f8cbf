"""A decoder layer as ten launches, where its modules are some forty operators.

On a card a step of few nodes reads every weight once, and in between starts small operators that take longer
than what they compute. A :class:`CardLayer` stands in the place of a decoder layer, takes the same arguments
and computes the same: the residual sum with its norm, one product for queries, keys and values, their angles
and the write into the cache, attention in two launches, the output product, and the same again for the gated
unit. It reads nothing on the host, so that it runs in a captured step.

Which layers can be computed so is decided by what they are made of, and then by a trial: each is run once on
noise beside its modules. A layer that is made of something else keeps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, copy_sharing_parameters, decoder_layers
from medusa.base.fixed_cache import FixedTreeCache
from medusa.base.passes import cache_argument, new_cache, tree_inputs
from medusa.engine.card.attention_kernel import tree_attention
from medusa.engine.card.joined_weights import KeepsModules, joined_product
from medusa.engine.card.rotary_kernel import turned_queries
from medusa.engine.card.row_kernels import NormWeights, gated, sum_and_norm
from medusa.trees.candidate_tree import CandidateTree

MOST_NODES = 64
"""Nodes of a row that the launches here compute. Passes over more, as over a prompt, run the modules."""
CLOSE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference to the modules in a trial, as a share of the largest number that a layer adds: rounding
stays below it, and a layer of another kind does not."""
TRIAL_TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1)])
TRIAL_LENGTHS = (70, 3)
"""Committed tokens of the rows of a trial."""
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms of a layer: of the input of attention, and of the gated unit (Llama, Qwen)."""
FOUR_NORMS = (
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
"""The same, and then of what attention and the unit add (Gemma 2 and 3)."""
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
"""Norms of a head's queries and keys, which attention may have (Qwen3)."""
GATED_UNIT = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass
class LayerCall:
    """How a base calls one of its layers."""

    layer: nn.Module
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None

    def note(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook."""
        self.args = args
        self.kwargs = kwargs
        self.output = output


class AttentionParts:
    """What attention computes with.

    Raises:
        KeepsModules: it is made of something else.
    """

    def __init__(self, attention: Any):
        children = {*attention._modules}
        if children - HEAD_NORMS != LINEARS or children & HEAD_NORMS not in (set(), HEAD_NORMS):
            raise KeepsModules(f"{type(attention).__name__} is made of {', '.join(sorted(children))}")
        if not attention._parameters.keys() <= {"sinks"}:
            raise KeepsModules(f"{type(attention).__name__} has weights of its own")
        self.rows = joined_product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = joined_product([attention.o_proj])
        self.width = int(attention.head_dim)
        self.head_norms: tuple[NormWeights, NormWeights] | None = None
        if children & HEAD_NORMS:
            self.head_norms = norm_weights(attention.q_norm), norm_weights(attention.k_norm)
            if any(len(norm.weight) != self.width for norm in self.head_norms):
                raise KeepsModules(f"{type(attention).__name__} has norms of more than a head")
        self.key_heads = attention.k_proj.out_features // self.width
        self.scale = float(attention.scaling)
        self.cap = float(getattr(attention, "attn_logit_softcapping", None) or 0)
        self.sinks = attention._parameters.get("sinks")
        self.place = int(attention.layer_idx)

    def __call__(
        self, normed: Tensor, cache: TreeCache, mask: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention of the nodes (B, N, D), and their keys and values in ``cache``."""
        layer = cache.tree_layers[self.place]
        layer.fill([(self.key_heads, self.width)] * 2, normed)
        keys, values = layer.entries
        queries = turned_queries(self.rows(normed), *angles, cache.slots, keys, values, self.head_norms)
        keys, values = (entries[:, :, : cache.num_slots] for entries in layer.entries)
        attended = tree_attention(queries, keys, values, mask, self.scale, self.cap, self.sinks)
        return self.output(attended.flatten(2))


class GatedParts:
    """What a gated unit computes with.

    Raises:
        KeepsModules: it is made of something else.
    """

    def __init__(self, unit: Any):
        if {*unit._modules} != GATED_UNIT or unit._parameters:
            raise KeepsModules(f"{type(unit).__name__} is made of {', '.join(sorted(unit._modules))}")
        self.gates = joined_product([unit.gate_proj, unit.up_proj])
        self.down = joined_product([unit.down_proj])
        self.is_silu = _is_silu(unit.act_fn)

    def __call__(self, normed: Tensor) -> Tensor:
        return self.down(gated(self.gates(normed), self.is_silu))


class LayerParts:
    """What a layer computes with.

    Raises:
        KeepsModules: it is made of something else.
    """

    def __init__(self, layer: Any):
        norms = {*layer._modules} - {"self_attn", "mlp"}
        names = next((names for names in (TWO_NORMS, FOUR_NORMS) if {*names} == norms), None)
        if names is None or layer._parameters:
            raise KeepsModules(f"{type(layer).__name__} is made of {', '.join(sorted(layer._modules))}")
        weights = [norm_weights(layer._modules[name]) for name in names]
        self.first_norm = weights[0]
        self.second_norm = weights[1]
        self.norm_of_attention = weights[2] if len(weights) > 2 else None
        self.norm_of_unit = weights[3] if len(weights) > 2 else None
        self.attention = AttentionParts(layer.self_attn)
        self.unit: Callable[[Tensor], Any] = layer.mlp  # experts, for example, which are as they are
        if {*layer.mlp._modules} == GATED_UNIT:
            self.unit = GatedParts(layer.mlp)


def norm_weights(module: nn.Module) -> NormWeights:
    """The weights of ``module``, a norm as :class:`NormWeights` describes it.

    Raises:
        KeepsModules: it is another function.
    """
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if {*module._parameters} != {"weight"} or weight is None or weight.dim() != 1 or type(eps) is not float:
        raise KeepsModules(f"{type(module).__name__} is no norm with one weight and an epsilon")
    trial = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).view(3, -1)
    scaled = F.rms_norm(trial, weight.shape, eps=eps)
    with torch.no_grad():
        theirs = module(trial.to(weight.dtype)).float()
    for adds_one in (False, True):
        ours = scaled * (weight.detach().float() + adds_one)
        if float((ours - theirs).abs().max()) <= CLOSE[weight.dtype] * float(ours.abs().max()):
            return NormWeights(weight.detach(), eps, adds_one)
    raise KeepsModules(f"{type(module).__name__} is no root mean square norm")


def _is_silu(function: nn.Module) -> bool:
    """Whether an activation is SiLU; it is GELU by its formula with tanh otherwise.

    Raises:
        KeepsModules: it is neither.
    """
    trial = torch.linspace(-6, 6, 1001)
    theirs = function(trial)
    if torch.allclose(theirs, F.silu(trial), atol=1e-5):
        return True
    if torch.allclose(theirs, F.gelu(trial, approximate="tanh"), atol=1e-5):
        return False
    raise KeepsModules(f"{type(function).__name__} is neither SiLU nor GELU with tanh")


@dataclass
class Handover:
    """The norm of a layer's input, which the layer before it has computed with its last sum."""

    sum: Tensor | None = None
    normed: Tensor | None = None

    def take(self, hidden: Tensor) -> Tensor | None:
        """The norm of ``hidden``, if this is of it; it is held no longer."""
        held = self.sum
        normed = self.normed
        self.sum = None
        self.normed = None
        return normed if held is hidden else None


class CardLayer(nn.Module):
    """``layer`` as launches of ours: hidden states (B, N, D) -> (B, N, D), in passes of at most
    :data:`MOST_NODES` nodes over a cache of ours; as its modules otherwise."""

    def __init__(self, layer: nn.Module, handover: Handover):
        super().__init__()
        self.layer = layer
        self.parts = LayerParts(layer)
        self.next_norm: NormWeights | None = None
        """The norm of the next layer's input, where that is computed here too."""
        self._handover = handover
        self._cache_name = cache_argument(layer)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache: Any = kwargs.get(self._cache_name)
        is_known = type(cache) in (TreeCache, FixedTreeCache) and hidden_states.shape[1] <= MOST_NODES
        if args or not is_known:
            return self.layer(hidden_states, *args, **kwargs)
        parts = self.parts
        hidden = hidden_states.contiguous()
        normed = self._handover.take(hidden)
        if normed is None:
            _, normed = sum_and_norm(hidden, None, parts.first_norm)
        more = parts.attention(normed, cache, kwargs["attention_mask"], kwargs["position_embeddings"])
        hidden, normed = sum_and_norm(hidden, more, parts.second_norm, parts.norm_of_attention)
        more = parts.unit(normed)
        if type(more) is tuple:  # experts, and how they were chosen
            more = more[0]
        hidden, normed = sum_and_norm(hidden, more, self.next_norm, parts.norm_of_unit)
        if self.next_norm is not None:
            self._handover.sum = hidden
            self._handover.normed = normed
        return hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models ask a layer of what type its attention is
            if name == "layer":
                raise
            return getattr(self.layer, name)


class CardNorm(nn.Module):
    """A norm of hidden states (B, N, D), as one launch or as the last layer has computed it."""

    def __init__(self, norm: nn.Module, handover: Handover):
        super().__init__()
        self.weights = norm_weights(norm)
        self._handover = handover

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = hidden_states.contiguous()
        normed = self._handover.take(hidden)
        return sum_and_norm(hidden, None, self.weights)[1] if normed is None else normed


# ------------------------------------------------------------------ a base whose layers are computed so


def num_fused(view: CausalLM) -> int:
    """How many of the layers of ``view`` are a :class:`CardLayer`."""
    return sum(type(layer) is CardLayer for layer in decoder_layers(view))


def card_view(base: CausalLM) -> tuple[CausalLM, list[str]]:
    """A model that shares the parameters of ``base`` and computes with a :class:`CardLayer` wherever it can,
    and why other layers keep their modules, each reason once."""
    view = copy_sharing_parameters(base).eval()
    layers = decoder_layers(view)
    handover = Handover()
    reasons = []
    with _recorded_calls(view) as trial:
        for place, call in enumerate(trial.calls):
            try:
                layer = _card_layer(call, handover)
                trial.check(layer, call)
            except KeepsModules as reason:
                reasons.append(str(reason))
            else:
                layers[place] = layer
    _hand_norms_over(view, layers, handover)
    return view, list(dict.fromkeys(reasons))


def _card_layer(call: LayerCall, handover: Handover) -> CardLayer:
    name = type(call.layer).__name__
    is_called_so = len(call.args) == 1 and {"attention_mask", "position_embeddings"} <= call.kwargs.keys()
    if not is_called_so or type(call.output) is not Tensor:
        raise KeepsModules(f"{name} is called in another way")
    layer = CardLayer(call.layer, handover)
    angles = call.kwargs["position_embeddings"]
    if type(angles) is not tuple or len(angles) != 2 or angles[0].shape[-1] > layer.parts.attention.width:
        raise KeepsModules(f"{name} takes no cosines and sines")
    return layer


def _hand_norms_over(view: CausalLM, layers: nn.ModuleList, handover: Handover) -> None:
    """Have each layer compute the norm of the next one's input, and the last one that of the LM head's."""
    for layer, following in itertools.pairwise(layers):
        if type(layer) is CardLayer and type(following) is CardLayer:
            layer.next_norm = following.parts.first_norm
    decoder = view.get_decoder()
    norm = decoder._modules.get("norm")
    last = layers[-1]
    if norm is None or type(last) is not CardLayer:
        return
    with suppress(KeepsModules):
        decoder.norm = CardNorm(norm, handover)
        last.next_norm = decoder.norm.weights


class _Trial:
    """A pass of a base whose layers have taken note of their calls, over a cache of noise."""

    def __init__(self, calls: list[LayerCall], cache: TreeCache):
        self.calls = calls
        self.cache = cache

    @torch.no_grad()
    def check(self, layer: CardLayer, call: LayerCall) -> None:
        """Raise KeepsModules unless ``layer`` computes what the modules of ``call`` do."""
        like = call.args[0]
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(like.shape, generator=generator).to(like)
        entries = self.cache.tree_layers[layer.parts.attention.place].entries
        noise = [torch.randn(entry.shape, generator=generator).to(entry) for entry in entries]
        added = []
        written = []
        for compute in (layer, call.layer):
            for entry, values in zip(entries, noise, strict=True):
                entry.copy_(values)
            added.append((compute(hidden, **call.kwargs) - hidden).float())
            written.append([entry.float() for entry in entries])
        results = [(added[0], added[1]), *zip(written[0], written[1], strict=True)]
        near = CLOSE[like.dtype]
        distances = [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in results]
        if not max(distances) <= near:
            raise KeepsModules(
                f"{type(call.layer).__name__} computes something else than what it is made of says: on noise "
                f"it differs by more than rounding, {near:g} of what it adds"
            )


@contextmanager
@torch.no_grad()
def _recorded_calls(view: CausalLM) -> Iterator[_Trial]:
    """How ``view`` calls its layers in a pass over a small tree, in two rows of different lengths."""
    cache = new_cache(view, len(TRIAL_LENGTHS))
    cache.lengths = torch.tensor(TRIAL_LENGTHS, device=cache.lengths.device)
    cache.longest = max(TRIAL_LENGTHS)
    topology = TRIAL_TREE.topology(cache.lengths.device)
    tokens = cache.lengths.new_zeros(len(TRIAL_LENGTHS), topology.num_nodes)
    calls = [LayerCall(layer) for layer in decoder_layers(view)]
    hooks = [call.layer.register_forward_hook(call.note, with_kwargs=True) for call in calls]
    try:
        view(**tree_inputs(view, tokens, topology, cache))
    finally:
        for hook in hooks:
            hook.remove()
    yield _Trial(calls, cache)
