"""How often the host waits for a card, and how many operators a captured step launches, on a pretended one:

    python tests/pretended_card/counts.py

The last line is one JSON object, which MEASUREMENTS.md is written from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # where it is a program of its own

import pretended_card  # isort: skip  # before torch

import torch
from conftest import GROUPED, random_heads, random_prompts
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, MedusaModel
from medusa.base.passes import cache_argument
from medusa.decoding.batch import BatchLimits, Row

NUM_LAYERS = 32
SHARED_ROWS = (1, 4, 16)
STEPS_OF_A_BURST = 8
DRAFTERS = ("plain", "heads", "dynamic-heads+suffix")
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "seed": 3},
}


def model_of(num_layers: int) -> MedusaModel:
    """A random base on a card, with four heads and a tree of 64 nodes."""
    torch.manual_seed(7)
    base = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "num_hidden_layers": num_layers}))
    paths = [(0,) * depth + (rank,) for depth in range(4) for rank in range(15)]
    tree = CandidateTree.from_paths([(), *paths, (1, 0), (1, 0, 0), (2, 0)])
    return MedusaModel(base.eval().to("cuda"), random_heads(num_heads=4), tree)


def launches_of_a_pass(model: MedusaModel) -> int:
    """Operators of the base's own forward pass over one token, as ``transformers`` runs it."""
    prompt, cache = random_prompts(1, 20).to("cuda"), DynamicCache(config=model.base.config)
    kept = {cache_argument(model.base): cache, "use_cache": True}
    with torch.no_grad():
        model.base(input_ids=prompt, **kept)
        with pretended_card.watched() as seen:
            model.base(input_ids=prompt[:, :1], **kept)
    return seen.launches.total()


def launches_of_a_step(model: MedusaModel, drafter: str, rule: str) -> int:
    """Operators in the graph of a captured step of one row."""
    pretended_card.PretendedGraph.made.clear()
    prompt = random_prompts(1, 20).to("cuda")
    model.generate(prompt, **RULES[rule], drafter=drafter, step="captured", max_new_tokens=30)
    return pretended_card.PretendedGraph.made[0].num_launches


def waits_of_a_call(model: MedusaModel, drafter: str, rule: str) -> int:
    """Times that the host waits in a call of ``generate`` for one token."""
    prompt = random_prompts(1, 20).to("cuda")
    with pretended_card.watched() as seen:
        model.generate(prompt, **RULES[rule], drafter=drafter, max_new_tokens=1)
    return seen.waits.total()


def shared_burst(model: MedusaModel, num_rows: int, rule: str) -> tuple[int, int]:
    """Operators in the graph of a captured step of a batch of so many requests, and how often the host waits
    in a burst of eight such steps."""
    shared = model.continuous_batch(BatchLimits(max_rows=num_rows))
    for place in range(num_rows):
        prompt = random_prompts(1, 20, seed=place).to("cuda")
        shared.add(Row(model.request(prompt, **RULES[rule], max_new_tokens=200)))
    while shared.num_rows < num_rows:
        shared.step()
    graphs = pretended_card.PretendedGraph.made
    graphs.clear()
    while shared.is_busy:
        num_graphs = len(graphs)
        with pretended_card.watched() as seen:
            shared.step()
        if num_graphs == len(graphs) and seen.launches["replay"] == STEPS_OF_A_BURST:  # nothing was captured
            return graphs[0].num_launches, seen.waits.total()
    raise RuntimeError("every burst has captured something")


def main() -> None:
    model = model_of(NUM_LAYERS)
    print(
        json.dumps(
            {
                "num_layers": NUM_LAYERS,
                "num_nodes": model.tree.num_nodes,
                "launches_of_a_pass": launches_of_a_pass(model),
                "launches_of_a_step": {
                    drafter: {rule: launches_of_a_step(model, drafter, rule) for rule in RULES}
                    for drafter in DRAFTERS
                },
                "shared_bursts": {
                    num_rows: {rule: shared_burst(model, num_rows, rule) for rule in RULES}
                    for num_rows in SHARED_ROWS
                },
                "waits_of_a_call": max(waits_of_a_call(model, drafter, "sampled") for drafter in DRAFTERS),
            }
        )
    )


if __name__ == "__main__":
    main()
