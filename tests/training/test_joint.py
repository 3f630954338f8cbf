"""Heads and adapter trained together: gradients, the two stages, what stays frozen and what is repeated."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_training
import torch
from accelerate import Accelerator
from conftest import tiny_model
from refusals import refusals
from tiny_training import (
    JOINT,
    assert_equal_weights,
    counting_rows,
    history,
    tiny_base,
)
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import lm_head
from medusa.base.passes import hidden_states
from medusa.training.config import JointOptions
from medusa.training.data.batching import collate
from medusa.training.losses import Alignment, align, teacher_of
from medusa.training.recipes.joint import BaseLoss, TrainedAdapter, target_layers
from medusa.training.run.trainer import Trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return counting_rows(40)


def new_trainer(directory: Path, rows: list[dict[str, Any]], **options: Any) -> Trainer:
    """A trainer on ``rows``; options as in the YAML file."""
    return tiny_training.new_trainer(directory, rows, **JOINT | options)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Of heads and adapter."""
    return {name: each.detach().clone() for name, each in trainer.loss.state_dict().items()}


def disturb(adapter: TrainedAdapter, std: float = 0.1) -> None:
    """Give the adapter an effect, which a new one has not."""
    torch.manual_seed(11)
    for each in adapter.parameters.values():
        nn.init.normal_(each, std=std)


# The loss of the base's own row.


def base_problem() -> tuple[nn.Linear, Tensor, Tensor, Alignment]:
    torch.manual_seed(2)
    embedding, tokens = nn.Linear(16, 40).requires_grad_(False), torch.randint(0, 40, (13,))
    own = align(tokens, torch.arange(13) >= 6, torch.arange(13), num_heads=0)
    return embedding, torch.randn(13, 16, requires_grad=True), torch.randn(13, 16), own


@pytest.mark.parametrize("objective", ["kl", "ce"])
@pytest.mark.parametrize("block_elements", [1, 80, 2**20])
def test_the_base_s_loss_and_gradient_are_those_of_plain_autograd(objective, block_elements):
    embedding, hidden, reference, targets = base_problem()
    loss, sums = BaseLoss(embedding, 40, objective, block_elements)(
        hidden, reference, targets, torch.tensor(10)
    )
    log_q = embedding(hidden[targets.sources[0]]).log_softmax(-1)
    log_p = embedding(reference[targets.sources[0]]).log_softmax(-1)
    divergence = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    hard = F.nll_loss(log_q, targets.columns, reduction="sum")
    expected = (divergence if objective == "kl" else hard) / 10
    torch.testing.assert_close(loss, expected)
    (ours,), (theirs,) = torch.autograd.grad(3 * loss, hidden), torch.autograd.grad(3 * expected, hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sums.divergence, divergence.detach())
    torch.testing.assert_close(sums.cross_entropy, hard.detach())
    reference_hard = F.nll_loss(log_p, targets.columns, reduction="sum")
    torch.testing.assert_close(sums.reference_cross_entropy, reference_hard)
    assert int(sums.num_agreeing) == int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    assert int(sums.num_targets) == int(sums.num_compared) == 7


# The loss of both.


def plain_loss(trainer: Trainer, batch: list[list[int]], num_targets: Tensor) -> Tensor:
    """L_base + lambda_0 * L_heads, target by target, as the definition says."""
    padded = collate(trainer.data.training, batch)
    base, embedding = trainer.base, lm_head(trainer.base)
    with torch.no_grad():
        for layer in base.modules():
            if isinstance(layer, peft.tuners.lora.Linear):
                layer._disable_adapters = True
        reference = hidden_states(base, padded.input_ids, position_ids=padded.positions)
        for layer in base.modules():
            if isinstance(layer, peft.tuners.lora.Linear):
                layer._disable_adapters = False
    layers = trainer.heads.fused_layers
    hidden = hidden_states(base, padded.input_ids, position_ids=padded.positions, layers=layers)
    read, hidden = trainer.heads.fuse(hidden), hidden[..., :32]
    options, total = trainer.configuration.joint, torch.zeros(())
    for row in range(len(padded.input_ids)):
        log_q = embedding(hidden[row]).log_softmax(-1)
        log_p = embedding(reference[row]).log_softmax(-1)
        path = torch.stack([padded.input_ids[row].roll(-depth) for depth in (1, 2, 3)], dim=1)
        guesses = trainer.heads(read[row], embedding, path).log_softmax(-1)
        for target in padded.is_label[row].nonzero().flatten().tolist():
            token = padded.input_ids[row, target]
            hard = -log_q[target - 1, token]
            soft = F.kl_div(log_q[target - 1], log_p[target - 1], log_target=True, reduction="sum")
            total = total + (soft if options.base_objective == "kl" else hard) / num_targets[0]
            for depth in (1, 2, 3):
                if (source := target - 1 - depth) >= 0:
                    loss = -guesses[source, depth - 1, token]
                    total = total + options.lambda_0 * 0.8**depth * loss / num_targets[depth]
    return total


@pytest.mark.parametrize("reading", [{}, {"fused_layers": [1]}], ids=["last state", "layer too"])
@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_loss_and_gradients_of_heads_and_adapter_are_those_of_plain_autograd(
    tmp_path, rows, objective, reading
):
    options = {"base_objective": objective, "heads_weight": 0.3, "block_elements": 1000}
    trainer = new_trainer(tmp_path, rows, **options, **reading)
    disturb(trainer.recipe.trained_adapter)
    if reading:
        nn.init.normal_(trainer.heads.fusion.weight, std=0.2)
    for block in trainer.heads.blocks:
        nn.init.normal_(block[0].linear.weight, std=0.2)
    batch = [[0], [3], [5]]
    num_targets = torch.tensor([50, 40, 30, 20])
    trainer.loss.is_joint = True
    source = partial(trainer.recipe.read, trainer.data.training, "training")
    loss, _ = trainer.loss(*source(batch), lm_head(trainer.base), num_targets)
    expected = plain_loss(trainer, batch, num_targets)
    torch.testing.assert_close(loss, expected)
    parameters = list(trainer.loss.parameters())
    assert len(parameters) == 3 * 3 + 2 * 14 + len(reading)
    theirs = torch.autograd.grad(expected, parameters)
    for ours, his in zip(torch.autograd.grad(loss, parameters), theirs, strict=True):
        torch.testing.assert_close(ours, his, rtol=1e-4, atol=1e-6)
        assert his.abs().max() > 0


def note(kept: list[int], tensor: Tensor) -> Tensor:
    kept.append(tensor.numel())
    return tensor


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradient_checkpointing_gives_the_same_gradients_and_keeps_less(tmp_path, rows, dropout):
    """Dropout is drawn again as it was: the layers are computed twice."""
    found = []
    for is_on in (False, True):
        options = {"lora_dropout": dropout, "gradient_checkpointing": is_on, "fused_layers": [1]}
        trainer = new_trainer(tmp_path / str(is_on), rows, **options)
        disturb(trainer.recipe.trained_adapter)
        trainer.loss.is_joint = True
        given = trainer.recipe.read(trainer.data.training, "training", [[0], [3], [5]])
        kept = []
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(partial(note, kept), lambda t: t):
            loss, _ = trainer.loss(*given, lm_head(trainer.base), torch.tensor([50, 40, 30, 20]))
        gradients = torch.autograd.grad(loss, list(trainer.loss.parameters()))
        found.append((loss, gradients, sum(kept)))
    (plain, gradients, much), (again, same, little) = found
    assert torch.equal(plain, again)
    for one, other in zip(gradients, same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
    assert little < 0.5 * much


def test_heads_held_to_the_base_are_held_to_the_adapted_one(tmp_path, rows):
    """Their job is to guess what the adapted model will say."""
    trainer = new_trainer(tmp_path, rows, objective="kl", heads_weight=1, base_objective="ce")
    disturb(trainer.recipe.trained_adapter, std=0.5)
    batch, ones = [[0], [3]], torch.ones(4)
    source = partial(trainer.recipe.read, trainer.data.training, "training")
    embedding = lm_head(trainer.base)
    with torch.no_grad():
        given, alignment = source(batch)
        joined = given.padded
        _, sums = trainer.loss(given, alignment, embedding, ones, trainer.recipe.teacher)
        hidden = hidden_states(trainer.base, joined.input_ids, position_ids=joined.positions).flatten(0, 1)
        expected = 0.0
        for base_source, head_source in zip(alignment.sources[0], alignment.sources[1], strict=True):
            log_p = embedding(hidden[base_source]).log_softmax(-1)
            path = joined.input_ids.flatten()[head_source + 1][None]
            log_q = trainer.heads.logits_of(0, hidden[head_source], embedding, path).log_softmax(-1)
            expected += float(F.kl_div(log_q, log_p, log_target=True, reduction="sum"))
    assert float(sums.heads.loss[0]) == pytest.approx(expected, rel=1e-4)


def test_the_same_seed_drops_the_same_out_of_the_adapter(tmp_path, rows):
    options = {"lora_dropout": 0.5, "max_steps": 6, "joint_warmup_fraction": 0}
    runs = [new_trainer(tmp_path / name, rows, **options) for name in ("one", "two")]
    other = new_trainer(tmp_path / "other", rows, **options | {"seed": 5})
    for number, each in enumerate((*runs, other)):
        torch.manual_seed(number)  # what came before takes no part
        each.train()
    assert_equal_weights(*runs, rtol=0, atol=0)
    assert history(other) != history(runs[0])


def test_a_base_that_caps_its_logits_is_held_to_the_capped_ones():
    base = copy.deepcopy(tiny_model("gemma3")).requires_grad_(False)
    adapter = TrainedAdapter(base, JointOptions(joint=True, lora_rank=3), seed=1)
    disturb(adapter)
    ids = torch.arange(3, 13)[None]
    with torch.no_grad(), adapter.switched_off():
        reference, log_p = hidden_states(base, ids)[0], base(ids).logits[0].log_softmax(-1)
    text, ends = torch.zeros(11, dtype=torch.long), torch.arange(11)
    targets = align(text, ends > 0, ends, num_heads=0)
    loss, _ = BaseLoss(teacher_of(base), 61)(
        hidden_states(base, ids)[0], reference, targets, torch.tensor(10)
    )
    log_q = base(ids).logits[0].log_softmax(-1)
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="sum") / 10
    torch.testing.assert_close(loss, expected)
    parameters = list(adapter.parameters.values())
    theirs = torch.autograd.grad(expected, parameters)
    for ours, his in zip(torch.autograd.grad(loss, parameters), theirs, strict=True):
        torch.testing.assert_close(ours, his, rtol=1e-4, atol=1e-6)


def test_half_precision_trains_an_adapter_in_float32_that_starts_as_nothing(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, precision="bf16", max_steps=6, joint_warmup_fraction=0.5)
    trainer.base.to(torch.bfloat16)
    for each in trainer.recipe.trained_adapter.parameters.values():
        each.data = each.data.float()  # as peft keeps them where the base is loaded in half precision
    trainer.train()
    entries = history(trainer)
    assert entries[4]["train/base_divergence"] == pytest.approx(0, abs=1e-6)
    assert entries[6]["train/base_divergence"] > 1e-5
    assert all(
        each.dtype == torch.float32 for each in trainer.recipe.trained_adapter.taken_out().weights.values()
    )


# The two stages.


def test_the_heads_are_trained_alone_first_and_the_adapter_from_its_time_on(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, joint_warmup_fraction=0.5, max_steps=8)
    before, do_step, moved = weights(trainer), trainer._step, []

    def watched(*args: Any) -> None:
        do_step(*args)
        now = weights(trainer)
        moved.append({name.split(".")[0] for name in now if not torch.equal(now[name], before[name])})

    trainer._step = watched
    trainer.train()
    assert moved == [{"heads_loss"}] * 4 + [{"heads_loss", "adapter"}] * 4
    assert trainer.state.adapter_steps == 4
    entries = history(trainer)
    assert [step for step in entries if "train/base_divergence" in entries[step]] == [5, 6, 7, 8]
    assert entries[5]["train/base_divergence"] == pytest.approx(0, abs=1e-6)  # a new adapter does nothing
    assert entries[8]["train/base_divergence"] > 1e-5


def test_the_adapter_s_moments_begin_with_the_second_stage(tmp_path, rows):
    """The moments of heads and adapter after the first joint step, the fifth of all."""
    trainer = new_trainer(tmp_path, rows, joint_warmup_fraction=0.5, max_steps=8)
    do_step, steps = trainer._step, []

    def watched(*args: Any) -> None:
        do_step(*args)
        moments = trainer.optimiser.state
        steps.append([int(moments[group["params"][0]]["step"]) for group in trainer.optimiser.param_groups])

    trainer._step = watched
    trainer.train()
    assert steps[3:] == [[4, 4], [5, 1], [6, 2], [7, 3], [8, 4]]


def test_the_first_stage_gives_the_adapter_zero_gradients_rather_than_none(tmp_path, rows):
    """Every process of a distributed run must have a gradient for every parameter."""
    trainer = new_trainer(tmp_path, rows)
    source = partial(trainer.recipe.read, trainer.data.training, "training")
    embedding = lm_head(trainer.base)
    for batch, is_joint in (([[0]], False), ([], False), ([], True)):
        trainer.loss.is_joint = is_joint
        trainer.loss.zero_grad()
        loss, _ = trainer.loss(*source(batch), embedding, torch.ones(4))
        loss.backward()
        assert all(each.grad is not None for each in trainer.loss.parameters())
        assert not any(each.grad.any() for each in trainer.recipe.trained_adapter.parameters.values())


def test_heads_and_adapter_have_their_own_learning_rates_and_warm_up_each_in_its_stage(tmp_path, rows):
    trainer = new_trainer(
        tmp_path, rows, max_steps=10, warmup_steps=2, head_learning_rate_multiplier=3, learning_rate=1e-3
    )
    do_step, rates = trainer._step, []

    def watched(*args: Any) -> None:
        do_step(*args)
        rates.append([group["lr"] for group in trainer.optimiser.param_groups])

    trainer._step = watched
    trainer.train()
    factors = [trainer.schedule.learning_rate_factor(step, 0) for step in range(10)]
    assert [heads for heads, _ in rates] == pytest.approx([3e-3 * factor for factor in factors])
    warming = [0, 0, 0, 0, 0, 0.5, 1, 1, 1, 1]
    expected = [1e-3 * rise * factor for rise, factor in zip(warming, factors, strict=True)]
    assert [adapter for _, adapter in rates] == pytest.approx(expected)


def test_the_base_s_own_weights_never_change(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, joint_warmup_fraction=0)
    trainer.train()
    now = dict(trainer.base.named_parameters())
    for name, tensor in tiny_base().named_parameters():
        ours = now.get(name, now.get(name.replace(".weight", ".base_layer.weight")))
        assert torch.equal(ours, tensor), name
        assert not ours.requires_grad
    ids = torch.arange(3, 20)[None]
    with torch.no_grad(), trainer.recipe.trained_adapter.switched_off():
        assert torch.equal(trainer.base(ids).logits, tiny_base()(ids).logits)
    assert not torch.equal(trainer.base(ids).logits, tiny_base()(ids).logits)


def test_a_checkpoint_holds_heads_and_adapter_and_none_of_the_base(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, checkpoint_steps=8)
    trainer.train()
    assert {name.split(".")[0] for name in weights(trainer)} == {"heads_loss", "adapter"}
    num_trained = sum(each.numel() for each in trainer.loss.parameters())
    (checkpoint,) = trainer.run.checkpoints.iterdir()
    assert (checkpoint / "model.safetensors").stat().st_size < 4 * num_trained + 10_000


def test_token_map_heads_leave_the_base_all_its_targets(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, unembedding="token_map", token_map_size=8, max_steps=2)
    source = partial(trainer.recipe.read, trainer.data.training, "training")
    joined, alignment = source([[0], [1]])
    labels = sum(int(trainer.data.training[index].is_label[1:].sum()) for index in (0, 1))
    assert len(joined.own.columns) == labels > len(alignment.columns)
    assert trainer.num_scored[[0, 1], 0].sum() == labels
    assert "held_out/base_perplexity" in trainer.train()


# What is said of the base at the end.


def test_perplexity_before_and_after_is_that_of_transformers_own_loss(tmp_path, rows):
    trainer = new_trainer(
        tmp_path, rows, joint_warmup_fraction=0.2, max_steps=20, base_objective="ce", learning_rate=2e-2
    )
    metrics = trainer.train()

    def perplexity() -> float:
        total, count = 0.0, 0
        for index in range(len(trainer.data.held_out)):
            tokens, is_label = trainer.data.held_out[index]
            ids, wanted = torch.from_numpy(tokens).long()[None], torch.from_numpy(is_label).clone()
            wanted[0] = False
            labels = ids.masked_fill(~wanted, -100)
            with torch.no_grad():
                total += float(trainer.base(ids, labels=labels).loss) * int(wanted.sum())
            count += int(wanted.sum())
        return float(torch.tensor(total / count).exp())

    assert metrics["held_out/base_perplexity"] == pytest.approx(perplexity(), rel=1e-4)
    with trainer.recipe.trained_adapter.switched_off():
        assert metrics["held_out/base_perplexity_before"] == pytest.approx(perplexity(), rel=1e-4)
    assert metrics["held_out/base_perplexity"] < 0.9 * metrics["held_out/base_perplexity_before"]
    assert metrics["held_out/base_agreement"] < 1
    said = trainer.recipe.closing_report(metrics)
    assert f"{metrics['held_out/base_perplexity_before']:.4f} before" in said
    assert "its own text, not the base's" in said
    (last,) = [entry for step, entry in history(trainer, "held_out").items() if step == 20]
    assert last["held_out/base_perplexity"] == metrics["held_out/base_perplexity"]


def test_without_held_out_documents_nothing_is_claimed_of_the_base(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, held_out_fraction=0)
    assert "was not measured" in trainer.recipe.closing_report({})


# Bad input.


def test_targets_are_the_ends_of_names():
    names = target_layers(tiny_base(), ["v_proj", "layers.1.mlp.up_proj"])
    assert names == [
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert len(target_layers(tiny_base(), [])) == 14


def test_the_heads_weight_follows_the_objective_where_it_is_not_given():
    assert JointOptions().lambda_0 == 0.01
    assert JointOptions(base_objective="ce").lambda_0 == 0.2
    assert JointOptions(heads_weight=0.5).lambda_0 == 0.5


def sharded(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", "FSDP")
    new_trainer(tmp_path, rows)


def without_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    TrainedAdapter(tiny_base(), JointOptions(joint=True), seed=0)


def without_reference():
    embedding, hidden, _, targets = base_problem()
    BaseLoss(embedding, 40, "kl")(hidden, None, targets, torch.tensor(7))


test_what_cannot_be_trained_jointly_is_refused = refusals(
    *(
        (
            target,
            partial(target_layers, tiny_base(), ["v_proj", target]),
            f"'{target}' matches no linear layer",
        )
        for target in ("q_projj", "experts", "self_attn", "lm_head")
    ),
    ("no peft", without_peft, ImportError, "needs peft, ... pip install peft"),
    ("no states to hold to", without_reference, "'kl' ... without the adapter: pass reference"),
    ("sharded", sharded, "joint=true needs the adapter whole on every process"),
)
