"""A base whose layers are computed by the kernels for a card gives what its modules give."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    CHECKOUT,
    GROUPED,
    left_padded,
    random_heads,
    random_prompts,
    tiny_model,
)
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from triton_device import DEVICE, NEAR

from medusa import CandidateTree, MedusaModel
from medusa.base.passes import new_cache, prefill, verify
from medusa.engine.card.fused_layer import CardLayer, Handover, card_view, num_fused
from medusa.engine.card.joined_weights import in_one_piece, joined_product
from medusa.engine.card.support import (
    NO_TRITON,
    card_unsupported_reason,
    fused_on_card,
    triton_unsupported_reason,
)

OTHERS = {
    "llama-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh")
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**GROUPED)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GROUPED, sliding_window=7, query_pre_attn_scalar=8, attn_logit_softcapping=0.5)
    ),
}
QUICK = ["llama-biased", "gemma2"]
KNOWN = [*OTHERS, "llama", "qwen3", "mistral-sliding", "gemma3", "mixtral-moe"]


def base_of(kind, dtype=torch.float32):
    """A base whose norms, biases and weights all show."""
    torch.manual_seed(7)
    base = OTHERS[kind]() if kind in OTHERS else ARCHITECTURES[kind]()
    for name, parameter in base.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return base.eval().to(DEVICE, dtype)


def states_of_a_tree(base):
    """Hidden states and logits of a tree's nodes in two rows, after prompts of different lengths."""
    prompts = random_prompts(2, 70).to(DEVICE)
    cache = new_cache(base, 2)
    prefill(base, prompts, torch.tensor([70, 13], device=DEVICE), cache)
    topology = CandidateTree.from_paths([(0,), (1,), (0, 0)]).topology(DEVICE)
    return verify(base, prompts[:, : topology.num_nodes], topology, cache)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KNOWN]
)
@torch.no_grad()
def test_a_base_gives_the_states_of_its_modules(kind):
    base = base_of(kind)
    theirs = states_of_a_tree(copy.deepcopy(base))
    view, reasons = card_view(base)
    assert num_fused(view) == 2 and not reasons
    for ours, expected in zip(states_of_a_tree(view), theirs, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)
    for ours, expected in zip(states_of_a_tree(base), theirs, strict=True):  # whose weights are joined now
        torch.testing.assert_close(ours, expected)


@torch.no_grad()
def test_a_base_in_half_precision_gives_nearly_the_states_of_its_modules():
    base = base_of("qwen2", torch.float16)
    view, _ = card_view(base)
    ours = states_of_a_tree(view)[0].float()
    theirs = states_of_a_tree(base)[0].float()
    assert float((ours - theirs).abs().max()) < 5 * NEAR[torch.float16] * float(theirs.abs().max())


@pytest.mark.parametrize(
    ("kind", "step"),
    [("llama", "static"), pytest.param("qwen2", "static", marks=pytest.mark.slow)]
    + [pytest.param(kind, "general", marks=pytest.mark.slow) for kind in ("llama", "qwen2", "gemma3")],
)
def test_the_text_is_that_of_plain_decoding_by_the_modules(kind, step):
    base = base_of(kind)
    prompts = {name: each.to(DEVICE) for name, each in left_padded(random_prompts(2, 9), [9, 3]).items()}
    call = {**prompts, "do_sample": False, "max_new_tokens": 5}
    plain = MedusaModel(copy.deepcopy(base), engine="eager").generate(**call, tree=CandidateTree.chain(0))
    model = MedusaModel(card_view(base)[0], random_heads(), CandidateTree.chain(2), engine="eager")
    assert model.generate(**call, step=step).tolist() == plain.tolist()


@torch.no_grad()
def test_prompts_and_caches_of_transformers_run_the_modules(monkeypatch):
    base = base_of("llama")
    view, _ = card_view(base)
    calls = []
    forward = type(base.model.layers[0]).forward
    monkeypatch.setattr(
        type(base.model.layers[0]),
        "forward",
        lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs),
    )
    prompt = random_prompts(1, 70).to(DEVICE)
    torch.testing.assert_close(view(input_ids=prompt).logits, base(input_ids=prompt).logits)
    assert len(calls) == 4
    cache = new_cache(view, 1)
    prefill(view, prompt, torch.tensor([70], device=DEVICE), cache)
    assert len(calls) == 6
    verify(view, prompt[:, :1], CandidateTree.chain(0).topology(DEVICE), cache)
    assert len(calls) == 6


@torch.no_grad()
def test_weights_of_one_product_lie_in_one_piece_and_none_is_held_twice():
    base = base_of("qwen2")
    attention = base.model.layers[0].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.ones(32, device=DEVICE)
    expected = [linear(x) for linear in linears]
    together = joined_product(linears)
    torch.testing.assert_close(together(x), torch.cat(expected))
    attention.k_proj.weight.fill_(0.5)  # a write to one is a write to all
    torch.testing.assert_close(together(x), torch.cat([linear(x) for linear in linears]))
    addresses = [linear.weight.data_ptr() for linear in linears]
    joined_product(linears)
    assert [linear.weight.data_ptr() for linear in linears] == addresses
    weights = [linear.weight.detach() for linear in linears]
    assert in_one_piece(weights).data_ptr() == addresses[0]
    assert torch.equal(in_one_piece(weights[::-1]), torch.cat(weights[::-1]))


def test_a_norm_is_handed_over_for_the_sum_that_it_is_of_and_once():
    handover = Handover()
    hidden = torch.ones(1)
    for asked_for, expected in ((hidden, True), (torch.ones(1), False)):
        handover.sum = hidden
        handover.normed = torch.zeros(1)
        assert (handover.take(asked_for) is not None) == expected
        assert handover.take(hidden) is None


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("phi", "PhiDecoderLayer is made of input_layernorm, mlp, resid_dropout"),
        ("gpt-neox", "GPTNeoXLayer is made of"),
    ],
)
def test_layers_of_another_structure_are_refused_in_words(kind, words):
    with pytest.raises(ValueError, match=f"engine='packed' knows no layer.*{words}.*use engine='eager'"):
        fused_on_card(tiny_model(kind).to(DEVICE))


def test_layers_that_compute_something_else_keep_their_modules():
    torch.manual_seed(7)
    sizes = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    base = GptOssForCausalLM(GptOssConfig(**sizes)).eval().to(DEVICE)  # whose angles are of half a head
    view, reasons = card_view(base)
    assert num_fused(view) == 0 and "GptOssDecoderLayer computes something else" in " ".join(reasons)


def test_one_layer_of_another_kind_keeps_its_modules_and_this_is_said(capsys):
    base = base_of("llama")
    base.model.layers[1].mlp.act_fn = nn.Tanh()
    view = fused_on_card(base)
    assert [type(layer) is CardLayer for layer in view.model.layers] == [True, False]
    assert "leaves some layers to their modules: Tanh is neither SiLU nor GELU" in " ".join(
        capsys.readouterr().err.split()
    )
    assert view.model.layers[0].next_norm is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda base: base.double(), "a base in bfloat16, float16 or float32, got torch.float64"),
        (lambda base: base.model.layers[0].register_forward_hook(lambda *_: None), "a forward hook on"),
    ],
)
def test_a_base_that_cannot_be_computed_so_is_refused(change, words):
    base = base_of("llama")
    assert card_unsupported_reason(base) is None
    change(base)
    assert words in card_unsupported_reason(base)


def test_without_triton_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("medusa.engine.card.support.importlib.util.find_spec", lambda name: None)
    assert (
        triton_unsupported_reason.__wrapped__(torch.device(DEVICE)) == NO_TRITON
        and "pip install triton" in NO_TRITON
    )


def test_where_triton_cannot_compile_the_reason_says_why(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr("medusa.engine.card.row_kernels.gated", fail)
    reason = triton_unsupported_reason.__wrapped__(torch.device(DEVICE))
    assert "cannot compile" in reason and "(Failed to find C compiler.)" in reason


# ------------------------------------------------------------------ on a pretended card


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and the headers of torch")
def test_engine_packed_runs_on_a_pretended_card_in_all_steps_with_ten_launches_a_layer():
    """See ``pretended_card/packed_on_a_card.py``."""
    tests = CHECKOUT / "tests"
    places = [str(tests), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["-p", "pretended_card", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tests / "pretended_card" / "packed_on_a_card.py")],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
