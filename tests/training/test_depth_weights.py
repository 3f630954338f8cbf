"""D-PACE: the weights by their definition, in the fused losses, and what they are the derivative of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_eagle_loss
import torch
from test_loss import MAPPED, NUM_HEADS, OBJECTIVES, UNEMBEDDINGS, VOCAB, Problem
from torch import Tensor

from medusa.training.losses.alignment import align
from medusa.training.losses.depth_weights import acceptance_weights, decay_weights
from medusa.training.losses.loss import LossOptions


def path_weights(confidence: list[float | None], smoothing: float) -> list[float]:
    """The weights along one path of depths 1 .. K; None marks a token that is no label, or no token."""
    smoothed = [1.0 if q is None else (1 - smoothing) * q + smoothing for q in confidence]
    reached = torch.tensor([1.0, *smoothed]).cumprod(0)[1:]
    earned = [0.0 if q is None else float(r) for q, r in zip(confidence, reached, strict=True)]
    return [sum(earned[depth:]) for depth in range(len(earned))]


def naive_loss(problem: Problem, objective: str, smoothing: float) -> Tensor:
    """All logits at once, all heads stacked, every path written out; autograd does the rest."""
    log_q = problem.heads(problem.hidden, problem.embedding).log_softmax(-1)  # (P, K, V')
    log_p = problem.teacher(problem.hidden.detach()).log_softmax(-1)
    total = torch.zeros(())
    for start in range(30):
        places: list[tuple[int, int] | None] = []  # of each depth: target and column, -1 without a column
        for depth in range(1, NUM_HEADS + 1):
            target = start + depth + 1
            inside = target < 30 and problem.positions[target] == problem.positions[start] + depth + 1
            if inside and problem.is_label[target]:
                token = problem.tokens[target]
                places.append((target, int(token if problem.column_of is None else problem.column_of[token])))
            else:
                places.append(None)
        confidence = [
            None if place is None else 0.0 if place[1] < 0 else log_q[start, k, place[1]].exp().item()
            for k, place in enumerate(places)
        ]
        for k, (place, weight) in enumerate(zip(places, path_weights(confidence, smoothing), strict=True)):
            if place is None or place[1] < 0:
                continue
            ours, base = log_q[start, k], log_p[place[0] - 1]
            hard, soft = -ours[place[1]], (base.exp() * (base - ours)).sum()
            loss = {
                "ce": hard,
                "kl": soft,
                "blend": 0.5 * soft + 0.5 * hard,
                "lk": -torch.minimum(base.exp(), ours.exp()).sum().log(),
            }[objective]
            total = total + weight * loss / problem.num_scored[k]
    return total


@pytest.mark.parametrize("unembedding", UNEMBEDDINGS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_are_those_of_the_definition(unembedding, objective):
    problem = Problem(unembedding)
    problem.hidden.requires_grad_()
    expected = naive_loss(problem, objective, smoothing=0.3)
    loss, sums = problem.fused(objective, depth_weighting="dpace", dpace_smoothing=0.3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums.objective(problem.num_scored), loss.detach())
    for ours, theirs in zip(problem.gradients(loss), problem.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_weights_change_the_loss_and_not_what_is_counted():
    problem = Problem("token_map")
    plain, plain_sums = problem.fused()
    weighted, sums = problem.fused(depth_weighting="dpace")
    assert not torch.isclose(plain, weighted)
    for name in ("loss", "top1", "top5", "num_labels", "num_scored"):
        torch.testing.assert_close(getattr(sums, name), getattr(plain_sums, name))


def one_path(num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """A document of K + 2 tokens, all of them labels: only position 0 sees a whole path."""
    length = num_heads + 2
    return torch.arange(length), torch.ones(length, dtype=torch.bool), torch.arange(length)


def test_the_weights_are_the_derivative_of_the_expected_number_of_accepted_tokens():
    alignment = align(*one_path(3), num_heads=3)
    confidence = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    weights = acceptance_weights(confidence, alignment, num_states=5, smoothing=0.0)
    last = [int((alignment.sources[depth] == 0).nonzero()) for depth in (1, 2, 3)]  # targets seen from 0
    log_q = torch.stack([confidence[k, target] for k, target in enumerate(last)]).log().requires_grad_()
    log_q.cumsum(0).exp().sum().backward()
    torch.testing.assert_close(weights[range(3), last], log_q.grad)


def test_a_confident_first_head_moves_the_weight_to_later_depths():
    alignment = align(*one_path(2), num_heads=2)
    target = int((alignment.sources[2] == 0).nonzero())

    def of(first: float) -> float:
        confidence = torch.full((2, 3), 0.5)
        confidence[0] = first
        return float(acceptance_weights(confidence, alignment, 4, smoothing=0.5)[1, target])

    assert of(0.9) > 1.5 * of(0.1)
    assert of(0.0) == pytest.approx(0.5 * 0.75)


def test_a_gap_in_the_labels_is_passed_through_and_earns_nothing():
    tokens, is_label, positions = one_path(3)
    is_label[3] = False  # what depth 2 predicts from position 0
    alignment = align(tokens, is_label, positions, num_heads=3)
    confidence = torch.full((3, 3), 0.5)
    weights = acceptance_weights(confidence, alignment, 5, smoothing=0.0)
    first, last = (int((alignment.sources[depth] == 0).nonzero()) for depth in (1, 3))
    assert float(weights[0, first]) == pytest.approx(0.5 + 0.25)
    assert float(weights[2, last]) == pytest.approx(0.25)


def test_a_label_without_a_column_lowers_what_lies_behind_it():
    tokens, is_label, positions = one_path(2)
    columns = torch.tensor([0, 1, -1, 2])  # depth 1 predicts token 2 from position 0
    alignment = align(tokens, is_label, positions, num_heads=2, column_of=columns)
    weights = acceptance_weights(torch.ones(2, 2), alignment, 4, smoothing=0.4)
    target = int((alignment.sources[2] == 0).nonzero())
    assert float(weights[1, target]) == pytest.approx(0.4)


def test_stored_states_are_weighed_like_states_in_place():
    problem = Problem("token_map")
    arguments = (problem.tokens, problem.is_label, problem.positions, NUM_HEADS, problem.column_of)
    moved = torch.randperm(30)
    plain, stored = align(*arguments), align(*arguments, state_of=moved)
    confidence = torch.rand(NUM_HEADS, len(plain.columns))
    assert len(plain.columns) < int(problem.is_label.sum()) <= 30 and MAPPED < VOCAB
    torch.testing.assert_close(
        acceptance_weights(confidence, stored, 30, 0.5), acceptance_weights(confidence, plain, 30, 0.5)
    )


def test_decay_weighs_every_target_of_a_depth_alike():
    problem = Problem()
    weights, sources = decay_weights(problem.alignment(), 0.8), problem.alignment().sources[1:]
    for depth in (1, 2, 3):
        of_targets = weights[depth - 1, sources[depth - 1] >= 0]
        torch.testing.assert_close(of_targets, torch.full_like(of_targets, 0.8**depth))
    assert not weights[sources < 0].any()


def eagle_naive(problem: test_eagle_loss.Problem, smoothing: float, probabilities: Callable) -> Tensor:
    """The loss of an EAGLE-style head with cross-entropy, target by target along each draft."""
    total, scale = torch.zeros(()), problem.head.feature_scale
    for row, span in problem.documents():
        features, following = problem.features[row, span], problem.following[row, span]
        tokens, is_label = problem.tokens[row, span], problem.is_label[row, span]
        for start in range(len(tokens) - 2):
            inputs, drafted = features[: start + 1], []
            for depth in range(1, min(3, len(tokens) - 2 - start) + 1):
                guess = problem.head(inputs[None], following[None, : len(inputs)])[0, -1]
                drafted.append((start + depth + 1, guess))
                inputs = torch.cat([inputs, guess[None]])
            confidence = [
                probabilities(guess)[tokens[target]].item() if is_label[target] else None
                for target, guess in drafted
            ]
            weights = path_weights(confidence, smoothing)
            for k, (target, guess) in enumerate(drafted):
                if is_label[target]:
                    truth = features[target - 1]
                    loss = 2.0 * torch.nn.functional.smooth_l1_loss(guess / scale, truth / scale)
                    loss = loss - probabilities(guess)[tokens[target]].log()
                    total = total + weights[k] * loss / problem.num_scored[k]
    return total


def test_an_eagle_head_is_weighed_along_its_own_drafts():
    problem = test_eagle_loss.Problem()
    expected = eagle_naive(problem, 0.3, lambda guess: problem.embedding(guess).softmax(-1))
    loss, sums = problem.fused("ce", depth_weighting="dpace", dpace_smoothing=0.3, feature_weight=2.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums.objective(problem.num_scored), loss.detach())
    for ours, theirs in zip(problem.gradients(loss), problem.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth_weighting": "linear"}, "depth_weighting must be one of .*got 'linear'"),
        ({"dpace_smoothing": 1.5}, r"dpace_smoothing must be in \[0, 1\], got 1.5"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossOptions(**options)
