"""The adapter of a base model while it is trained: new, switched off for a while, taken out at the end."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from medusa.base.causal_lm import CausalLM, decoder_layers, output_embedding
from medusa.heads.adapter import Adapter, injected, linear_sizes, peft_library
from medusa.heads.fingerprint import BaseFingerprint
from medusa.training.config.options import JointOptions


class TrainedAdapter:
    """An adapter in a base model's layers. It starts as nothing: the second factor of each layer is zero."""

    def __init__(self, base: CausalLM, options: JointOptions, seed: int):
        """Wraps layers of ``base``, whose own weights stay frozen.

        Raises:
            ImportError: peft is not installed.
            ValueError: ``lora_targets`` names something that cannot be adapted.
        """
        config = peft_library().LoraConfig(
            task_type="CAUSAL_LM",
            r=options.lora_rank,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=target_layers(base, options.lora_targets),
        )
        base.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._wrapped = injected(base, config)
        self.base = base
        self.parameters: dict[str, nn.Parameter] = {
            name: each for name, each in base.named_parameters() if each.requires_grad
        }
        """The adapter's own, by name."""
        base.eval()
        if options.gradient_checkpointing:
            for layer in decoder_layers(base):
                layer.forward = self._recomputed(layer.forward)

    def _recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, of which only the input is kept for the backward pass."""

        def run(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            both = (nullcontext(), self.dropping_out())  # the second time as in the first
            return checkpoint(forward, *arguments, use_reentrant=False, context_fn=lambda: both, **named)

        return run

    @property
    def num_parameters(self) -> int:
        return sum(each.numel() for each in self.parameters.values())

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within the block the base is what it was before."""
        self._wrapped.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self._wrapped.base_model.enable_adapter_layers()

    @contextmanager
    def dropping_out(self) -> Iterator[None]:
        """Within the block ``lora_dropout`` drops; the base itself stays in evaluation mode."""
        dropouts = [
            each
            for name, each in self.base.named_modules()
            if isinstance(each, nn.Dropout) and ".lora_dropout." in name
        ]
        for each in dropouts:
            each.train()
        try:
            yield
        finally:
            for each in dropouts:
                each.eval()

    def taken_out(self) -> Adapter:
        """A copy of the adapter as it stands, on the CPU, as it is saved."""
        weights = peft_library().get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        config = self._wrapped.peft_config["default"].to_dict()
        return Adapter(
            {key: _plain(value) for key, value in config.items()} | {"inference_mode": True},
            {name: each.detach().cpu().clone().contiguous() for name, each in weights.items()},
            BaseFingerprint.of(self.base),
        )


def target_layers(base: CausalLM, targets: list[str]) -> list[str]:
    """Full names of the linear layers that ``targets``, the ends of their names, ask for; none asks for all.

    Raises:
        ValueError: a target is no linear layer, or is the output embedding.
    """
    unembedding = output_embedding(base)
    linear = [name for name, each in base.named_modules() if linear_sizes(each) and each is not unembedding]
    if not targets:
        return linear
    chosen: list[str] = []
    for target in targets:
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matching:
            raise ValueError(f"lora_targets {target!r} {_why_not(base, target, linear)}")
        chosen += [name for name in matching if name not in chosen]
    return chosen


def _why_not(base: CausalLM, target: str, linear: list[str]) -> str:
    named = [each for name, each in base.named_modules() if name == target or name.endswith(f".{target}")]
    if any(each is output_embedding(base) for each in named):
        return "is the output embedding, which the heads share: it must stay as it is; leave it out"
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    nearest = difflib.get_close_matches(target, known, n=1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(known)}"
    return f"matches no linear layer of {type(base).__name__}; {advice}"


def _plain(value: Any) -> Any:
    """``value`` as JSON has it."""
    if isinstance(value, (set, tuple)):
        return sorted(value) if isinstance(value, set) else list(value)
    return str(value.value) if hasattr(value, "value") else value
