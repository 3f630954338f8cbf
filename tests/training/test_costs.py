"""docs/guides/scale.md: its formulas are the code's own numbers at small scale."""

from __future__ import annotations

import json
import os
import subprocess
from typing import NamedTuple

import pytest
import torch
from conftest import CHECKOUT
from tiny_training import MORTAL, accelerated, counting_rows, new_trainer, tiny_base, write_run
from torch.utils.flop_counter import FlopCounterMode

from medusa.base.causal_lm import lm_head
from medusa.training.data.batching import PaddedBatch
from medusa.training.states.base import OnlineHiddenStates
from medusa.training.states.stored import CachedHiddenStates

PAGE = CHECKOUT / "docs" / "guides" / "scale.md"


MEASURED = {
    ("ddp", 3, 2): 28,
    ("zero3", 3, 2): 36,
    ("fsdp2", 3, 2): 21,
    ("ddp", 8, 4): 24,
    ("fsdp2", 8, 4): 10,
}
"""Kind of launch, heads, processes: bytes that the first process takes for a parameter of the heads, at the
worst moment of a step."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_heads", "num_processes"), MEASURED)
def test_the_memory_of_shared_out_heads_is_what_the_page_says(tmp_path, kind, num_heads, num_processes):
    """Of heads with unembeddings of their own, against such as train none."""
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    write_run(
        tmp_path, num_heads=num_heads, reads_path="false", max_steps=3, logging_steps=1, tokens_per_batch=300
    )
    tiny_base(vocab_size=16384, hidden_size=256).save_pretrained(tmp_path / "base")
    options = ["--block_elements", "131072", "--replayed_documents", "0", "--held_out_fraction", "0"]
    peaks = {}
    for unembedding in ("full", "shared"):
        arguments = ["--config", "run.yaml", "--output_dir", unembedding, "--unembedding", unembedding]
        beside = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        beside |= {"PRETEND_DEVICES": "1"} if kind == "fsdp2" else {}
        launcher = accelerated(kind, "--num_processes", str(num_processes))
        command = [*launcher, MORTAL, *arguments, *options]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **beside}, check=True, timeout=900)
        entries = (tmp_path / unembedding / "metrics.jsonl").read_text().splitlines()
        peaks[unembedding] = max(json.loads(entry).get("peak_gib", 0) for entry in entries)
    each = (peaks["full"] - peaks["shared"]) * 2**30 / (num_heads * 16384 * 256)
    measured = MEASURED[kind, num_heads, num_processes]
    assert each == pytest.approx(measured, rel=0.15)
    assert f" {measured} under" in PAGE.read_text()


class Base(NamedTuple):
    """Sizes of a base model."""

    hidden_size: int  # D
    vocab_size: int  # V
    intermediate_size: int  # I
    attention: int  # numbers of all query heads of a token
    key_value: int  # and of all key heads


def states_of(num_answer_tokens: int, num_answers: int, num_heads: int) -> int:
    """P: heads predict each answer token from up to K + 1 states; an answer's first from those before it."""
    return num_answer_tokens + num_heads * num_answers


def bytes_of_state(base: Base, num_layers: int, bytes_of_number: int) -> int:
    return (1 + num_layers) * base.hidden_size * bytes_of_number


def medusa_parameters(base: Base, num_heads: int, unembedding: str, reads_path: bool, num_layers: int) -> int:
    d = base.hidden_size
    blocks, path = num_heads * (d * d + d), num_heads * (num_heads + 1) // 2 * d * d
    full = num_heads * base.vocab_size * d
    return blocks + reads_path * path + (unembedding == "full") * full + num_layers * d * d


def eagle3_parameters(base: Base) -> int:
    d = base.hidden_size
    attention = 2 * d * (base.attention + 2 * base.key_value) + base.attention * d
    return 3 * d * d + attention + 3 * d * base.intermediate_size + 4 * d  # and four norms


def bytes_of_training(num_parameters: int) -> int:
    """Weights, gradients and AdamW's two moments, in float32."""
    return 16 * num_parameters


def operations_of_label(base: Base, num_heads: int, num_columns: int, has_teacher: bool) -> float:
    """To train Medusa heads that read their path and share the unembedding, on one answer token.

    Forward, and backward to weights and inputs; the unembedding is frozen, so its weights have none. The
    rows of the path have none either.
    """
    d = base.hidden_size
    blocks, path = 6 * num_heads * d * d, 4 * num_heads * (num_heads + 1) / 2 * d * d
    return blocks + path + 4 * num_heads * d * num_columns + 2 * has_teacher * d * num_columns


def small(trainer) -> Base:
    config = trainer.base.config
    heads, size = config.num_attention_heads, config.head_dim
    return Base(
        config.hidden_size,
        config.vocab_size,
        config.intermediate_size,
        heads * size,
        config.num_key_value_heads * size,
    )


@pytest.mark.parametrize("layers", [(), (1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_of_stored_states_is_the_codes_own(tmp_path, layers, dtype):
    trainer = new_trainer(tmp_path, counting_rows(20))
    documents, width = trainer.data.training, torch.finfo(getattr(torch, dtype)).bits // 8
    states = CachedHiddenStates(tmp_path / "states", trainer.base, documents, 3, dtype, layers)
    expected = states_of(documents.num_labels, len(documents), 3) * bytes_of_state(
        small(trainer), len(layers), width
    )
    assert states.num_bytes == expected


@pytest.mark.parametrize("unembedding", ["shared", "full"])
@pytest.mark.parametrize("reads_path", [True, False])
def test_the_parameters_and_the_memory_of_medusa_heads_are_the_codes_own(tmp_path, unembedding, reads_path):
    options = {"unembedding": unembedding, "reads_path": reads_path, "fused_layers": [1, 2], "max_steps": 1}
    trainer = new_trainer(tmp_path, counting_rows(20), **options)
    expected = medusa_parameters(small(trainer), 3, unembedding, reads_path, 2)
    parameters = list(trainer.heads.parameters())
    assert sum(each.numel() for each in parameters) == expected
    kept = []
    zero_grad = trainer.optimiser.zero_grad
    trainer.optimiser.zero_grad = lambda: (kept.extend(each.grad for each in parameters), zero_grad())
    trainer.train()
    moments = [each for state in trainer.optimiser.state.values() for each in state.values() if each.ndim]
    held = sum(each.nbytes for each in (*parameters, *kept, *moments))
    assert held == bytes_of_training(expected)


def test_the_parameters_of_an_eagle3_head_are_the_codes_own(tmp_path):
    trainer = new_trainer(tmp_path, counting_rows(20), head_kind="eagle3", fused_layers=[1, 2, 2][:2])
    size = trainer.base.config.hidden_size  # of two fused layers where the base has but two
    expected = eagle3_parameters(small(trainer)) - size * size
    assert sum(each.numel() for each in trainer.heads.parameters()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_the_operations_of_a_label_are_those_that_are_counted(tmp_path, objective):
    trainer = new_trainer(tmp_path, counting_rows(40), objective=objective, held_out_fraction=0)
    rows = [[index] for index in range(len(trainer.training))]
    given = trainer.recipe.read(trainer.training, "training", rows)
    num_scored = torch.from_numpy(trainer.num_scored.sum(0))
    with FlopCounterMode(display=False) as counter:
        arguments = (*given, lm_head(trainer.base), num_scored, trainer.recipe.teacher)
        trainer.loss(*arguments)[0].backward()
    base, labels = small(trainer), trainer.training.num_labels
    expected = labels * operations_of_label(base, 3, base.vocab_size, objective == "kl")
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_the_operations_of_a_token_of_the_base_are_two_for_each_weight(tmp_path):
    base = tiny_base()
    ids = torch.arange(64)[None] + 5
    with FlopCounterMode(display=False) as counter:
        OnlineHiddenStates(base)(PaddedBatch(ids, torch.arange(64)[None], ids > 0))
    weights = sum(each.numel() for each in base.model.layers.parameters())
    assert counter.get_total_flops() == pytest.approx(2 * weights * 64, rel=0.02)  # but for attention's own
