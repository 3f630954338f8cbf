"""How the base model's layers are executed, chosen by one argument, ``engine=``.

    engine        what runs                                      needs                       the text is
    eager         the model as loaded: any device and            nothing                     the model's own
                  precision, quantised, sharded
    packed        the kernels, every weight exactly, in the      float32 on a CPU; kernels   as with eager
                  narrowest type or in twelve bits               of a wheel, or a compiler
    packed,       kernels in Triton (medusa/engine/card), which  one CUDA card; Triton       as with eager
    on a card     no card has run yet; a GGUF file in its bits
    int8          the kernels, int8 weights with a scale per     as packed                   the int8 model's
                  output channel
    auto          packed where it applies, eager elsewhere       nothing                     as with eager

``auto`` never changes a model's text, so it never quantises and never casts:

    the base is                                           auto runs it
    float32, wholly on a CPU, its weights plain           packed
    bfloat16 or float16 on a CPU                          eager: dtype="float32" makes it packed
    on an accelerator, in any precision                   eager
    quantised already, or sharded over devices            eager
    given hooks, or a forward of its own, in any module   eager, also where they come after loading

A base that is loaded by its name on a CPU is packed while it is read, and holds each weight once
(:mod:`medusa.engine.weights.load`). It runs only on its engine: for ``eager``, hooks, adapters or training
load it with ``engine="eager"``.

The kernels (:mod:`medusa.engine.kernels`) compute in float32, whatever the type of the weights, and give a
node bit-identical logits in a single pass, in a tree and in a batch. The router of a mixture of experts, and
experts of an unusual form, are ``transformers``' own code, whose sums depend on the number of rows; there,
and on eager, text is equal except where two tokens tie to the last bits. Drafts cannot change the text, so
Medusa heads compute with int8 weights, and score the tokens of a token map so.

The views compute layers with the same input as one product, and norms in one call; see ``views``. To quantise
weights on any device, let ``transformers`` quantise them when it loads the model; ``eager`` runs it.

Threads are left at torch's default, one per physical core: the products of a decode step read every weight
once and wait for memory, which two threads of one core share. ``torch.set_num_threads`` changes it.
"""

QUANTISED = ("int8",)
"""Engines that quantise, and so change the text."""
