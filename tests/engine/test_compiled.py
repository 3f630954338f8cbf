"""Compiled passes give what their view gives, a node what it gives that node alone, and are compiled once."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import GROUPED, VOCAB_SIZE, left_padded, needs_kernels, needs_newest, random_prompts, tiny_model
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.assets import cache_home
from medusa.base.causal_lm import lm_head
from medusa.base.passes import new_cache, prefill, verify
from medusa.decoding.batch import BatchLimits, Row
from medusa.engine import compiled as compiled_passes
from medusa.engine import kernels, pass_parts
from medusa.engine.compiled import CompiledPass, layers_unsupported_reason, library_paths
from medusa.engine.engine_state import apply_engine
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.programs import Part, Program

pytestmark = needs_kernels
BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
HEADS = HeadsConfig(32, VOCAB_SIZE, num_heads=3, fused_layers=(1,), reads_path=True, path_rank=8)
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


def check_heads(heads, embedding):
    """Programs compute each head, for any number of rows and nodes."""
    programs, fusing = heads.programs, heads.fusing
    with torch.no_grad():
        for rows, nodes in ((1, 1), (2, 1), (3, 4)):
            states = torch.randn(rows, 64)
            heads.programs, heads.fusing = programs, fusing
            hidden = heads.fuse(states)
            heads.fusing = None
            torch.testing.assert_close(hidden, heads.fuse(states), atol=1e-3, rtol=1e-3)
            paths = torch.randint(VOCAB_SIZE, (rows, nodes, heads.num_heads))
            per_node = hidden[:, None].expand(-1, nodes, -1)
            for index in range(heads.num_heads):
                heads.programs, heads.fusing = programs, fusing
                mine = heads.logits_of(index, per_node, embedding, paths[..., : index + 1])
                heads.programs = heads.fusing = None
                theirs = heads.logits_of(index, per_node, embedding, paths[..., : index + 1])
                torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    heads.programs, heads.fusing = programs, fusing


def check_a_view(engine, base):
    """All that is promised of compiled passes, which take long to make."""
    model = MedusaModel(base, heads(), BUSHY, engine=engine, step="compiled")
    for temperature in (0.0, 0.9):
        said = texts(model, **asked(temperature))
        assert said["heads"] == said["plain"] and said["dynamic"] == said["plain"]
        if engine == "packed":
            assert said["plain"] == MedusaModel(base).generate(**BATCH, **asked(temperature)).tolist()

    check_a_shared_batch(model)

    check_heads(model.optimized_heads, lm_head(model.engine_base))
    view, topology = model.engine_base, BUSHY.topology("cpu")
    compiled, seconds = model._executor.compiled_pass()
    assert seconds < 0.1, "the calls above have it"
    tree = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])

    def after_prompt(run):
        cache = new_cache(view, 2)
        prefill(view, random_prompts(2, 21), torch.tensor([21, 13]), cache, run=run)
        return cache

    with torch.no_grad():
        hidden, together = compiled.verify(view, tree, topology, after_prompt(compiled.verify), layers=(1,))
        theirs_hidden, theirs = verify(view, tree, topology, after_prompt(verify), layers=(1,))
        near = 1e-4 if engine == "packed" else 1e-2  # steps of int8 products are rounded to other sides
        torch.testing.assert_close(together, theirs, atol=near, rtol=near)
        torch.testing.assert_close(hidden, theirs_hidden, atol=near, rtol=near)
        for node, path in enumerate(BUSHY.paths):
            cache = after_prompt(compiled.verify)
            for at in (BUSHY.paths.index(path[:depth]) for depth in range(len(path) + 1)):
                _, alone = compiled.verify(view, tree[:, [at]], CandidateTree.chain(0).topology("cpu"), cache)
                cache.commit_prefix(torch.ones(2, dtype=torch.long))
            assert torch.equal(alone[:, 0], together[:, node]), "not a bit depends on the tree"


def test_compiled_passes_are_exact_kept_and_serve_other_weights(capsys, monkeypatch):
    torch.manual_seed(7)
    monkeypatch.setattr(pass_parts, "MOST_TOGETHER", 2)
    config = LlamaConfig(**{**GROUPED, "num_hidden_layers": 4})
    base, other = (LlamaForCausalLM(config).eval() for _ in range(2))
    check_a_view("packed", base)
    view = apply_engine(other, "packed")
    paths = library_paths(view)
    assert len(paths) == 3 and all(path.exists() for path in paths), "the ends, and one for both groups"
    capsys.readouterr()
    compiled = CompiledPass(view)
    assert "compiling" not in capsys.readouterr().err
    ids, given = random_prompts(2, 12), []
    for run in (verify, compiled.verify):
        with torch.no_grad():
            given.append(prefill(view, ids, torch.tensor([12, 9]), new_cache(view, 2), run=run)[1])
    torch.testing.assert_close(*given, atol=1e-4, rtol=1e-4)


MIXTURES = {
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**GROUPED, num_experts=16, num_experts_per_tok=3, moe_intermediate_size=48)
    ),
    "experts with biases": lambda: GptOssForCausalLM(
        GptOssConfig(**GROUPED, num_local_experts=16, num_experts_per_tok=3, sliding_window=8)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_compiled_passes_of_mixtures_are_exact(kind, engine, monkeypatch):
    monkeypatch.setattr(pass_parts, "MOST_TOGETHER", 1)  # one library serves two layers, of other routers
    torch.manual_seed(7)
    check_a_view(engine, MIXTURES[kind]().eval())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "mistral-sliding", "gpt-neox", "phi"])
def test_compiled_passes_are_exact_on_every_architecture(architecture, engine):
    check_a_view(engine, tiny_model(architecture))


@pytest.mark.slow
def test_angles_that_depend_on_the_length_are_computed_as_they_are():
    config = LlamaConfig(
        **{**GROUPED, "num_hidden_layers": 2, "max_position_embeddings": 40},
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    torch.manual_seed(7)
    base = LlamaForCausalLM(config).eval()
    model = MedusaModel(base, heads(), BUSHY, engine="packed", step="compiled")
    assert len(library_paths(model.engine_base)) == 1, "what comes before and after the layers runs as it is"
    said = texts(model, **asked(0.0))
    assert said["heads"] == said["plain"] == MedusaModel(base).generate(**BATCH, **asked(0.0)).tolist()


def test_a_library_is_named_for_all_that_it_depends_on_but_weights(monkeypatch):
    def paths(engine="packed", **changes):
        config = LlamaConfig(**{**GROUPED, **changes})
        return tuple(library_paths(apply_engine(LlamaForCausalLM(config).eval(), engine)))

    assert paths() == paths() and len(paths()) == 3
    others = (paths("int8"), paths(rms_norm_eps=0.1), paths(hidden_act="gelu"), paths(intermediate_size=64))
    assert len({path for each in (paths(), *others) for path in each}) == 14, (
        "what comes before the layers has no product, and is the same in int8"
    )
    for together, libraries in ((2, 3), (1, 4)):
        monkeypatch.setattr(pass_parts, "MOST_TOGETHER", together)
        two_kinds = library_paths(apply_engine(tiny_model("gemma3"), "packed"))
        assert len(two_kinds) == libraries, "layers of two kinds in one library, or in one each"


def test_another_transformers_or_number_of_threads_has_its_own_libraries_and_the_same_kernels(monkeypatch):
    view = apply_engine(tiny_model("llama"), "packed")
    before = set(library_paths(view))
    compiler = kernels.found_compiler()
    kernels_before = kernels.kept_kernels(compiler)
    for module, name, value in (
        (transformers, "__version__", "5.0.0"),
        (torch, "get_num_threads", lambda: 99),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            assert not before & set(library_paths(view)), name
            assert kernels.kept_kernels(compiler) == kernels_before


@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("error", [0.0, 1e-2])
def test_programs_that_compute_something_else_are_refused_and_not_made_again(
    monkeypatch, tmp_path, engine, error
):
    """What is within rounding passes: the same code, where each number is moved by its last bit."""
    made = []

    def written(part, count=""):
        made.append(part.name)
        part.path.parent.mkdir(parents=True, exist_ok=True)
        part.path.write_bytes(b"a library")

    class Uncompiled(Program):
        def __init__(self, module, part):
            super().__init__(module, None)

        def __call__(self, inputs):
            moved = 1 + (error or torch.finfo(torch.float32).eps)
            return [each * moved if each.is_floating_point() else each for each in super().__call__(inputs)]

    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    monkeypatch.setattr(Part, "compile", written)
    monkeypatch.setattr(compiled_passes, "Program", Uncompiled)
    view = apply_engine(LlamaForCausalLM(LlamaConfig(**GROUPED)).eval(), engine)
    if not error:
        CompiledPass(view)
        return
    for _ in range(2):
        with pytest.raises(ValueError, match=r"other logits than the model: they differ by .* rounding"):
            CompiledPass(view)
    assert made == ["llama-before", "llama-after", "llama-layers"], "once"
    assert not any(path.exists() for path in library_paths(view))


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch):
    def fails(module, args, kwargs, options):
        (Path(options["aot_inductor.output_path"]) / "half").write_bytes(b"half")
        raise RuntimeError("the compiler died")

    monkeypatch.setattr(torch._inductor, "aot_compile", fails)
    base = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "rms_norm_eps": 0.5})).eval()
    view = apply_engine(base, "packed")
    with pytest.raises(RuntimeError, match="the compiler died"):
        CompiledPass(view)
    stem = library_paths(view)[0].stem
    left = [path.name for path in (cache_home() / "compiled").iterdir() if path.name.startswith(stem)]
    assert left == [f"{stem}.lock"]


NO_KERNEL = pytest.param("attention", marks=needs_newest)


@pytest.mark.parametrize("what", ["compiler", NO_KERNEL, "routers", "width"])
def test_what_cannot_be_compiled_is_refused_with_the_reason(monkeypatch, what):
    base = copy.deepcopy(tiny_model("llama"))
    if what == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
        kernels_unsupported_reason.cache_clear()
        reason = r"engine='packed' needs a C\+\+ compiler \(g\+\+ .*none is installed"
    elif what == "attention":
        base = DogeForCausalLM(DogeConfig(**GROUPED)).eval()
        reason = "step='compiled' needs attention that the kernels compute, got 'sdpa'"
    elif what == "routers":
        base = tiny_model("mixtral-moe")
        reason = "step='compiled' needs widths that are multiples of 16, got 4"
    else:
        base = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "intermediate_size": 40})).eval()
        assert "multiples of 16, got 40" in str(layers_unsupported_reason(apply_engine(base, "packed")))
        reason = "step='compiled' needs widths that are multiples of 16, got 40"
    with pytest.raises(ValueError, match=reason):
        MedusaModel(base, engine="packed", step="compiled")
    kernels_unsupported_reason.cache_clear()
