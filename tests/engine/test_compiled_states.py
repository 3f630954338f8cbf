"""Compiled passes of bases that keep a state: the text is that of plain decoding, and of general steps."""

from __future__ import annotations

import pytest
import torch
from conftest import left_padded, needs_kernels, random_prompts
from stateful_models import DECODABLE, stateful_model

from medusa import CandidateTree, MedusaModel
from medusa.base.passes import new_cache, prefill
from medusa.decoding.batch import BatchLimits, Row
from medusa.engine.engine_state import apply_engine

pytestmark = needs_kernels
WIDE = {"vocab_size": 64}  # in whole vectors
SCAN = {**WIDE, "mamba_n_heads": 16, "mamba_d_head": 16}
WIDTHS = {
    "qwen3_5_text": {
        **WIDE,
        **{"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 16},
        **{"linear_value_head_dim": 16, "head_dim": 16},
    },
    "bamba": {**SCAN, "mamba_expand": 8},
    "granitemoehybrid": {**SCAN, "mamba_expand": 8, "num_local_experts": 0},
    "falcon_h1": {**SCAN, "mamba_d_ssm": 256},
    "lfm2": {**WIDE, "hidden_size": 64, "intermediate_size": 64},
    "mamba2": {**WIDE, "num_heads": 16, "head_dim": 4},
    "nemotron_h": {**WIDE, "mamba_num_heads": 16},
    "kimi_linear": WIDE,
    "zamba2": WIDE,
}
"""Settings of :func:`stateful_model` with which layers are compiled, by type."""
BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0), (1, 1)])
BATCH = left_padded(random_prompts(3, 14), [14, 2, 9])
KINDS = [kind for kind in WIDTHS if kind in DECODABLE]


def model_of(kind):
    return MedusaModel(stateful_model(kind, **WIDTHS[kind]), engine="packed", step="compiled")


def check_texts(kind):
    """Alone and in a batch, with right and wrong drafts, greedy and sampled."""
    model = model_of(kind)
    general = MedusaModel(model.base, engine="packed", step="general")
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 3}):
        options = {"max_new_tokens": 24, **sampling}
        plain = model.generate(**BATCH, **options, drafter="plain")
        assert plain.equal(general.generate(**BATCH, **options, drafter="plain"))
        assert plain.equal(model.generate(**BATCH, **options, drafter="suffix"))
        prompt, answer = BATCH["input_ids"][:1], plain[0, 14:]
        for wrong_every in (None, 5, 2):
            guess = answer.clone()
            if wrong_every:
                guess[wrong_every - 1 :: wrong_every] = 1
            said = model.generate(prompt, **options, prediction=guess)
            assert torch.equal(said[0], plain[0])


def check_nodes(kind):
    """A node's logits have the same bits as those of its path alone, after a prompt in other chunks."""
    model = model_of(kind)
    view = model.engine_base
    compiled, _ = model._executor.compiled_pass()
    nodes = random_prompts(2, BUSHY.num_nodes, 5)
    root = CandidateTree.chain(0).topology("cpu")

    def after_prompt(chunk):
        cache = new_cache(view, 2)
        prefill(view, random_prompts(2, 21), torch.tensor([21, 13]), cache, chunk, run=compiled.verify)
        return cache

    with torch.no_grad():
        _, together = compiled.verify(view, nodes, BUSHY.topology("cpu"), after_prompt(512))
        for node in range(BUSHY.num_nodes):
            cache = after_prompt(4)
            for at in BUSHY.ancestors(node):
                _, alone = compiled.verify(view, nodes[:, [at]], root, cache)
                cache.commit_prefix(torch.ones(2, dtype=torch.long))
            assert torch.equal(alone[:, 0], together[:, node])


def check_shared_batch(kind):
    """Rows that join and leave say what each says alone."""
    model = model_of(kind)
    prompts = [[*range(3, 3 + length)] for length in (30, 4, 17, 9)]
    options = {"max_new_tokens": 12, "do_sample": False}
    batch = model.continuous_batch(BatchLimits(max_rows=3, chunk=8))
    rows = [Row(model.request(torch.tensor([prompt]), **options)) for prompt in prompts]
    for row in rows:
        batch.add(row)
        batch.step()
    while batch.is_busy:
        batch.step()
    for row, prompt in zip(rows, prompts, strict=True):
        alone = model.generate(torch.tensor([prompt]), **options, drafter="plain")
        assert prompt + row.tokens == alone[0].tolist()


def test_gated_deltas_are_compiled():
    check_texts("qwen3_5_text")
    check_nodes("qwen3_5_text")
    check_shared_batch("qwen3_5_text")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_is_compiled(kind):
    check_texts(kind)
    check_nodes(kind)
    check_shared_batch(kind)


@pytest.mark.slow
def test_states_go_from_general_passes_to_compiled_ones():
    """A cache may be read by either: a prefix that one has computed, the other goes on from."""
    model = model_of("qwen3_5_text")
    view = apply_engine(model.base, "packed")
    compiled, _ = model._executor.compiled_pass()
    ids = random_prompts(1, 40)
    whole, half = new_cache(view, 1), new_cache(view, 1)
    with torch.no_grad():
        _, expected = prefill(view, ids, torch.tensor([40]), whole, run=compiled.verify)
        prefill(view, ids[:, :21], torch.tensor([21]), half, 5)
        _, given = prefill(view, ids, torch.tensor([40]), half, run=compiled.verify)
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
