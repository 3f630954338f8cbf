"""An engine runs the base as it is: what is put onto its modules counts, and what it took must be current."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
from conftest import BUSHY, needs_kernels, random_prompts, tiny_model
from refusals import assert_refused
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

from medusa import HeadsConfig, MedusaHeads, MedusaModel
from medusa.decoding.batch import Row
from medusa.engine.optimized_heads import optimized_heads
from medusa.engine.snapshot import Snapshot, alteration_of

pytestmark = needs_kernels
PROMPT = random_prompts(1, 9)
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def half(*args):
    return args[-1] * 0.5


def wrap(module, change=half):
    """Patch ``module.forward`` as a user does: the old one is called, and its result changed."""
    old = module.forward
    module.forward = lambda *args, **kwargs: change(old(*args, **kwargs))


def bind_forward(mlp):
    mlp.forward = MethodType(lambda self, x: self.down_proj(self.up_proj(x)), mlp)


def negate_logits(output):
    output.logits = -output.logits
    return output


ALTERATIONS = {
    "a hook on a linear layer": lambda base: base.model.layers[0].mlp.down_proj.register_forward_hook(half),
    "a hook before a linear layer": lambda base: base.model.layers[1].mlp.up_proj.register_forward_pre_hook(
        lambda module, args: (args[0] * -2,)
    ),
    "a hook on a norm": lambda base: base.model.norm.register_forward_hook(lambda m, a, o: o.flip(-1)),
    "a hook on the LM head": lambda base: base.lm_head.register_forward_hook(
        lambda module, args, output: -output
    ),
    "a patched linear layer": lambda base: wrap(base.model.layers[0].self_attn.q_proj, lambda x: x.flip(-1)),
    "a patched norm": lambda base: wrap(base.model.layers[0].input_layernorm, lambda x: x.flip(-1)),
    "a bound method as forward": lambda base: bind_forward(base.model.layers[0].mlp),
    "a wrapped decoder layer": lambda base: wrap(base.model.layers[0]),
    "a wrapped forward of the base": lambda base: wrap(base, negate_logits),
}


def fresh_base():
    return copy.deepcopy(tiny_model("llama"))


def heads():
    return MedusaHeads(HeadsConfig(32, 61, num_heads=4))


def row_of(model):
    return Row(model.request(PROMPT, **OPTIONS))


def said_by(base):
    return base.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **OPTIONS).tolist()


@pytest.mark.parametrize("is_loaded_before", [True, False])
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_auto_says_what_an_altered_base_says(alteration, is_loaded_before):
    base = fresh_base()
    before = said_by(base)
    model = MedusaModel(base, heads(), BUSHY, engine="auto") if is_loaded_before else None
    ALTERATIONS[alteration](base)
    model = model or MedusaModel(base, heads(), BUSHY, engine="auto")
    reference = said_by(base)
    assert reference != before  # the alteration counts
    assert model.generate(PROMPT, **OPTIONS).tolist() == reference
    assert [token for step in model.stream(PROMPT, **OPTIONS) for token in step.tokens[0]] == reference[0][9:]


def test_hooks_of_all_modules_count():
    base, negated = fresh_base(), lambda module, args, output: -output if type(module) is nn.Linear else None
    model = MedusaModel(base, heads(), BUSHY, engine="auto")
    handle = nn.modules.module.register_module_forward_hook(negated)
    try:
        assert model.generate(PROMPT, **OPTIONS).tolist() == said_by(base)
    finally:
        handle.remove()


def test_hooks_that_only_look_on_for_transformers_or_medusa_change_nothing():
    base = fresh_base()
    base(PROMPT, output_hidden_states=True)  # leaves hooks of transformers' own
    base.enable_input_require_grads()
    assert alteration_of(base) is None


def replace_shared(base):
    """The same weights in another module."""
    layer = base.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, nn.ReLU())


def negate_by_class(base):
    mlp = base.model.layers[0].mlp
    mlp.__class__ = type(
        "Negated", (type(mlp),), {"forward": lambda self, x: -super(type(self), self).forward(x)}
    )


UNSEEN_WRITES = {
    "another class": negate_by_class,
    "another buffer": lambda base: setattr(
        base.model.rotary_emb, "inv_freq", base.model.rotary_emb.inv_freq * 3
    ),
    "another epsilon": lambda base: setattr(base.model.norm, "variance_epsilon", 5.0),
    "another scale": lambda base: setattr(base.model.layers[0].self_attn, "scaling", 2.0),
    "through .data": lambda base: base.model.layers[1].mlp.up_proj.weight.data.mul_(-3),
    "another tensor in .data": lambda base: setattr(
        base.lm_head.weight, "data", -base.lm_head.weight.data.clone()
    ),
    "a module replaced around the same weights": replace_shared,
}


@pytest.mark.parametrize("write", UNSEEN_WRITES)
def test_writes_that_torch_does_not_count_are_refused_until_they_are_refreshed(write):
    base = fresh_base()
    model = MedusaModel(base, heads(), BUSHY, engine="packed")
    UNSEEN_WRITES[write](base)
    with pytest.raises(ValueError, match=r"have changed .* call refresh\(\)"):
        model.generate(PROMPT, **OPTIONS)
    model.refresh()
    assert model.generate(PROMPT, **OPTIONS).tolist() == said_by(base)


WRITES = {
    "counted": lambda base: base.model.layers[0].mlp.up_proj.weight.mul_(-3),
    "through .data": UNSEEN_WRITES["through .data"],
    "a module replaced": replace_shared,
    "a weight replaced": lambda base: setattr(base.lm_head, "weight", nn.Parameter(-base.lm_head.weight)),
}


def adapted(base):
    """``base`` under an adapter, and a context in which that is off."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).eval().disable_adapter()


def training(base):
    base.train()
    return nullcontext()


def hooked(base):
    ALTERATIONS["a hook on a linear layer"](base)
    return nullcontext()


def autocast(base):
    return torch.autocast("cpu", dtype=torch.bfloat16)


MIDWAY = {  # the engine, what is prepared, what comes in the middle; what new calls are told, and old ones
    "a hook": (
        "packed",
        None,
        hooked,
        "a forward hook on model.layers.0.mlp.down_proj",
        "have changed since",
    ),
    "training": ("eager", None, training, "training mode ... eval()", "set to training mode"),
    "an adapter off": (
        "packed",
        adapted,
        None,
        "an adapter was switched ... refresh()",
        "an adapter switched",
    ),
    "autocast": ("eager", None, autocast, None, "autocast was switched"),
    "autocast, packed": ("packed", None, autocast, "torch.autocast", "autocast was switched"),
}


@pytest.mark.parametrize(("engine", "prepare", "change", "new", "old"), MIDWAY.values(), ids=MIDWAY)
def test_what_an_engine_would_not_run_is_refused_before_and_in_the_middle(engine, prepare, change, new, old):
    base = fresh_base()
    prepared = prepare(base) if prepare else None
    model = MedusaModel(base, engine=engine)
    stream, batch, row = model.stream(PROMPT, **OPTIONS), model.continuous_batch(), row_of(model)
    batch.add(row_of(model))
    next(stream)
    with prepared or change(base):
        assert_refused(lambda: batch.add(row), ValueError, old)
        if change is not hooked:  # what is under way runs the modules that it was begun with
            assert_refused(lambda: next(stream), ValueError, old)
            assert_refused(batch.step, ValueError, old)
        if new:
            assert_refused(lambda: model.generate(PROMPT, **OPTIONS), ValueError, new)
            assert_refused(model.continuous_batch, ValueError, new)
    if prepared:
        assert model.generate(PROMPT, **OPTIONS).tolist() == said_by(base)
    elif change is hooked:
        assert_refused(lambda: MedusaModel(base, engine=engine), ValueError, new)


@pytest.mark.parametrize("engine", ["eager", "packed"])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_neither_a_stream_nor_a_batch_goes_on_across_a_change_of_weights(engine, write):
    base = fresh_base()
    model = MedusaModel(base, heads(), BUSHY, engine=engine)
    stream, batch = model.stream(PROMPT, **OPTIONS), model.continuous_batch()
    next(stream)
    batch.add(row_of(model))
    batch.step()
    WRITES[write](base)
    assert_refused(lambda: list(stream), ValueError, "have changed since this answer or batch was begun")
    for _ in range(2):  # refreshing the model does not make the batch's keys and values new
        for go_on in (batch.step, lambda: batch.add(row_of(model))):
            assert_refused(go_on, ValueError, "answer or batch was begun ... continuous_batch()")
        model.refresh()
    assert model.generate(PROMPT, **OPTIONS).tolist() == said_by(base)


def test_weights_that_are_lent_for_each_pass_are_no_change(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    base = fresh_base()
    reference = said_by(base)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    layers = {"model.layers.0": "disk", "model.layers.1": "cpu"}
    accelerate.dispatch_model(base, places | layers, main_device="cpu", offload_dir=tmp_path)
    model = MedusaModel(base, heads(), BUSHY, engine="eager")
    assert model.generate(PROMPT, **OPTIONS).tolist() == reference
    batch, row = model.continuous_batch(), row_of(model)
    batch.add(row)
    while batch.is_busy:
        batch.step()
    assert row.tokens == reference[0][9:]


def test_buffers_that_a_pass_puts_anew_are_no_change():
    base = fresh_base()
    snapshot = Snapshot(base)
    base.model.rotary_emb.inv_freq = base.model.rotary_emb.inv_freq.clone()
    assert snapshot.is_current


def test_a_snapshot_reads_weights_of_any_layout_and_precision():
    module = nn.Module()
    module.turned = nn.Parameter(torch.randn(5, 7).T)
    module.empty = nn.Parameter(torch.empty(0, 3))
    module.one = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
    module.spread = nn.Parameter(torch.ones(1).expand(4, 4))
    module.elsewhere = nn.Parameter(torch.empty(3, device="meta"))
    snapshot = Snapshot(module)
    assert snapshot.is_current
    module.one.data.fill_(3)
    assert not snapshot.is_current


def test_calls_that_meet_a_refresh_in_another_thread_find_a_whole_model(monkeypatch):
    model = MedusaModel(fresh_base(), heads(), BUSHY, engine="packed")
    reference, met = model.generate(PROMPT, **OPTIONS).tolist(), []

    def slow(*given):
        met.append(model.generate(PROMPT, **OPTIONS).tolist())  # as another thread would just now
        return optimized_heads(*given)

    monkeypatch.setattr("medusa.engine.engine_state.optimized_heads", slow)
    model.refresh()
    assert met == [reference]


@pytest.mark.parametrize("engine", ["eager", "packed"])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_an_answer_during_which_weights_change_is_not_given(engine, write):
    base = fresh_base()
    model = MedusaModel(base, heads(), BUSHY, engine=engine)

    class Writes(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == PROMPT.shape[1] + 5:
                WRITES[write](base)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with pytest.raises(ValueError, match="have changed since this answer or batch was begun"):
        model.generate(PROMPT, **OPTIONS, stopping_criteria=StoppingCriteriaList([Writes()]))
