"""Heads in the formats of other projects: export for serving, and import.

    name          written by             read by                    files
    vllm-medusa   medusa export          vLLM                       config.json, model.safetensors
    vllm-eagle3   medusa export          vLLM, SGLang, llama.cpp    config.json, model.safetensors
    speculators   medusa export          vLLM                       config.json, model.safetensors
    medusa        FasterDecoding/Medusa  medusa import, and others  config.json, medusa_lm_head.pt
    medusa-full   FasterDecoding/Medusa  medusa import              a whole model with medusa_head.* in it

EAGLE-3 formats (arXiv 2503.01840) hold one transformer layer (:mod:`medusa.interop.eagle3`). The others hold
plain Medusa heads (arXiv 2401.10774): each reads the base's last hidden state and nothing else. A format is a
:class:`~medusa.interop.protocol.ForeignFormat` and a line in :mod:`medusa.interop.conversion`. One strict
reader of each format serves ``medusa import`` and ``medusa check``, so a checked export is loaded by the
other project in the same way.
"""
