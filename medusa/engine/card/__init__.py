"""Kernels for a CUDA card, in Triton, which comes with torch for CUDA; ``engine="packed"`` asks for them.

No card has run them yet. They were tried in Triton's interpreter and compiled for four generations of cards,
so ``engine="auto"`` takes none of them; ``scripts/on_gpu.py`` asks a card about each.

    support.py           whether they can run here, and the base that computes with them
    fused_layer.py       a decoder layer as ten launches, known by its modules and tried against them
    row_kernels.py       a residual sum with a norm; a gate with its activation
    rotary_kernel.py     rotary angles, and keys and values that go to the cache
    attention_kernel.py  attention of the nodes of a tree over the cache
    joined_weights.py    linear layers of one input as one product
    stored_blocks.py     matrices of a GGUF file in its own bits
    block_kernels.py     products with these, and rows of them as numbers
    block_modules.py     linear layers and embeddings that hold them
    file_loading.py      a GGUF file as a base that holds them

Modules here but ``support.py`` and ``stored_blocks.py`` import Triton, so they are imported where they are
used.
"""
