"""A view's forward pass over the nodes of a tree, compiled for this processor and kept on disk.

Run as modules, a pass of a small model is thousands of operators, and calling them takes longer than what
they compute. Here the pass of a view on a CPU (``packed`` or ``int8``) is exported, compiled by Inductor into
one shared library with the weights inside, in the layout of its matrix kernels, and kept: compiling takes
minutes, loading a second or two. One library serves every number of rows, nodes and slots.

Attention is written as sums here, which Inductor turns into loops. A loop adds in the same order for any
number of queries, rows and masked slots, so in int8 too a node's logits do not depend on the tree that it
stands in, and float64 is not needed for it. The vector and the scalar form of a function such as exp differ
in their last bit, so slots come in whole vectors, and int8 wants the model's widths to be whole vectors too.

Prompts are chains of nodes, and read by the same pass; long ones in float32 by the view's modules, whose long
products are faster.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
import zipfile
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
from medusa.engine.int8 import Digits, Int8Linear, int8_product, quantised
from medusa.engine.joined_linears import JoinedLinear
from medusa.engine.packed import PackedLinear
from medusa.files import replaced_file
from medusa.hardware import device_name
from medusa.places import cache_home
from medusa.progress import log_console
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

LOOP_ATTENTION = "medusa_loop_sdpa"
"""An attention implementation of ``transformers``: :func:`loop_attention`."""
VERSION = 2
"""Of what is compiled: raise it with every change of what a pass computes."""
COMPILERS = ("g++", "clang++", "c++")
VECTOR = 16
"""Floats in the widest vector of a processor."""
CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose factors depend on how long the text is: a choice that no compiled pass can make."""
INDUCTOR_OPTIONS = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
"""Weights become constants, and products Inductor's own kernels, which read few rows twice as fast as
oneDNN's. Where it has none, oneDNN's remain."""
GCC_OPTIONS = (
    "-fno-tree-loop-distribute-patterns"
    " --param max-completely-peel-times=64 --param max-completely-peeled-insns=2000"
)
"""Keep the sums of a product of five rows and more in registers. g++ 12 makes one ``memset`` of the loop that
sets them to zero, and leaves what a ``memset`` has touched in memory."""
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
    if not any(map(shutil.which, COMPILERS)):
        return f"a C++ compiler ({', '.join(COMPILERS)}), and none is installed"
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
        masks = _masks(base, cache.lengths, num_slots, topology)
        positions = node_positions(cache.lengths, topology, cache.num_positions or context_length(base))
        for layer, (heads, width), (_, value_width) in zip(
            cache.tree_layers, self.entry_sizes[::2], self.entry_sizes[1::2], strict=True
        ):
            if not layer.is_initialized:
                nothing = torch.empty(len(tokens), heads, 0, width + value_width)
                layer.lazy_initialization(*nothing.split([width, value_width], dim=-1))
            layer.reserve(num_slots)
        keys, values = zip(*(layer.entries for layer in cache.tree_layers), strict=True)
        positions = positions.expand(len(tokens), -1)
        assert all(each.is_contiguous() for each in (*keys, *values)), "written to in place"
        inputs = [each.contiguous() for each in (tokens, positions, cache.slots, *masks.values())]
        hidden, logits = self.library.run([*inputs, *keys, *values])
        if select is not None:
            logits = logits.gather(1, select[..., None].expand(-1, -1, logits.shape[2]))
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
    if not path.exists():
        _compile(view, tuple(layers), path)
    loaded = _loaded(view, tuple(layers), path)
    return replace(loaded, setup_seconds=time.perf_counter() - began)


def library_path(view: CausalLM, layers: Sequence[int] = ()) -> Path:
    """Where the library of a view is kept: the name tells apart all that it depends on."""
    digest = hashlib.sha256()
    for name, tensor in view.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    runs_on = (device_name(view.device), platform.machine(), torch.backends.cpu.get_cpu_capability())
    depends_on = (
        view.config.to_json_string(),
        type(view).__name__,
        _is_int8(view),
        tuple(layers),
        torch.__version__,
        torch.get_num_threads(),
        runs_on,
        VERSION,
    )
    digest.update(repr(depends_on).encode())
    name = "int8" if _is_int8(view) else "float32"
    return cache_home() / "compiled" / f"{view.config.model_type}-{name}-{digest.hexdigest()[:24]}.so"


def _compile(view: CausalLM, layers: tuple[int, ...], path: Path) -> None:
    """Export, compile, hold against ``view``, and keep as ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    console = log_console()
    text = f"compiling {type(view).__name__} for this processor: some minutes, once; kept in {path.parent}"
    console.print(text, style="dim", soft_wrap=True)
    with console.status("compiling", spinner="dots"), replaced_file(path) as partial:
        package = partial.with_suffix(".pt2")
        try:
            _export(view, layers, package)
            with zipfile.ZipFile(package) as archive:
                (name,) = (each for each in archive.namelist() if each.endswith(".so"))
                with archive.open(name) as source, partial.open("wb") as target:
                    shutil.copyfileobj(source, target)
        finally:
            package.unlink(missing_ok=True)
        partial.chmod(0o755)
        _check_same(_loaded(view, layers, partial))


def _loaded(view: CausalLM, layers: tuple[int, ...], path: Path) -> CompiledPass:
    cache = new_cache(view, 1)
    with torch.no_grad():  # one token tells how large the entries of a cache are
        prefill(view, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long), cache)
    entries = [each for layer in cache.tree_layers for each in layer.entries]
    sizes = tuple((each.shape[1], each.shape[3]) for each in entries)
    return CompiledPass(view, layers, torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1), sizes)


@torch.no_grad()
def _export(view: CausalLM, layers: tuple[int, ...], package: Path) -> None:
    """Write the pass of ``view`` as a package of AOTInductor."""
    _let_packing_be_traced()
    rows, nodes, slots, capacity = (torch.export.Dim(name, min=1) for name in ("b", "n", "s", "c"))
    cache = new_cache(view, 2)
    prompts = torch.zeros(2, 200, dtype=torch.long)
    prefill(view, prompts, torch.tensor([200, 190]), cache)
    keys, values = (list(each) for each in zip(*(layer.entries for layer in cache.tree_layers), strict=True))
    topology = CandidateTree.chain(3).topology("cpu")
    cache.begin(4)
    masks = _masks(view, cache.lengths, cache.num_slots, topology)
    tokens, positions = torch.zeros(2, 4, dtype=torch.long), node_positions(cache.lengths, topology)
    of_nodes, of_slots = {0: rows, 1: nodes}, {0: rows, 2: capacity}
    exported = torch.export.export(
        _ExportedPass(view, layers, list(masks)).eval(),
        (tokens, positions, cache.slots, list(masks.values()), keys, values),
        dynamic_shapes=(
            of_nodes,
            of_nodes,
            of_nodes,
            [{0: rows, 2: nodes, 3: slots}] * len(masks),
            [of_slots] * len(keys),
            [of_slots] * len(values),
        ),
        strict=False,
    )
    options = {**INDUCTOR_OPTIONS, **_compiler_options()}
    torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=options)


def _compiler_options() -> dict[str, str]:
    """:data:`GCC_OPTIONS` for Inductor, which has one setting that reaches the compiler's command line."""
    is_gcc = Path(os.environ.get("CXX", COMPILERS[0])).name.startswith("g++")
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    has_setting = hasattr(torch._inductor.config.cpp, "march")
    return {"cpp.march": f"native {GCC_OPTIONS}"} if is_gcc and is_x86 and has_setting else {}


def _masks(view: CausalLM, lengths: Tensor, num_slots: int, topology: TreeTopology) -> dict[str, Tensor]:
    """What is added to the scores of each type of layer, (B, 1, N, S)."""
    windows = attention_windows(view)
    masks = tree_attention_masks(lengths, num_slots, topology, windows, torch.float32)
    return masks if isinstance(masks, dict) else {next(iter(windows)): masks}


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
    """The pass as a function of tensors: (tokens, positions, slots, masks, keys, values) -> (hidden, logits).

    Keys and values (B, heads, C, width) of each layer are written to in place.
    """

    def __init__(self, view: CausalLM, layers: tuple[int, ...], kinds: list[str]):
        """``kinds`` are those of the masks, in order."""
        super().__init__()
        self.model, self.layers, self.kinds = _traceable(view), layers, kinds

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        masks: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        num_slots = masks[0].shape[3]
        cache = Cache(
            layers=[_Entries(key, value, slots, num_slots) for key, value in zip(keys, values, strict=True)]
        )
        with seen_hidden(self.model, layers=self.layers) as seen:
            output = self.model(
                input_ids=tokens,
                attention_mask=dict(zip(self.kinds, masks, strict=True)) if len(masks) > 1 else masks[0],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        return seen.last, output.logits


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
    is_int8, model = _is_int8(view), copy_sharing_parameters(view)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (PackedLinear, Int8Linear, JoinedLinear)):
                setattr(parent, name, (_Int8Linear if is_int8 else _Float32Linear)(child.weight, child.bias))
    model.set_attn_implementation(LOOP_ATTENTION)
    return model


def _is_int8(view: CausalLM) -> bool:
    return isinstance(output_embedding(view), Int8Linear)


class _Float32Linear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class _Int8Linear(nn.Module):
    """What :class:`medusa.engine.int8.Int8Linear` computes; Inductor packs the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.codes: Tensor
        self.scales: Tensor
        self.zeros: Tensor
        codes, scales = quantised(weight.detach())
        self.digits, self.weight, self.bias = Digits(2), weight, bias
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales / self.digits.largest_code)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        packed = torch.ops.onednn.qlinear_prepack(self.codes, None)
        return int8_product(x, packed, self.scales, self.zeros, self.bias, self.digits)


def _let_packing_be_traced() -> None:
    """Tell torch the shape of what oneDNN packs, which it has no rule for."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("onednn::qlinear_prepack", "Meta"):

        @torch.library.register_fake("onednn::qlinear_prepack")
        def _shape(weight: Tensor, shape: Any) -> Tensor:
            return weight.new_empty(weight.shape[1], weight.shape[0])


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
