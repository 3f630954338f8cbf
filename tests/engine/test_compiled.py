"""A compiled pass gives what its view gives, a node what it gives that node alone, and is compiled once."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from conftest import GROUPED, VOCAB_SIZE, left_padded, random_prompts, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.causal_lm import new_cache, prefill, verify
from medusa.decoding.batch import BatchLimits, Row
from medusa.decoding.steps import Libraries
from medusa.engine import prepared_base
from medusa.engine.compiled import (
    compiled_pass,
    library_path,
    loop_attention,
    missing_for_compiled_pass,
)
from medusa.engine.int8 import missing_for_int8
from medusa.engine.libraries import missing_compiler
from medusa.places import cache_home

pytestmark = pytest.mark.skipif(
    missing_for_int8(tiny_model("llama")) is not None or missing_compiler() is not None,
    reason="this torch has no oneDNN, or there is no C++ compiler",
)
BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
HEADS = HeadsConfig(32, VOCAB_SIZE, num_heads=3, fused_layers=(1,))
BATCH = left_padded(random_prompts(3, 14), [14, 2, 9])


def heads():
    torch.manual_seed(1)
    made = MedusaHeads(HEADS)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return made


def asked(temperature):
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    return {"seed": 3, "max_new_tokens": 24, **sampling}


def texts(model, **call):
    return {
        name: model.generate(**BATCH, **call, **how).tolist()
        for name, how in {
            "plain": {"tree": CandidateTree.chain(0)},
            "heads": {"tree": BUSHY},
            "dynamic": {"drafter": "dynamic-heads+suffix"},
        }.items()
    }


def check_a_shared_batch(model):
    """Requests that share passes, and one that goes on where another has ended, say what each says alone."""
    prompts = [[*range(3, 3 + length)] for length in (30, 4, 17, 9)]
    plainly = {"tree": CandidateTree.chain(0), **asked(0.9)}
    batch = model.continuous_batch(BatchLimits(max_rows=3, chunk=8))

    def answered(prompts):
        rows = [Row(model.request(torch.tensor([prompt]), **asked(0.9))) for prompt in prompts]
        for row in rows:
            batch.add(row)
            batch.step()
        while batch.is_busy:
            batch.step()
        for row, prompt in zip(rows, prompts, strict=True):
            assert prompt + row.tokens == model.generate(torch.tensor([prompt]), **plainly)[0].tolist()
        return rows

    first = answered(prompts)[0]
    (late,) = answered([[*prompts[0], *first.tokens, 5]])
    assert late.num_reused == len(prompts[0]) + len(first.tokens) - 1


def check_a_view(engine, base):
    """All that is promised of one compiled pass, which takes long to make."""
    model = MedusaModel(base, heads(), BUSHY, engine=engine, step="compiled")
    for temperature in (0.0, 0.9):
        said = texts(model, **asked(temperature))
        assert said["heads"] == said["plain"] and said["dynamic"] == said["plain"]
        if engine == "packed":
            assert said["plain"] == MedusaModel(base).generate(**BATCH, **asked(temperature)).tolist()

    check_a_shared_batch(model)

    view, topology = model.runner, BUSHY.topology("cpu")
    mine, seconds = model._steps.libraries.compiled_pass((1,))
    assert seconds == 0.0, "the calls above have it"
    tree = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])

    def after_prompt():
        cache = new_cache(view, 2)
        prefill(view, random_prompts(2, 21), torch.tensor([21, 13]), cache)
        return cache

    with torch.no_grad():
        hidden, together = mine.verify(view, tree, topology, after_prompt(), layers=(1,))
        theirs_hidden, theirs = verify(view, tree, topology, after_prompt(), layers=(1,))
        assert torch.allclose(together, theirs, atol=2e-3) and torch.allclose(
            hidden, theirs_hidden, atol=2e-3
        )
        for node, path in enumerate(BUSHY.paths):
            cache = after_prompt()
            for at in (BUSHY.paths.index(path[:depth]) for depth in range(len(path) + 1)):
                _, alone = mine.verify(view, tree[:, [at]], CandidateTree.chain(0).topology("cpu"), cache)
                cache.commit_prefix(torch.ones(2, dtype=torch.long))
            assert torch.equal(alone[:, 0], together[:, node]), "not a bit depends on the tree"
    again = compiled_pass(view, (1,))
    assert again.setup_seconds < 3, "loaded, not compiled again"


def test_a_compiled_int8_pass_is_exact_and_kept(monkeypatch):
    as_it_is = lambda runners, drafter, *are_sampled: (drafter, 0.0)  # noqa: E731
    monkeypatch.setattr(Libraries, "compiled_drafter", as_it_is)  # see tests/drafters/test_compiled_drafts.py
    torch.manual_seed(7)
    sizes = {**GROUPED, "head_dim": 16, "num_hidden_layers": 1}
    check_a_view("int8", LlamaForCausalLM(LlamaConfig(**sizes)).eval())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "mistral-sliding"])
def test_a_compiled_float32_pass_is_exact_and_kept(architecture):
    check_a_view("packed", tiny_model(architecture))


def test_a_library_is_named_for_all_that_it_depends_on():
    view, other = (prepared_base(tiny_model("llama"), engine) for engine in ("int8", "packed"))
    names = {library_path(view).name, library_path(other).name, library_path(view, (1,)).name}
    assert len(names) == 3 and library_path(view).name in names
    with torch.no_grad():
        changed = prepared_base(copy.deepcopy(tiny_model("llama")), "int8")
        changed.get_output_embeddings().weight.add_(1e-6)
    assert library_path(changed).name not in names


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch):
    def fails(module, args, kwargs, options):
        (Path(options["aot_inductor.output_path"]) / "half").write_bytes(b"half")
        raise RuntimeError("the compiler died")

    monkeypatch.setattr(torch._inductor, "aot_compile", fails)
    view = prepared_base(tiny_model("qwen3"), "packed")
    with pytest.raises(RuntimeError, match="the compiler died"):
        compiled_pass(view)
    left = [path.name for path in (cache_home() / "compiled").iterdir() if "qwen3" in path.name]
    assert all(name.endswith(".lock") for name in left)


def test_loop_attention_is_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 4)
    mask = torch.zeros(2, 1, 5, 11).masked_fill_(torch.rand(2, 1, 5, 11) < 0.3, torch.finfo().min)
    mask[..., 0] = 0
    given, _ = loop_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=0.3, enable_gqa=True
    )
    assert torch.allclose(given, expected.transpose(1, 2), atol=1e-6)


def test_int8_refuses_widths_that_are_no_whole_vectors():
    with pytest.raises(ValueError, match="widths that are multiples of 16 for engine='int8', got 8"):
        MedusaModel(tiny_model("llama"), engine="int8", step="compiled")


@pytest.mark.parametrize("what", ["compiler", "attention", "rope"])
def test_what_cannot_be_compiled_is_refused_with_the_reason(monkeypatch, what):
    base = copy.deepcopy(tiny_model("llama"))
    if what == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
        reason = r"step='compiled' needs a C\+\+ compiler \(g\+\+, .*none is installed"
    elif what == "attention":
        base.set_attn_implementation("eager")
        reason = "step='compiled' needs attn_implementation='sdpa', got 'eager'"
    else:
        base.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        reason = "needs rotary embeddings that do not change with the length of the text, got 'dynamic'"
        assert "dynamic" in missing_for_compiled_pass(prepared_base(base, "packed"))
    with pytest.raises(ValueError, match=reason):
        MedusaModel(base, engine="packed", step="compiled")
