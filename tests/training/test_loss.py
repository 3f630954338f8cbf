"""The fused loss against plain autograd on every target written out, and what it must never learn from."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import ARCHITECTURES, READING, random_prompts, tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from medusa import HeadsConfig, MedusaHeads
from medusa.base.passes import hidden_states
from medusa.training.config import LossOptions
from medusa.training.losses import Alignment, FusedLoss, SplitHeads, align, needed_states, teacher_of
from medusa.training.recipes.recipe import HeadsLoss

NUM_HEADS, HIDDEN, VOCAB, MAPPED = 3, 16, 40, 20
UNEMBEDDINGS = ("shared", "full", "token_map")
OBJECTIVES = ("ce", "kl", "blend")


def new_heads(unembedding: str, num_layers: int = 2, **reading) -> MedusaHeads:
    """Heads with random weights everywhere."""
    size = {"token_map_size": MAPPED} if unembedding == "token_map" else {}
    config = HeadsConfig(HIDDEN, VOCAB, NUM_HEADS, num_layers, unembedding, **reading, **size)
    heads = MedusaHeads(config, torch.randperm(VOCAB)[:MAPPED] if size else None)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    return heads


def new_embedding() -> nn.Linear:
    return nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)


class Problem:
    """Two documents, 13 and 17 tokens, one behind the other, 60 % of their tokens labels."""

    def __init__(self, unembedding: str = "shared", **reading):
        torch.manual_seed(1)
        self.heads, self.embedding = new_heads(unembedding, **reading), new_embedding()
        self.tokens = torch.randint(0, VOCAB, (30,))
        self.is_label = torch.rand(30) > 0.4
        self.positions = torch.cat([torch.arange(13), torch.arange(17)])
        self.hidden = torch.randn(30, HIDDEN * (1 + len(self.heads.fused_layers)))
        self.num_scored = torch.tensor([9, 8, 7])

    @property
    def column_of(self) -> Tensor | None:
        if self.heads.token_map is None:
            return None
        columns = torch.full((VOCAB,), -1)
        columns[self.heads.token_map] = torch.arange(MAPPED)
        return columns

    def alignment(self) -> Alignment:
        return align(self.tokens, self.is_label, self.positions, NUM_HEADS, self.column_of)

    def teacher(self, states: Tensor) -> Tensor:
        logits = self.embedding(states)
        return logits if self.heads.token_map is None else logits[:, self.heads.token_map]

    def fused(self, objective: str = "ce", **options):
        module = HeadsLoss(self.heads, LossOptions(objective, **{"block_elements": 200, **options}))
        return module(self.hidden, self.alignment(), self.embedding, self.num_scored, self.teacher)

    def naive(self, objective: str, kl_weight: float = 0.5, decay: float = 0.8) -> Tensor:
        """The same loss, target by target, as the definition says."""
        # Of position t the path is t + 1 .. t + K; past the end any token will do, no target follows it.
        path = torch.stack([self.tokens.roll(-depth) for depth in range(1, NUM_HEADS + 1)], dim=1)
        logits, total = self.heads(self.heads.fuse(self.hidden), self.embedding, path), torch.zeros(())
        for target in range(30):
            for depth in range(1, NUM_HEADS + 1):
                source = target - 1 - depth
                same_document = self.positions[target] - 1 - depth >= 0
                if not self.is_label[target] or not same_document:
                    continue
                column = int(
                    self.tokens[target] if self.column_of is None else self.column_of[self.tokens[target]]
                )
                if column < 0:
                    continue
                log_q = logits[source, depth - 1].log_softmax(-1)
                log_p = self.teacher(self.hidden[target - 1 : target, :HIDDEN].detach())[0].log_softmax(-1)
                hard, soft = -log_q[column], (log_p.exp() * (log_p - log_q)).sum()
                loss = {
                    "ce": hard,
                    "kl": soft,
                    "blend": kl_weight * soft + (1 - kl_weight) * hard,
                }[objective]
                total = total + decay**depth / self.num_scored[depth - 1] * loss
        return total

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [*self.heads.parameters(), self.hidden]))


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("unembedding", UNEMBEDDINGS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_are_those_of_the_definition(unembedding, objective, reading):
    problem = Problem(unembedding, **READING[reading])
    problem.hidden.requires_grad_()
    expected = problem.naive(objective)
    loss, _ = problem.fused(objective)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(problem.gradients(loss), problem.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 1.0])
def test_blend_moves_from_hard_labels_to_the_base(kl_weight):
    problem = Problem()
    torch.testing.assert_close(
        problem.fused("blend", kl_weight=kl_weight)[0], problem.naive("blend", kl_weight=kl_weight)
    )


@pytest.mark.parametrize("block_elements", [1, VOCAB * 7, 10**9])
def test_the_block_size_changes_nothing_but_memory(block_elements):
    problem = Problem()
    problem.hidden.requires_grad_()
    reference, reference_sums = problem.fused()
    loss, sums = problem.fused(block_elements=block_elements)
    torch.testing.assert_close(loss, reference)
    for ours, theirs in zip(problem.gradients(loss), problem.gradients(reference), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(sums, reference_sums, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_block_of_logits_is_larger_than_asked(monkeypatch):
    problem, seen = Problem(), []
    logits_of = MedusaHeads.logits_of

    def recorded(self, *arguments):
        logits = logits_of(self, *arguments)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(MedusaHeads, "logits_of", recorded)
    problem.fused(block_elements=3 * VOCAB)
    assert max(seen) == 3 * VOCAB
    assert len(seen) > NUM_HEADS


def test_the_gradients_that_the_loss_finds_become_those_of_the_parameters(monkeypatch):
    """No second copy of them is held: of heads with an unembedding of their own they are gigabytes."""
    problem, found, run = Problem("full"), {}, FusedLoss.run

    def noting(work, states, gradients):
        found.update({each: gradient.data_ptr() for each, gradient in gradients.items()})
        return run(work, states, gradients)

    monkeypatch.setattr(FusedLoss, "run", noting)
    (3 * problem.fused()[0]).backward()
    parameters = list(problem.heads.parameters())
    assert [each.grad.data_ptr() for each in parameters] == [found[each] for each in parameters]


def test_without_gradients_the_same_sums_come_back():
    problem = Problem("token_map")
    loss, sums = problem.fused()
    with torch.no_grad():
        silent, silent_sums = problem.fused()
    torch.testing.assert_close(silent, loss.detach())
    assert not silent.requires_grad
    for ours, theirs in zip(silent_sums, sums, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_two_micro_batches_give_the_gradient_of_the_joined_batch():
    """The documents have different numbers of labels, so a mean of means would be wrong."""
    problem = Problem()
    joined = list(torch.autograd.grad(problem.fused()[0], list(problem.heads.parameters())))
    everything = (problem.tokens, problem.is_label, problem.positions, problem.hidden)
    parts = []
    for span in (slice(0, 13), slice(13, 30)):
        problem.tokens, problem.is_label, problem.positions, problem.hidden = (x[span] for x in everything)
        parts.append(torch.autograd.grad(problem.fused()[0], list(problem.heads.parameters())))
    for whole, first, second in zip(joined, *parts, strict=True):
        torch.testing.assert_close(first + second, whole, atol=1e-6, rtol=1e-5)


def test_depth_d_predicts_d_tokens_beyond_the_next_one():
    tokens = torch.arange(10)
    alignment = align(tokens, torch.ones(10, dtype=torch.bool), tokens, num_heads=4)
    for depth, sources in enumerate(alignment.sources):
        valid = sources >= 0
        assert torch.equal(alignment.columns[valid], sources[valid] + depth + 1)
        assert valid.sum() == 9 - depth


def test_needed_states_are_exactly_the_sources():
    problem = Problem()
    problem.is_label = torch.arange(30) % 9 == 0
    sources = problem.alignment().sources
    needed = needed_states(problem.is_label, problem.positions, NUM_HEADS)
    assert 0 < needed.sum() < 20
    assert set(needed.nonzero().flatten().tolist()) == set(sources[sources >= 0].tolist())


def test_rows_without_a_label_cost_nothing_and_give_no_nan():
    problem = Problem()
    problem.is_label[:] = False
    loss, sums = problem.fused()
    assert loss == 0
    assert sums.num_labels.tolist() == [0, 0, 0]
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, list(problem.heads.parameters())))


def test_targets_outside_the_token_map_are_misses_and_not_losses():
    problem = Problem("token_map")
    loss, sums = problem.fused()
    is_mapped = torch.isin(problem.tokens, problem.heads.token_map)
    for depth in range(1, NUM_HEADS + 1):
        reachable = problem.is_label & (problem.positions - 1 - depth >= 0)
        assert sums.num_labels[depth - 1] == reachable.sum()
        assert sums.num_scored[depth - 1] == (reachable & is_mapped).sum()
    assert (sums.num_scored < sums.num_labels).all()
    assert loss.isfinite()


def test_hits_are_counted_against_the_head_where_logits_tie():
    problem = Problem()
    problem.embedding.weight.zero_()
    _, sums = problem.fused()
    assert sums.top1.tolist() == [0, 0, 0]
    assert sums.top5.tolist() == [0, 0, 0]


def test_hit_counts_are_those_of_a_plain_top_k():
    problem = Problem()
    _, sums = problem.fused()
    guesses = problem.heads(problem.hidden, problem.embedding).topk(5, dim=-1).indices  # (P, K, 5)
    alignment = problem.alignment()
    for depth in range(1, NUM_HEADS + 1):
        sources = alignment.sources[depth]
        hits = guesses[sources.clamp(min=0), depth - 1] == alignment.columns[:, None]
        hits &= (sources >= 0)[:, None]
        assert sums.top1[depth - 1] == hits[:, 0].sum()
        assert sums.top5[depth - 1] == hits.sum()


def test_soft_objectives_ask_for_the_teacher():
    problem = Problem()
    module = HeadsLoss(problem.heads, LossOptions("kl"))
    with pytest.raises(ValueError, match="objective 'kl' needs the base's logits: pass teacher"):
        module(problem.hidden, problem.alignment(), problem.embedding, problem.num_scored)


@pytest.fixture
def mesh():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def split_loss(problem: Problem, mesh, objective: str) -> tuple[HeadsLoss, SplitHeads]:
    module = HeadsLoss(problem.heads, LossOptions(objective, block_elements=200))
    module.split = SplitHeads(problem.heads, mesh)
    return module, module.split


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("objective", ["ce", "blend"])
def test_split_heads_have_the_loss_and_the_gradients_of_whole_ones(mesh, objective, reading):
    problem = Problem("full", **READING[reading])
    problem.hidden.requires_grad_()
    expected, expected_sums = problem.fused(objective)
    theirs = problem.gradients(3 * expected)
    module, _ = split_loss(problem, mesh, objective)
    arguments = (problem.hidden, problem.alignment(), problem.embedding, problem.num_scored, problem.teacher)
    for _ in range(2):  # the second finds the parts as the first left them
        loss, sums = module(*arguments)
        torch.testing.assert_close(loss, expected)
        for our, their in zip(problem.gradients(3 * loss), theirs, strict=True):
            torch.testing.assert_close(whole(our), their)
    for our, their in zip(sums, expected_sums, strict=True):
        torch.testing.assert_close(our, their)
    with torch.no_grad():
        torch.testing.assert_close(module(*arguments)[0], expected.detach())


def test_only_the_head_whose_loss_runs_is_whole(mesh, monkeypatch):
    problem, seen, gathered = Problem("full", reads_path=True), [], []
    logits_of, full_tensor = MedusaHeads.logits_of, DTensor.full_tensor

    def noted(self, index, *arguments):
        is_whole = [
            {not isinstance(each, DTensor) for each in self.parameters_of(head)} for head in range(NUM_HEADS)
        ]
        seen.append((index, is_whole))
        return logits_of(self, index, *arguments)

    def counted(self):
        gathered.append(full_tensor(self))
        return gathered[-1]

    monkeypatch.setattr(MedusaHeads, "logits_of", noted)
    monkeypatch.setattr(DTensor, "full_tensor", counted)
    module, split = split_loss(problem, mesh, "ce")
    module(problem.hidden, problem.alignment(), problem.embedding, problem.num_scored, problem.teacher)
    assert len(seen) > NUM_HEADS, "a head has several blocks"
    for index, is_whole in seen:
        assert is_whole == [{head == index} for head in range(NUM_HEADS)]
    assert len(gathered) == len(split.parameters), (
        "each parameter travels once, however many blocks there are"
    )
    assert all(isinstance(each, DTensor) for each in split.parameters)


def test_a_head_is_split_again_after_an_error(mesh):
    problem = Problem("full")
    _, split = split_loss(problem, mesh, "ce")
    with pytest.raises(FloatingPointError), split.gathered(0, {}):
        raise FloatingPointError
    assert all(isinstance(each, DTensor) for each in problem.heads.parameters_of(0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("token_map", [None, torch.tensor([4, 9, 33])], ids=["all tokens", "token map"])
@torch.no_grad()
def test_the_teacher_gives_the_logits_of_the_base(architecture, token_map):
    base, tokens = tiny_model(architecture), random_prompts(2, 9)
    expected = base(input_ids=tokens).logits.flatten(0, 1)
    states = hidden_states(base, tokens).flatten(0, 1)
    logits = teacher_of(base, token_map)(states)
    torch.testing.assert_close(logits, expected if token_map is None else expected[:, token_map])


def test_nothing_stays_attached_to_the_base():
    base = tiny_model("gemma3")
    teacher_of(base)(torch.zeros(2, 32))
    assert not base.get_output_embeddings()._forward_pre_hooks
