"""Training an EAGLE-3 head: the loss by its definition, the run by the same trainer, the result live."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import counting_model
from tiny_training import (
    EAGLE3,
    chat_tokenizer,
    configured,
    counting_rows,
    history,
    tiny_base,
    trainer_on,
)
from torch import Tensor, nn

from medusa import CandidateTree, MedusaModel
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.training.config import LossOptions
from medusa.training.data.dataset import Document, Documents
from medusa.training.data.loading import Dataset, load_data
from medusa.training.losses import add_metrics, align
from medusa.training.recipes.recipe import AutoregressiveLoss
from medusa.training.run.metrics import calibrated_tree
from medusa.training.run.trainer import Trainer
from medusa.training.states.stored import HiddenStateSource, StateBatch

DEPTH, HIDDEN, VOCAB, LAYERS = 3, 16, 40, (1, 2)
LENGTHS = (5, 8)
"""Two documents, packed into the first row; the second row is one document."""


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


class Problem:
    """Two rows of 13 tokens, the first of two documents, 60 % of their tokens labels."""

    def __init__(self, with_norms: bool = False):
        torch.manual_seed(1)
        norms = {"fc_norm": True, "norm_output": True} if with_norms else {}
        sizes = {"vocab_size": VOCAB, "fused_layers": LAYERS, "max_depth": DEPTH, **norms}
        self.head = Eagle3Head(Eagle3Config(HIDDEN, 2, 1, 8, 24, **sizes))
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.embedding = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
        self.tokens, self.is_label = torch.randint(0, VOCAB, (2, 13)), torch.rand(2, 13) > 0.4
        packed = torch.cat([torch.arange(length) for length in LENGTHS])
        self.positions = torch.stack([packed, torch.arange(13)])
        self.hidden = torch.randn(2, 13, (1 + len(LAYERS)) * HIDDEN)
        self.table, self.next_tokens = torch.randn(VOCAB, HIDDEN), self.tokens.roll(-1, dims=1)
        self.following = self.table[self.next_tokens]
        self.num_scored = torch.tensor([9, 8, 7])

    def fused(self, objective: str = "kl", **options: Any):
        teacher = options.pop("teacher", self.embedding)
        options = {"block_elements": 200, **options}
        module = AutoregressiveLoss(self.head, LossOptions(objective, **options), self.table.__getitem__)
        alignment = align(self.tokens.flatten(), self.is_label.flatten(), self.positions.flatten(), DEPTH)
        batch = StateBatch(self.hidden, self.next_tokens, self.positions)
        return module(batch, alignment, self.embedding, self.num_scored, teacher)

    def documents(self) -> list[tuple[int, slice]]:
        return [(0, slice(0, 5)), (0, slice(5, 13)), (1, slice(0, 13))]

    def naive(self, objective: str, decay: float = 0.8) -> Tensor:
        """The same loss, target by target and draft by draft, as the definition says."""
        total = torch.zeros(())
        for row, span in self.documents():
            hidden, following = self.hidden[row, span], self.following[row, span]
            tokens, is_label = self.tokens[row, span], self.is_label[row, span]
            for target in is_label.nonzero().flatten().tolist():
                for depth in range(1, DEPTH + 1):
                    if target - 1 - depth < 0:
                        continue
                    # The first entry joins the states before the root.
                    inputs = self.head.fuse(hidden[: target - depth])
                    for _ in range(depth):
                        drafted = self.head(inputs[None], following[None, : len(inputs)])
                        inputs = torch.cat([inputs, drafted.features[0, -1:]])
                    guess, truth = drafted.states[0, -1], hidden[target - 1, :HIDDEN]
                    log_q, log_p = (self.embedding(each).log_softmax(-1) for each in (guess, truth))
                    if objective == "kl":
                        loss = (log_p.exp() * (log_p - log_q)).sum()
                    else:
                        loss = -log_q[tokens[target]]
                    total = total + decay**depth / self.num_scored[depth - 1] * loss
        return total

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(self.head.parameters())))


@pytest.mark.parametrize(("objective", "with_norms"), [("ce", False), ("kl", False), ("kl", True)])
def test_loss_and_gradients_are_those_of_the_definition(objective, with_norms):
    problem = Problem(with_norms)
    expected = problem.naive(objective)
    loss, _ = problem.fused(objective)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(problem.gradients(loss), problem.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_sums_add_up_to_the_loss_and_count_every_target():
    problem = Problem()
    loss, sums = problem.fused()
    weights = 0.8 ** torch.arange(1, DEPTH + 1) / problem.num_scored
    torch.testing.assert_close((weights * sums.loss).sum(), loss.detach())
    starts = [
        sum(int(problem.is_label[row, span][depth + 1 :].sum()) for row, span in problem.documents())
        for depth in (1, 2, 3)
    ]
    assert sums.num_scored.tolist() == sums.num_labels.tolist() == starts
    with torch.no_grad():
        measured, the_same = problem.fused()
    torch.testing.assert_close(measured, loss.detach())
    assert [each.tolist() for each in the_same] == [each.tolist() for each in sums]


def new_trainer(directory: Path, base: Any = None, data: Any = None, **options: Any) -> Trainer:
    """A trainer of an EAGLE-3 head; options as in the YAML file."""
    defaults = {
        **EAGLE3,
        "max_steps": 8,
        "tokens_per_batch": 512,
        "learning_rate": 3e-3,
    }
    configuration = configured(directory, counting_rows(40), **defaults | options)
    data = load_data(configuration.data, chat_tokenizer()) if data is None else data
    return trainer_on(configuration, tiny_base() if base is None else base, data)


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> tuple[Trainer, dict[str, float]]:
    """A head trained where every token is the one before plus one, and its held-out metrics."""
    size = 32
    documents = [
        Document((np.arange(20) + start).astype(np.int32) % size, np.arange(20) >= 4) for start in range(size)
    ]
    data = Dataset(Documents.of(documents), Documents.of(documents[:4]), {})
    base = counting_model(size).requires_grad_(False)
    trainer = new_trainer(
        tmp_path_factory.mktemp("counted"), base, data, max_steps=60, learning_rate=1e-2, logging_steps=20
    )
    metrics = trainer.train()
    AcceleratorState._reset_state(True)
    return trainer, metrics


def test_a_trained_head_is_accepted_more_than_half_the_time_live(counted):
    trainer, metrics = counted
    assert [metrics[f"held_out/top1_{depth}"] for depth in (1, 2, 3)] == [1.0] * 3
    tree = calibrated_tree(trainer.base, trainer.heads, trainer.data.held_out, num_nodes=4)
    assert tree == CandidateTree.chain(3)
    trainer.save(trainer.run.heads, trainer.heads, metrics, tree)
    model = MedusaModel.from_pretrained(trainer.base, trainer.run.heads, engine="eager")
    prompts = torch.tensor([[3, 4, 5, 6], [20, 21, 22, 23]])
    arguments = {"do_sample": False, "max_new_tokens": 21}
    out = model.generate(prompts, **arguments, tree=tree, return_dict_in_generate=True)
    plain = model.generate(prompts, **arguments, tree=CandidateTree.chain(0))
    assert out.sequences.tolist() == plain.tolist()
    assert min(out.statistics.acceptance_rate) > 0.5


def test_packed_documents_have_the_loss_of_documents_alone(tmp_path):
    metrics = []
    for name, options in {"alone": {}, "packed": {"packing": True, "max_length": 200}}.items():
        trainer = new_trainer(tmp_path / name, **options)
        sums, embedding = trainer.window, trainer.base.get_output_embeddings()
        source = partial(trainer.recipe.read, trainer.data.training, "training")
        batches = [batch for group in trainer._plan(0) for batch in group]
        assert (max(len(row) for batch in batches for row in batch) > 1) == (name == "packed")
        with torch.no_grad():
            for batch in batches:
                _, more = trainer.loss(*source(batch), embedding, torch.ones(DEPTH), trainer.recipe.teacher)
                sums = add_metrics(sums, more)
        metrics.append(sums)
    torch.testing.assert_close(metrics[0].loss, metrics[1].loss, rtol=1e-4, atol=1e-3)
    assert metrics[0].num_scored.tolist() == metrics[1].num_scored.tolist()


def test_stored_features_and_a_token_map_train_as_the_base_itself_does(tmp_path):
    histories = []
    for name, options in {"live": {}, "stored": {"cache_hidden_states": True}}.items():
        trainer = new_trainer(tmp_path / name, token_map_size=60, **options)
        trainer.train()
        assert (trainer.run.states / "training" / "manifest.json").exists() == (name == "stored")
        histories.append(history(trainer))
    live, stored = histories
    assert live.keys() == stored.keys() and len(live) > 2
    for step, metrics in live.items():
        assert stored[step] == pytest.approx(metrics, rel=1e-4, abs=1e-5), step


def test_a_process_without_a_batch_gives_every_parameter_a_gradient_of_zero():
    base, problem = tiny_base(), Problem()
    head = Eagle3Head(Eagle3Config.of_base(base, fused_layers=LAYERS[:1], max_depth=DEPTH))
    rows, padded = HiddenStateSource.of(base).of_batch(Documents.of([]), "training", [], head.fused_layers)
    module = AutoregressiveLoss(head, LossOptions("ce"), base.get_input_embeddings())
    loss, sums = module(rows, padded.aligned(DEPTH), base.get_output_embeddings(), problem.num_scored)
    loss.backward()
    assert float(loss.detach()) == 0 and int(sums.num_labels.sum()) == 0
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_the_head_is_what_the_options_say(tmp_path):
    config = new_trainer(tmp_path, intermediate_size=40, norm_output=True).heads.config
    assert (config.intermediate_size, config.norm_output, config.fc_norm) == (40, True, False)
