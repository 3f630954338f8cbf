"""How the base model's layers are executed, chosen by one argument, ``engine=``.

    engine  what runs                                        needs                        the text is
    eager   the model as loaded: any device and precision,   nothing                      the model's own
            quantised, sharded
    packed  float32 weights, packed for this processor       float32 on a CPU, oneDNN     as with eager
    int8    int8 weights with a scale per output channel,    as packed, and sdpa          the int8 model's
            int8 activations with a scale per row            attention
    auto    packed where it applies, eager elsewhere         nothing                      as with eager

``auto`` never changes what a model says, so it never picks ``int8`` and never casts:

    the base is                                           auto runs it
    float32, wholly on a CPU, its weights plain           packed
    bfloat16 or float16 on a CPU                          eager
    on an accelerator, in any precision                   eager
    quantised already, or sharded over devices            eager

In float32 and in int8 a tree gives the text that one token at a time gives on the same engine; in half
precision the two may part where two tokens tie. Drafts cannot change the text, so under ``packed`` and
``int8`` Medusa heads compute in int8, and score the tokens of a token map so.

Both views compute layers that read one input as one product, norms in one call, and attention without
repeating the keys that several heads share; see ``siblings``, ``norms`` and ``medusa.attention``.

Threads are left at torch's default, one per physical core: the products of a decode step read every weight
once and wait for memory, which two threads of one core share. ``torch.set_num_threads`` changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from medusa.base import CausalLM
from medusa.engine.int8 import int8_view, missing_for_int8
from medusa.engine.packed import missing_for_packed, packed

Engine = Literal["auto", "eager", "packed", "int8"]
"""See the table above."""

_BUILDERS: dict[str, tuple[Callable[[CausalLM], str | None], Callable[[CausalLM], CausalLM]]] = {
    "packed": (missing_for_packed, packed),
    "int8": (missing_for_int8, int8_view),
}
"""Engine -> what it lacks to run a model (None: nothing), and the view of the model that it runs."""


def prepared_base(base: CausalLM, engine: Engine) -> CausalLM:
    """The model to decode with: ``base`` itself, or a view of it that shares its parameters.

    Raises:
        ValueError: unknown engine, or one that cannot run this model; the message says what is missing.
    """
    engine = resolved_engine(base, engine)
    if engine == "eager":
        return base
    missing, view_of = _BUILDERS[engine]
    if (lacks := missing(base)) is not None:
        raise ValueError(f"engine={engine!r} needs {lacks}; use engine='eager'")
    return view_of(base)


def resolved_engine(base: CausalLM, engine: Engine) -> Engine:
    """``engine``, or what "auto" stands for on this model.

    Raises:
        ValueError: unknown engine.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine must be one of {get_args(Engine)}, got {engine!r}")
    if engine == "auto":
        return "packed" if missing_for_packed(base) is None else "eager"
    return engine
