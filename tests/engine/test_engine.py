"""Every engine leaves the base alone; packed computes what eager does, int8 nearly."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from functools import partial

import pytest
import torch
from conftest import (
    GROUPED,
    READING,
    VOCAB_SIZE,
    left_padded,
    needs_kernels,
    needs_newest,
    random_prompts,
    tiny_model,
)
from refusals import assert_refused
from transformers import DogeConfig, DogeForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.passes import new_cache, prefill, verify
from medusa.engine.engine_state import apply_engine
from medusa.engine.optimized_heads import optimized_heads
from medusa.engine.views import (
    InPlaceNorm,
    in_place_norm,
    packed_as,
    packed_bytes,
    share_of_outliers,
    view_of,
)
from medusa.engine.weights import forms
from medusa.engine.weights.products import (
    JoinedLinear,
    PackedMatmul,
    joinable_linears,
    joined_bias,
    share_product,
)

BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])


def with_random_biases(base):
    """A copy whose biases count: architectures that have them start with zeros."""
    clone = copy.deepcopy(base)
    for name, parameter in clone.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return clone


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3", "gpt-neox", "mixtral-moe"])
def test_packed_logits_equal_eager_ones(architecture):
    base = with_random_biases(tiny_model(architecture))
    for num_tokens in (1, 2, 16, 100):
        ids = random_prompts(2, num_tokens)
        with torch.no_grad():
            assert torch.allclose(view_of(base)(ids).logits, base(ids).logits, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral-sliding"])
def test_a_tree_on_the_packed_engine_gives_the_logits_of_the_eager_one(architecture):
    base, (prompts, lengths) = tiny_model(architecture), (random_prompts(2, 41), torch.tensor([41, 13]))
    tree = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    logits = []
    for runner in (base, view_of(base)):
        cache = new_cache(runner, 2)
        with torch.no_grad():
            prefill(runner, prompts, lengths, cache, chunk=70)
            logits.append(verify(runner, tree, BUSHY.topology(), cache)[1])
    assert torch.allclose(*logits, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_packed_view_heeds_padding_as_the_base_does(architecture):
    base, batch = tiny_model(architecture), left_padded(random_prompts(2, 14), [14, 5])
    with torch.no_grad():
        logits, packed_logits = base(**batch).logits, view_of(base)(**batch).logits
    real = batch["attention_mask"].bool()
    assert torch.allclose(packed_logits[real], logits[real], atol=1e-4)


@needs_kernels
def test_a_base_published_in_bfloat16_is_decoded_in_float32_with_its_weights_as_they_are(tmp_path):
    copy.deepcopy(tiny_model("llama")).bfloat16().save_pretrained(tmp_path)
    model = MedusaModel.from_pretrained(tmp_path)
    assert model.base.dtype == torch.float32 and model.runtime.engine == "packed"
    assert model.engine_base.get_output_embeddings().panels.dtype == torch.bfloat16
    held, whole = packed_bytes(model.engine_base), packed_bytes(view_of(tiny_model("llama")))
    assert held.keys() == {"bfloat16"} and whole == {"float32": 2 * held["bfloat16"]}
    assert model.base is model.engine_base, "which is held once"
    prompt, options = random_prompts(1, 9), {"max_new_tokens": 12, "do_sample": False}
    reference = model.base.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    assert model.generate(prompt, **options).tolist() == reference.tolist()
    assert MedusaModel.from_pretrained(tmp_path, dtype="auto").base.dtype == torch.bfloat16


@needs_kernels
@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"])
def test_decoding_with_heads_is_token_identical_on_an_engine(sampling, engine):
    """Packed, it is what the base itself writes too."""
    base, options = tiny_model("llama"), {"do_sample": False, "seed": 2, "max_new_tokens": 30, **sampling}
    batch = left_padded(random_prompts(3, 14), [14, 2, 9])
    model = MedusaModel(base, MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3)), BUSHY, engine=engine)
    plain = model.generate(**batch, **options, tree=CandidateTree.chain(0))
    assert model.generate(**batch, **options, tree=model.tree).tolist() == plain.tolist()
    if engine == "packed":
        assert MedusaModel(base).generate(**batch, **options).tolist() == plain.tolist()
    assert model.base is base and model.engine_base is not base


@needs_kernels
def test_packing_shares_parameters_and_leaves_the_base_as_it_was():
    base = tiny_model("llama")
    clone = view_of(base)
    assert {id(p) for p in clone.parameters()} == {id(p) for p in base.parameters()}
    assert any(isinstance(module, PackedMatmul) for module in clone.modules())
    assert not any(isinstance(module, PackedMatmul) for module in base.modules())
    assert clone.get_output_embeddings().weight is base.get_output_embeddings().weight


def joined(linears, int8=False):
    """Layers in their places that share one product."""
    product = PackedMatmul([linear.weight.detach() for linear in linears], joined_bias(linears), int8)
    return share_product(linears, product)


def linears_of(widths, bias=False, inputs=40):
    torch.manual_seed(0)
    return [torch.nn.Linear(inputs, width, bias=bias) for width in widths]


@needs_kernels
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_give_each_bit_that_they_give_alone(bias, int8):
    linears, x = linears_of((24, 8, 8), bias), 3 * torch.randn(2, 5, 40)
    for layer, linear in zip(joined(linears, int8), linears, strict=True):
        assert torch.equal(layer(x), PackedMatmul([linear.weight.detach()], linear.bias, int8)(x))
        assert torch.allclose(layer(x), linear(x), atol=0.1 if int8 else 1e-5)
        assert layer.weight is linear.weight and layer.bias is linear.bias


class CountedProduct(torch.nn.Module):
    """An ordinary product that counts its calls."""

    def __init__(self, linears):
        super().__init__()
        self.weight, self.num_calls = torch.cat([linear.weight for linear in linears]), 0

    def forward(self, x):
        self.num_calls += 1
        return torch.nn.functional.linear(x, self.weight)


@needs_kernels
def test_joined_layers_compute_once_for_one_input_and_again_for_any_other():
    linears = linears_of((6, 3))
    first, second = joined(linears)
    product = first.product = CountedProduct(linears)
    x, other = torch.randn(4, 40), torch.randn(4, 40)
    is_close = partial(torch.allclose, atol=1e-5)  # a wider product rounds otherwise
    with torch.no_grad():
        for _ in range(2):
            assert is_close(first(x), linears[0](x)) and is_close(second(x), linears[1](x))
        assert product.num_calls == 2  # nothing is kept once all have taken their part
        first(x)
        assert is_close(second(other), linears[1](other))
        first(x)
        x.mul_(2)
        assert is_close(second(x), linears[1](x))
        assert is_close(second(x), linears[1](x)) and is_close(first(x), linears[0](x))
    with torch.inference_mode():
        assert is_close(first(x + 1), linears[0](x + 1))


def test_only_plain_layers_that_can_read_one_input_are_joined():
    attention = tiny_model("llama").model.layers[0].self_attn
    assert list(joinable_linears(attention)) == [[attention.q_proj, attention.k_proj, attention.v_proj]]
    mlp = torch.nn.Module()
    mlp.gate_proj, mlp.up_proj = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    assert len(list(joinable_linears(mlp))) == 1
    for up_proj in (torch.nn.Linear(9, 4), torch.nn.Linear(8, 4, bias=False), torch.nn.Bilinear(8, 8, 4)):
        mlp.up_proj = up_proj
        assert list(joinable_linears(mlp)) == []
    assert not any(list(joinable_linears(module)) for module in tiny_model("gpt-neox").modules())


@needs_kernels
def test_a_view_joins_what_reads_one_input_and_packs_the_rest():
    layer = view_of(tiny_model("llama")).model.layers[0]
    joined_names = {name for name, module in layer.named_modules() if type(module) is JoinedLinear}
    attention, mlp = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
    assert joined_names == {f"self_attn.{name}" for name in attention} | {f"mlp.{name}" for name in mlp}
    assert type(layer.self_attn.o_proj) is type(layer.mlp.down_proj) is PackedMatmul
    assert type(layer.input_layernorm) is InPlaceNorm
    plain = {PackedMatmul, InPlaceNorm}
    assert plain.isdisjoint(map(type, tiny_model("llama").modules()))


@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 7, 576), (64, 33)])
def test_a_norm_of_a_view_gives_every_bit_of_the_models_own(shape):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    quick, x = in_place_norm(norm), 10 * torch.randn(shape)
    assert torch.equal(quick(x), norm(x)) and quick.weight is norm.weight


class CentredNorm(LlamaRMSNorm):
    """Named and built as a root-mean-square norm, and none."""

    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


def test_a_norm_that_computes_something_else_is_left_alone():
    gemma = tiny_model("gemma3").model.norm
    for norm in (CentredNorm(8), gemma, torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)):
        assert in_place_norm(norm) is None


class QuantisedWeight(torch.Tensor):
    """What torchao puts in place of a weight: a subclass of tensor."""


def sharded():
    base = copy.deepcopy(tiny_model("llama"))
    base.hf_device_map = {"model": "cpu", "lm_head": "cuda:0"}
    return base


def quantised():
    base = copy.deepcopy(tiny_model("llama"))
    linear = base.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(QuantisedWeight))
    return base


@pytest.mark.parametrize(
    ("make", "engine", "words"),
    [
        (lambda: copy.deepcopy(tiny_model("phi")).bfloat16(), "packed", "a float32 model on the CPU"),
        (sharded, "packed", "the whole model in one place, and this one is sharded"),
        (quantised, "int8", "plain weights, and this model's are quantised already"),
        (lambda: tiny_model("llama"), "warp", "engine must be one of ... 'eager', 'packed' ... got 'warp'"),
    ],
)
def test_an_engine_says_what_it_lacks_and_auto_falls_back_to_eager(make, engine, words):
    base = make()
    assert_refused(lambda: apply_engine(base, engine), ValueError, words)
    assert engine == "warp" or apply_engine(base, "auto") is base


@needs_kernels
@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_pytorch_tanh", "quick_gelu"])
def test_an_activation_of_a_view_gives_a_row_the_same_bits_alone_and_among_others(activation, width):
    config = LlamaConfig(**{**GROUPED, "hidden_act": activation, "intermediate_size": width})
    function = view_of(LlamaForCausalLM(config).eval()).model.layers[0].mlp.act_fn
    rows = torch.randn(1400, 2 * width) * 3  # more than torch gives to one thread

    def of_part(rows):  # as a joined product hands its part out
        return function(rows.split(width, dim=-1)[0])

    assert torch.equal(of_part(rows), torch.cat([of_part(row) for row in rows.split(1)]))


@needs_kernels
def test_an_int8_view_is_near_the_base_and_leaves_it_alone():
    base = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    view, ids = view_of(base, int8=True), random_prompts(1, 20)
    with torch.no_grad():
        logits, near = base(ids).logits, view(ids).logits
    assert 0 < (logits - near).abs().mean() < 0.15 * logits.std()
    assert {id(p) for p in view.parameters()} == {id(p) for p in base.parameters()}
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
    assert base.config._attn_implementation == "sdpa"


def drawn_heads(**options):
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3, **options))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads


@needs_kernels
@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("reading", READING)
@torch.no_grad()
def test_heads_draft_with_the_products_of_the_engine_near_their_own(engine, reading):
    options = {**READING[reading], "num_layers": 2}
    heads, base = drawn_heads(**options), tiny_model("llama")
    embedding = apply_engine(base, engine).get_output_embeddings()
    quick = optimized_heads(heads, embedding)
    hidden, path = torch.randn(4, 32), torch.randint(VOCAB_SIZE, (4, 3))
    exact, near = (each(hidden, base.get_output_embeddings(), path) for each in (heads, quick))
    assert 0 < (near - exact).abs().max() < 0.1 * exact.abs().max()
    assert {id(p) for p in quick.parameters()} <= {id(p) for p in heads.parameters()}, "shared, none copied"
    assert optimized_heads(heads, base.get_output_embeddings()) is heads
    assert heads.state_dict().keys() == drawn_heads(**options).state_dict().keys()


@needs_kernels
def test_a_base_in_twelve_bits_writes_the_same_text_and_tells_what_it_keeps_apart(monkeypatch):
    base = copy.deepcopy(tiny_model("llama")).bfloat16().float()
    with torch.no_grad():
        base.lm_head.weight[3, 7] = 2.0**40
    plain, prompt = view_of(base), random_prompts(2, 9)
    monkeypatch.setattr(forms, "TWELVE_BITS_FROM", 0)
    monkeypatch.setattr(forms, "_twelve_bits", True)
    view = view_of(base)
    assert packed_bytes(view).keys() == {"bfloat16 in 12 bits"}
    num_weights = sum(
        each.width * each.num_inputs for each in view.modules() if isinstance(each, PackedMatmul)
    )
    assert share_of_outliers(plain) == 0 and 1 / num_weights <= share_of_outliers(view) < 0.004
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert view.generate(prompt, **options).tolist() == plain.generate(prompt, **options).tolist()


CHANGES = {
    "the base is written to": lambda model: model.base.lm_head.weight.mul_(-1),
    "the base is cast": lambda model: model.base.double(),
    "the heads are written to": lambda model: model.heads.blocks[0][0].linear.weight.add_(1),
    "the heads get other weights": lambda model: setattr(
        model.heads.blocks[0][0].linear, "weight", torch.nn.Parameter(torch.ones(32, 32))
    ),
}


@needs_kernels
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_weights_that_changed_after_the_engine_took_them_are_refused_until_they_are_refreshed(change):
    base = copy.deepcopy(tiny_model("llama"))
    model = MedusaModel(base, drawn_heads(), BUSHY, engine="auto")
    prompt, options = random_prompts(1, 9), {"max_new_tokens": 12, "do_sample": False}
    assert model.optimized_heads is not model.heads
    model.generate(prompt, **options)
    CHANGES[change](model)
    for call in (model.generate, lambda *args, **kwargs: list(model.stream(*args, **kwargs))):
        with pytest.raises(ValueError, match=r"have changed .* engine='auto' .* refresh\(\)"):
            call(prompt, **options)
    model.refresh()
    reference = base.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    assert model.generate(prompt, **options).tolist() == reference.tolist()


def test_an_eager_model_takes_nothing_and_follows_every_change():
    base = copy.deepcopy(tiny_model("llama"))
    model = MedusaModel(base, drawn_heads(), BUSHY)
    prompt, options = random_prompts(1, 9), {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        base.lm_head.weight.mul_(-1)
    reference = base.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    assert model.generate(prompt, **options).tolist() == reference.tolist()


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


@needs_kernels
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("engine", ["packed", "int8"])
@torch.no_grad()
def test_a_view_and_a_model_on_it_can_be_copied_and_pickled(engine, copied):
    base, ids = tiny_model("llama"), random_prompts(1, 9)
    view = apply_engine(base, engine)
    other = copied(view)
    assert torch.equal(other(ids).logits, view(ids).logits)
    assert {id(weight) for weight in other.parameters()}.isdisjoint(map(id, base.parameters()))
    model = MedusaModel(base, drawn_heads(), BUSHY, engine=engine)
    options = {"max_new_tokens": 12, "do_sample": False}
    twin = copied(model)
    assert (
        twin.base is not base
        and twin.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    )


def doge():
    torch.manual_seed(3)
    return DogeForCausalLM(DogeConfig(**GROUPED)).eval()


@needs_newest
@needs_kernels
def test_a_model_that_makes_masks_of_its_own_keeps_its_attention_where_products_are_packed():
    base, ids, options = doge(), random_prompts(1, 9), {"max_new_tokens": 12, "do_sample": False}
    model = MedusaModel(base, engine="packed")
    assert (
        model.engine_base.config._attn_implementation == "sdpa" and packed_as(model.engine_base) is not None
    )
    reference = base.generate(ids, **options, attention_mask=torch.ones_like(ids))
    assert model.generate(ids, **options).tolist() == reference.tolist()


@needs_kernels
@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("reads_path", [True, False])
def test_heads_with_a_token_map_draft_in_int8_and_decode_exactly(engine, reads_path):
    torch.manual_seed(0)
    base, ids = tiny_model("llama"), list(range(0, VOCAB_SIZE, 2))
    config = HeadsConfig(
        32, VOCAB_SIZE, num_heads=3, unembedding="token_map", token_map_size=len(ids), reads_path=reads_path
    )
    heads = MedusaHeads(config, ids)
    model = MedusaModel(base, heads, BUSHY, engine=engine)
    hidden, path = torch.randn(4, 32), torch.randint(VOCAB_SIZE, (4, 3))
    with torch.no_grad():
        exact = heads(hidden, base.get_output_embeddings(), path)
        quick = model.optimized_heads(hidden, model.engine_base.get_output_embeddings(), path)
        again = heads(hidden, model.engine_base.get_output_embeddings(), path)
    assert 0 < (quick - exact).abs().max() < 0.05 * exact.abs().max()
    assert torch.equal(again, exact)  # the heads themselves gather the rows as they are
    prompt, options = {"inputs": random_prompts(1, 9)}, {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(**prompt, **options, tree=CandidateTree.chain(0))
    assert model.generate(**prompt, **options).tolist() == plain.tolist()
    assert torch.equal(copy.deepcopy(heads)(hidden, base.get_output_embeddings(), path), exact)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install torchao")
def test_a_model_that_transformers_has_quantised_runs_eagerly_and_decodes_exactly():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = copy.deepcopy(tiny_model("llama"))
    quantize_(base, Int8WeightOnlyConfig(version=2, set_inductor_config=False))
    model = MedusaModel(base, MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3)), BUSHY, engine="auto")
    assert model.engine_base is base
    options = {"do_sample": False, "max_new_tokens": 20}
    batch = left_padded(random_prompts(3, 14), [14, 2, 9])
    assert model.generate(**batch, **options).tolist() == base.generate(**batch, **options).tolist()
