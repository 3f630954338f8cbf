"""Without a compiler a pass runs as operators of ours, and its text is that of plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import BUSHY, GROUPED, VOCAB_SIZE, left_padded, needs_kernels, random_prompts, tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.passes import new_cache, prefill, verify
from medusa.cli import loading
from medusa.engine import compiled, fused_layers, optimized_heads, programs
from medusa.engine.compiled import CompiledPass, library_paths
from medusa.engine.engine_state import apply_engine
from medusa.engine.kernels import lanes
from medusa.engine.weights.products import PackedMatmul

pytestmark = needs_kernels
WIDE = {**GROUPED, "head_dim": 32, "num_hidden_layers": 4, "rms_norm_eps": 3e-3}
"""Heads as wide as the operators take them, and an epsilon that shows."""
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**WIDE)),
}
ALONE = CandidateTree.chain(0)


@pytest.fixture
def without_compiler(monkeypatch):
    """No compiler is installed; the kernels have come with the package."""
    lanes()
    for module in (compiled, optimized_heads, programs):
        monkeypatch.setattr(module, "found_compiler", lambda: None)


def base_of(kind):
    torch.manual_seed(7)
    base = KINDS[kind]().eval()
    for name, parameter in base.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return base


@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding_for_any_draft(without_compiler, kind, engine):
    base = base_of(kind)
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3, reads_path=True, path_rank=8))
    model = MedusaModel(base, heads, CandidateTree.chain(3), engine=engine, step="compiled")
    assert model._executor.compiled_pass()[0].is_fused and not model.is_compiled
    prompts = left_padded(random_prompts(3, 14), [14, 2, 9])
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9}):
        call = {**prompts, **sampling, "seed": 3, "max_new_tokens": 16}
        plain = model.generate(**call, tree=ALONE).tolist()
        assert model.generate(**call, tree=CandidateTree.chain(3)).tolist() == plain
        assert model.generate(**call, drafter="dynamic-heads+suffix").tolist() == plain
        if engine == "packed":
            assert MedusaModel(base).generate(**call, tree=ALONE).tolist() == plain


@pytest.mark.parametrize("engine", ["packed", "int8"])
@torch.no_grad()
def test_a_node_has_the_same_bits_alone_and_in_a_tree_and_is_near_the_modules(without_compiler, engine):
    view = apply_engine(base_of("qwen2"), engine)
    fused = CompiledPass(view)
    ids = random_prompts(2, 21)
    tree = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]])

    def after_prompt(run):
        cache = new_cache(view, 2)
        prefill(view, ids, torch.tensor([21, 13]), cache, run=run)
        return cache

    hidden, together = fused.verify(
        view, tree, BUSHY.topology("cpu"), after_prompt(fused.verify), layers=(1, 2)
    )
    their_hidden, theirs = verify(view, tree, BUSHY.topology("cpu"), after_prompt(verify), layers=(1, 2))
    near = 1e-4 if engine == "packed" else 1e-2
    torch.testing.assert_close(together, theirs, atol=near, rtol=near)
    torch.testing.assert_close(hidden, their_hidden, atol=near, rtol=near)
    for node, path in enumerate(BUSHY.paths):
        cache = after_prompt(fused.verify)
        for at in (BUSHY.paths.index(path[:depth]) for depth in range(len(path) + 1)):
            _, alone = fused.verify(view, tree[:, [at]], ALONE.topology("cpu"), cache)
            cache.commit_prefix(torch.ones(2, dtype=torch.long))
        assert torch.equal(alone[:, 0], together[:, node])


@torch.no_grad()
def test_a_pass_computes_four_products_a_layer_and_one_of_the_lm_head(without_compiler, monkeypatch):
    view = apply_engine(base_of("llama"), "packed")
    fused = CompiledPass(view)
    widths = []
    product = PackedMatmul.forward
    monkeypatch.setattr(
        PackedMatmul, "forward", lambda self, x: widths.append(self.width) or product(self, x)
    )
    fused.verify(view, torch.tensor([[3]]), ALONE.topology("cpu"), new_cache(view, 1))
    assert len(widths) == 4 * WIDE["num_hidden_layers"] + 1 and widths.count(VOCAB_SIZE) == 1


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt-neox", "mistral-sliding"])
def test_layers_of_another_kind_need_a_compiler_and_steps_run_general(
    without_compiler, nothing_is_compiled_unasked, monkeypatch, capsys, kind
):
    monkeypatch.setattr(loading, "default_step", nothing_is_compiled_unasked)
    monkeypatch.setattr(programs.Part, "path", property(lambda part: library_of(part)))
    model = MedusaModel(tiny_model(kind), engine="packed")
    loading.set_step(model, None)
    assert model.step == "general"
    said = capsys.readouterr().err
    assert "steps run general, which is slower" in said and "needs a C++ compiler" in said
    assert "apt install g++" in said and "are of another kind" in said


def library_of(part):
    from medusa.assets import cache_home

    return cache_home() / f"{part.name}-that-was-never-compiled.so"


@pytest.mark.parametrize("change", ["scale", "angles"])
def test_what_computes_something_else_is_refused(without_compiler, monkeypatch, change):
    view = apply_engine(base_of("llama"), "packed")
    right = fused_layers.fused_layer

    def wrong(call):
        layer = right(call)
        seen, cosines, sines = layer.places
        if change == "angles":
            return replace(layer, places=(seen, sines, cosines))
        return replace(layer, scale=0.5)

    monkeypatch.setattr(fused_layers, "fused_layer", wrong)
    with pytest.raises(ValueError, match="compute something else than their modules"):
        CompiledPass(view)


def test_libraries_that_are_there_are_used_without_a_compiler(without_compiler, monkeypatch, tmp_path):
    view = apply_engine(base_of("llama"), "packed")
    opened = []
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    monkeypatch.setattr(programs, "_opened", opened.append)
    for path in library_paths(view):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a library")
    assert not CompiledPass(view).is_fused and {*opened} == {*library_paths(view)}


def test_the_user_is_told_what_a_compiler_would_bring(without_compiler, capsys):
    CompiledPass(apply_engine(base_of("llama"), "packed"))
    said = capsys.readouterr().err
    assert said.count("layers run as operators") == 1 and "dnf install gcc-c++" in said


# ------------------------------------------------------------------ the operators


@pytest.mark.parametrize("width", [16, 48, 4096])
@pytest.mark.parametrize("rows", [(1, 1), (2, 5)])
def test_norms_and_sums_are_those_of_their_formulas(width, rows):
    torch.manual_seed(0)
    x, more, weight = torch.randn(*rows, width), torch.randn(*rows, width), torch.randn(width)
    expected = nn.functional.rms_norm(x, (width,), weight, 1e-2)
    torch.testing.assert_close(torch.ops.medusa.norm(x, weight, 1e-2), expected)
    total, normed = torch.ops.medusa.sum_and_norm(x, more, weight, 1e-2)
    assert torch.equal(total, x + more)
    assert torch.equal(normed, torch.ops.medusa.norm(total, weight, 1e-2))


def test_gates_are_silu_up_to_its_ends():
    both = torch.cat([torch.linspace(-100, 100, 4096), torch.randn(4096)])[None]
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(torch.ops.medusa.gated(both), nn.functional.silu(gate) * up)
    assert torch.ops.medusa.gated(torch.full((1, 64), torch.nan)).isnan().all()


@pytest.mark.parametrize("num_angles", [1, 2])
def test_queries_and_keys_are_turned_to_the_bit_and_kept_in_their_slots(num_angles):
    torch.manual_seed(0)
    rows = torch.randn(2, 3, (4 + 2 * 2) * 32)
    cosines, sines = torch.randn(2, num_angles, 3, 32)
    keys, values = torch.zeros(2, 2, 2, 7, 32)
    slots = torch.tensor([[0, 6, 2], [3, 4, 1]])
    queries = torch.ops.medusa.turned_queries(rows, cosines, sines, slots, keys, values)

    def turned(heads):
        first, second = heads.chunk(2, dim=-1)
        return heads * cosines[:, None] + torch.cat([-second, first], dim=-1) * sines[:, None]

    heads = rows.view(2, 3, 8, 32).transpose(1, 2)
    assert torch.equal(queries, turned(heads[:, :4]))
    for row in range(2):
        assert torch.equal(keys[row][:, slots[row]], turned(heads[:, 4:6])[row])
        assert torch.equal(values[row][:, slots[row]], heads[row, 6:])
    assert int((keys != 0).any(-1).sum()) == int((values != 0).any(-1).sum()) == 2 * 2 * 3


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"slots": torch.tensor([[7]])}, "slots must be"),
        ({"slots": torch.tensor([[-1]])}, "slots must be"),
        ({"cosines": torch.zeros(1, 2, 32)}, "cosines and sines"),
        ({"keys": torch.zeros(1, 1, 7, 8)}, "keys and values must"),
        ({"rows": torch.zeros(1, 1, 64)}, "twice whole vectors"),
        ({"rows": torch.zeros(1, 1, 96, dtype=torch.double)}, "float32"),
    ],
)
def test_what_would_be_read_or_written_beside_its_memory_is_refused(change, rule):
    call = {
        "rows": torch.zeros(1, 1, 96),
        "cosines": torch.zeros(1, 1, 32),
        "sines": torch.zeros(1, 1, 32),
        "slots": torch.tensor([[0]]),
        "keys": torch.zeros(1, 1, 7, 32),
        "values": torch.zeros(1, 1, 7, 32),
    }
    torch.ops.medusa.turned_queries(**call)
    with pytest.raises(RuntimeError, match=rule):
        torch.ops.medusa.turned_queries(**{**call, **change})
