"""What a run says when it cannot go on, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from medusa.training.config.configuration import TrainingConfiguration


@contextmanager
def memory_advice(configuration: TrainingConfiguration) -> Iterator[None]:
    """Turns running out of memory, of a device's or the machine's, into a MemoryError that names the settings
    to lower."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            "there is not enough memory: lower tokens_per_batch (it is "
            f"{configuration.optimisation.tokens_per_batch}; raise gradient_accumulation_steps to make up "
            f"for it) or block_elements (it is {configuration.loss.block_elements})"
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch found no memory; on a CPU it says so in words only."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class FiniteWatch:
    """Remembers the first step whose numbers were not finite, without asking the device at every step."""

    def __init__(self, device: torch.device):
        self._bad_step = torch.zeros((), dtype=torch.long, device=device)

    def see(self, step: int, number: torch.Tensor) -> None:
        """``number`` () belongs to ``step``, counted from 1."""
        is_first = ~torch.isfinite(number) & (self._bad_step == 0)
        self._bad_step = torch.where(is_first, step, self._bad_step)

    def check(self, configuration: TrainingConfiguration) -> None:
        """Raise FloatingPointError when a number seen was not finite; waits for the device."""
        step = int(self._bad_step)
        if step:
            raise FloatingPointError(
                f"loss or gradient of step {step} is not finite; lower learning_rate (it is "
                f"{configuration.optimisation.learning_rate}), or train with precision=fp32 and "
                "base_dtype=float32"
            )
