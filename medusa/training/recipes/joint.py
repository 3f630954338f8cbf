"""Joint training (Medusa-2): Medusa heads together with a LoRA adapter on the base, in two stages.

    first    L = lambda_0 * L_heads              the base as it was, no gradient beyond the heads
    then     L = L_base + lambda_0 * L_heads     arXiv 2401.10774, section 2.2.2

    L_base = sum over targets of KL(p || q) / num_targets

where q is the adapted base's distribution and p the distribution of the same model with the adapter switched
off (self-distillation); or L_base is the cross-entropy with the text's own tokens. lambda_0 is used in the
first stage too, so that the second moments of the optimiser are of one scale throughout. The base runs once
in the first stage, and in the second once with the adapter and, for self-distillation, once without: there is
one base in memory. The second stage warms up like the first, for the adapter only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medusa.base.causal_lm import CausalLM, decoder_layers, lm_head, vocab_size
from medusa.heads.adapter import Adapter, injected, linear_sizes, peft_library
from medusa.heads.fingerprint import BaseFingerprint
from medusa.training.config import JointOptions, TrainingConfiguration
from medusa.training.data.batching import MicroBatch, PaddedBatch, collate
from medusa.training.data.dataset import Documents
from medusa.training.losses import (
    Alignment,
    FusedLoss,
    LossSums,
    TargetBlock,
    Teacher,
    add_metrics,
    expected,
    teacher_of,
)
from medusa.training.recipes.recipe import HeadsLoss, Recipe, RunState, new_heads
from medusa.training.states.apart import hidden_states_apart
from medusa.training.states.stored import HiddenStateSource


class JointRecipe(Recipe):
    """Medusa heads, and from some point on an adapter of the base with them."""

    loss: _JointLoss
    result = "heads and adapter"

    def __init__(self, configuration: TrainingConfiguration, states: HiddenStateSource, training: Documents):
        """The base gets the adapter into its layers."""
        base = states.base
        options = configuration.joint
        heads = new_heads(configuration, states, training)
        self.trained_adapter = TrainedAdapter(base, options, configuration.data.seed)
        block_elements = configuration.loss.block_elements
        base_loss = BaseLoss(teacher_of(base), vocab_size(base), options.base_objective, block_elements)
        heads_loss = HeadsLoss(heads, configuration.loss)
        loss = _JointLoss(heads_loss, self.trained_adapter, base_loss, options.lambda_0)
        super().__init__(configuration, states, heads, loss)

    def describe(self, training: Documents) -> str:
        options = self.configuration.joint
        return (
            f"{super().describe(training)}, and a LoRA adapter of {self.trained_adapter.num_parameters:,} "
            f"parameters; only heads for {options.joint_warmup_fraction:.0%} of the run, heads_weight "
            f"{options.lambda_0:g}"
        )

    def read(self, documents: Documents, name: str, batch: MicroBatch) -> tuple[_JointBatch, Alignment]:
        """No states: the loss runs the base itself."""
        padded = collate(documents, batch)
        device = self.states.base.device
        own = padded.aligned(num_heads=0)  # the base has a column for every token
        return _JointBatch(padded.to(device), own.to(device)), self.aligned(padded)

    def check_launch(self, accelerator: Accelerator) -> None:
        plugin = accelerator.state.deepspeed_plugin
        stage = 0 if plugin is None else plugin.zero_stage
        if accelerator.distributed_type == DistributedType.FSDP or stage == 3:
            raise ValueError(
                "joint=true needs the adapter whole on every process, since the base that it sits in is; "
                "launch with plain data parallelism or DeepSpeed ZeRO-2 instead of FSDP or ZeRO-3"
            )

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """The heads' parameters, then the adapter's."""
        return [list(self.heads.parameters()), list(self.trained_adapter.parameters.values())]

    def begin_step(self, optimiser: torch.optim.Optimizer, peak: float, state: RunState) -> str | None:
        """Once the second stage has begun it stays."""
        options = self.configuration.joint
        note = None
        of_heads, of_adapter = optimiser.param_groups
        is_joint = state.adapter_steps > 0 or state.progress >= options.joint_warmup_fraction
        if is_joint and state.adapter_steps == 0:
            # The adapter's moments start here: the zeros of the first stage say nothing. They are kept under
            # what the optimiser steps: under ZeRO-2 a part of the adapter, in one piece.
            for parameter in of_adapter["params"]:
                optimiser.state.pop(parameter, None)
            note = f"step {state.step}: from here on the adapter is trained with the heads"
        warmup_steps = self.configuration.optimisation.warmup_steps
        rise = min(1.0, (state.adapter_steps + 1) / max(1, warmup_steps))
        of_heads["lr"] = peak * options.head_learning_rate_multiplier
        of_adapter["lr"] = peak * rise if is_joint else 0.0
        self.loss.is_joint = is_joint
        state.adapter_steps += is_joint
        return note

    def count_targets(self, documents: Documents) -> np.ndarray:
        """(n, K + 1) long: targets of the base's own row, then of each depth, in each document."""
        own = np.array([documents[index].is_label[1:].sum() for index in range(len(documents))], np.int64)
        return np.concatenate([own[:, None], super().count_targets(documents)], axis=1)

    def zero_metrics(self, device: torch.device) -> _JointSums:
        return _JointSums(LossSums.zeros(self.heads.num_heads, device), _BaseSums.zeros(device))

    def adapter(self) -> Adapter:
        return self.trained_adapter.taken_out()

    def closing_report(self, metrics: Mapping[str, float]) -> str:
        """Facts for users about the text of a jointly trained base."""
        if "held_out/base_perplexity" not in metrics:
            return "no held-out documents, so what became of the base was not measured"
        before, now, divergence, agreement = (
            metrics[f"held_out/base_{each}"]
            for each in ("perplexity_before", "perplexity", "divergence", "agreement")
        )
        return (
            f"the base's perplexity on held-out answers: {before:.4f} before, {now:.4f} with the adapter; "
            f"its first choice is the same at {agreement:.1%} of their tokens, KL {divergence:.4f}. With the "
            "adapter the model writes its own text, not the base's: decoding is exact with respect to the "
            "adapted model"
        )


class _BaseSums(NamedTuple):
    """Sums over targets of the base's own row, () each."""

    cross_entropy: Tensor  # of the adapted base and the text
    reference_cross_entropy: Tensor  # of the base without the adapter and the text
    divergence: Tensor  # KL(without || with)
    num_agreeing: Tensor  # long; targets at which both have the same first guess
    num_targets: Tensor  # long
    num_compared: Tensor  # long; targets at which the base without the adapter was asked

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> _BaseSums:
        sums = (torch.zeros((), device=device) for _ in range(3))
        counts = (torch.zeros((), dtype=torch.long, device=device) for _ in range(3))
        return cls(*sums, *counts)

    def metrics(self, name: str) -> dict[str, float]:
        """The change of the base: perplexity on label tokens now and before, and the distance of its text.

        Empty while the adapter is not trained.
        """
        metrics = {}
        if int(self.num_targets):
            metrics[f"{name}/base_perplexity"] = float((self.cross_entropy / self.num_targets).exp())
        num_compared = int(self.num_compared)
        if num_compared:
            before = (self.reference_cross_entropy / num_compared).exp()
            metrics[f"{name}/base_perplexity_before"] = float(before)
            metrics[f"{name}/base_divergence"] = float(self.divergence / num_compared)
            metrics[f"{name}/base_agreement"] = float(self.num_agreeing / num_compared)
        return metrics


class _JointSums(NamedTuple):
    """The sums of heads and base."""

    heads: LossSums
    base: _BaseSums

    def metrics(self, name: str) -> dict[str, float]:
        return self.heads.metrics(name) | self.base.metrics(name)


@dataclass(frozen=True)
class BaseLoss:
    """The loss of the adapted base's own next-token row."""

    project: Teacher
    """States (C, D) -> the base's logits (C, V)."""
    vocab_size: int
    """V."""
    objective: Literal["kl", "ce"] = "kl"
    block_elements: int = 2**24
    """Logits held at a time."""

    def __call__(
        self, hidden: Tensor, reference: Tensor | None, own: Alignment, num_targets: Tensor
    ) -> tuple[Tensor, _BaseSums]:
        """The loss, a scalar (), and its sums.

        Args:
            hidden: (P, D) states of the adapted base; gradients reach them.
            reference: (P, D) states of the same base with the adapter switched off; constants.
            own: of no heads, and of every token.
            num_targets: () targets of the whole optimisation step, all micro-batches and processes.
        """
        if reference is None and self.objective == "kl":
            raise ValueError("base_objective 'kl' needs the states without the adapter: pass reference")
        sums = _BaseSums.zeros(hidden.device)
        before = reference

        def observe(log_q: Tensor, seen: TargetBlock) -> None:
            nonlocal sums
            sums = add_metrics(sums, _compared(log_q, seen))

        work = FusedLoss(
            columns=own.columns,
            sources=own.sources,
            weights=torch.ones_like(own.sources, dtype=torch.float32),
            num_scored=num_targets[None],
            kl_weight=float(self.objective == "kl"),
            block_elements=self.block_elements,
            num_columns=self.vocab_size,
            logits_of=lambda index, block, states: self.project(states),
            teacher=self.project,
            teacher_states=None if before is None else lambda block: before[own.sources[0, block]],
            observe=observe,
        )
        return work(hidden), sums


def _compared(log_q: Tensor, targets: TargetBlock) -> _BaseSums:
    """Statistics of one block on the adapted base, and on the difference from the adapter."""
    columns = targets.columns[:, None]
    sums = _BaseSums.zeros(log_q.device)
    count = torch.tensor(len(columns), device=log_q.device)
    sums = sums._replace(cross_entropy=-log_q.gather(1, columns).sum(), num_targets=count)
    if targets.teacher_rows is None:
        return sums
    before = targets.teacher_rows
    return sums._replace(
        reference_cross_entropy=-before.log_probabilities.gather(1, columns).sum(),
        divergence=-(before.entropy + expected(before.probabilities, log_q)).sum(),
        num_agreeing=(before.probabilities.argmax(-1) == log_q.argmax(-1)).sum(),
        num_compared=count,
    )


class _JointBatch(NamedTuple):
    """A micro-batch as the base reads it, and the targets of the base's own row."""

    padded: PaddedBatch
    own: Alignment


class _JointLoss(nn.Module):
    """Heads, adapter and their loss.

    The base is no part of it: neither its weights nor its buffers are moved, synchronised or saved with it.
    """

    def __init__(self, heads_loss: HeadsLoss, adapter: TrainedAdapter, base_loss: BaseLoss, lambda_0: float):
        super().__init__()
        self.heads_loss = heads_loss
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): each for name, each in adapter.parameters.items()}
        )
        self.is_joint = False
        """Which stage this is; measuring, without gradients, is the same in both."""
        self._adapted = adapter
        self._base_loss = base_loss
        self._lambda_0 = lambda_0

    def forward(
        self,
        batch: _JointBatch,
        alignment: Alignment,
        lm_head: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, _JointSums]:
        """The loss, a scalar, and its sums; gradients reach the heads, and in the second stage the adapter.

        Args:
            alignment: its sources count the B * T positions of ``batch`` row by row.
            lm_head: the base's; never trained here.
            num_scored: (K + 1,) targets of the whole optimisation step, the base's own row first.
            teacher: needed by every objective of the heads but "ce". The adapted base is the heads' teacher:
                they have to predict its text.
        """
        is_measuring = not torch.is_grad_enabled()
        size = self.heads_loss.heads.config.hidden_size
        reference = None
        if not self.is_joint or is_measuring or self._base_loss.objective == "kl":
            with torch.no_grad(), self._adapted.switched_off():
                reference = self._states(batch.padded)
        if not self.is_joint and not is_measuring:
            assert reference is not None
            loss, sums = self.heads_loss(reference, alignment, lm_head, num_scored[1:], teacher)
            # Every process of a launch must have a gradient for every parameter.
            loss = self._lambda_0 * loss + 0 * sum(each.sum() for each in self.adapter.values())
            return loss, _JointSums(sums, _BaseSums.zeros(loss.device))
        with nullcontext() if is_measuring else self._adapted._dropping_out():
            hidden = self._states(batch.padded)
        heads_loss, sums = self.heads_loss(hidden, alignment, lm_head, num_scored[1:], teacher)
        before = None if reference is None else reference[:, :size]
        base_loss, base_sums = self._base_loss(hidden[:, :size], before, batch.own, num_scored[0])
        return base_loss + self._lambda_0 * heads_loss, _JointSums(sums, base_sums)

    def _states(self, padded: PaddedBatch) -> Tensor:
        """(P, (1 + L) * D), of the base as it is now."""
        layers = self.heads_loss.heads.fused_layers
        states = hidden_states_apart(self._adapted.base, padded.input_ids, padded.positions, layers)
        return states.flatten(0, 1)


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
        """``forward`` with gradient checkpointing: only its input is kept for the backward pass."""

        def run(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            both = (nullcontext(), self._dropping_out())  # the second time as in the first
            return checkpoint(forward, *arguments, use_reentrant=False, context_fn=lambda: both, **named)

        return run

    @property
    def num_parameters(self) -> int:
        return sum(each.numel() for each in self.parameters.values())

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within the block the adapter is switched off."""
        self._wrapped.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self._wrapped.base_model.enable_adapter_layers()

    @contextmanager
    def _dropping_out(self) -> Iterator[None]:
        """Within the block ``lora_dropout`` drops; the base itself stays in evaluation mode."""
        dropouts = [
            each
            for name, each in self.base.named_modules()
            if isinstance(each, nn.Dropout) and ".lora_dropout." in name
        ]
        for dropout in dropouts:
            dropout.train()
        try:
            yield
        finally:
            for dropout in dropouts:
                dropout.eval()

    def taken_out(self) -> Adapter:
        """A copy of the current adapter, on the CPU, in the form that is saved."""
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
        ValueError: a target is no linear layer, or is the LM head.
    """
    unembedding = lm_head(base)
    linear = [name for name, each in base.named_modules() if linear_sizes(each) and each is not unembedding]
    for target in targets:
        if not any(_ends_in(name, target) for name in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise ValueError(
                f"lora_targets {target!r} matches no linear layer of {type(base).__name__}, whose output "
                f"embedding stays as it is; there are {', '.join(known)}"
            )
    return [name for name in linear if not targets or any(_ends_in(name, target) for target in targets)]


def _ends_in(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _plain(value: Any) -> Any:
    """``value`` as JSON has it."""
    if isinstance(value, (set, tuple)):
        return sorted(value) if isinstance(value, set) else list(value)
    return str(value.value) if hasattr(value, "value") else value
