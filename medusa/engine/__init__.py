"""How the base model's layers are executed, chosen by one argument, ``engine=``.

    engine        what runs                                      needs                      the text is
    eager         the model as loaded: any device and            nothing                    the model's own
                  precision, quantised, sharded
    packed        float32 weights, packed for this processor     float32 on a CPU, oneDNN   as with eager
    int8          int8 weights with a scale per output channel,  as packed, and sdpa        the int8 model's
                  int8 activations with a scale per row          attention
    auto          packed where it applies, eager elsewhere       nothing                    as with eager

``auto`` never changes what a model says, so it never quantises and never casts:

    the base is                                           auto runs it
    float32, wholly on a CPU, its weights plain           packed
    bfloat16 or float16 on a CPU                          eager
    on an accelerator, in any precision                   eager
    quantised already, or sharded over devices            eager
    given hooks, or a forward of its own, in any module   eager, also where they come after loading

Of those that change the text, a CPU runs ``int8`` fastest. Its bfloat16 instructions gain little on a model
as small as SmolLM2-135M: on one core, a step of 1 token took 0.93 of the time of ``packed`` in float32, and
one of 6 tokens 1.17 times it, against 0.6 and 0.8 in ``int8``.

In float32 and in int8 a tree gives the text that one token at a time gives on the same engine; in half
precision, whatever the weights, they may differ where two tokens tie. Drafts cannot change the text, so
under ``packed`` and ``int8`` Medusa heads compute in int8, and score the tokens of a token map so.

The two views compute layers that read one input as one product, norms in one call, and attention without
repeating the keys that several heads share; see ``views``, ``joined_linears`` and ``medusa.base.attention``.
Weights that are to lie quantised on any device are quantised when ``transformers`` loads the model; ``eager``
runs it so.

Threads are left at torch's default, one per physical core: the products of a decode step read every weight
once and wait for memory, which two threads of one core share. ``torch.set_num_threads`` changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from medusa.base.causal_lm import CausalLM
from medusa.choices import Engine
from medusa.engine.int8 import int8_view, missing_for_int8
from medusa.engine.packed import missing_for_packed, packed

_BUILDERS: dict[str, tuple[Callable[[CausalLM], str | None], Callable[[CausalLM], CausalLM]]] = {
    "packed": (missing_for_packed, packed),
    "int8": (missing_for_int8, int8_view),
}
"""Engine -> what it lacks to run a model (None: nothing), and the view of the model that it runs."""


QUANTISED_BYTES: dict[str, float] = {"int8": 1.0}
"""Engine that quantises, and so changes the text -> bytes of a weight in its linear layers."""


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
