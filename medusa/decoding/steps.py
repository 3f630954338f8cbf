"""How decode steps are run, chosen by one argument, ``step=``.

    step      what runs                                            needs
    general   the base's modules; the tokens of every step are     nothing
              read on the host
    static    one function over tensors that keep their place      a drafter of heads, suffix match or both,
              and shape, which never waits for the device          or plain decoding; acceptance "exact", no
              (``static.py``)                                      stopping criteria, no logits processor that
                                                                   reads the text
    compiled  as general, with a pass (``engine/compiled.py``)     engine "packed" or "int8" on a CPU, a C++
              and drafts of heads (``drafters/compiled.py``)       compiler, and sdpa attention
              compiled ahead and kept on disk
    captured  static, replayed as a CUDA graph                     as static, on one CUDA device

The tokens are the same. Models sharded over devices (``device_map``) run ``general`` and ``static``.

Capturing takes as long as a few steps, once for each batch size, tree, sampling setting and number of slots,
with drafts and without where guessing may pause (``pausing.py``); ``DecodingStatistics.setup_seconds`` says
what it took. A model keeps what it captured for its last few settings, and the caches too, since a graph
writes to the tensors it was captured with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from medusa.base.causal_lm import CausalLM
from medusa.choices import StepKind
from medusa.decoding.state import DecodeRequest
from medusa.decoding.static import StaticRows, StepRunner, keep_newest, static_drafter
from medusa.decoding.step import Forward
from medusa.drafters.compiled import CompiledDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import Drafter
from medusa.engine.compiled import CompiledPass, compiled_pass, library_path, missing_for_compiled_pass
from medusa.engine.views import holds_packed_weights


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
            return made.for_drafter(drafter), sum(map(made.prepare, are_sampled))

    def make(self, drafters: Sequence[Drafter]) -> float:
        """Have the libraries of the pass and of ``drafters`` on disk and loaded; the seconds that it took."""
        seconds = self.compiled_pass()[1]
        return seconds + sum(self.compiled_drafter(each, False, True)[1] for each in drafters)

    def paths(self, drafters: Sequence[Drafter]) -> list[Path]:
        """Where the libraries of the pass and of ``drafters`` are, or will be."""
        heads = [self._drafter_to_compile(each) for each in drafters if isinstance(each, HeadsDrafter)]
        drafts = [each.path(is_sampled) for each in heads for is_sampled in (False, True)]
        return [self._pass_path, *drafts]

    def _drafter_to_compile(self, drafter: HeadsDrafter) -> CompiledDrafter:
        key = drafter.static_key
        made = self._drafters.pop(key, None) or CompiledDrafter(drafter, self._pass_path.stem)
        keep_newest(self._drafters, key, made)
        return made

    @property
    def _pass_path(self) -> Path:
        return self._library_path(tuple(sorted(self.layers)))

    def _library_path(self, layers: tuple[int, ...]) -> Path:
        """See :func:`medusa.engine.compiled.library_path`, which reads all weights for it."""
        if layers not in self._paths:
            self._paths[layers] = library_path(self.base, layers)
        return self._paths[layers]


@dataclass(frozen=True)
class Way:
    """How the steps of one request, or of a batch, are run."""

    forward: Forward
    drafter: Drafter
    static: StaticRows | None = None
    """What runs whole steps; None where they are the general one."""
    setup_seconds: float = 0.0


class Steps:
    """The ways to run the steps of one base; what is compiled or captured for it is kept.

    ``layers`` are the decoder layers that compiled passes give the states of.
    """

    def __init__(self, base: CausalLM, layers: Sequence[int] = ()):
        self.base = base
        self.libraries = Libraries(base, layers)
        self.captured: dict[Hashable, StepRunner] = {}
        self._checked: set[str] = set()

    def way(
        self,
        step: StepKind,
        drafter: Drafter,
        request: DecodeRequest,
        host_sync_interval: int | None = None,
    ) -> Way:
        """How to decode ``request`` with ``drafter``; ``host_sync_interval`` as for :class:`StaticRows`.

        Raises:
            ValueError: such steps do not run on this base, or cannot decode this request.
        """
        if step not in self._checked:
            check_step(step, self.base)
            self._checked.add(step)
        if step == "general":
            return Way(Forward(self.base, drafter.reads_layers), drafter)
        if step == "compiled":
            compiled, seconds = self.libraries.compiled_pass(drafter.reads_layers)
            if request.rule is None:  # others draw their candidates
                drafter, more = self.libraries.compiled_drafter(drafter, request.seeds is not None)
                seconds += more
            return Way(Forward(self.base, drafter.reads_layers, compiled), drafter, setup_seconds=seconds)
        checked = static_drafter(step, drafter, request)
        captured = self.captured if step == "captured" else None
        rows = StaticRows(self.base, checked, captured, host_sync_interval)
        return Way(Forward(self.base, drafter.reads_layers), checked, rows)

    @property
    def can_compile(self) -> bool:
        """Whether ``compiled`` steps run here, on libraries that are compiled ahead."""
        return missing_for_compiled(self.base) is None

    def forward_of_many(self, step: StepKind, layers: tuple[int, ...]) -> Forward:
        """The passes of a batch that requests join, with the states of ``layers``.

        Raises:
            ValueError: steps of this kind have one shape for a whole answer.
        """
        if step == "general":
            return Forward(self.base, layers)
        if step != "compiled":
            raise ValueError(
                f"step={step!r} runs steps of one shape, and a batch that rows join changes its own; use "
                "step='general', or 'compiled' with engine='packed' or 'int8' on a CPU"
            )
        return Forward(self.base, layers, self.libraries.compiled_pass(layers)[0])


def check_step(step: str, base: CausalLM) -> None:
    """Raise ValueError, with the reason, unless steps of this kind run on ``base``."""
    if step not in get_args(StepKind):
        raise ValueError(f"step must be one of {get_args(StepKind)}, got {step!r}")
    lacks = _MISSING[step](base) if step in _MISSING else None
    if lacks is not None:
        raise ValueError(f"step={step!r} needs {lacks}; use step='static', which any model runs")


def missing_for_compiled(base: CausalLM) -> str | None:
    """What a compiled step lacks on ``base``; None when nothing."""
    if _is_sharded(base):
        return "a model in one place, and this one is sharded (device_map)"
    if not holds_packed_weights(base):
        return "engine='packed' or 'int8', which compile their pass ahead on a CPU"
    return missing_for_compiled_pass(base)


def missing_for_captured(base: CausalLM) -> str | None:
    """What a captured step lacks on ``base``; None when nothing."""
    devices = sorted({str(parameter.device) for parameter in base.parameters()})
    if _is_sharded(base) or len(devices) > 1:
        return f"a model on one CUDA device, and this one is sharded over {', '.join(devices)} (device_map)"
    if not devices[0].startswith("cuda"):
        return f"a model on a CUDA device, got one on {devices[0]}"
    return None


_MISSING: dict[str, Callable[[CausalLM], str | None]] = {
    "compiled": missing_for_compiled,
    "captured": missing_for_captured,
}


def _is_sharded(base: CausalLM) -> bool:
    return len(set(getattr(base, "hf_device_map", {}).values())) > 1
