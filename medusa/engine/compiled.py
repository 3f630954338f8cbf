"""A view's forward pass over the nodes of a tree, compiled for this processor and kept on disk.

The pass of a view on a CPU (``packed`` or ``int8``) is exported with dynamic rows, nodes, slots and capacity
and compiled (:mod:`medusa.engine.libraries`): one library serves every number of each.

Attention is written as sums here, which Inductor turns into loops. A loop adds in the same order for any
number of queries, rows and masked slots, so in int8 too a node's logits do not depend on the tree that it
stands in, and float64 is not needed for it. The vector and the scalar form of a function such as exp differ
in their last bit, so slots come in whole vectors, and int8 wants the model's widths to be whole vectors too.

Prompts are chains of nodes, and read by the same pass; long ones in float32 by the view's modules, whose long
products are faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from medusa.base.attention import (
    FLOAT64_ATTENTION,
    GROUPED_ATTENTION,
    attention_windows,
    node_positions,
    tree_attention_masks,
)
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import (
    CausalLM,
    context_length,
    copy_sharing_parameters,
    layers_of,
    new_cache,
    output_embedding,
    prefill,
    seen_hidden,
    verify,
    vocab_size,
)
from medusa.engine.int8 import Int8Linear
from medusa.engine.libraries import (
    code_of,
    compile_library,
    digest_of,
    kept_library,
    missing_compiler,
    open_library,
    traceable_products,
)
from medusa.engine.views import JoinedLinear
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

LOOP_ATTENTION = "medusa_loop_sdpa"
"""An attention implementation of ``transformers``: :func:`loop_attention`."""
VERSION = 4
"""Of what is compiled: raise it with every change of what a pass computes."""
VECTOR = 16
"""Floats in the widest vector of a processor."""
CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose factors depend on how long the text is: a choice that no compiled pass can make."""
PROMPT_TOKENS = 128
"""Tokens of prompts, in all rows, that a compiled pass reads at a time."""
LONG_PROMPT = 192
"""Prompts in float32 with more tokens than this are read by the view's modules. On SmolLM2-135M, two cores,
64, 128 and 256 tokens take a compiled pass 199, 299 and 581 ms, the modules 263, 364 and 468. In int8 it is
faster for any, and must read all: modules round otherwise, and a row's text would depend on the prompts
beside it."""
TOLERANCE = 1e-2
"""Largest difference of logits between the compiled pass and the view, over the largest logit: int8 rounds
what differs in the last bit to another step."""


def missing_for_compiled_pass(view: CausalLM) -> str | None:
    """What :func:`compiled_pass` lacks to compile the pass of ``view``; None when nothing."""
    if (lacks := missing_compiler()) is not None:
        return lacks
    config = view.config.get_text_config(decoder=True)
    if config._attn_implementation not in (GROUPED_ATTENTION, FLOAT64_ATTENTION):
        return f"attn_implementation='sdpa', got {config._attn_implementation!r}"
    given = getattr(config, "rope_parameters", None) or {}
    for parameters in (given, *(each for each in given.values() if isinstance(each, dict))):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in CHANGING_ROPE:
            return f"rotary embeddings that do not change with the length of the text, got {kind!r}"
    odd = [width for width in _widths(view) if width % VECTOR] if _is_int8(view) else []
    return f"widths that are multiples of {VECTOR} for engine='int8', got {odd[0]}" if odd else None


def _widths(view: CausalLM) -> list[int]:
    """Of what a row is while it passes through the model."""
    config = view.config.get_text_config(decoder=True)
    of_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = (
        module for module in view.get_decoder().modules() if isinstance(module, (Int8Linear, JoinedLinear))
    )
    return [of_head, *(width for layer in layers for width in layer.weight.shape)]


@dataclass(frozen=True)
class CompiledPass:
    """The forward pass of one view, in the place of :func:`medusa.base.causal_lm.verify`."""

    base: CausalLM
    """The view."""
    layers: tuple[int, ...]
    """Decoder layers whose states it gives beside the last (:func:`medusa.base.causal_lm.seen_hidden`)."""
    library: Any
    """Torch's runner of the shared library."""
    entry_sizes: tuple[tuple[int, int], ...]
    """Heads and width of the keys of each layer, then of its values, as a cache holds them."""
    setup_seconds: float = 0.0
    """What it took to compile or load."""

    def gives(self, layers: Sequence[int]) -> bool:
        """Whether it gives the states of all these layers."""
        return set(layers) <= set(self.layers)

    def verify(
        self,
        base: CausalLM,
        tokens: Tensor,
        topology: TreeTopology,
        cache: TreeCache,
        select: Tensor | None = None,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.verify` of all nodes on ``base``, which must be the view."""
        assert base is self.base, "compiled for another view"
        cache.begin(tokens.shape[1])
        num_slots = -(-cache.num_slots // VECTOR) * VECTOR
        positions = node_positions(cache.lengths, topology, cache.num_positions or context_length(base))
        for layer, (heads, width), (_, value_width) in zip(
            cache.tree_layers, self.entry_sizes[::2], self.entry_sizes[1::2], strict=True
        ):
            if not layer.is_initialized:
                nothing = torch.empty(len(tokens), heads, 0, width + value_width)
                layer.lazy_initialization(*nothing.split([width, value_width], dim=-1))
            layer.reserve(num_slots)
        keys, values = zip(*(layer.entries for layer in cache.tree_layers), strict=True)
        assert all(each.is_contiguous() for each in (*keys, *values)), "written to in place"
        inputs = _inputs(tokens, positions, cache.slots, topology, num_slots, select)
        hidden, logits = self.library.run([*inputs, *keys, *values])
        return layers_of(hidden, self.layers, layers), logits

    def prefill(
        self, base: CausalLM, tokens: Tensor, lengths: Tensor, cache: TreeCache, *, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.prefill` on ``base``, which must be the view."""
        longest = int((lengths - cache.lengths).max())
        if longest > LONG_PROMPT and not _is_int8(base):
            return prefill(base, tokens, lengths, cache, layers=layers)
        chunk = max(VECTOR, PROMPT_TOKENS // len(tokens))
        return prefill(base, tokens, lengths, cache, chunk, layers, self.verify)


def compiled_pass(view: CausalLM, layers: Sequence[int] = (), path: Path | None = None) -> CompiledPass:
    """The pass of ``view``, from the cache directory, compiled first where it is not there.

    ``path`` is its :func:`library_path`, for callers that know it.

    Raises:
        ValueError: the view cannot be exported, or what was compiled computes something else.
    """
    began, path = time.perf_counter(), path or library_path(view, layers)
    _compile(view, tuple(layers), path)
    loaded = _loaded(view, tuple(layers), open_library(path))
    return replace(loaded, setup_seconds=time.perf_counter() - began)


def library_path(view: CausalLM, layers: Sequence[int] = ()) -> Path:
    """Where the library of a view is kept: the name tells apart all that it depends on."""
    kind = "int8" if _is_int8(view) else "float32"
    code = (type(view).__name__, code_of(view))
    depends_on = (view.config.to_json_string(), *code, kind, tuple(layers), VERSION)
    digest = digest_of(view.state_dict(), view.device, *depends_on)
    return kept_library(f"{view.config.model_type}-{kind}", digest)


def _compile(view: CausalLM, layers: tuple[int, ...], path: Path) -> None:
    """Export, compile, hold against ``view``, and keep as ``path``, unless it is there."""
    if path.exists():
        return
    text = f"compiling {type(view).__name__} for this processor: some minutes, once; kept in {path.parent}"
    compile_library(
        path, text, lambda: _exported(view, layers), lambda made: _check_same(_loaded(view, layers, made))
    )


def _loaded(view: CausalLM, layers: tuple[int, ...], library: Any) -> CompiledPass:
    cache = new_cache(view, 1)
    with torch.no_grad():  # one token tells how large the entries of a cache are
        prefill(view, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long), cache)
    entries = [each for layer in cache.tree_layers for each in layer.entries]
    sizes = tuple((each.shape[1], each.shape[3]) for each in entries)
    return CompiledPass(view, layers, library, sizes)


def _exported(view: CausalLM, layers: tuple[int, ...]) -> torch.export.ExportedProgram:
    """The pass of ``view`` as a program of tensors."""
    rows, nodes, slots, capacity, selected = (torch.export.Dim(name, min=1) for name in "bnscm")
    cache = new_cache(view, 2)
    prompts = torch.zeros(2, 200, dtype=torch.long)
    prefill(view, prompts, torch.tensor([200, 190]), cache)
    keys, values = (list(each) for each in zip(*(layer.entries for layer in cache.tree_layers), strict=True))
    topology = CandidateTree.chain(3).topology("cpu")
    cache.begin(4)
    tokens, positions = torch.zeros(2, 4, dtype=torch.long), node_positions(cache.lengths, topology)
    select = torch.zeros(2, 3, dtype=torch.long)
    inputs = _inputs(tokens, positions, cache.slots, topology, cache.num_slots, select)
    of_nodes, of_slots = {0: rows, 1: nodes}, {0: rows, 2: capacity}
    return torch.export.export(
        _ExportedPass(view, layers).eval(),
        (*inputs, keys, values),
        dynamic_shapes=(
            of_nodes,
            of_nodes,
            of_nodes,
            {0: rows, 1: nodes, 2: nodes},
            {0: slots},
            {0: rows, 1: selected},
            [of_slots] * len(keys),
            [of_slots] * len(values),
        ),
        strict=False,
    )


def _inputs(
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    topology: TreeTopology,
    num_slots: int,
    select: Tensor | None,
) -> list[Tensor]:
    """What :class:`_ExportedPass` takes before keys and values."""
    rows, nodes = tokens.shape
    every_slot = torch.empty(num_slots, dtype=torch.bool)  # tells their number
    if select is None:
        select = torch.arange(nodes).expand(rows, -1)
    of_rows = (positions.expand(rows, -1), slots, topology.ancestors.expand(rows, -1, -1))
    return [each.contiguous() for each in (tokens, *of_rows, every_slot, select)]


def _check_same(compiled: CompiledPass) -> None:
    """Raise ValueError unless the compiled pass gives the logits of the view it was made of."""
    view, tree = compiled.base, CandidateTree.from_paths([(0,), (1,), (0, 0)])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size(view), (2, 24), generator=generator)
    given = []
    for fill, run in ((prefill, verify), (compiled.prefill, compiled.verify)):
        cache = new_cache(view, 2)
        with torch.no_grad():
            _, after_prompt = fill(view, ids[:, :20], torch.tensor([20, 13]), cache)
            _, after_nodes = run(view, ids[:, 20:], tree.topology("cpu"), cache)
        given.append(torch.cat([after_prompt[:, None], after_nodes], dim=1))
    apart = float((given[0] - given[1]).abs().max() / given[0].abs().max())
    if not apart <= TOLERANCE:
        raise ValueError(
            f"the compiled pass of {type(view).__name__} gives other logits than the model ({apart:.1e} of "
            "the largest); use step='general'"
        )


class _ExportedPass(nn.Module):
    """The pass as a function of tensors.

    tokens, positions, slots (B, N) long, ancestors (B, N, N) bool, something (S,), select (B, M) long: the
    nodes whose logits are wanted; then keys and values (B, heads, C, width) of each layer, which are written
    to in place -> hidden (B, N, ...), logits (B, M, V).
    """

    def __init__(self, view: CausalLM, layers: tuple[int, ...]):
        super().__init__()
        self.model, self.layers, self.windows = _traceable(view), layers, attention_windows(view)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        ancestors: Tensor,
        every_slot: Tensor,
        select: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        num_slots, lengths = every_slot.shape[0], slots[:, 0]
        cache = Cache(
            layers=[_Entries(key, value, slots, num_slots) for key, value in zip(keys, values, strict=True)]
        )

        def wanted(hidden: Tensor) -> Tensor:
            return hidden.gather(1, select[..., None].expand(-1, -1, hidden.shape[2]))

        depths = positions - lengths[:, None]
        topology = TreeTopology(depths, depths, ancestors, depths[..., None])  # masks read the middle two
        masks = tree_attention_masks(lengths, num_slots, topology, self.windows, torch.float32)
        with seen_hidden(self.model, wanted, self.layers) as seen:
            output = self.model(
                input_ids=tokens,
                attention_mask=_realized(masks),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        return seen.last, output.logits


def _realized(masks: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Masks that exist in memory: otherwise every loop that reads them computes them anew."""
    if isinstance(masks, dict):
        return {kind: torch.ops._inductor_test.realize(mask) for kind, mask in masks.items()}
    return torch.ops._inductor_test.realize(masks)


class _Entries(CacheLayerMixin):
    """Keys and values of one layer while a pass is exported."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, num_slots: int):
        super().__init__()
        self.entries, self.slots, self.num_slots = (keys, values), slots, num_slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the entries are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values (B, heads, N, width); all that it may read."""
        rows, heads = torch.arange(self.slots.shape[0]), torch.arange(key_states.shape[1])
        where = (rows[:, None, None], heads[:, None], self.slots[:, None])
        for entries, states in zip(self.entries, (key_states, value_states), strict=True):
            entries.index_put_(where, states)  # Inductor writes in place here, and copies all for scatter_
        keys, values = self.entries
        return keys[:, :, : self.num_slots], values[:, :, : self.num_slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_slots, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _traceable(view: CausalLM) -> CausalLM:
    """The modules of ``view``, with linear layers and attention that Inductor compiles."""
    model = traceable_products(copy_sharing_parameters(view), int8=_is_int8(view))
    model.set_attn_implementation(LOOP_ATTENTION)
    return model


def _is_int8(view: CausalLM) -> bool:
    return isinstance(output_embedding(view), Int8Linear)


def loop_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as sums of products, for Inductor: query (B, H, N, width), key and value (B, H', S, width),
    attention_mask (B, 1, N, S) that is added -> (B, N, H, width).

    Queries and exponentials are made to exist in memory: otherwise every loop computes them anew. Sums over
    slots go slot by slot, in vectors that run across something else: where an accepted node moves to another
    slot, only zeros come between. The vectors of a value are sums of their own, which one loop adds side by
    side. Heads come first, since threads share the outermost loops, and one row may be all rows there are.
    """
    assert attention_mask is not None
    batch, num_heads, num_nodes, width = query.shape
    num_groups = key.shape[1]
    queries = query.reshape(batch, num_groups, num_heads // num_groups, num_nodes, 1, width)
    queries = torch.ops._inductor_test.realize(queries.permute(1, 2, 0, 3, 4, 5).contiguous())
    keys, values = (
        each.transpose(0, 1)[:, None, :, None] for each in (key, value)
    )  # (H', 1, B, 1, S, width)
    scores = (queries * keys).sum(-1) * (width**-0.5 if scaling is None else scaling)
    scores = scores + attention_mask[:, 0]  # (H', G, B, N, S)
    weights = torch.ops._inductor_test.realize((scores - scores.amax(-1, keepdim=True)).exp())[..., None]
    parts = values.split(VECTOR, dim=-1)
    sums = [(weights * part).sum(-2) for part in parts]
    total = (weights * (parts[0] == parts[0])).sum(-2)[
        ..., :1
    ]  # of ones that Inductor does not know to be ones
    output = torch.cat([each / total for each in sums], dim=-1)  # (H', G, B, N, width)
    return output.permute(2, 3, 0, 1, 4).reshape(batch, num_nodes, num_heads, -1).contiguous(), None


AttentionInterface.register(LOOP_ATTENTION, loop_attention)
AttentionMaskInterface.register(LOOP_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
