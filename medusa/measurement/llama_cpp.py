"""llama.cpp to compare with: the base model in a GGUF file, run in this process.

It runs llama.cpp's own C interface through llama-cpp-python, with llama.cpp's own defaults: keys and values
in half precision, flash attention where available, prompts in parts of 512 tokens. It gets the same token ids
as all systems and the same number of threads as torch, and its cache is cleared before each answer.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

INSTALL = "pip install '.[llama-cpp]', which compiles llama.cpp for this machine in some minutes"
LEAST_SLOTS = 2048
"""Tokens that a context holds at least, so that it is seldom made anew."""
MOST_LOGITS = 256
"""Positions whose logits are held at a time."""


def llama_cpp_unsupported_reason() -> str | None:
    """The missing requirement of llama.cpp; None without any."""
    if importlib.util.find_spec("llama_cpp") is None:
        return f"llama-cpp-python is not installed: {INSTALL}"
    return None


class LlamaCpp:
    """The model in a GGUF file, run by llama.cpp on the CPU, one row at a time.

    Args:
        vocab_size: tokens of the base that it is compared with.

    Raises:
        ImportError: llama-cpp-python is not installed.
        FileNotFoundError: there is no such file.
        ValueError: llama.cpp cannot load it, or it is a model with another vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int):
        if not path.is_file():
            raise FileNotFoundError(f"llama_cpp names {str(path)!r}, which is no file; give a GGUF file")
        lacks = llama_cpp_unsupported_reason()
        if lacks is not None:
            raise ImportError(lacks)
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        self.path = path
        self._llama = llama_cpp
        self._context: Any = None
        self._free_context: Callable[[], Any] = lambda: None
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ValueError(
                f"llama.cpp cannot load {path}: it must be a whole GGUF file of an architecture that the "
                "installed llama.cpp knows; convert or download it again, or update llama-cpp-python"
            )
        weakref.finalize(self, llama_cpp.llama_model_free, self._model)  # at exit, while callbacks still live
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        if self.vocab_size != vocab_size:
            raise ValueError(
                f"{path} has {self.vocab_size} tokens and the base has {vocab_size}, so it is another model; "
                "give a GGUF file that was converted from this base"
            )

    def tokens(self, prompt: Sequence[int], max_new_tokens: int, ends: Collection[int]) -> Iterator[int]:
        """The greedy answer to ``prompt``, as it is written; the last token may be one of ``ends``."""
        self._forget(len(prompt) + max_new_tokens)
        step = self._llama.llama_n_batch(self._context)
        for start in range(0, len(prompt), step):
            self._decode(prompt[start : start + step])
        for number in range(max_new_tokens):
            logits = self._llama.llama_get_logits_ith(self._context, -1)
            token = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            yield token
            if token in ends or number + 1 == max_new_tokens:
                return
            self._decode([token])

    def logits(self, tokens: Sequence[int], tokens_per_pass: int | None = None) -> Iterator[Tensor]:
        """The logits after each of ``tokens``, in parts (T', V). Many are read in a pass, as in prefill; with
        ``tokens_per_pass`` 1 as in decoding."""
        self._forget(len(tokens))
        step = min(tokens_per_pass or MOST_LOGITS, MOST_LOGITS)
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            self._decode(part, with_all_logits=True)
            logits = self._llama.llama_get_logits(self._context)
            yield torch.from_numpy(np.ctypeslib.as_array(logits, (len(part), self.vocab_size)).copy())

    def _forget(self, num_tokens: int) -> None:
        """An empty context of at least ``num_tokens`` slots."""
        llama = self._llama
        if self._context is None or llama.llama_n_ctx(self._context) < num_tokens:
            self._free_context()
            parameters = llama.llama_context_default_params()
            parameters.n_ctx = max(LEAST_SLOTS, num_tokens)
            parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
            self._context = llama.llama_init_from_model(self._model, parameters)
            if not self._context:
                raise MemoryError(
                    f"llama.cpp could not make a context of {parameters.n_ctx} tokens for {self.path}; "
                    "shorten prompts or answers"
                )
            self._free_context = weakref.finalize(self, llama.llama_free, self._context)
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _decode(self, tokens: Sequence[int], with_all_logits: bool = False) -> None:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)  # a batch only points to it
        batch = self._llama.llama_batch_get_one(ids, len(tokens))
        if with_all_logits:
            batch.logits = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
        status = self._llama.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama.cpp could not decode {len(tokens)} tokens of {self.path}: {status}")


def answered_by(model: LlamaCpp, ends: Collection[int]) -> Any:
    """``model`` with the arguments of ``generate`` that a benchmark uses.

    The result takes input_ids (1, T) long, ``max_new_tokens`` and a streamer, and returns ``sequences``.
    """

    def answer(
        input_ids: Tensor, max_new_tokens: int, do_sample: bool, streamer: Any = None, **others: Any
    ) -> GenerateDecoderOnlyOutput:
        if do_sample:
            raise ValueError("llama.cpp draws from another generator; compare it at temperature 0")
        if streamer is not None:
            streamer.put(input_ids)
        new_ids: list[int] = []
        for token in model.tokens(input_ids[0].tolist(), max_new_tokens, ends):
            new_ids.append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
        sequences: Any = torch.cat([input_ids, torch.tensor([new_ids])], dim=1)
        return GenerateDecoderOnlyOutput(sequences=sequences)

    return answer
