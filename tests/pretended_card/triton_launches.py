"""Launches of kernels in Triton on pretended cards: each is one operator, which Triton's interpreter runs on
the memory of the host. Import it after ``pretended_card``, in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

import pretended_card

assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter is chosen when a kernel is defined"
_interpreted = InterpretedFunction.run


class Launch:
    """A kernel with its grid and its constants, in the place of an operator of torch: it may write to each of
    its tensors."""

    def __init__(self, kernel: InterpretedFunction, grid: Any, constants: dict[str, Any], args: tuple):
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        arguments = [
            SimpleNamespace(
                name=str(place), type="", alias_info=SimpleNamespace(is_write=isinstance(value, Tensor))
            )
            for place, value in enumerate(args)
        ]
        self._schema = SimpleNamespace(arguments=arguments, returns=[])

    def name(self) -> str:
        return f"triton::{self.kernel.fn.__name__}"

    def __call__(self, *args: Any) -> None:
        _interpreted(self.kernel, *args, grid=self.grid, warmup=False, **self.constants)


def _launched(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
    pretended_card._any_operator(Launch(kernel, grid, constants, args), *args)


InterpretedFunction.run = _launched
