"""Passes of a view as compiled programs; their libraries are kept on disk.

A pass has three parts: before the decoder layers (embedding, rotary angles), the layers, and after them
(norm, LM head). The layers are run in groups, most often of one kind, which differ only in their weights
(:mod:`medusa.engine.pass_parts`). Each kind is exported once, with its weights, keys and values as arguments
and with dynamic rows, nodes and slots, and compiled in some twenty seconds (:mod:`medusa.engine.programs`),
as are the two ends in ten. The
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa.base.attention import attention_windows, takes_seen_slots
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, decoder_layers, vocab_size
from medusa.base.passes import new_cache, prefill, tree_inputs, verify
from medusa.console import log_console
from medusa.engine.fused_layers import FusedLayers
from medusa.engine.libraries import NO_COMPILER, LibraryError, digest_of, found_compiler, kept_library
from medusa.engine.pass_parts import CachePart, LayerGroup, parts_of, tensors_in
from medusa.engine.programs import Part, Program
from medusa.engine.weights.experts import PackedExperts
from medusa.engine.weights.memory import give_back_freed_memory
from medusa.engine.weights.products import JoinedLinear, PackedMatmul
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

VECTOR = 16
"""Floats in the widest vector of a processor."""
ROUNDING_FACTOR = 8
"""Largest allowed ratio of the distance between compiled passes and the view's to the distance between the
view's own passes when the last bit of the embeddings changes. On three families of full width it was 0.7 to
1.3 times: 1e-6 of the largest logit, and 1e-4 in int8, where steps are rounded to other sides."""


def layers_unsupported_reason(view: CausalLM) -> str | None:
    """The requirement of :class:`CompiledPass` that ``view`` does not meet; None without any."""
    config = view.config.get_text_config(decoder=True)
    if not takes_seen_slots(config):
        return f"attention that the kernels compute, got {config._attn_implementation!r}"
    layers = decoder_layers(view)
    modules = list(layers.modules())
    experts = [module for module in modules if isinstance(module, PackedExperts)]
    packed = {id(weight) for each in experts for weight in each.experts.parameters()}
    stacked = [weight for weight in layers.parameters() if weight.dim() > 2 and weight.shape[1] > 1]
    if any(id(weight) not in packed for weight in stacked):  # a convolution of one channel has 1 there
        return "experts in a form that the kernels compute"
    widths = [len(module.weight) for module in modules if isinstance(module, JoinedLinear)]
    widths += [module.width for module in modules if isinstance(module, PackedMatmul)]
    widths += [each.out_of.num_inputs for each in experts]
    odd = [width for width in widths if width % VECTOR]
    return f"widths that are multiples of {VECTOR}, got {odd[0]}" if odd else None


class CompiledPass:
    """The passes of ``view``, computed by libraries from the cache directory, or compiled first; without a
    compiler by operators of ours, one after the other (:mod:`medusa.engine.fused_layers`).

    Raises:
        ValueError: a part cannot be exported, or its compiled code computes something else.
    """

    def __init__(self, view: CausalLM):
        self.view = view
        self._windows = attention_windows(view)
        parts = parts_of(view)
        digest = digest_of(*(str(path) for path in parts.compiled))
        refusal = kept_library(f"{parts.before.name}-refused", digest).with_suffix(".txt")
        if refusal.exists():
            raise ValueError(refusal.read_text())
        new = [part for part in parts.compiled.values() if not part.path.exists()]
        self.is_fused = bool(new) and found_compiler() is None
        """Whether no compiler is installed: the layers are operators of ours, and the rest runs as it is."""
        for part in () if self.is_fused else new:
            part.compile()
        are_code = parts.ends_are_code or self.is_fused
        self._before = Program(parts.before.module, None if are_code else parts.before)
        self._after = Program(parts.after.module, None if are_code else parts.after)
        if self.is_fused:
            self._groups = _fused(parts.groups)
            log_console().print(
                f"layers run as operators, a tenth to a fifth slower: {NO_COMPILER}",
                style="dim",
                soft_wrap=True,
            )
        else:
            self._groups = [(Program(part.module, part), group) for part, group in parts.groups]
        self._window_sizes = parts.window_sizes
        if new and not self.is_fused:
            try:
                self._check_same()
            except ValueError as error:
                for part in new:
                    part.path.unlink()
                refusal.write_text(str(error))  # not to be compiled again at each start
                raise
        del parts
        give_back_freed_memory()  # of the passes that told the parts

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
        """As :func:`medusa.base.passes.verify` of ``base``, which is the view."""
        arguments = tree_inputs(base, tokens, topology, cache, first_node, self._windows)
        inputs = [tensor.contiguous() for tensor in tensors_in(arguments)]
        pass_tensors = [*inputs, *self._before(inputs)]
        first_group = self._groups[0][1]
        hidden = pass_tensors[first_group.takes[0]]
        outputs: list[Tensor] = []  # of each layer
        of_cache = [tensor.contiguous() for tensor in cache.program_inputs(self._window_sizes)]
        for program, group in self._groups:
            taken = [hidden, *(pass_tensors[place] for place in group.takes[1:]), *of_cache]
            kept = _kept_parts(cache, group)
            for held, part in kept:
                held.fill(part.sizes, hidden)
                taken += held.program_inputs()
            results = iter(program(taken))
            outputs += itertools.islice(results, len(group.parts))
            hidden = outputs[-1]
            for held, part in kept:
                held.take_results([*itertools.islice(results, part.num_results)])
        select = _all_nodes(*tokens.shape) if select is None else select.contiguous()
        last, logits = self._after([hidden, select, *inputs])
        if layers:
            last = torch.cat([last, *(outputs[layer - 1] for layer in layers)], dim=-1)
        return last, logits

    def _check_same(self) -> None:
        """Raise ValueError unless the programs give the logits of the view."""
        expected = self._trial(verify)
        with _last_bits_moved(self.view):
            rounded = self._trial(verify)
        rounding = float((rounded - expected).abs().max())
        distance = float((self._trial(self.verify) - expected).abs().max())
        if not distance <= ROUNDING_FACTOR * max(rounding, torch.finfo(expected.dtype).eps):
            raise ValueError(
                f"compiled passes of {type(self.view).__name__} give other logits than the model: they "
                f"differ by {distance:.1e}, and rounding explains {rounding:.1e}; use step='general'"
            )

    @torch.no_grad()
    def _trial(self, run: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """Logits (B, 1 + N + N, V) after two prompts, of a tree below them, and of one below two of its
        nodes, or one."""
        tree = CandidateTree.from_paths([(0,), (1,), (0, 0)])
        ids = torch.randint(vocab_size(self.view), (2, 28), generator=torch.Generator().manual_seed(0))
        cache = new_cache(self.view, 2)
        _, after_prompt = prefill(self.view, ids[:, :20], torch.tensor([20, 13]), cache, run=run)
        _, after_nodes = run(self.view, ids[:, 20:24], tree.topology("cpu"), cache)
        cache.commit(torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 1]))
        _, after_more = run(self.view, ids[:, 24:], tree.topology("cpu"), cache)
        return torch.cat([after_prompt[:, None], after_nodes, after_more], dim=1)


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


def _kept_parts(cache: TreeCache, group: LayerGroup) -> list[tuple[Any, CachePart]]:
    """What the layers of ``group`` keep in ``cache``, as far as they use it."""
    held = itertools.chain.from_iterable(cache.parts[group.layers])
    parts = itertools.chain.from_iterable(group.parts)
    return [(each, part) for each, part in zip(held, parts, strict=True) if part.sizes]


@functools.lru_cache(64)
def _all_nodes(num_rows: int, num_nodes: int) -> Tensor:
    """(B, N) long: 0 to N - 1 in each row."""
    return torch.arange(num_nodes).repeat(num_rows, 1)


def _fused(groups: Sequence[tuple[Part, LayerGroup]]) -> list[tuple[Any, LayerGroup]]:
    """The groups without a compiler; the first of each class of layers is tried.

    Raises:
        LibraryError: these need one.
    """
    tried: set[type] = set()
    fused = []
    for part, group in groups:
        classes = group.classes
        try:
            fused.append((FusedLayers(part, is_tried=classes <= tried), group))
        except ValueError as error:
            raise LibraryError(
                f"{NO_COMPILER}; without one, layers run as operators of ours, and these {error}"
            ) from None
        tried |= classes
    return fused


def library_paths(view: CausalLM) -> list[Path]:
    """Where the libraries of a view's passes are, or will be."""
    return list(parts_of(view).compiled)
