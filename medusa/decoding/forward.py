"""Forward: the only place that knows whether a pass is run by the base's modules or by a compiled library."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, prefill, verify
from medusa.drafters.compiled import CompiledDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import Drafter
from medusa.engine.compiled import CompiledPass, compiled_pass, library_path
from medusa.trees.candidate_tree import TreeTopology

T = TypeVar("T")
MAX_KEPT = 16
"""Settings whose libraries, graphs or compiled steps a model keeps, of each kind."""


@dataclass(frozen=True)
class Forward:
    """The passes of ``base``, with the states of ``layers`` (:func:`medusa.base.causal_lm.seen_hidden`)."""

    base: CausalLM
    layers: tuple[int, ...] = ()
    compiled: CompiledPass | None = None
    """A library for ``base``, run in the place of its modules."""

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: TreeCache) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.prefill`."""
        run = self.compiled.prefill if self.compiled else prefill
        return run(self.base, tokens, lengths, cache, layers=self.layers)

    def verify(self, tokens: Tensor, topology: TreeTopology, cache: TreeCache) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.verify`."""
        run = self.compiled.verify if self.compiled else verify
        return run(self.base, tokens, topology, cache, layers=self.layers)


class Libraries:
    """What is compiled ahead for one base, its pass and the drafts of heads; kept for the calls to come."""

    def __init__(self, base: CausalLM, layers: Sequence[int] = ()):
        self.base = base
        self.layers = frozenset(layers)
        """Decoder layers that a compiled pass gives the states of, whatever else a drafter reads."""
        self._lock = threading.Lock()
        self._pass: CompiledPass | None = None
        self._drafters: dict[Hashable, CompiledDrafter] = {}
        self._paths: dict[tuple[int, ...], Path] = {}

    def compiled_pass(self, layers: Sequence[int] = ()) -> tuple[CompiledPass, float]:
        """The base's pass with the states of ``layers``, and the seconds that getting it took."""
        with self._lock:
            if self._pass is not None and self._pass.gives(layers):
                return self._pass, 0.0
            given = tuple(sorted(self.layers.union(layers)))
            self._pass = compiled_pass(self.base, given, self._library_path(given))
            return self._pass, self._pass.setup_seconds

    def compiled_drafter(self, drafter: Drafter, *are_sampled: bool) -> tuple[Drafter, float]:
        """``drafter``, and the seconds that this took: one of Medusa heads with compiled drafts for rows that
        are sampled, or not."""
        if not isinstance(drafter, HeadsDrafter):
            return drafter, 0.0
        with self._lock:
            made = self._drafter_to_compile(drafter)
            return made.over(drafter), sum(map(made.prepare, are_sampled))

    def make(self, drafters: Sequence[Drafter]) -> float:
        """Have the libraries of the pass and of ``drafters`` on disk and loaded; the seconds that it took."""
        seconds = self.compiled_pass()[1]
        return seconds + sum(self.compiled_drafter(each, False, True)[1] for each in drafters)

    def paths(self, drafters: Sequence[Drafter]) -> list[Path]:
        """Where the libraries of the pass and of ``drafters`` are, or will be."""
        heads = [self._drafter_to_compile(each) for each in drafters if isinstance(each, HeadsDrafter)]
        drafts = [each.path(is_sampled) for each in heads for is_sampled in (False, True)]
        return [self._library_path(tuple(sorted(self.layers))), *drafts]

    def _drafter_to_compile(self, drafter: HeadsDrafter) -> CompiledDrafter:
        key = drafter.static_key
        base_digest = self._library_path(tuple(sorted(self.layers))).stem
        made = self._drafters.pop(key, None) or CompiledDrafter(drafter, base_digest)
        keep_newest(self._drafters, key, made)
        return made

    def _library_path(self, layers: tuple[int, ...]) -> Path:
        """See :func:`medusa.engine.compiled.library_path`, which reads all weights for it."""
        if layers not in self._paths:
            self._paths[layers] = library_path(self.base, layers)
        return self._paths[layers]


def keep_newest(kept: dict[Hashable, T], key: Hashable, value: T) -> None:
    """Add ``value`` as the newest; the oldest beyond :data:`MAX_KEPT` go."""
    kept[key] = value
    for oldest in list(kept)[:-MAX_KEPT]:
        kept.pop(oldest, None)  # another thread may have dropped it
