"""Drafts of Medusa heads, compiled for this processor and kept on disk.

A draft of heads is a few hundred operators, which take several times as long to call as to compute. Its
programs are compiled as the layers of a base are (:mod:`medusa.engine.programs`): one for greedy rows and one
for sampled rows, for each tree. Candidates that a rule wants drawn are drafted as before.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.acceptance.protocol import DraftKind
from medusa.base.causal_lm import embedding_weight
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import Draft, DraftContext, Drafter, StatelessDrafter
from medusa.engine.kernels import SOURCE
from medusa.engine.libraries import (
    check_library,
    compile_library,
    digest_of,
    kept_library,
)
from medusa.engine.programs import compiled_program, exported, open_program, weights_of
from medusa.trees.candidate_tree import TreeTopology

VERSION = 8
"""Of what is compiled: raise it with every change of what a draft computes."""
MIN_COLUMNS = 16
"""Columns of tokens that a library wants at least."""


LEAST_EQUAL = 0.5
"""Tokens of a compiled draft that must be the heads' own on trial: rounding decides those near a tie."""


class CompiledDrafter(StatelessDrafter):
    """``drafter``, whose drafts are compiled for the kinds of rows that :meth:`prepare` is told of."""

    context_only = False

    def __init__(self, drafter: HeadsDrafter):
        self.drafter, self.reads_layers = drafter, drafter.reads_layers
        self.needs_features = drafter.needs_features
        self._weights = weights_of(_Draft(drafter))
        self._libraries: dict[bool, Any] = {}  # by whether rows are sampled
        self._paths: dict[bool, Path] = {}

    def for_drafter(self, drafter: HeadsDrafter) -> CompiledDrafter:
        """The same libraries for ``drafter``, made as this one's own, which keeps to itself what it reads."""
        other = copy.copy(self)
        other.drafter, other._weights = drafter, weights_of(_Draft(drafter))
        return other

    def begin(self, num_rows: int, after: Drafter | None = None) -> None:
        self.drafter.begin(num_rows, after.drafter if isinstance(after, CompiledDrafter) else after)

    def keep_rows(self, rows: Tensor) -> None:
        self.drafter.keep_rows(rows)

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth

    def sampled_kind(self, wanted: DraftKind) -> DraftKind:
        return self.drafter.sampled_kind(wanted)

    def path(self, is_sampled: bool) -> Path:
        """Where the library for such rows is, or will be."""
        if is_sampled in self._paths:
            return self._paths[is_sampled]
        drafter = self.drafter
        depends_on = (
            drafter.heads.config,
            [(name, tuple(weight.shape), weight.dtype) for name, weight in self._weights.items()],
            type(drafter).__name__,
            drafter.tree.paths,
            getattr(drafter, "suffix_length", 0),
            drafter.beta,
            is_sampled,
            SOURCE.read_bytes(),
            VERSION,
        )
        digest = digest_of({}, embedding_weight(drafter.output_embedding).device, *depends_on)
        return self._paths.setdefault(is_sampled, kept_library("draft", digest))

    def prepare(self, is_sampled: bool) -> float:
        """Load the library for such rows, compiled first where it is not there; the seconds that it took."""
        began = time.perf_counter()
        if is_sampled not in self._libraries:
            path = self.path(is_sampled)
            self._compile(is_sampled, path)
            check_library(path)
            self._libraries[is_sampled] = open_program(path)
        return time.perf_counter() - began

    def draft(self, context: DraftContext) -> Draft:
        library = self._libraries.get(context.noise is not None)
        if context.sampled is not None or library is None:
            return self.drafter.draft(context)
        if self.needs_features:
            context = replace(context, hidden=self.drafter.read(context))
        return self._drafted(library, context)

    def _drafted(self, library: Any, context: DraftContext) -> Draft:
        tokens, *others = library.run([*self._weights.values(), *_inputs(context, self.drafter)])
        if isinstance(self.drafter, DynamicDrafter):
            *topology, worth = others
            return Draft(tokens, TreeTopology(*topology), worth=worth)
        return Draft(tokens, self.drafter.topology)

    def _compile(self, is_sampled: bool, path: Path) -> None:
        num_nodes = self.drafter.num_nodes
        text = f"compiling drafts of {num_nodes} nodes: about a minute, once; kept in {path.parent}"
        trial = self._trial(is_sampled)

        def check(made: Path) -> None:
            mine, theirs = self._drafted(open_program(made), trial), _draft_after_reading(self.drafter, trial)
            is_equal = mine.tokens.shape == theirs.tokens.shape and mine.tokens == theirs.tokens
            if not torch.as_tensor(is_equal).float().mean() >= LEAST_EQUAL:
                raise ValueError("the compiled draft is not what the heads draft; use step='general'")

        compile_library(path, text, lambda made: compiled_program(self._exported(trial), made), check)

    def _trial(self, is_sampled: bool) -> DraftContext:
        """What a step of two rows might begin with."""
        drafter, generator = self.drafter, torch.Generator().manual_seed(0)
        vocabulary, size = drafter.vocab_size, drafter.heads.config.hidden_size
        tokens = torch.randint(min(vocabulary, 50), (2, 3 * MIN_COLUMNS), generator=generator)
        lengths = torch.tensor([3 * MIN_COLUMNS, MIN_COLUMNS])
        width = size if self.needs_features else (1 + len(drafter.reads_layers)) * size
        noise = torch.rand(2, drafter.max_depth + 1, vocabulary, generator=generator)
        return DraftContext(
            root=tokens.gather(1, lengths[:, None] - 1)[:, 0],
            hidden=torch.randn(2, width, generator=generator),
            tokens=tokens,
            lengths=lengths,
            cache=None,  # type: ignore[arg-type]  # heads read none
            noise=noise if is_sampled else None,
            temperature=torch.tensor([0.5, 1.5])[:, None, None] if is_sampled else 1.0,
        )

    def _exported(self, trial: DraftContext) -> torch.export.ExportedProgram:
        rows, columns = torch.export.Dim("b", min=1), torch.export.Dim("s", min=MIN_COLUMNS)
        inputs = _inputs(trial, self.drafter)
        shapes: list[dict[int, Any]] = [{0: rows}, {0: rows}, {0: rows, 1: columns}, {0: rows}, {}]
        shapes += [{0: rows}] * (len(inputs) - len(shapes))
        return exported(_Draft(self.drafter).eval(), inputs, shapes)


def _draft_after_reading(drafter: HeadsDrafter, context: DraftContext) -> Draft:
    """A draft as a library makes it: heads that read the text have read it before."""
    return drafter.draft_from(context) if drafter.needs_features else drafter.draft(context)


def _inputs(context: DraftContext, drafter: HeadsDrafter) -> list[Tensor]:
    """What a library takes after the weights: see :class:`_Draft`."""
    tokens, rows = context.tokens, embedding_weight(drafter.output_embedding)
    if tokens.shape[1] < MIN_COLUMNS:
        tokens = F.pad(tokens, (0, MIN_COLUMNS - tokens.shape[1]))
    inputs = [context.root, context.hidden, tokens, context.lengths, rows.detach()]
    if context.noise is not None:
        temperature = torch.as_tensor(context.temperature, dtype=torch.float32)
        inputs += [context.noise, temperature.expand(len(tokens), 1, 1)]
    return [each.contiguous() for each in inputs]  # the strides of the trial's are those of the library


class _Draft(nn.Module):
    """Drafts as a function of tensors: (root, hidden, tokens, lengths, rows of the output embedding), and for
    sampled rows (noise, temperature (B, 1, 1)) -> (tokens, the tensors of a topology, and where the draft
    says it what nodes are worth)."""

    def __init__(self, drafter: HeadsDrafter):
        super().__init__()
        self._drafter = copy.copy(drafter)
        self.heads, self.embedding = drafter.heads, drafter.output_embedding

    def forward(self, *inputs: Tensor) -> Sequence[Tensor]:
        root, hidden, tokens, lengths, rows, *sampling = inputs
        self._drafter.output_embedding = _Rows(self.embedding, rows)  # type: ignore[assignment]
        noise, temperature = sampling or (None, 1.0)
        context = DraftContext(root, hidden, tokens, lengths, None, noise, temperature)  # type: ignore[arg-type]
        draft = _draft_after_reading(self._drafter, context)
        shape = draft.topology
        made = (draft.tokens, shape.parents, shape.depths, shape.ancestors, shape.lineage)
        return made if draft.worth is None else (*made, draft.worth)


@dataclass
class _Rows:
    """An output embedding whose rows are an input, so that no library holds a copy of them."""

    forward: Callable[[Tensor], Tensor]
    weight: Tensor
