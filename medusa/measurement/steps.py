"""What a decode step costs, at 1 node and at more, however it is run, and how much of it is the base's pass.

Weights do not matter to time, so large models of known shapes are made at random on the device itself, and
so are heads. Steps are timed as ``medusa tune`` does (:mod:`medusa.measurement.tuning`): sizes take turns,
medians over rounds, the prefill left out, the device waited for. A step is held against the least time that
the device needs for it (:mod:`medusa.measurement.bounds`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa.base.causal_lm import CausalLM, SeenHidden, hidden_size, tree_inputs, vocab_size
from medusa.decoding.loop import begin, draft_context
from medusa.decoding.static_loop import DEFAULT_HOST_SYNC_INTERVAL, rounded_slots
from medusa.decoding.static_step import StaticState
from medusa.decoding.statistics import DecodingStatistics
from medusa.decoding.step_runners import CapturedStepRunner, StepRunner
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import StaticDrafter
from medusa.hardware import DeviceRates, wait_for
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.measurement.bounds import step_floor_seconds
from medusa.measurement.tuning import measure_step_seconds
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import CandidateTree, best_tree, independent_path_values

NUM_HEADS = 4
WIDTH = 10
"""Guesses of a head that the tree may hold."""
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Configurations of Llama models, by name."""
CONTEXT = 8192
"""Positions of these models."""


def random_base(shape: str, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """A random model of a shape of :data:`SHAPES`, made on the device; it never ends its answer."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=CONTEXT)
    with torch.device(device):
        base: Any = LlamaForCausalLM._from_config(config, dtype=dtype)
    return endless(base)


def endless(base: CausalLM) -> CausalLM:
    """``base`` in evaluation mode, with no token that ends an answer."""
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    return base.eval()


def random_heads(base: CausalLM, token_map_size: int | None) -> MedusaHeads:
    """Untrained heads in the precision of ``base``, over its ``token_map_size`` first tokens; None is all."""
    size = None if token_map_size is None else min(token_map_size, vocab_size(base))
    config = HeadsConfig(
        hidden_size(base),
        vocab_size(base),
        num_heads=NUM_HEADS,
        unembedding="shared" if size is None else "token_map",
        token_map_size=size,
    )
    return MedusaHeads(config, None if size is None else range(size)).to(base.dtype)


def tree_of(num_nodes: int) -> CandidateTree:
    """A tree like those that get tuned: heads right less and less often, by depth and by rank."""
    rates = [[0.5 * 0.8**depth / (1 + rank) ** 1.3 for rank in range(WIDTH)] for depth in range(NUM_HEADS)]
    return best_tree(independent_path_values(rates), num_nodes)


def random_prompts(base: CausalLM, num_rows: int, num_tokens: int) -> dict[str, Any]:
    """``input_ids`` and ``attention_mask``, (B, T) long."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size(base), (num_rows, num_tokens), generator=generator).to(base.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def timed_steps(
    model: MedusaModel,
    rates: DeviceRates,
    num_nodes: Sequence[int],
    batch_size: int,
    context: int,
    rounds: int,
    num_steps: int,
    label: str | None = None,
) -> Iterator[dict[str, Any]]:
    """For 1 node and each of ``num_nodes``: milliseconds of a step, overhead over 1 node, and ``f_hw``.

    ``batch_size`` rows of ``context`` random tokens are decoded in the kind of step of ``model``, for
    ``num_steps`` steps in each of ``rounds``. ``setup_seconds`` were spent on compiling or capturing first.
    """
    trees = {size: tree_of(size) for size in sorted({1, *num_nodes})}
    inputs = [random_prompts(model.base, batch_size, context)] * (1 + rounds)
    setups = {size: setup_seconds(model, tree, inputs[0]) for size, tree in trees.items()}
    seconds = measure_step_seconds(model, trees, inputs, num_steps=num_steps, label=label)
    for size, taken in seconds.items():
        cached = context + num_steps / 2
        floor = step_floor_seconds(model, rates, size, batch_size, cached, with_heads=size > 1)
        yield {
            "batch_size": batch_size,
            "context_length": context,
            "num_nodes": size,
            "step_milliseconds": 1000 * taken,
            "floor_milliseconds": 1000 * floor,
            "overhead": taken / seconds[1],
            "f_hw": floor / taken,
            "setup_seconds": setups[size],
        }


def setup_seconds(model: MedusaModel, tree: CandidateTree, batch: Mapping[str, Any]) -> float:
    """What a first short answer spends on compiling or capturing."""
    counted = DecodingStatistics()
    num_tokens = 2 * DEFAULT_HOST_SYNC_INTERVAL
    for _ in model.stream(**batch, tree=tree, max_new_tokens=num_tokens, do_sample=False, statistics=counted):
        pass
    return counted.setup_seconds


# ------------------------------------------------------------------ the parts of a step


@dataclass(frozen=True)
class StepParts:
    """Seconds of a whole step and of its parts, each run alone, again and again, as static steps run it."""

    step: float
    forward: float
    """The base's forward pass over the nodes."""
    draft: float

    @property
    def around(self) -> float:
        """Share of a step that is not the base's forward pass."""
        return 1 - self.forward / self.step


@torch.no_grad()
def step_parts(
    model: MedusaModel, tree: CandidateTree, batch: Mapping[str, Any], num_steps: int = 8, rounds: int = 5
) -> StepParts:
    """What a greedy step costs by its parts: captured as CUDA graphs on a CUDA device, else as they are."""
    num_left = (2 + rounds) * num_steps * (tree.depth + 1)
    request = model.request(**batch, max_new_tokens=num_left, do_sample=False)
    base, heads = model.runner, model.drafting_heads
    assert isinstance(heads, MedusaHeads), "asked only with Medusa heads"
    drafter = HeadsDrafter(heads, base.get_output_embeddings(), tree)
    rows, _ = begin(base, request, drafter.reads_layers)
    kind = CapturedStepRunner if base.device.type == "cuda" else StepRunner
    found = []
    for work in (None, forward_alone, draft_alone):
        runner = kind(base, drafter, rows, num_steps, **({} if work is None else {"step": work}))
        runner.state.reserve(rounded_slots(int(request.lengths.max()) + num_left + tree.num_nodes))
        runner.state.load(rows, num_left)
        found.append(_seconds(runner, num_steps, rounds))
    return StepParts(*found)


def forward_alone(base: CausalLM, drafter: StaticDrafter, state: StaticState, seen: SeenHidden) -> None:
    """The base's pass over the nodes of a :class:`HeadsDrafter`'s tree; nothing is committed."""
    assert isinstance(drafter, HeadsDrafter)
    tokens = state.rows.tokens[:, :1].expand(-1, drafter.num_nodes)
    base(**tree_inputs(base, tokens, drafter.topology, state.cache))


def draft_alone(base: CausalLM, drafter: StaticDrafter, state: StaticState, seen: SeenHidden) -> None:
    """The drafter's part of a step."""
    drafter.draft(replace(draft_context(state.rows, drafter, base), fixed_shape=True))


def _seconds(runner: StepRunner, num_steps: int, rounds: int) -> float:
    """Of one step: the best of ``rounds`` bursts of ``num_steps``, two bursts before them left out."""
    taken = []
    for _ in range(2 + rounds):
        runner.state.num_unread.zero_()
        wait_for(runner.base.device)
        began = time.perf_counter()
        runner.run(num_steps)
        wait_for(runner.base.device)
        taken.append((time.perf_counter() - began) / num_steps)
    return min(taken[2:])
