"""A server for tests that answers as vLLM does where it extracts hidden states: the states lie in files."""

from __future__ import annotations

import fcntl
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fake_endpoint import FakeEndpoint
from safetensors.torch import save_file
from torch import Tensor

_computing = threading.Lock()


@torch.no_grad()
def states_of(base: Any, tokens: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """States (n, layers, D) after so many layers, those after the last not normed; and the log-probabilities
    (V,) of the token that follows."""
    raw: list[Tensor] = []
    with _computing:
        hook = base.model.norm.register_forward_pre_hook(lambda _module, args: raw.append(args[0][0]))
        output = base(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        hook.remove()
    after = [*(states[0] for states in output.hidden_states[:-1]), raw[0]]
    return torch.stack([after[layer] for layer in layers], dim=1), output.logits[0, -1].log_softmax(-1)


def write_states(path: Path, base: Any, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """A file of vLLM, and what :func:`states_of` says of the token that follows."""
    states, following = states_of(base, tokens, layers)
    tensors = {"token_ids": torch.tensor(list(tokens)), "hidden_states": states.contiguous()}
    save_file(tensors, path)
    return following


class FakeVllm(FakeEndpoint):
    """Writes the states of ``base`` into ``directory``, half a moment after it has answered."""

    def __init__(self, base: Any, directory: Path, layers: Sequence[int], **options: Any):
        super().__init__(**options)
        self.base = base
        self.directory = directory
        self.layers = layers
        self._numbers = itertools.count()

    def refuses(self, request: dict[str, Any]) -> bool:
        return len(request["prompt"]) > 400

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        path = self.directory / f"cmpl-{self.server.server_port}-{next(self._numbers)}.safetensors"
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        following = states_of(self.base, request["prompt"], self.layers)[1]

        def write() -> None:
            write_states(path, self.base, request["prompt"], self.layers)
            lock.close()

        threading.Timer(0.005, write).start()
        token = int(following.argmax())
        choice = {"token_ids": [token], "logprobs": {"token_logprobs": [float(following[token])]}}
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}
