"""Medusa heads that read the text through a causal layer: decoding, counting and training read the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import ARCHITECTURES, BUSHY, VOCAB_SIZE, left_padded, random_prompts, tiny_model
from stateful_models import stateful_model
from tiny_training import configuration_of, counting_rows, new_trainer
from torch.nn import functional as F

from medusa import (
    CandidateTree,
    HeadsCheckpoint,
    HeadsConfig,
    MedusaHeads,
    MedusaModel,
    load_heads,
    save_heads,
)
from medusa.base.causal_lm import hidden_states, output_embedding
from medusa.decoding.batch import Row
from medusa.drafters import ahead
from medusa.drafters.heads import HeadsDrafter
from medusa.engine.kernels import PackedLinear
from medusa.engine.quick_heads import quick_heads
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.heads.causal_layer import LayerConfig
from medusa.interop.protocol import ToExport
from medusa.interop.vllm_medusa import checked_plain
from medusa.training.config import LossOptions
from medusa.training.losses import align
from medusa.training.recipes.frozen import HeadsLoss
from medusa.training.states.stored import StateBatch
from medusa.trees.rank_counts import UNKNOWN

CONTEXT = LayerConfig(32, 4, 2, 8, 48)
CONFIG = HeadsConfig(32, VOCAB_SIZE, num_heads=3, reads_path=True, fused_layers=(1,), context=CONTEXT)
TREE = BUSHY.subtree(3)
GREEDY = {"do_sample": False, "max_new_tokens": 14}
SAMPLED = {"do_sample": True, "temperature": 1.1, "top_p": 0.9, "seed": 4, "max_new_tokens": 14}


def new_heads(**changes) -> MedusaHeads:
    """Heads with random weights, the layer's last ones included."""
    with torch.random.fork_rng():
        heads = MedusaHeads(replace(CONFIG, **changes))
        torch.manual_seed(3)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return heads.eval()


def read_at_once(heads: MedusaHeads, base, states, tokens):
    """What heads read after all of a text: states (E, (1 + L) * D) of all but its last token, (D,)."""
    with torch.no_grad():
        return heads.attend(heads.fuse(states)[None], tokens[None, 1:], output_embedding(base))[0, -1]


@pytest.fixture
def readings(monkeypatch) -> list:
    """(drafter, context, what was read) of every draft."""
    found, read = [], HeadsDrafter.read

    def recorded(self, context):
        kept = replace(context, features=context.features.clone())  # rows move within them later
        found.append((self, kept, read(self, context)))
        return found[-1][2]

    monkeypatch.setattr(HeadsDrafter, "read", recorded)
    return found


def assert_read_at_once(readings, base):
    for drafter, context, given in readings:
        for row, length in enumerate(context.lengths.tolist()):
            states, tokens = context.features[row, : length - 1], context.tokens[row, :length]
            with torch.no_grad():
                of_base = hidden_states(base, tokens[None, :-1], layers=CONFIG.fused_layers)[0]
            torch.testing.assert_close(states, of_base, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                given[row], read_at_once(drafter.heads, base, states, tokens), atol=1e-4, rtol=1e-4
            )


def test_untrained_it_changes_nothing():
    heads, generator = MedusaHeads(CONFIG), torch.Generator().manual_seed(0)
    fused, tokens = torch.randn(2, 5, 32, generator=generator), random_prompts(2, 5)
    assert torch.equal(heads.attend(fused, tokens, output_embedding(tiny_model("llama"))), fused)


@pytest.mark.parametrize("drafter", ["heads", "dynamic-heads", "dynamic-heads+suffix", "heads+suffix"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(drafter, options):
    model = MedusaModel(tiny_model("qwen3"), new_heads(), tree=TREE)
    batch = left_padded(random_prompts(3, 11), [11, 4, 7])
    plain = model.generate(**batch, **options, drafter="plain")
    assert model.generate(**batch, **options, drafter=drafter).tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("architecture", "engine"),
    [*((each, "eager") for each in ARCHITECTURES), ("gemma3", "packed"), ("llama", "int8")],
)
def test_the_text_is_that_of_plain_decoding_on_every_architecture(architecture, engine):
    model = MedusaModel(tiny_model(architecture), new_heads(), tree=TREE, engine=engine)
    batch = left_padded(random_prompts(2, 9), [9, 5])
    plain = model.generate(**batch, **GREEDY, drafter="plain")
    assert model.generate(**batch, **GREEDY, drafter="heads").tolist() == plain.tolist()


@pytest.mark.parametrize("most_entries", [512, 3])
def test_what_is_read_step_by_step_is_what_is_read_at_once(readings, most_entries, monkeypatch):
    monkeypatch.setattr(ahead, "MOST_ENTRIES", most_entries)
    base = tiny_model("llama")
    model = MedusaModel(base, new_heads(), tree=TREE)
    model.generate(**left_padded(random_prompts(3, 11), [11, 4, 7]), **GREEDY, drafter="dynamic-heads")
    assert len(readings) > 5 and {len(context.root) for _, context, _ in readings} == {1, 2, 3}
    assert_read_at_once(readings, base)


@pytest.mark.parametrize(
    ("make", "architecture", "tree"),
    [(tiny_model, "llama", TREE), (stateful_model, "lfm2", CandidateTree.chain(3))],
)
def test_rows_that_come_and_go_read_their_own_text(readings, make, architecture, tree):
    base = make(architecture)
    model = MedusaModel(base, new_heads(), tree=tree)
    batch = model.continuous_batch()
    rows = [
        Row(model.request(random_prompts(1, length, seed=length), do_sample=False, max_new_tokens=new))
        for length, new in ((11, 4), (4, 9), (7, 12), (6, 3))
    ]
    for row in rows[:2]:
        batch.add(row)
    batch.step()
    batch.step()
    for row in rows[2:]:
        batch.add(row)
    while batch.is_busy:
        batch.step()
    assert {len(context.root) for _, context, _ in readings} >= {1, 2, 4}
    going_on = torch.tensor([[*rows[0].prompt, *rows[0].tokens, 5]])
    batch.add(last := Row(model.request(going_on, do_sample=False, max_new_tokens=4)))
    while batch.is_busy:
        batch.step()
    assert last.num_reused > 0
    assert_read_at_once(readings, base)


def test_a_repeated_draft_is_the_same_draft(monkeypatch):
    read, num_read = HeadsDrafter.read, 0

    def twice(self, context):
        nonlocal num_read
        num_read += 1
        first = read(self, context)
        torch.testing.assert_close(read(self, context), first)
        return first

    monkeypatch.setattr(HeadsDrafter, "read", twice)
    model = MedusaModel(tiny_model("llama"), new_heads(), tree=TREE)
    model.generate(random_prompts(2, 6), **GREEDY, drafter="heads")
    assert num_read > 5


def test_counted_ranks_are_those_of_the_true_token_among_the_guesses():
    base, heads, ids = tiny_model("llama"), new_heads(), random_prompts(1, 14)
    row = AnsweredTokens.after_prompt(ids[0].tolist(), 6)
    (ranks,) = calibrate(base, heads, [row, row], max_rank=VOCAB_SIZE).ranks[:1]
    states = hidden_states(base, ids, layers=(1,))[0]
    for root in range(6, 14):
        read = read_at_once(heads, base, states[:root], ids[0, : root + 1])
        for depth in (1, 2, 3):
            if root + depth >= 14:
                assert ranks[root - 6, depth - 1] == UNKNOWN
                continue
            path = ids[0, root : root + depth]
            with torch.no_grad():
                order = heads.logits_of(depth - 1, read, output_embedding(base), path).argsort(
                    descending=True
                )
            assert order[ranks[root - 6, depth - 1]] == ids[0, root + depth]


def packed_batch() -> tuple[StateBatch, torch.Tensor]:
    """A row of two documents, 4 and 5 tokens long, and its tokens."""
    generator, tokens = torch.Generator().manual_seed(1), random_prompts(1, 9)
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    return StateBatch(torch.randn(1, 9, 64, generator=generator), tokens.roll(-1, 1), positions), tokens


def losses(heads: MedusaHeads, batch: StateBatch, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of cross-entropy, and the gradient that reaches the layer."""
    alignment = align(tokens[0], torch.ones(9, dtype=torch.bool), batch.positions[0], 3)
    module = HeadsLoss(heads, LossOptions("ce", decay=0.5))
    embedding = output_embedding(tiny_model("llama"))
    loss, _ = module(batch, alignment, embedding, torch.ones(3))
    heads.zero_grad()
    loss.backward()
    return loss.detach(), heads.context.self_attn.q_proj.weight.grad.clone()


def test_training_reads_each_document_as_decoding_does():
    heads, (batch, tokens) = new_heads(), packed_batch()
    loss, gradient = losses(heads, batch, tokens)
    base, naive = tiny_model("llama"), torch.zeros(())
    for start, end in ((0, 4), (4, 9)):
        ids = tokens[0, start:end]
        fused = heads.fuse(batch.hidden[:, start : end - 1])
        read = heads.attend(fused, ids[None, 1:], output_embedding(base))[0]
        for depth in (1, 2, 3):
            for at in range(end - start - 1 - depth):
                path = ids[at + 1 : at + 1 + depth]
                logits = heads.logits_of(depth - 1, read[at], output_embedding(base), path)
                naive = naive + 0.5**depth * F.cross_entropy(logits[None], ids[None, at + 1 + depth])
    heads.zero_grad()
    naive.backward()
    torch.testing.assert_close(loss, naive.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, heads.context.self_attn.q_proj.weight.grad, rtol=1e-3, atol=1e-4)


def test_a_run_trains_the_layer(tmp_path):
    options = {"context_layers": 1, "fused_layers": [1], "packing": True}
    trainer = new_trainer(tmp_path, counting_rows(40), **options)
    before = {name: each.clone() for name, each in trainer.recipe.heads.state_dict().items()}
    trainer.train()
    after = trainer.recipe.heads
    assert after.reads_text and not torch.equal(
        after.context.mlp.down_proj.weight, before["context.mlp.down_proj.weight"]
    )
    metrics = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    found = [each["train/loss"] for each in metrics if "train/loss" in each]
    assert found[-1] < 0.9 * found[0]


def test_heads_without_the_layer_are_a_start_for_heads_with_it(tmp_path):
    plain = MedusaHeads(HeadsConfig(32, 258, num_heads=3, reads_path=True))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_heads(HeadsCheckpoint(plain, "tiny"), tmp_path / "plain")
    trainer = new_trainer(
        tmp_path / "run", counting_rows(20), context_layers=1, start_from=str(tmp_path / "plain")
    )
    started = trainer.recipe.heads
    assert started.reads_text and torch.equal(started.paths[2], plain.paths[2])


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"hidden_size": 32}, "context: .*missing .*num_attention_heads"),
        ({**vars(CONTEXT), "wide": 3}, "context: .*unexpected .*wide"),
        ({**vars(CONTEXT), "num_key_value_heads": 3}, "context: num_key_value_heads must divide"),
        (
            {**vars(CONTEXT), "hidden_size": 16},
            "context must be null or the sizes of a layer with hidden_size=32",
        ),
        (7, "context must be null or the sizes of a layer"),
    ],
)
def test_a_directory_that_describes_no_such_layer_is_refused(tmp_path, context, message):
    directory = save_heads(HeadsCheckpoint(new_heads(), "some/base"), tmp_path / "heads")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "context": context}))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        load_heads(directory)


def test_every_product_of_the_layer_is_a_quick_one():
    model = MedusaModel(tiny_model("llama"), new_heads(), engine="int8")
    quick = quick_heads(model.heads, output_embedding(model.runner))
    assert not any(isinstance(each, torch.nn.Linear) for each in quick.context.modules())
    products = [each.panels.dtype for each in quick.context.modules() if isinstance(each, PackedLinear)]
    assert products == [torch.int8] * 7


def test_steps_of_one_shape_and_foreign_formats_refuse_them(tmp_path):
    model = MedusaModel(tiny_model("llama"), new_heads(), tree=TREE)
    with pytest.raises(ValueError, match="step='static' cannot work with HeadsDrafter"):
        model.generate(random_prompts(1, 4), **GREEDY, drafter="heads", step="static")
    run = {"base": "tiny", "data": "rows.jsonl", "output_dir": "run", "max_steps": 1}
    with pytest.raises(ValueError, match="context_layers=1 and joint exclude each other"):
        configuration_of(**run, context_layers=1, joint=True)
    with pytest.raises(ValueError, match="context_layers must be 0 or 1, got 2"):
        configuration_of(**run, context_layers=2)
    checkpoint = HeadsCheckpoint(new_heads(reads_path=False, fused_layers=()), "some/base")
    with pytest.raises(ValueError, match="context is set: the heads read the text"):
        checked_plain(ToExport("heads", checkpoint, lambda: None, "base", torch.float32))
