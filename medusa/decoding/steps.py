"""How decode steps are run, chosen by one argument, ``step=``.

    step      what runs                                            needs
    general   the loop of ``loop.py``, which reads the tokens of   nothing
              every step
    static    one function over tensors that keep their place      a drafter of heads, suffix match or both,
              and shape, which never waits for the device          or plain decoding; acceptance "exact", no
                                                                   stopping criteria, no logits processor that
                                                                   reads the text
    compiled  engine "packed" or "int8": the general loop, with    a C++ compiler, and sdpa attention
              a pass (``engine/compiled.py``) and drafts of
              heads (``drafters/compiled.py``) compiled ahead
              other engines: static, as torch.compile makes it     as static, and a model in one place that
                                                                   traces in one piece
    captured  the same, replayed as a CUDA graph                   as static, on one CUDA device

The tokens are the same. Models sharded over devices (``device_map``) run ``general`` and ``static``.

Compiling a whole step takes minutes for a large model, once for each tree and sampling setting, once more
when the cache first outgrows its slots and when the number of rows first changes; what Inductor has compiled
is kept on disk (``TORCHINDUCTOR_CACHE_DIR``), and the next process that needs it only traces. Capturing takes
as long as a few steps, once for each batch size, tree, sampling setting and number of slots. Where guessing
may pause (``pausing.py``), the step that does not draft is made too.
``DecodingStatistics.setup_seconds`` says what either took. A model keeps what it made for its last few
settings, and of a captured one the caches too, since a graph writes to the tensors it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from medusa.acceptance.sampling import PATH_FREE_PROCESSORS
from medusa.base.causal_lm import CausalLM
from medusa.choices import StepKind
from medusa.decoding.loop import StepResult, decode
from medusa.decoding.pausing import Pausing
from medusa.decoding.state import DecodeRequest
from medusa.decoding.static_loop import decode_static
from medusa.decoding.statistics import DecodingStatistics
from medusa.decoding.step_runners import StepRunners
from medusa.drafters.protocol import Drafter, StaticDrafter, host_bound_parts
from medusa.engine.compiled import missing_for_compiled_pass
from medusa.engine.views import holds_packed_weights


def decode_in_steps(
    step: StepKind,
    runners: StepRunners,
    drafter: Drafter,
    request: DecodeRequest,
    statistics: DecodingStatistics | None = None,
    pausing: Pausing | None = None,
) -> Iterator[StepResult]:
    """Decode ``request`` on the base of ``runners``, one :class:`StepResult` per forward pass.

    ``pausing`` decides which steps draft; without, every one.

    Raises:
        ValueError: such steps do not run on this base, or cannot decode this request.
    """
    runners.check(step, check_step)
    if step == "general":
        return decode(runners.base, drafter, request, statistics, pausing)
    if step == "compiled" and runners.compile_passes:
        statistics = DecodingStatistics() if statistics is None else statistics
        compiled, setup_seconds = runners.compiled_pass(drafter.reads_layers)
        if request.rule is None:  # others draw their candidates
            drafter, more_seconds = runners.compiled_drafter(drafter, request.seeds is not None)
            setup_seconds += more_seconds
        statistics.setup_seconds += setup_seconds
        return decode(runners.base, drafter, request, statistics, pausing, compiled)
    checked = static_drafter(step, drafter, request)
    return decode_static(step, runners, checked, request, statistics, pausing=pausing)


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
    return missing_for_compiled_pass(base) if holds_packed_weights(base) else None


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


def static_drafter(step: str, drafter: Drafter, request: DecodeRequest) -> StaticDrafter:
    """``drafter``, if steps of fixed shape can decode ``request`` with it.

    Raises:
        ValueError: they cannot; the message names ``step``, what is in the way, and what to use instead.
    """
    problem, instead = "", ""
    reading = [type(each).__name__ for each in request.processors if type(each) not in PATH_FREE_PROCESSORS]
    if host_bound := host_bound_parts(drafter):
        problem = f"{type(host_bound[0]).__name__}, which reads its drafts on the host"
        instead = "drafter='heads', 'dynamic-heads', 'suffix', unions of these or 'plain', or "
    elif request.acceptance == "typical" or request.rule is not None:
        problem, instead = f"acceptance={request.acceptance!r}", "acceptance='exact', or "
    elif reading:
        problem = f"logits processors that read the tokens before each node on the host: {', '.join(reading)}"
    elif request.criteria:
        problem = "stopping criteria (stop_strings are one), which are asked on the host after every token"
    if problem or not isinstance(drafter, StaticDrafter):
        raise ValueError(f"step={step!r} cannot work with {problem}; use {instead}step='general'")
    return drafter
