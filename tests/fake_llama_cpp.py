"""A stand-in for llama-cpp-python's C interface: its next token follows from all tokens before it."""

import ctypes
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np

BATCH = 4
"""Most tokens of one decode, so that prompts are cut."""


def next_token(tokens, vocab_size):
    return (7 * sum(tokens) + len(tokens)) % vocab_size


class FakeLlamaCpp(ModuleType):
    """The functions that are used, under their names; ``read`` is what each decode was given."""

    def __init__(self, vocab_size):
        super().__init__("llama_cpp")
        self.__spec__ = ModuleSpec("llama_cpp", None)
        self.vocab_size, self.read, self.freed = vocab_size, [], []

    def llama_backend_init(self):
        pass

    def llama_model_default_params(self):
        return SimpleNamespace(n_gpu_layers=99)

    def llama_model_load_from_file(self, path, parameters):
        assert parameters.n_gpu_layers == 0
        with open(path, "rb") as file:
            return SimpleNamespace() if file.read(4) == b"GGUF" else None

    def llama_model_free(self, model):
        self.freed.append("model")

    def llama_model_get_vocab(self, model):
        return model

    def llama_vocab_n_tokens(self, vocab):
        return self.vocab_size

    def llama_context_default_params(self):
        return SimpleNamespace(n_ctx=0, n_threads=0, n_threads_batch=0)

    def llama_init_from_model(self, model, parameters):
        self.parameters = parameters
        return SimpleNamespace(num_slots=parameters.n_ctx, tokens=[])

    def llama_free(self, context):
        self.freed.append("context")

    def llama_n_ctx(self, context):
        return context.num_slots

    def llama_n_batch(self, context):
        return BATCH

    def llama_get_memory(self, context):
        return context

    def llama_memory_clear(self, memory, data):
        memory.tokens = []

    def llama_batch_get_one(self, tokens, count):
        return SimpleNamespace(token=tokens, n_tokens=count, logits=None)

    def llama_decode(self, context, batch):
        part = list(batch.token[: batch.n_tokens])
        if len(context.tokens) + len(part) > context.num_slots:
            return 1
        self.read.append(part)
        rows = []
        for token in part:
            context.tokens.append(token)
            rows.append(np.eye(self.vocab_size)[next_token(context.tokens, self.vocab_size)])
        context.logits = np.array(rows if batch.logits else rows[-1:], dtype=np.float32)
        return 0

    def llama_get_logits(self, context):
        return context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_get_logits_ith(self, context, row):
        assert row == -1
        return context.logits[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
